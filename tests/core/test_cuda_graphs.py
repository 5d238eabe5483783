"""A capture that fails: torch works afterwards as if there had been none."""

import pytest
import torch
import torch.nn.functional as F

from flexor.core.cuda_graphs import capture


def active_bytes() -> int:
    """GPU memory that torch can't give to others yet."""
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # looks which other streams are done
    return torch.cuda.memory_stats()["active_bytes.all.current"]


@pytest.mark.gpu
@pytest.mark.parametrize("mistake", ["CUDA sees it", "CUDA does not see it"])
def test_nothing_is_left_of_a_capture_that_fails(mistake):
    x, stream, before = torch.ones(64, device="cuda"), torch.cuda.Stream(), torch.cuda.current_stream()
    pool = torch.cuda.graph_pool_handle()
    with pytest.raises((RuntimeError, ValueError)), capture(torch.cuda.CUDAGraph(), pool, stream):
        F.dropout(x)
        if mistake == "CUDA sees it":
            x.sum().item()
        raise ValueError("another")

    assert torch.cuda.current_stream() == before
    assert 0 < F.dropout(x).count_nonzero() < 64  # random numbers

    at_first = active_bytes()
    for _ in range(4):  # memory that another stream uses too
        batch = torch.empty(2**20, device="cuda")
        batch.record_stream(stream)
        del batch
    assert active_bytes() == at_first

    graph, made = torch.cuda.CUDAGraph(), torch.zeros(64, device="cuda")
    with capture(graph, torch.cuda.graph_pool_handle(), stream):
        made += F.dropout(x, 0.5)
    graph.replay()
    assert set(made.tolist()) == {0.0, 2.0}
    assert torch.cuda.current_stream() == before
