"""Names of a policy's weights: of a weight that several modules share, and in the files of other programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor, nn


@dataclass(frozen=True)
class UnusedWeight:
    """A weight in LeRobot's files that the policy does not have, since nothing uses it.

    It is computed when a file is written, and ignored when one is read.
    """

    name: str
    value: Callable[..., Tensor]
    """Computes it from the weights in `sources`, which may be on the meta device."""
    sources: Sequence[str]
    before: str
    """LeRobot's optimizer numbers it before the first weight whose name starts with this."""


@dataclass(frozen=True)
class WeightNames:
    """How the names in files differ from a policy's own."""

    optional_prefix: str = ""
    """Files may have the names without it."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Other names that files may have for a weight. Those of a tied weight need no alias."""
    unused: Sequence[UnusedWeight] = ()
    older: Callable[[str], Sequence[str]] = lambda _: ()
    """The names that a weight has in files of earlier versions."""
    transposed: Collection[str] = ()
    """Names in files of matrices that are transposed there."""
    ignored: Collection[str] = ()
    """Names in files of what a policy does not need, and has no place for."""

    def name_in_file(self, name: str, present: Collection[str], ties: Sequence[str] = ()) -> str:
        """The name of a weight in a file with the names `present`; its own if there is none of its names.

        `ties` are further names of the same weight in the policy.
        """
        names = [name, *ties, *self.aliases.get(name, ())]
        names += [older for each in (name, *ties) for older in self.older(each)]
        candidates = [each.removeprefix(prefix) for each in names for prefix in ("", self.optional_prefix)]
        return next((each for each in candidates if each in present), name)

    def unused_weights(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The unused weights of a file with these weights."""
        return {
            each.name: each.value(*(weights[source] for source in each.sources))
            for each in self.unused
            if all(source in weights for source in each.sources)
        }

    def optimizer_names(self, names: Sequence[str]) -> list[str]:
        """The names of the optimizer's parameters as LeRobot numbers them, those of unused weights included."""
        numbered = list(names)
        for each in self.unused:
            place = next((n for n, name in enumerate(numbered) if name.startswith(each.before)), None)
            if place is not None:
                numbered.insert(place, each.name)
        return numbered


def tied_names(module: nn.Module) -> dict[str, str]:
    """Further names of weights that have several -> the name that files have.

    That one is the first in alphabetical order: safetensors' `save_model`, and so LeRobot, keeps it too.
    """
    return _ties(module.state_dict(keep_vars=True))


def _ties(state: Mapping[str, Tensor]) -> dict[str, str]:
    names_of: dict[int, list[str]] = {}
    for name, tensor in state.items():
        names_of.setdefault(id(tensor), []).append(name)
    return {alias: min(names) for names in names_of.values() for alias in names if alias != min(names)}


def aliases_of(module: nn.Module) -> dict[str, list[str]]:
    """The further names of each weight that has several."""
    aliases: dict[str, list[str]] = {}
    for alias, name in tied_names(module).items():
        aliases.setdefault(name, []).append(alias)
    return aliases


def unique_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's `state_dict`, with every weight once."""
    state = module.state_dict(keep_vars=True)
    ties = _ties(state)
    return {name: tensor.detach() for name, tensor in state.items() if name not in ties}


def unique_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's parameters by the names in `unique_state`."""
    ties = tied_names(module)
    named = module.named_parameters(remove_duplicate=False)
    return {name: parameter for name, parameter in named if name not in ties}


def shared_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters that several layers have."""
    layers = Counter(parameter for layer in module.modules() for parameter in layer.parameters(recurse=False))
    return {parameter for parameter, count in layers.items() if count > 1}


def parameters_only_in(module: nn.Module, kinds: tuple[type[nn.Module], ...]) -> set[nn.Parameter]:
    """The parameters of layers of these kinds that no layer of another kind has, such as a tied embedding."""
    selected: set[nn.Parameter] = set()
    other: set[nn.Parameter] = set()
    for layer in module.modules():
        (selected if isinstance(layer, kinds) else other).update(layer.parameters(recurse=False))
    return selected - other
