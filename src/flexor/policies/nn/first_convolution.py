"""The first convolution of an image encoder, with space-to-depth on a GPU.

A GPU multiplies small matrices, of at least 8 channels, so with 3 channels most of its work would be zeros. There each
square of 2 by 2 pixels becomes one pixel of 12 channels, and the kernel of 7 by 7 becomes one of 4 by 4. Of 4 more
channels one is 1 everywhere: its weights are the bias, so that nothing is added afterwards. The others are 0.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexor.policies.nn.autocast import autocast_type


class FirstConv2d(nn.Conv2d):
    """A convolution of 7 by 7 at every second pixel."""

    def __init__(self, inputs: int, outputs: int, padding: int, bias: bool):
        super().__init__(inputs, outputs, 7, 2, padding, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        if not self._uses_space_to_depth(x):
            return super().forward(x)
        around = int(self.padding[0])
        kernel = space_to_depth_kernel(self.weight, self.bias, around)
        return F.conv2d(space_to_depth(x, around, self.bias is not None), kernel)

    def _uses_space_to_depth(self, x: Tensor) -> bool:
        even = not (x.shape[-2] % 2 or x.shape[-1] % 2)
        channels_last = self.weight.is_contiguous(memory_format=torch.channels_last)
        # with few outputs, kernels for float32 are faster without squares
        is_faster = self.out_channels >= 64 or autocast_type(x).itemsize == 2
        on_gpu = x.device.type in ("cuda", "meta") and not x.requires_grad
        return on_gpu and even and channels_last and is_faster and self.in_channels == 3


def space_to_depth(x: Tensor, around: int, ones: bool) -> Tensor:
    """Images [B, 3, H, W] with `around` pixels of zeros on each side -> [B, 16, H/2 + around, W/2 + around]."""
    batch, _, height, width = x.shape
    offset, rows, columns = (around + 1) // 2, height // 2, width // 2
    shape = (batch, rows + around, columns + around, 16)
    out = torch.zeros(shape, dtype=autocast_type(x), device=x.device)
    if ones:
        out[..., 12] = 1
    squares = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))  # [B, 3, H/2, 2, W/2, 2]
    interior = out[:, offset : offset + rows, offset : offset + columns, :12]
    interior.unflatten(3, (3, 2, 2)).copy_(squares.permute(0, 2, 4, 1, 3, 5))
    return out.permute(0, 3, 1, 2)


def space_to_depth_kernel(weight: Tensor, bias: Tensor | None, around: int) -> Tensor:
    """A kernel [outputs, 3, 7, 7] -> [outputs, 16, 4, 4]. It gets a row and a column of zeros.

    They come first where the kernel begins at an odd pixel, so in the middle of a square; otherwise last.
    """
    zeros = (1, 0, 1, 0) if around % 2 else (0, 1, 0, 1)
    squares = F.pad(weight, zeros).unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
    kernel = squares.permute(0, 1, 3, 5, 2, 4).flatten(1, 3)
    if bias is None:
        kernel = F.pad(kernel, (0, 0, 0, 0, 0, 4))
    else:
        kernel = torch.cat((kernel, F.pad(bias[:, None, None, None], (0, 3, 0, 3, 0, 3))), 1)
    return kernel.contiguous(memory_format=torch.channels_last)
