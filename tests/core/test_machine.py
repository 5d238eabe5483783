"""What the trainer tells torch's allocator."""

import os
import sys

import pytest

from flexor.core.machine import let_gpu_memory_grow


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only there")
def test_gpu_memory_grows_unless_the_user_has_said_something(monkeypatch):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    let_gpu_memory_grow()
    assert os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.delenv("PYTORCH_ALLOC_CONF")
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync")
    let_gpu_memory_grow()
    assert "PYTORCH_ALLOC_CONF" not in os.environ
