"""LeRobot's pi0.5 at small sizes."""

from functools import partial

from parity.pi0 import lerobot
from parity.pi0.lerobot import acting, gradients, groups, training

__all__ = ["acting", "gradients", "groups", "measure", "prepared", "training"]

measure = partial(lerobot.measure, kind="pi05")
prepared = partial(lerobot.prepared, kind="pi05")
