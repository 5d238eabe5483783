"""Columns that travel together arrive as they were."""

import torch

from flexor.data.loader.packed import ALIGNED, pack

TENSORS = {
    "bytes": torch.arange(5, dtype=torch.uint8),
    "action": torch.arange(24, dtype=torch.float32).reshape(2, 3, 4),
    "is_pad": torch.tensor([[True, False, True]]),
    "index": torch.tensor([2**40, -1]),
    "time": torch.tensor([0.1, 0.2], dtype=torch.float64),
    "half": torch.tensor([[1.5]], dtype=torch.float16),
    "patches": torch.tensor([[1.5, -2]], dtype=torch.bfloat16),
    "number": torch.tensor(3),
    "nothing": torch.empty((4, 0)),
    "every second": torch.arange(10)[::2],
    "channels last": torch.arange(24, dtype=torch.uint8).reshape(2, 4, 3).movedim(-1, 0),
}


def test_what_is_packed_is_what_arrives():
    packed = pack(TENSORS, pin_memory=False)
    arrived = packed.on(torch.device("cpu"))
    assert list(arrived) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert torch.equal(arrived[name], tensor), name
        assert arrived[name].dtype == tensor.dtype
        assert arrived[name].is_contiguous()
        offset = arrived[name].data_ptr() - packed.memory.data_ptr()
        assert offset % ALIGNED == 0 or not tensor.numel()


def test_nothing_at_all():
    assert pack({}, pin_memory=False).on(torch.device("cpu")) == {}
