"""The device to compute on."""

from __future__ import annotations

import warnings

import torch
import torch.nn.functional as F

from flexor.core.errors import ConfigError


def find_device(requested: str | None) -> torch.device:
    """The requested device; without a request, the fastest available one. An unavailable device is an error."""
    if requested is None:
        if torch.cuda.is_available():
            return torch.device("cuda", 0)
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(requested)
    except RuntimeError as error:
        raise ConfigError(
            f"policy.device={requested!r} is not a device: use cpu, cuda, cuda:N or mps."
        ) from error
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    missing = (device.type == "cuda" and (device.index or 0) >= count) or (
        device.type == "mps" and not torch.backends.mps.is_available()
    )
    if missing:
        raise ConfigError(
            f"policy.device={requested!r} is not available (`flexor doctor` shows why). "
            "Leave it out to use the fastest available device, or set --policy.device=cpu."
        )
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def settle_rounding(device: torch.device) -> None:
    """Before a run computes in bfloat16: on ARM CPUs without it, torch rounds otherwise after the first such product.

    Otherwise the first step of a resumed run would differ from that step of an uninterrupted one.
    """
    if device.type == "cpu":
        ones = torch.ones(64, 64, dtype=torch.bfloat16)
        with warnings.catch_warnings(action="ignore"):  # of torch: it leaves oneDNN
            F.linear(ones, ones)
