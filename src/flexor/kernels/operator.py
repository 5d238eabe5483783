"""Defines operators of torch whose kernels are written in Triton."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch


def define_operator(name: str, schema: str, empty: Callable[..., Any], module: str) -> None:
    """Define `flexor::name`, computed by the function `name` in `flexor.kernels.triton.{module}`.

    `empty` allocates the outputs without computing them.
    The module is imported on the first call: a plan runs operators on the meta device, on machines without Triton.
    """

    def run(*arguments: Any) -> Any:
        return getattr(importlib.import_module(f"flexor.kernels.triton.{module}"), name)(*arguments)

    torch.library.define(f"flexor::{name}", schema)
    # the CPU's is Triton's interpreter, for tests
    torch.library.impl(f"flexor::{name}", ("cuda", "cpu"), run)
    torch.library.register_fake(f"flexor::{name}", empty)
