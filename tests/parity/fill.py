"""Numbers that both programs make for themselves, so that no weights need to be stored.

A tensor's values follow from its name, its shape and a seed. Only uniform numbers are drawn: unlike
logarithms and sines they are the same to the last bit on every processor.
"""

import functools
import hashlib
import math
from collections.abc import Sequence

import numpy as np
import torch


def uniform(name: str, shape: tuple[int, ...], low: float, high: float, seed: int = 0) -> np.ndarray:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(digest, "little")))
    # drawn as float32, whose 24 bits survive the arithmetic below
    return generator.random(shape, dtype=np.float32) * np.float32(high - low) + np.float32(low)


@functools.lru_cache(300)  # cases of a kind have most of them in common
def weight(name: str, shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Values for a parameter or buffer that keep activations near one through a deep network."""
    if name.endswith("running_var"):
        return uniform(name, shape, 0.5, 1.5, seed)
    if "embed" in name:  # learned positions must be felt
        return uniform(name, shape, -1.0, 1.0, seed)
    if len(shape) >= 2:
        bound = math.sqrt(3 / math.prod(shape[1:]))
        return uniform(name, shape, -bound, bound, seed)
    if name.endswith("weight"):  # of a normalisation
        return uniform(name, shape, 0.5, 1.5, seed)
    return uniform(name, shape, -0.2, 0.2, seed)


def fill(module: torch.nn.Module) -> str:
    """Set every weight, but for computed positions, which are compared as they are.

    Returned is a digest of names and shapes, and of the order of parameters, by which an optimizer's
    state is numbered: two networks that agree here take each other's checkpoints.
    """
    lines = []
    for name, value in sorted(module.state_dict().items()):
        lines.append(f"{name} {tuple(value.shape)}")
        if not name.endswith(("pos_enc", "pos_grid")):
            value.copy_(torch.as_tensor(weight(name, tuple(value.shape))))
    lines += [name for name, _ in module.named_parameters()]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


class Draws:
    """What a policy draws at some moment, by name: our source of noise, and what LeRobot is made to draw.

    LeRobot draws places to crop and critics once for a whole batch, so here all samples get the same.
    """

    def __init__(self, moment: str):
        self.moment = moment

    def to(self, device: object) -> "Draws":
        return self

    def for_batch(self) -> "Draws":
        return self

    def normal(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(uniform(f"{self.moment}/{name}", tuple(shape), -1.7, 1.7))

    def uniform(self, name: str, shape: Sequence[int]) -> torch.Tensor:
        return torch.from_numpy(uniform(f"{self.moment}/{name}", tuple(shape), 1e-3, 1 - 1e-3))

    def integers(self, name: str, shape: Sequence[int], high: int) -> torch.Tensor:
        count = 1 if "crop" in name or "critics" in name else shape[0]
        integers = uniform(f"{self.moment}/{name}", (count, *shape[1:]), 0, high)
        return torch.from_numpy(integers.astype(np.int64)).expand(shape).clone()
