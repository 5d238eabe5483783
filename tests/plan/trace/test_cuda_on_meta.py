"""The planner's model of CUDA against torch's own fake CUDA tensors: which branches a training step takes.

If a release of torch changes a branch, a test here says which operations differ. Either the model follows, or the
difference has a reason, and is listed. What fake tensors can't show without CUDA, and so is not compared: which kernel
attention takes (here both sides take plain operations; `test_trace.py` has the choice), cuDNN's batch norm, kernels
that only a build with CUDA has. The order of operations is not compared, because compilers choose some of it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from flexor.plan.trace import cuda_on_meta as cuda
from flexor.plan.trace.cuda_on_meta import CudaOnMeta
from flexor.plan.trace.rehearsal import META
from support import fake_cuda
from support.fake_cuda import CASES, Recorder, Result, rehearse
from support.limits import LIMIT_S
from support.runs import SERVER
from support.torch_functions import FUNCTIONS, types

without_cuda = pytest.mark.skipif(
    torch.version.cuda is not None, reason="fake tensors of a build with CUDA take kernels that others lack"
)

Calls = Counter[tuple[str, str, tuple[Result, ...]]]  # phase, operation, results


@dataclass(frozen=True)
class Difference:
    """Operations of the plan in whose place fake tensors have others, with the same first result."""

    why: str
    cases: tuple[str, ...]
    plan: str | None
    fake: tuple[str, ...]
    result: Result | None = None  # if there is none in the plan


DIFFERENCES = (
    Difference(
        "a build without CUDA has no such kernel, and takes it apart",
        ("diffusion", "tdmpc"),
        "mish_backward",
        ("softplus", "tanh", "sigmoid", "mul", "mul", "fill_", "sub_", "mul", "add", "mul"),
    ),
    Difference(
        "a build without CUDA has no cuDNN",
        ("diffusion", "vqbet fp16"),
        "cudnn_batch_norm",
        ("native_batch_norm",),
    ),
    Difference(
        "a build without CUDA has no cuDNN",
        ("diffusion", "vqbet fp16"),
        "cudnn_batch_norm_backward",
        ("native_batch_norm_backward",),
    ),
    Difference(
        "the schedule's table is on the host, and the meta device has it for its own",
        ("diffusion",),
        None,
        ("_to_copy",),
        ((100,), "float32"),
    ),
)

# Bytes that the plan has at each backward pass and fake tensors do not: two flags, made with a value, which no
# operation shows on the meta device until they are set.
KEPT_MORE = {"vqbet fp16": [0, 2], "diffusion": [-400]}  # the noise schedule stays on the GPU


@pytest.fixture(scope="module")
def fake(tmp_path_factory) -> dict[str, Any]:
    """What fake CUDA tensors do, from a process of their own."""
    file = tmp_path_factory.mktemp("fake") / "cuda.json"
    process = SERVER.Process(target=write_fake, args=(file,))
    process.start()
    process.join(LIMIT_S)
    assert process.exitcode == 0
    return json.loads(file.read_text())


def write_fake(file: Path) -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    with file.open("w") as out, contextlib.redirect_stdout(out):
        fake_cuda.main()


def planned(case: str) -> dict[str, Any]:
    with torch.random.fork_rng(devices=[]), CudaOnMeta(capability=None).active():
        return rehearse(CASES[case](), Recorder("meta"), META)


def as_calls(listed: list[Any]) -> Calls:
    return Counter(
        (phase, name, tuple((tuple(shape), dtype) for shape, dtype in results))
        for phase, name, results in listed
    )


def first_results(calls: Calls) -> Counter[tuple[str, str, Result]]:
    counts: Counter[tuple[str, str, Result]] = Counter()
    for (phase, name, results), count in calls.items():
        counts[phase, name, results[0]] += count
    return counts


def explain(difference: Difference, plan: Counter, fake: Counter) -> Iterator[None]:
    """Take away what a listed difference explains, once for each time that it occurs."""
    if difference.plan is None:
        calls = [call for call in fake if call[1:] == (difference.fake[0], difference.result)]
    else:
        calls = [call for call in plan if call[1] == difference.plan]
    for phase, name, result in calls:
        instead = Counter((phase, each, result) for each in difference.fake)
        while instead <= fake and (difference.plan is None or plan[phase, name, result]):
            fake.subtract(instead)
            if difference.plan is not None:
                plan[phase, name, result] -= 1
            yield


@pytest.mark.ranks
@without_cuda
@pytest.mark.parametrize("case", CASES)
def test_a_step_does_what_it_does_on_fake_cuda_tensors(case: str, fake: dict[str, Any]):
    ours, theirs = planned(case), fake["steps"][case]
    our_calls, their_calls = as_calls(ours["calls"]), as_calls(theirs["calls"])
    only_ours, only_theirs = first_results(our_calls - their_calls), first_results(their_calls - our_calls)
    for difference in DIFFERENCES:
        times = sum(1 for _ in explain(difference, only_ours, only_theirs))
        assert bool(times) == (case in difference.cases), f"{difference.fake} occurs {times} times"
    assert (+only_ours, +only_theirs) == (Counter(), Counter())
    more = [a - b for a, b in zip(ours["kept"], theirs["kept"], strict=True)]
    assert more == KEPT_MORE.get(case, [0] * len(more))  # for the backward pass


@pytest.mark.ranks
@without_cuda
def test_autocast_gives_the_same_types(fake: dict[str, Any]):
    with CudaOnMeta().active():
        ours = types(META)
    different = {name for name in FUNCTIONS if ours[name] != fake["types"][name]}
    assert different == {"pairwise_distance"}  # calls `norm` within torch, where the mode does not see it


def test_autocast_knows_the_same_functions():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    theirs = {name.removeprefix("aten::").split(".")[0] for name in registered if name.startswith("aten::")}
    ours = cuda.LOWER_PRECISION | cuda.FP32 | cuda.FP32_RESULT | cuda.PROMOTE
    assert ours - theirs == {
        *("__matmul__", "__rmatmul__", "__pow__", "__rpow__"),  # names in Python
        *("cross_entropy_loss", "nll_loss_nd", "square", "linalg_norm"),  # call such a function within torch
    }
    only_in_cuda_builds = {"_cudnn_rnn"}
    assert theirs - ours - only_in_cuda_builds == {
        *("_convolution", "cudnn_convolution", "cudnn_convolution_transpose"),  # are called within torch only
        *("_scaled_dot_product_flash_attention", "_thnn_fused_gru_cell", "_thnn_fused_lstm_cell"),
        "binary_cross_entropy",  # is refused
        # no policy has them
        *("conv_tbc", "vdot", "lstm_cell", "gru_cell", "rnn_relu_cell", "rnn_tanh_cell"),
    }
