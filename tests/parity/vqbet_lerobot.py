"""What LeRobot's VQ-BeT computes for every case: run where `lerobot` is installed.

    python tests/parity/vqbet_lerobot.py tests/golden/vqbet

Weights, inputs and noise come from fill.py, so vqbet_flexor.py can compute the same.
"""

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import vqbet_cases as cases
from inputs import BATCH, shown
from lerobot_side import act, make_policy, tensors
from records import gradients, group, record_batch, save


def measure(name: str) -> dict:
    case = cases.CASES[name]
    sequential = case["settings"].get("sequentially_select", False)
    made = make_policy("vqbet", case)
    policy, before = made.policy, made.before
    groups = [group(policy, each["params"], each) for each in policy.get_optim_params()]
    record = {"parameters": cases.fill_policy(policy), "groups": groups}
    batch = before(tensors(cases.training_batch(name)))
    record["batch"] = record_batch({"action": batch["action"], "state": batch["observation.state"]})

    policy.train()
    record["vocabulary"] = vocabulary(policy, batch)
    assert policy.vqbet.action_head.vqvae_model.discretized
    policy.train()
    with crops(), codes(sequential, "training"):
        loss, parts = policy(batch)
    policy.zero_grad()
    loss.backward()
    record["loss"] = {"loss": loss.item(), **{part: parts[part] for part in cases.PARTS}}
    record["gradients"] = gradients(policy)

    policy.eval()
    with torch.no_grad(), codes(sequential, "training"):
        record["eval_loss"] = policy(batch)[0].item()
    record["actions"] = act(made, shown(case["inputs"], cases.STEPS), acting)
    return record


def vocabulary(policy, batch: dict) -> dict:
    """The first phase: two steps, and the loss on held-out data between them."""
    loss, parts = policy(batch)
    loss.backward()
    record = {"loss": [loss.item(), parts["recon_l1_error"]], "gradients": gradients(policy)}
    record["codebooks"] = cases.codebooks(policy)
    policy.eval()
    policy.vqbet.action_head.vqvae_model.optimized_steps -= 1  # it counts what is not a step too
    with torch.no_grad():
        record["eval_loss"] = policy(batch)[0].item()
    policy.train()
    record["second_loss"] = policy(batch)[0].item()
    record["second_codebooks"] = cases.codebooks(policy)
    return record


def acting(policy, step: int) -> AbstractContextManager:
    return codes(policy.config.sequentially_select, f"act {step}")


@contextmanager
def crops() -> Iterator[None]:
    """LeRobot draws the top, then the left of a crop."""
    sides = iter(("top", "left"))

    def randint(low: int, high: int, size: tuple) -> torch.Tensor:
        assert low == 0 and size == (1,)
        return torch.tensor([cases.place(next(sides), high)])

    with patch("torch.randint", randint):
        yield


@contextmanager
def codes(sequential: bool, moment: str) -> Iterator[None]:
    """Both codes are drawn at once (rows are sample, chunk, codebook), or all first codes and then all second ones."""
    calls = iter(range(2))

    def multinomial(probabilities: torch.Tensor, num_samples: int) -> torch.Tensor:
        assert num_samples == 1
        rows, count = probabilities.shape
        tokens, call = rows // BATCH // (1 if sequential else 2), next(calls)
        noise = given(moment, tokens, count)
        noise = noise[:, :, call] if sequential else noise
        gumbel = -(-noise.reshape(-1, count).log()).log()
        return (probabilities.log() + gumbel).argmax(-1, keepdim=True)

    with patch("torch.multinomial", multinomial):
        yield


def given(moment: str, tokens: int, count: int) -> torch.Tensor:
    """In training each chunk has its own noise; when acting one chunk is used, whatever the others draw."""
    if moment == "training":
        return torch.from_numpy(cases.code_noise(moment, tokens, count))
    return torch.from_numpy(cases.code_noise(moment, 1, count)).expand(-1, tokens, -1, -1)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    save(folder / "vqbet.json", {name: measure(name) for name in cases.CASES})


if __name__ == "__main__":
    main(Path(sys.argv[1]))
