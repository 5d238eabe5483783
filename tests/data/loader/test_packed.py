"""Columns that travel together arrive as they were."""

import numpy as np
import torch

from flexor.data.loader.packed import ALIGNED, pack

ARRAYS = {
    "bytes": np.arange(5, dtype=np.uint8),
    "action": np.arange(24, dtype=np.float32).reshape(2, 3, 4),
    "is_pad": np.array([[True, False, True]]),
    "index": np.array([2**40, -1]),
    "time": np.array([0.1, 0.2]),
    "half": np.array([[1.5]], np.float16),
    "nothing": np.empty((4, 0), np.float32),
    "every second": np.arange(10)[::2],
}


def test_what_is_packed_is_what_arrives():
    packed = pack(ARRAYS, pin_memory=False)
    found = packed.on(torch.device("cpu"))
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert torch.equal(found[name], torch.from_numpy(array.copy())), name
        assert found[name].dtype == torch.from_numpy(array.copy()).dtype
        assert found[name].is_contiguous()
        assert (found[name].data_ptr() - packed.memory.data_ptr()) % ALIGNED == 0 or not array.size


def test_nothing_at_all():
    assert pack({}, pin_memory=False).on(torch.device("cpu")) == {}
