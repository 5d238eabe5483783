"""The first phase of our VQ-BeT."""

import torch

from flexor.policies.vqbet.policy import VQBeT
from parity.fill import Draws
from parity.records import gradients
from parity.vqbet.cases import codebooks


def before_step(policy: VQBeT, batch: dict) -> dict:
    """Two steps, and the loss on held-out data between them."""
    policy.begin_step(0)
    loss = policy.loss(batch, Draws("training"))
    loss.per_sample.mean().backward()
    means = [part.mean().item() for part in (loss.per_sample, loss.parts["recon_l1_error"])]
    record = {"loss": means, "gradients": gradients(policy), "codebooks": codebooks(policy)}
    policy.eval()
    with torch.no_grad():
        record["eval_loss"] = policy.loss(batch, Draws("training")).per_sample.mean().item()
    policy.train()
    policy.begin_step(1)
    record["second_loss"] = policy.loss(batch, Draws("training")).per_sample.mean().item()
    record["second_codebooks"] = codebooks(policy)
    policy.begin_step(2)
    policy.zero_grad()
    return {"vocabulary": record}
