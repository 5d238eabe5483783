"""Whether a file of weights fits a policy. If not, every weight that differs is named."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flexor.core.errors import CheckpointError
from flexor.core.name_ranges import ON_ONE_LINE, grouped, listed
from flexor.core.weight_files import WeightFiles
from flexor.policies.base import Policy
from flexor.policies.weight_names import aliases_of, tied_names

Shape = tuple[int, ...]
OLD_STATISTICS = ("normalize_inputs.", "normalize_targets.", "unnormalize_outputs.")
MIGRATE = (
    "LeRobot before 0.4 kept statistics among the weights: convert the policy with its migrate_policy_normalization "
    "script."
)
CHECK = "Check for overridden settings that change the network."


def names_in_file(policy: Policy, weights: Mapping[str, Tensor], file: WeightFiles) -> dict[str, str]:
    """The name in the file of each of the policy's weights. Refuses a file with others."""
    adapter = policy.weight_names
    present = {
        name: tuple(reversed(tensor.shape)) if name in adapter.transposed else tuple(tensor.shape)
        for name, tensor in file.described().items()
        if name not in adapter.ignored
    }
    ties = aliases_of(policy)
    names = {name: adapter.name_in_file(name, present, ties.get(name, ())) for name in weights}
    described = {name: torch.empty_like(tensor, device="meta") for name, tensor in weights.items()}
    unused = {adapter.name_in_file(name, present) for name in adapter.unused_weights(described)}
    unused |= {adapter.name_in_file(alias, present) for aliases in ties.values() for alias in aliases}
    missing = {name for name in weights if names[name] not in present}
    unexpected = present.keys() - {*names.values()} - unused
    shapes = {name: (present[names[name]], tuple(weights[name].shape)) for name in weights.keys() - missing}
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


def check_ties(policy: Policy, names: Mapping[str, str], file: WeightFiles) -> None:
    """Refuse a file with other values under another name of a tied weight. `names` are those it is loaded from."""
    ties = tied_names(policy)
    present = file.described() if ties else {}
    for alias, name in ties.items():
        stored = policy.weight_names.name_in_file(alias, present)
        if stored not in present or stored == names[name]:
            continue
        if not torch.equal(file.read(stored), file.read(names[name])):
            raise CheckpointError(
                f"{file} has different values for {stored} and {names[name]}, which are one weight in this "
                f"{policy.config.type} policy. The checkpoint was trained with two."
            )


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
