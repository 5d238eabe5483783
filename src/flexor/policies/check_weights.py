"""Whether a file of weights fits a policy. If not, every weight that differs is named."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from flexor.core.errors import CheckpointError
from flexor.core.name_ranges import ON_ONE_LINE, grouped, listed
from flexor.core.tensors import described_in
from flexor.policies.base import Policy

Shape = tuple[int, ...]
OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
MIGRATE = (
    "LeRobot before 0.4 kept statistics among the weights: convert the policy with its migrate_policy_normalization "
    "script."
)
CHECK = "Check for overridden settings that change the network."


def names_in_file(policy: Policy, own: Mapping[str, Tensor], file: Path) -> dict[str, str]:
    """The name in the file of each of the policy's weights. Refuses a file with others."""
    there = {name: tuple(tensor.shape) for name, tensor in described_in(file).items()}
    names = {name: policy.name_in_file(name, there) for name in own}
    dead = policy.dead_weights({name: torch.empty_like(t, device="meta") for name, t in own.items()})
    unused = {policy.name_in_file(name, there) for name in dead}
    missing = {name for name in own if names[name] not in there}
    unexpected = there.keys() - {*names.values()} - unused
    shapes = {name: (there[names[name]], tuple(own[name].shape)) for name in own.keys() - missing}
    other = {name: pair for name, pair in shapes.items() if pair[0] != pair[1]}
    if missing or unexpected or other:
        raise CheckpointError(
            _paragraphs(
                f"{file} does not fit this {policy.config.type} policy.",
                f"Missing: {listed(missing)}.",
                f"Unexpected: {listed(unexpected)}.",
                f"Different shape: {_reshaped(other)}.",
                MIGRATE if any(name.startswith(OLD_STATISTICS) for name in unexpected) else CHECK,
            )
        )
    return names


def _paragraphs(*sentences: str) -> str:
    """In one line, unless there is a list among them."""
    return ("\n" if any("\n" in sentence for sentence in sentences) else " ").join(sentences)


def _reshaped(shapes: Mapping[str, tuple[Shape, Shape]]) -> str:
    """The names of weights, by their shapes in the file and in the policy."""
    lines = []
    for pair in sorted(set(shapes.values())):
        names = grouped(name for name in shapes if shapes[name] == pair)
        lines += [f"{name}: {pair[0]} in the file, {pair[1]} in the policy" for name in names]
    if len(lines) > ON_ONE_LINE:
        return "".join(f"\n  {line}" for line in lines)
    return "; ".join(lines) or "nothing"
