"""Operators of torch whose kernels are written in Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def define_operator(name: str, schema: str, empty: Callable[..., Any], kernels: str) -> None:
    """`empty` makes the results without computing them; `kernels` is the module with the function that computes them.

    The module is imported with the first call: a plan runs operators on the meta device, on machines without Triton.
    """

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(kernels), name)(*arguments)

    torch.library.define(f"flexor::{name}", schema)
    # the CPU's is Triton's interpreter, for tests
    torch.library.impl(f"flexor::{name}", ("cuda", "cpu"), run)
    torch.library.register_fake(f"flexor::{name}", empty)
