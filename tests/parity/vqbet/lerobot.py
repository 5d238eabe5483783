"""The first phase of LeRobot's VQ-BeT, and how it is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from parity.fill import Draws
from parity.inputs import BATCH
from parity.records import gradients
from parity.vqbet.cases import codebooks


def before_step(policy: Any, batch: dict) -> dict:
    """Two steps, and the loss on held-out data between them."""
    loss, parts = policy(batch)
    loss.backward()
    record = {"loss": [loss.item(), parts["recon_l1_error"]], "gradients": gradients(policy)}
    record["codebooks"] = codebooks(policy)
    policy.eval()
    policy.vqbet.action_head.vqvae_model.optimized_steps -= 1  # it counts what is not a step too
    with torch.no_grad():
        record["eval_loss"] = policy(batch)[0].item()
    policy.train()
    record["second_loss"] = policy(batch)[0].item()
    record["second_codebooks"] = codebooks(policy)
    assert policy.vqbet.action_head.vqvae_model.discretized
    policy.train()
    policy.zero_grad()
    return {"vocabulary": record}


@contextmanager
def training(policy: Any) -> Iterator[None]:
    """LeRobot draws the top, then the left of a crop; and codes."""
    sides = iter(("top", "left"))

    def randint(low: int, high: int, size: tuple) -> torch.Tensor:
        assert low == 0
        return Draws("training").integers(f"crop/{next(sides)}", size, high)

    with patch("torch.randint", randint), acting(policy, "training"):
        yield


@contextmanager
def acting(policy: Any, moment: str) -> Iterator[None]:
    """Both codes are drawn at once (rows are sample, chunk, codebook), or all first codes and then all second ones."""
    sequential = policy.config.sequentially_select
    calls = iter(range(2))

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        rows, count = probabilities.shape
        tokens, call = rows // BATCH // (1 if sequential else 2), next(calls)
        # in training each chunk has its own noise; when acting one chunk is used, whatever the others draw
        draws = tokens if moment == "training" else 1
        noise = Draws(moment).uniform("codes", (BATCH, draws, 2, count)).expand(-1, tokens, -1, -1)
        noise = noise[:, :, call] if sequential else noise
        gumbel = -(-noise.reshape(-1, count).log()).log()
        return (probabilities.log() + gumbel).argmax(-1, keepdim=True)

    with patch("torch.multinomial", multinomial):
        yield
