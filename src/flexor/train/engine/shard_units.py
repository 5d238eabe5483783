"""What FSDP gathers and reduces together. Inside such a unit, all trained weights must have the same dtype."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from flexor.policies.base import Policy
from flexor.policies.weight_names import shared_parameters


@dataclass
class Sharding:
    """How a policy is sharded."""

    units: list[nn.Module] = field(default_factory=list)
    """Inner ones first. A parameter belongs to the first that holds it; the policy itself, the last, has the rest."""
    replicated: dict[str, nn.Parameter] = field(default_factory=dict)
    """Not sharded: parameters of another dtype than the rest of their unit that are not in a linear layer, such as
    norms in float32 among bfloat16 matrices, a few megabytes in all; and weights that two units share."""


def sharding_of(policy: Policy) -> Sharding:
    """The policy's blocks and the rest; in each, parameters of another dtype are apart.

    A linear layer can be a unit: it is called, so that FSDP gets to gather its weights. Of other modules the policy may
    read the weights itself.
    """
    names = {id(parameter): name for name, parameter in policy.named_parameters()}
    tied = {id(parameter) for parameter in shared_parameters(policy)}
    sharding = Sharding()
    for block in [*policy.shard_units(), policy]:
        weights = {module: [*module.parameters(recurse=False)] for module in _modules(block, sharding.units)}
        apart = _other_dtypes([p for parameters in weights.values() for p in parameters])
        for module, parameters in weights.items():
            trained = [p for p in parameters if p.requires_grad]
            alone = trained and all(id(p) in apart and id(p) not in tied for p in trained)
            if alone and type(module) is nn.Linear:
                sharding.units.append(module)
            else:
                sharding.replicated |= {names[id(p)]: p for p in trained if id(p) in apart}
        sharding.units.append(block)
    sharding.replicated |= shared_between(policy, sharding.units)
    return sharding


def shared_between(policy: Policy, units: list[nn.Module]) -> dict[str, nn.Parameter]:
    """Tied weights whose modules are in different units: FSDP gathers a weight with one unit only."""
    tied = shared_parameters(policy)
    if not tied:
        return {}
    units_of: dict[nn.Parameter, set[int]] = {parameter: set() for parameter in tied}
    for number, unit in enumerate(units):
        for module in _modules(unit, units[:number]):
            for parameter in module.parameters(recurse=False):
                if parameter in tied:
                    units_of[parameter].add(number)
    return {name: p for name, p in policy.named_parameters() if len(units_of.get(p, ())) > 1}


def _modules(module: nn.Module, units: list[nn.Module]) -> Iterator[nn.Module]:
    """The modules within one, except for those in units."""
    return _modules_outside(module, {id(unit) for unit in units})


def _modules_outside(module: nn.Module, units: set[int]) -> Iterator[nn.Module]:
    if id(module) in units:
        return
    yield module
    for child in module.children():
        yield from _modules_outside(child, units)


def _other_dtypes(parameters: list[nn.Parameter]) -> set[int]:
    """The ids of trained parameters that do not have the dtype of most bytes."""
    trained = [p for p in parameters if p.requires_grad]
    sizes: Counter[torch.dtype] = Counter()
    for parameter in trained:
        sizes[parameter.dtype] += parameter.nbytes
    main = sizes.most_common(1)[0][0] if sizes else None
    return {id(p) for p in trained if p.dtype != main}
