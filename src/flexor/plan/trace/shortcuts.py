"""Optimizations that make a rehearsal faster. They do not change its result."""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from flexor.plan.trace.ops import Op, tensors_in

META = torch.device("meta")
ONE_TRACE = threading.RLock()
"""Held while torch is changed for a trace: it is changed for all threads."""
COMPILER = "torch._dynamo"


class CompilerSettings:
    """The compiler's settings that are read even if nothing is compiled; others import the compiler."""

    error_on_nested_fx_trace = True  # read, but not used, for a block that is recomputed

    def __init__(self, compiler: NoCompiler):
        self.compiler = compiler

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiler.real().config, name)


class NoCompiler(ModuleType):
    """Replaces torch's compiler module while nothing is compiled; imports the real one when more of it is used."""

    def __init__(self) -> None:
        super().__init__(COMPILER)
        self.disabled: list[Any] = []  # functions that must not be compiled
        self.config = CompilerSettings(self)

    def disable(self, function: Callable, *_: Any, **__: Any) -> Callable:
        self.disabled.append(function)
        return function

    def graph_break(self, *_: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__path__":  # code that inspects all modules reads such names
            raise AttributeError(name)
        return getattr(self.real(), name)

    def real(self) -> ModuleType:
        self.uninstall()
        return importlib.import_module(COMPILER)

    def uninstall(self) -> None:
        if sys.modules.get(COMPILER) is self:
            del sys.modules[COMPILER]
        for function in self.disabled:  # where torch caches the result
            vars(function).pop("__dynamo_disable", None)
        self.disabled.clear()


@contextmanager
def without_compiler() -> Iterator[None]:
    """Avoid the import of torch's compiler, which takes longer than the rehearsal.

    An optimizer's step and many of torch's Python functions import it only to say that they must not be compiled.
    """
    with ONE_TRACE:
        if COMPILER in sys.modules:
            yield
            return
        sys.modules[COMPILER] = substitute = NoCompiler()
        try:
            yield
        finally:
            substitute.uninstall()


INITIALIZERS = (
    *("uniform_", "normal_", "trunc_normal_", "constant_", "ones_", "zeros_", "orthogonal_"),
    *("xavier_uniform_", "xavier_normal_", "kaiming_uniform_", "kaiming_normal_"),
)


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Modules made inside do not initialise their parameters, which have no values on the meta device."""

    def initialize(function: Callable, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if tensor.is_meta else function(tensor, *args, **kwargs)

    patched: Any = {n: functools.partial(initialize, getattr(torch.nn.init, n)) for n in INITIALIZERS}
    with mock.patch.multiple(torch.nn.init, **patched):
        yield


class OperatorResult(NamedTuple):
    """A new tensor that an operator returns."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def make(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=META)


@dataclass(slots=True)
class CachedCall:
    """What a call of an operator with certain inputs does."""

    results: list[OperatorResult] | OperatorResult | None
    """How to make what it returns; None if torch must be asked."""
    in_place: bool
    op: Op | None = None
    """Its costs, once they have been computed."""

    def repeat(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if self.in_place:
            return args[0]
        if self.results is None:
            return function(*args, **kwargs)
        if isinstance(self.results, OperatorResult):
            return self.results.make()
        return tuple(result.make() for result in self.results)


class CachedResults:
    """A cache of operator results on the meta device, by their inputs, because torch computes them in slow Python code.

    It helps because a policy consists of many equal blocks.
    """

    MOST = 20_000

    def __init__(self) -> None:
        self._calls: dict[tuple, CachedCall] = {}

    def call(
        self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Any, CachedCall | None]:
        """What an operator returns, and the cache's entry for such calls; None if they may differ."""
        in_place = _in_place(function) and args[0].device == META
        if not in_place and not _makes_tensors(function):
            return function(*args, **kwargs), None
        key = (function, _described(args), _described(tuple(kwargs.items())) if kwargs else ())
        cached = self._calls.get(key)
        if cached is not None:
            return cached.repeat(function, args, kwargs), cached
        out = function(*args, **kwargs)
        if len(self._calls) >= self.MOST:
            self._calls.clear()
        inputs = list(tensors_in([*args, *kwargs.values()]))
        cached = self._calls[key] = CachedCall(None if in_place else _results(out, inputs), in_place)
        return out, cached


@functools.cache
def _makes_tensors(function: Any) -> bool:
    """Whether the operator's schema says that it modifies nothing and returns new tensors."""
    schema = function._schema
    new = (str(result.type) == "Tensor" and result.alias_info is None for result in schema.returns)
    return bool(schema.returns) and not schema.is_mutable and all(new)


@functools.cache
def _in_place(function: Any) -> bool:
    """Whether an operator is elementwise, modifies its first tensor and returns it."""
    schema = function._schema
    aliases = [result.alias_info is not None for result in schema.returns]
    return torch.Tag.pointwise in function.tags and aliases == [True] and schema.name.endswith("_")


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


def _results(out: Any, inputs: list[Tensor]) -> list[OperatorResult] | OperatorResult | None:
    """How to make the same results again; None if they share memory with the inputs or with each other."""
    outs = [out] if isinstance(out, Tensor) else list(out)
    before = {tensor.untyped_storage()._cdata for tensor in inputs}
    after = before | {tensor.untyped_storage()._cdata for tensor in outs if tensor is not None}
    if len(after) != len(before) + len(outs) or not all(map(_plain, outs)):
        return None
    results = [OperatorResult(tuple(tensor.shape), tensor.stride(), tensor.dtype) for tensor in outs]
    return results[0] if isinstance(out, Tensor) else results


def _plain(tensor: Tensor) -> bool:
    """Whether it is an ordinary tensor that fills its whole storage."""
    if type(tensor) is not Tensor or tensor.device != META or tensor.storage_offset():
        return False
    copy = OperatorResult(tuple(tensor.shape), tensor.stride(), tensor.dtype).make()
    return tensor.untyped_storage().nbytes() == copy.untyped_storage().nbytes()
