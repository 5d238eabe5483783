"""Optimizations that make a rehearsal faster. They do not change its result."""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexor.plan.trace.ops import Op, tensors_in

META = torch.device("meta")
COMPILER = "torch._dynamo"


class CompilerSettings:
    """The compiler's settings that code reads which compiles nothing; others import the compiler."""

    error_on_nested_fx_trace = True  # read, but not used, for a block that is recomputed

    def __init__(self, compiler: NoCompiler):
        self.compiler = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiler.real().config, name)


class NoCompiler(ModuleType):
    """Replaces torch's compiler module while nothing is compiled; imports the real one when more of it is used."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.told: list[Any] = []
        self.config = CompilerSettings(self)

    def disable(self, function: Callable, *_: Any, **__: Any) -> Callable:
        self.told.append(function)
        return function

    def graph_break(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # code that inspects all modules reads such names
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        self.step_aside()
        return importlib.import_module(COMPILER)

    def step_aside(self) -> None:
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        for function in self.told:  # where torch caches the result
            vars(function).pop("__dynamo_disable", None)
        self.told.clear()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Avoid the import of torch's compiler, which takes longer than the rehearsal.

    An optimizer's step and many of torch's Python functions import it only to say that they must not be compiled.
    """
    if COMPILER in sys.modules:
        yield
        return
    sys.modules[COMPILER] = stand_in = NoCompiler()
    try:
        yield
    finally:
        stand_in.step_aside()


INITIALIZERS = (
    *("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "orthogonal_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Modules made inside do not initialise their parameters, which have no values on the meta device."""
    usual = {name: getattr(torch.nn.init, name) for name in INITIALIZERS}

    def keep(tensor: Tensor, *args: Any, of: Callable, **kwargs: Any) -> Tensor:
        return tensor if tensor.is_meta else of(tensor, *args, **kwargs)

    for name, function in usual.items():
        setattr(torch.nn.init, name, functools.partial(keep, of=function))
    try:
        yield
    finally:
        for name, function in usual.items():
            setattr(torch.nn.init, name, function)


class OperatorResult(NamedTuple):
    """A new tensor that an operator returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


@dataclass(slots=True)
class KnownCall:
    """What a call of an operator does, whenever it has the same inputs."""

    results: list[OperatorResult] | OperatorResult | None
    """How to make what it returns; None if torch must be asked."""
    in_place: bool
    op: Op | None = None
    """Its costs, once they are known."""

    def again(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.in_place:
            return args[0]
        if self.results is None:
            return function(*args, **kwargs)
        if isinstance(self.results, OperatorResult):
            return self.results.make()
        return tuple(one.make() for one in self.results)


class CachedResults:
    """A cache of operator results on the meta device, by their inputs, because torch computes them in slow Python code.

    It helps because a policy consists of many equal blocks.
    """

    MOST = 20_000

    def __init__(self) -> None:
        self._known: dict[tuple, KnownCall] = {}

    def call(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, KnownCall | None]:
        """What an operator returns, and what is known of such calls; None if they may differ."""
        in_place = _in_place(function) and args[0].device == META
        if not in_place and not _makes_tensors(function):
            return function(*args, **kwargs), None
        key = (function, _described(args), _described(tuple(kwargs.items())) if kwargs else ())
        known = self._known.get(key)
        if known is not None:
            return known.again(function, args, kwargs), known
        out = function(*args, **kwargs)
        if len(self._known) >= self.MOST:
            self._known.clear()
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        known = self._known[key] = KnownCall(None if in_place else _results(out, given), in_place)
        return out, known


@functools.cache
def _makes_tensors(function: Any) -> bool:
    """Whether the operator's schema says that it modifies nothing and returns new tensors."""
    schema = function._schema
    return (
        bool(schema.returns)
        and not schema.is_mutable
        and all(str(one.type) == "Tensor" and one.alias_info is None for one in schema.returns)
    )


@functools.cache
def _in_place(function: Any) -> bool:
    """Whether an operator is elementwise, modifies its first tensor and returns it."""
    schema = function._schema
    return (
        torch.Tag.pointwise in function.tags
        and len(schema.returns) == 1
        and schema.returns[0].alias_info is not None
        and schema.name.endswith("_")
    )


def _described(values: Sequence[Any]) -> tuple:
    """Everything that determines the result, as a key; 1, 1.0 and True are different."""
    key: list[Any] = []
    for value in values:
        if isinstance(value, Tensor):
            key += (value.shape, value.stride(), value.dtype, value.device)
        elif isinstance(value, list | tuple):
            key.append(_described(value))
        else:
            key += (type(value), value)
    return tuple(key)


def _results(out: Any, given: list[Tensor]) -> list[OperatorResult] | OperatorResult | None:
    """How to make the same results again; None if they share memory with the inputs or with each other."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    before = {tensor.untyped_storage()._cdata for tensor in given}
    after = before | {tensor.untyped_storage()._cdata for tensor in outs if tensor is not None}
    if len(after) != len(before) + len(outs) or not all(map(_plain, outs)):
        return None
    results = [OperatorResult(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in outs]
    return results[0] if isinstance(out, Tensor) else results


def _plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor that fills its whole storage."""
    again = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
    return (
        type(tensor) is Tensor
        and tensor.device == META
        and tensor.storage_offset() == 0
        and tensor.untyped_storage().nbytes() == again.untyped_storage().nbytes()
    )
