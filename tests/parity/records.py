"""Results as plain numbers in JSON, and how far two of them are apart. Imported by both programs."""

import copy
import hashlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open


def values(tensor: Any) -> list:
    """A tensor as nested lists."""
    return tensor.detach().float().numpy().tolist()


def direction(tensor: Any) -> list[float]:
    """Some numbers of a tensor relative to its norm, by which it is told from others of its shape."""
    flat = tensor.detach().float().flatten()
    return values(flat[:: max(1, len(flat) // 8)] / flat.norm().clamp(min=1e-30))


def gradients(module: Any) -> list[float | None]:
    """The norm of each parameter's gradient, in order; None for one that plays no part.

    In float64: of millions of numbers, the sum of squares in float32 depends on the processor from the fourth digit on.
    """
    return [None if p.grad is None else p.grad.double().norm().item() for p in module.parameters()]


@contextmanager
def in_double(policy: Any, batch: Mapping) -> Iterator[tuple[Any, dict]]:
    """A copy of both in float64, for gradients: in float32 a rounding error may open or close a ReLU."""
    wide = {
        key: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for key, value in batch.items()
    }
    torch.set_default_dtype(torch.float64)
    try:
        yield copy.deepcopy(policy).double(), wide
    finally:
        torch.set_default_dtype(torch.float32)


def group(module: Any, parameters: Iterable, settings: Mapping) -> list:
    """A group of an optimizer: a digest of its parameters' names in their order, and what it sets otherwise."""
    names = {id(p): name for name, p in module.named_parameters()}
    order = "\n".join(names[id(p)] for p in parameters)
    digest = hashlib.blake2b(order.encode(), digest_size=8).hexdigest()
    return [digest, settings.get("lr"), settings.get("weight_decay")]


def saved_weights(file: Path) -> str:
    """A digest of the names, shapes and types in a file of weights: either program loads it if it is the same."""
    with safe_open(file, "pt") as source:
        slices = {name: source.get_slice(name) for name in source.keys()}  # noqa: SIM118
        lines = [f"{name} {slices[name].get_shape()} {slices[name].get_dtype()}" for name in sorted(slices)]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def record_batch(batch: Mapping, inputs: Iterable[str]) -> dict:
    """What a policy learns from. Of pictures a few pixels and, for the rest, the mean and the mean square."""
    out = {}
    for key in [*inputs, "action", "observation.language.tokens", "observation.language.attention_mask"]:
        if key not in batch:
            continue
        value = batch[key]
        if value.dim() < 4:
            out[key] = values(value)
            continue
        moments = [value.double().mean().item(), value.double().square().mean().item()]
        out[key] = [moments, values(value[..., ::16, ::16])]
    return out


def save(path: Path, records: dict) -> None:
    """A line per record, so that a change shows where it is."""
    lines = [f"{json.dumps(name)}: {json.dumps(_short(record))}" for name, record in records.items()]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def _short(value: Any) -> Any:
    """Nine digits hold a float32."""
    if isinstance(value, float):
        return float(f"{value:.9g}")
    if isinstance(value, dict):
        return {key: _short(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_short(item) for item in value]
    return value


def numbers(value: Any) -> list[float]:
    if isinstance(value, dict):
        return [x for key in sorted(value) for x in numbers(value[key])]
    if isinstance(value, list):
        return [x for item in value for x in numbers(item)]
    return [value]


def difference(ours: Any, theirs: Any) -> float:
    """The largest difference, relative to the larger of one and the largest number there is.

    Infinite where shapes, names or anything that is not a number differ.
    """
    if _shape(ours) != _shape(theirs):
        return math.inf
    pairs = list(zip(numbers(ours), numbers(theirs)))
    scale = max([1.0, *(abs(b) for _, b in pairs if isinstance(b, float | int))])
    worst = 0.0
    for a, b in pairs:
        if isinstance(a, str) or a is None or b is None:
            if a != b:
                return math.inf
        elif not abs(a - b) / scale <= worst:  # also true of a NaN
            worst = abs(a - b) / scale if math.isfinite(a) and math.isfinite(b) else math.inf
    return worst


def _shape(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _shape(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_shape(item) for item in value]
    return isinstance(value, str)
