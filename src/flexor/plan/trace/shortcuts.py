"""Ways to rehearse a step sooner. What is computed without data is the same with them and without."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexor.plan.trace.ops import tensors_in

META = torch.device("meta")
COMPILER = "torch._dynamo"


class NoCompiler(ModuleType):
    """Stands for torch's compiler while nothing is compiled; becomes the real one when asked for more."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.told: list[Any] = []

    def disable(self, function: Callable, *_: Any, **__: Any) -> Callable:
        self.told.append(function)
        return function

    def graph_break(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # that is how one looks through all modules
            raise AttributeError(name)
        self.step_aside()
        return getattr(importlib.import_module(COMPILER), name)

    def step_aside(self) -> None:
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        for function in self.told:  # where torch remembers that it asked
            vars(function).pop("__dynamo_disable", None)
        self.told.clear()


@contextmanager
def without_compiler() -> Iterator[None]:
    """An optimizer's step, and much of what torch has in Python, imports the compiler to say that it is not for it.

    That takes longer than the rehearsal.
    """
    if COMPILER in sys.modules:
        yield
        return
    sys.modules[COMPILER] = stand_in = NoCompiler()
    try:
        yield
    finally:
        stand_in.step_aside()


class OperatorResult(NamedTuple):
    """A tensor of its own that an operator makes."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


class CachedResults:
    """What operators on the meta device make, by what they are given: torch finds it out in Python, at length.

    A policy is built of blocks that are alike.
    """

    MOST = 20_000

    def __init__(self) -> None:
        self._known: dict[tuple, list[OperatorResult] | OperatorResult | None] = {}

    def call(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        in_place = _in_place(function) and args[0].device == META
        if not in_place and not _makes_tensors(function):
            return function(*args, **kwargs)
        key = (function, _described(args), _described(tuple(kwargs.items())))
        if key not in self._known:
            out = function(*args, **kwargs)
            if len(self._known) >= self.MOST:
                self._known.clear()
            given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
            self._known[key] = None if in_place else _results(out, given)
            return out
        if in_place:
            return args[0]
        known = self._known[key]
        if known is None:
            return function(*args, **kwargs)
        return known.make() if isinstance(known, OperatorResult) else tuple(one.make() for one in known)


@functools.cache
def _makes_tensors(function: Any) -> bool:
    """Whether an operator promises to change nothing and to return new tensors."""
    schema = function._schema
    return (
        bool(schema.returns)
        and not schema.is_mutable
        and all(str(one.type) == "Tensor" and one.alias_info is None for one in schema.returns)
    )


@functools.cache
def _in_place(function: Any) -> bool:
    """Whether an operator works through its first tensor element by element, and returns it."""
    schema = function._schema
    return (
        torch.Tag.pointwise in function.tags
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
        and schema.name.endswith("_")
    )


def _described(value: Any) -> Any:
    """All that decides what comes out; 1, 1.0 and True are three things."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype, value.device
    if isinstance(value, list | tuple):
        return tuple(map(_described, value))
    return type(value), value


def _results(out: Any, given: list[Tensor]) -> list[OperatorResult] | OperatorResult | None:
    """How to make the same again; None if it is not that simple: something is shared with what was given."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    before = {tensor.untyped_storage()._cdata for tensor in given}
    after = before | {tensor.untyped_storage()._cdata for tensor in outs if tensor is not None}
    if len(after) != len(before) + len(outs) or not all(map(_plain, outs)):
        return None
    results = [OperatorResult(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in outs]
    return results[0] if isinstance(out, Tensor) else results


def _plain(tensor: Tensor) -> bool:
    """Whether it is all of its memory."""
    again = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return (
        type(tensor) is Tensor
        and tensor.device == META
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == again.untyped_storage().nbytes()
    )
