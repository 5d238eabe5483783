"""Randomness as a pure function of (seed, step, sample id, name), independent of earlier draws.

Built on SplitMix64 in integer operations, so a sample's noise is the same on every rank, worker
and device. A resumed run continues exactly without any saved generator state.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B97F4A7C15
_ALL_BITS = (1 << 64) - 1
FEW = 1 << 14  # numbers
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)


def _signed(value: int) -> int:
    """The same 64 bits as a signed integer, because torch's int64 is signed."""
    value &= _ALL_BITS
    return value - (1 << 64) if value >> 63 else value


def key_of(*parts: object) -> int:
    """A 64-bit key from anything printable: seeds, names, steps."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def mix_numpy(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser on uint64."""
    with np.errstate(over="ignore"):
        x = (x ^ (x >> np.uint64(30))) * np.uint64(_MIX[0])
        x = (x ^ (x >> np.uint64(27))) * np.uint64(_MIX[1])
    return x ^ (x >> np.uint64(31))


def mix_in_place(x: np.ndarray) -> np.ndarray:
    """The same, of an array that is not needed any more: in less time."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x ^= x >> np.uint64(shift)
        x *= np.uint64(factor)
    x ^= x >> np.uint64(31)
    return x


def _mix(x: Tensor) -> Tensor:
    """The same on int64 tensors: multiplication wraps, and a right shift must not copy the sign bit."""
    for shift, factor in ((30, _MIX[0]), (27, _MIX[1])):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return x ^ ((x >> 31) & ((1 << 33) - 1))


def random_bits(streams: Tensor, count: int) -> Tensor:
    """The first `count` values of 64 bits of each stream: [B] -> [B, count]."""
    counter = torch.arange(1, count + 1, device=streams.device) * _signed(_GOLDEN)
    return _mix(streams[:, None] + counter[None, :])


def _few_bits(sample_ids: np.ndarray, key: int, count: int) -> np.ndarray:
    """The upper 24 bits of `random_bits`, by numpy, which takes a fraction of torch's time for a few numbers."""
    with np.errstate(over="ignore"):
        streams = mix_in_place(sample_ids.astype(np.uint64) * np.uint64(_GOLDEN) + np.uint64(key & _ALL_BITS))
        counter = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
        return (mix_in_place(streams[:, None] + counter) >> np.uint64(40)).astype(np.int64)


class NoiseSource(Protocol):
    """Where policies and processing steps get their random numbers: `Noise`, or another in tests."""

    def normal(self, name: str, shape: Sequence[int]) -> Tensor: ...
    def uniform(self, name: str, shape: Sequence[int]) -> Tensor: ...
    def integers(self, name: str, shape: Sequence[int], high: int) -> Tensor: ...
    def for_batch(self) -> NoiseSource: ...


class Noise:
    """The only source of randomness a policy may use: one independent stream per sample and name."""

    def __init__(self, seed: int, step: int | Sequence[int], sample_ids: Tensor):
        self.seed = seed
        self.step = step  # of all samples, or of each
        self.sample_ids = sample_ids.long()  # [B]

    def to(self, device: torch.device) -> Noise:
        """The same noise, drawn on another device."""
        return Noise(self.seed, self.step, self.sample_ids.to(device))

    def for_batch(self) -> Noise:
        """Noise that all samples of a step share: it draws for a batch of one."""
        assert isinstance(self.step, int), "samples of different steps share nothing"
        return Noise(self.seed, self.step, self._shared_id())

    def _shared_id(self) -> Tensor:
        return torch.full((1,), -1, device=self.sample_ids.device)  # the id of no sample

    def _uniform_bits(self, name: str, shape: Sequence[int]) -> Tensor:
        """Integers in [0, 2^24) of this shape; the leading dimension is the batch."""
        batch, *rest = shape
        assert batch == len(self.sample_ids), f"noise {name!r} needs the batch first, got {tuple(shape)}"
        count, key = math.prod(rest), self._key(name)
        if isinstance(key, int) and batch * count <= FEW and self.sample_ids.device.type == "cpu":
            return torch.from_numpy(_few_bits(self.sample_ids.numpy(), key, count)).view(batch, *rest)
        streams = _mix(self.sample_ids * _signed(_GOLDEN) + key)
        return ((random_bits(streams, count) >> 40) & ((1 << 24) - 1)).view(batch, *rest)

    def _key(self, name: str) -> int | Tensor:
        if isinstance(self.step, int):
            return _signed(key_of(self.seed, self.step, name))
        keys = [_signed(key_of(self.seed, step, name)) for step in self.step]
        return torch.tensor(keys, device=self.sample_ids.device)

    def uniform(self, name: str, shape: Sequence[int]) -> Tensor:
        """Uniform in (0, 1): never exactly 0 or 1, so that a logarithm is safe."""
        return (self._uniform_bits(name, shape).double().add_(0.5) * 2.0**-24).float()

    def normal(self, name: str, shape: Sequence[int]) -> Tensor:
        """Standard normal (Box and Muller)."""
        radius = (-2.0 * self.uniform(f"{name}/radius", shape).log()).sqrt()
        angle = 2.0 * math.pi * self.uniform(f"{name}/angle", shape)
        return radius * angle.cos()

    def integers(self, name: str, shape: Sequence[int], high: int) -> Tensor:
        """Integers in [0, high)."""
        return (self._uniform_bits(name, shape) * high) >> 24


class NoiseKeys:
    """The keys of noise in the memory of a GPU: what a CUDA graph reads instead of the numbers themselves.

    Which names a policy draws by is found out while the graph is captured; `write` then sets their keys for a step.
    `rows`: the samples have a step each, not one for all.
    """

    MOST = 4096  # names

    def __init__(self, device: torch.device, rows: int | None = None):
        self.places: dict[str, int] = {}
        shape = (self.MOST,) if rows is None else (self.MOST, rows)
        self.values = torch.zeros(shape, dtype=torch.int64, device=device)

    def of(self, name: str) -> Tensor:
        place = self.places.setdefault(name, len(self.places))
        if place >= self.MOST:
            raise RuntimeError(f"noise is drawn under more than {self.MOST} names")
        return self.values[place]

    def write(self, seed: int, step: int | Sequence[int]) -> None:
        steps = [step] if isinstance(step, int) else list(step)
        by_step = {step: [_signed(key_of(seed, step, name)) for name in self.places] for step in {*steps}}
        keys = torch.tensor([by_step[step] for step in steps], dtype=torch.int64).mT  # [names, rows]
        keys = keys.reshape(len(self.places), *self.values.shape[1:])
        if keys.numel():
            pinned = keys.pin_memory() if self.values.is_cuda else keys
            self.values[: len(keys)].copy_(pinned, non_blocking=True)


class GraphNoise(Noise):
    """Noise whose keys are read from memory: the same values as `Noise` of the step that was written there."""

    def __init__(self, keys: NoiseKeys, sample_ids: Tensor):
        super().__init__(0, 0, sample_ids)
        self.keys = keys

    def to(self, device: torch.device) -> Noise:
        return GraphNoise(self.keys, self.sample_ids.to(device))

    def for_batch(self) -> Noise:
        return GraphNoise(self.keys, self._shared_id())

    def _key(self, name: str) -> int | Tensor:
        return self.keys.of(name)


def seed_everything(*parts: object) -> None:
    """Seed torch's own generators (dropout, initialisation) from a key.

    Like `torch.manual_seed`, which also keeps the stack for each kind of device that is not there: 0.3 ms, in every
    step.
    """
    seed = key_of(*parts) & ((1 << 63) - 1)
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(seed)
    if torch.backends.mps.is_available():
        torch.mps.manual_seed(seed)
