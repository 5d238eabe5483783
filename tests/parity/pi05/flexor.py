"""Our pi0.5 at small sizes."""

from functools import partial

from parity.pi0 import flexor
from parity.pi0.flexor import prepared

__all__ = ["measure", "prepared"]

measure = partial(flexor.measure, kind="pi05")
