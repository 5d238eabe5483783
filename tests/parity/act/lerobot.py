"""How LeRobot's ACT is made to draw what ours draws."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from parity.fill import Draws


@contextmanager
def training(policy: Any) -> Iterator[None]:
    with patch("torch.randn_like", lambda like: Draws("training").normal("latent", like.shape)):
        yield


def acting(policy: Any, moment: str) -> AbstractContextManager:
    """Nothing is drawn."""
    return nullcontext()
