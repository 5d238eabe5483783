"""Converts planes to RGB, and depth maps to depths, on any device of torch.

It is apart from `planes.py`, which processes that only decode can import without torch.
"""

from __future__ import annotations

from functools import cache, lru_cache

import numpy as np
import torch

from flexor.data.format.depth import CODES, DepthScale, depths_of_codes
from flexor.data.video.planes import PlaneFormat, to_rgb


def rgb_on_device(format: PlaneFormat, planes: torch.Tensor) -> torch.Tensor:
    """Planes uint8 [n, nbytes] on any device -> images uint8 [n, C, H, W] on that device, contiguous.

    Equal to `to_rgb` within one level. A level of the image is luma times a constant, plus one level for each of
    the two chroma values. These come from tables measured with `to_rgb` itself, because swscale rounds
    differently on each type of processor.
    """
    n, height, width = len(planes), format.height, format.width
    if format.is_depth:
        return depth_on_device(format.layout, format.depth, planes).view(n, 1, height, width)
    if format.layout != "yuv420p":
        return planes.view(n, height, width, format.channels).permute(0, 3, 1, 2).contiguous()
    slope, of_u, of_v = _levels(format.matrix, format.full_range, width % 32, planes.device)
    out = torch.empty((n, 3, height, width), dtype=torch.uint8, device=planes.device)
    some = max(1, 2**24 // (height * width))  # frames at a time: 64 MiB for each intermediate result
    for pixels, part in zip(out.split(some), planes.split(some)):
        _some_to_rgb(format, part, pixels, slope, of_u, of_v)
    return out


def _some_to_rgb(
    format: PlaneFormat,
    planes: torch.Tensor,
    pixels: torch.Tensor,
    slope: float,
    of_u: torch.Tensor,
    of_v: torch.Tensor,
) -> None:
    """Planes uint8 [n, nbytes] -> `pixels`, uint8 [n, 3, H, W]."""
    n, height, width = len(planes), format.height, format.width
    luma, u, v = planes.split([rows * row for _, rows, row in format.planes], dim=1)
    luma = luma.reshape(n, height // 2, 2, width // 2, 2) * slope  # a colour sample and its 2x2 pixels
    u, v = u.reshape(-1).int(), v.reshape(-1).int()
    for channel in range(3):
        colour = of_u[channel].index_select(0, u) + of_v[channel].index_select(0, v)  # [n*H/2*W/2]
        levels = luma + colour.view(n, height // 2, 1, width // 2, 1)
        pixels[:, channel].unflatten(1, (-1, 2)).unflatten(3, (-1, 2)).copy_(levels.clamp_(0, 255))


@lru_cache
def _levels(
    matrix: str, full_range: bool, odd_columns: int, device: torch.device
) -> tuple[float, torch.Tensor, torch.Tensor]:
    """(slope of luma, levels [3, 256] that each U adds, and each V) of this machine's swscale.

    Measured on images with every luma for every U, and every luma for every V. `odd_columns` is the width
    modulo 32; swscale may use different code for different values.
    """
    slope = 1.0 if full_range else 255 / 219
    format = PlaneFormat(512, 512 + odd_columns, "yuv420p", matrix, full_range)
    picture = np.empty((512, 512 + odd_columns, 3), np.uint8)
    contributions = []
    for swept in (1, 2):  # U, then V
        planes = np.full(format.nbytes, 128, np.uint8)
        parts = format.split(planes)
        parts[0][:, :512] = np.arange(256).repeat(2)
        parts[swept][:] = np.arange(256)[:, None]
        to_rgb(format, planes, picture)
        levels = picture[::2, :512:2].astype(np.float64)  # [colour, luma, channel]
        inside = (levels > 0) & (levels < 255)
        assert inside.any(axis=1).all()
        # Levels are integers, on average half a level below the straight line.
        above = np.where(inside, levels - slope * np.arange(256)[:, None] + 0.5, 0)
        contributions.append((above.sum(1) / inside.sum(1)).T)
    of_u, of_v = contributions
    of_u -= of_u[:, 128:129]  # both contain the contribution of gray
    return slope, _table(of_u, device), _table(of_v, device)


def _table(levels: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(levels, np.float32)).to(device)


def depth_on_device(layout: str, scale: DepthScale, planes: torch.Tensor) -> torch.Tensor:
    """Planes uint8 [n, nbytes] on any device -> depths float32 [n, pixels] on that device."""
    if layout == "grayf32":
        return _scaled(planes.view(torch.float32), scale)
    pixels = planes.view(torch.int16).int()  # torch computes little with uint16
    if layout == "gray16":
        return _scaled((pixels & 0xFFFF).float(), scale)
    table = _depth_table(scale, planes.device)
    return table.index_select(0, (pixels & (CODES - 1)).view(-1)).view(pixels.shape)


def _scaled(depths: torch.Tensor, scale: DepthScale) -> torch.Tensor:
    if scale.factor == 1:
        return depths
    return depths * 1000 if scale.factor > 1 else depths / 1000


@cache
def _depth_table(scale: DepthScale, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(depths_of_codes(scale).copy()).to(device)
