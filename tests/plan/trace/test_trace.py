"""The trace: the tracker against what was really allocated, categories of memory, and the branches that CUDA takes."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _foreach_utils

from flexor.config.schema import EMAConfig, OptimizerConfig
from flexor.plan.trace.cuda_on_meta import CudaOnMeta, attention_backend
from flexor.plan.trace.events import Category, Trace
from flexor.plan.trace.trace import OperationTracker, trace_step
from parity.multi_task_dit.clips import make_clips
from parity.smolvla.vlms import make_vlms
from support.own_policy import own_policy
from support.plans import H200, SMALL, Gpu, settings


@pytest.fixture(scope="module")
def act() -> Trace:
    return trace_step(settings(), 4, H200)


class Net(nn.Module):
    """Branches, sums of gradients, convolutions, an in-place operation: what tells trackers apart."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.inner, self.outer = nn.Linear(64, 256), nn.Linear(256, 64)
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).relu_().flatten(2).transpose(1, 2)  # [B, 64, 8]
        x = x.reshape(len(x), 8, 64)
        for _ in range(3):
            x = x + self.outer(F.gelu(self.inner(self.norm(x))))
        return x.square().mean()


def train(device: str) -> None:
    torch.manual_seed(0)
    net = Net().to(device)
    optimizer = torch.optim.AdamW(net.parameters(), foreach=device == "cpu")
    for _ in range(2):
        net(torch.randn(16, 3, 8, 8, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def live_bytes(tracker: OperationTracker) -> list[int]:
    live, sizes, out = 0, {}, []
    for event in tracker.events:
        if event.kind == "alloc":
            sizes[event.storage] = event.nbytes
            live += event.nbytes
        elif event.kind == "free":
            live -= sizes[event.storage]
        out.append(live)
    return out


def test_the_tracker_sees_what_the_cpu_really_allocates():
    train("cpu")  # what is made once in a process
    with torch.profiler.profile(profile_memory=True, record_shapes=True) as profile:
        train("cpu")
    changes = allocations(profile)
    with OperationTracker("cpu", scratch=False) as tracker:
        train("cpu")
    assert max(live_bytes(tracker)) == pytest.approx(peak(changes), rel=0.01)


def allocations(profile) -> list[int]:
    """Bytes taken (positive) and given back, in order."""
    from torch._C._profiler import _EventType

    allocations, waiting = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        if event.tag == _EventType.Allocation:
            allocations.append((event.start_time_ns, event.extra_fields.alloc_size))
    return [size for _, size in sorted(allocations, key=lambda each: each[0])]


def peak(changes: list[int]) -> int:
    most = now = 0
    for change in changes:
        now += change
        most = max(most, now)
    return most


def test_meta_tensors_are_allocated_and_freed_as_real_ones():
    with OperationTracker("cpu", scratch=False) as real:
        train("cpu")
    with OperationTracker("meta", scratch=False) as fake:
        train("meta")
    assert max(live_bytes(fake)) == pytest.approx(max(live_bytes(real)), rel=0.02)


def test_what_is_kept_adds_up_exactly(act):
    assert act.nbytes("weights") == 4 * act.parameters
    assert act.parameters == act.trained
    tensors = sum(1 for category in act.category.values() if category == "weights")
    assert act.nbytes("optimizer") == 8 * act.trained + 4 * tensors  # two moments, and a step for each tensor
    assert act.nbytes("gradients") >= 4 * act.trained
    assert act.nbytes("ema") == 0
    assert act.nbytes("workspaces") == 2 * (32 << 20)
    assert set(act.category.values()) <= set(get_args(Category))


def test_every_storage_is_freed_once_after_its_allocation(act):
    allocated, freed = set(), set()
    for event in act.events:
        if event.kind == "alloc":
            assert event.storage not in allocated
            allocated.add(event.storage)
        elif event.kind == "free":
            assert event.storage in allocated and event.storage not in freed
            freed.add(event.storage)
    left = {act.category[storage] for storage in allocated - freed}
    assert left <= {"weights", "buffers", "optimizer", "workspaces", "batch", "activations", "ema", "other"}


def test_phases_come_in_order(act):
    order = ["build", "load", "batch", "forward", "backward", "batch", "clip", "optimizer", "ema"]
    phases = [op.phase for op in act.ops]
    changes = [phase for i, phase in enumerate(phases) if i == 0 or phase != phases[i - 1]]
    assert changes == order
    assert any(op.module == "model.encoder.layers.0.linear1" for op in act.ops if op.phase == "forward")


def test_a_moving_average_is_a_copy_of_the_state():
    trace = trace_step(settings(ema=EMAConfig(enable=True)), 2, H200)
    buffers = 4 * 64 * (1 + 10 + 1)  # positions of the style encoder; those of cameras are not saved
    assert trace.nbytes("ema") >= trace.nbytes("weights") + buffers


@pytest.mark.parametrize(("kind", "state"), [("adam", 8), ("sgd", 0)])
def test_other_optimizers(kind: str, state: int):
    trace = trace_step(settings(optimizer=OptimizerConfig(type=kind)), 2, H200)
    assert trace.nbytes("optimizer") // trace.trained == state


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("kind", [kind for kind in SMALL if kind not in ("multi_task_dit", "smolvla")])
def test_every_policy(kind: str, precision: str):
    trace = trace_step(settings(kind, precision=precision), 2, H200)
    in_bf16 = sum(trace.float32_on_host) // 2
    assert trace.nbytes("weights") == 4 * trace.parameters - in_bf16
    assert sum(op.flops for op in trace.ops if op.phase == "backward") > 0
    assert (trace.nbytes("casts") > 0) == (precision != "no")
    assert len(trace.steps) == (2 if kind in ("vqbet", "tdmpc") else 1)


def test_multi_task_dit(tmp_path: Path):
    make_clips(tmp_path)
    clips = {f"{part}_encoder_name": str(tmp_path / "tiny-clip") for part in ("vision", "text")}
    trace = trace_step(settings("multi_task_dit", (32, 32), clips), 2, H200)
    assert trace.trained < trace.parameters  # words are never trained
    assert trace.nbytes("optimizer") < 9 * trace.trained


def test_smolvla(tmp_path: Path):
    make_vlms(tmp_path)
    model = {"vlm_model_name": str(tmp_path / "tiny-vlm")}
    frozen = trace_step(settings("smolvla", policy=model, precision="bf16"), 2, H200)
    unfrozen = trace_step(settings("smolvla", policy={**model, "train_expert_only": False}), 2, H200)
    assert frozen.trained < unfrozen.trained < unfrozen.parameters == frozen.parameters
    assert frozen.nbytes("optimizer") < 9 * frozen.trained


OWN_POLICY = own_policy(
    """\
        self.head = torch.nn.Linear(6, 6)
        self.register_buffer("scale", torch.tensor([2.0]))
        self.factor = float(self.scale)
    def loss(self, batch, noise):
        error = self.head(batch["observation.state"]) - batch["action"][:, 0]
        if (error > 100).any():
            error = error * 2
        per_sample = error.square().mean(-1)
        return Loss(per_sample, {})
""",
)


def test_a_policy_of_ones_own(tmp_path: Path):
    (tmp_path / "own.py").write_text(OWN_POLICY)
    trace = trace_step(settings(f"{tmp_path / 'own.py'}:Own"), 2, H200)
    assert trace.parameters == 6 * 6 + 6
    (point,) = set(trace.sync_points)  # a GPU would be waited for there
    line = 1 + OWN_POLICY.splitlines().index("        if (error > 100).any():")
    assert str(point) == f"bool in own.py, line {line}"


def test_products_have_their_flops():
    with OperationTracker("meta") as tracker:
        weight = torch.empty(32, 16, device="meta", requires_grad=True)
        x = torch.empty(8, 16, device="meta", requires_grad=True)
        tracker.phase = "forward"
        y = F.linear(x, weight)
        tracker.phase = "backward"
        y.sum().backward()
    products = [op for op in tracker.ops if op.kind == "matmul"]
    assert [op.flops for op in products] == [2 * 8 * 16 * 32] * 3
    assert [op.phase for op in products] == ["forward", "backward", "backward"]


def test_later_passes_add_to_gradients_in_place():
    single, four = (trace_step(settings(gradient_accumulation_steps=n), 2, H200) for n in (1, 4))
    assert four.passes == 2 and four.accumulation == 4
    count = [sum(1 for category in t.category.values() if category == "gradients") for t in (single, four)]
    assert count[0] == count[1]


def test_planning_leaves_torch_as_it_was(act):
    before = torch.autocast, torch.random.get_rng_state()
    trace_step(settings(precision="bf16"), 2, H200)
    assert torch.autocast is before[0]
    assert torch.equal(torch.random.get_rng_state(), before[1])
    assert "meta" not in _foreach_utils._get_fused_kernels_supported_devices()


# CUDA's code paths.


def active(**more):
    return CudaOnMeta(**more).active()


def test_dropout_keeps_a_mask_of_bytes():
    x = torch.empty(1000, device="meta", requires_grad=True)
    with OperationTracker("meta") as tracker, active():
        y = F.dropout(x, 0.1, True)
    assert y.shape == x.shape
    assert [event.nbytes for event in tracker.events] == [1000, 4000]


def test_autocast_casts_products_keeps_copies_of_weights_and_widens_losses():
    weight = torch.empty(4, 4, device="meta", requires_grad=True)
    x = torch.empty(2, 4, device="meta")
    with active() as cuda, torch.autocast("meta", torch.bfloat16):
        y = F.linear(x, weight)
        F.linear(x, weight)
        assert len(cuda._casts) == 1
        assert y.dtype == torch.bfloat16
        assert F.layer_norm(y, (4,)).dtype == torch.float32
        assert F.l1_loss(y, y).dtype == y.square().dtype == torch.float32
        assert y.softmax(-1).dtype == y.sum().dtype == torch.float32
        assert (y + y).dtype == torch.bfloat16
        with torch.autocast("meta", enabled=False):
            assert F.linear(x, weight).dtype == torch.float32
    assert not cuda._casts


@pytest.mark.parametrize(
    ("dtype", "width", "mask", "capability", "backend"),
    [
        (torch.float32, 64, False, (9, 0), "efficient"),
        (torch.float32, 30, False, (9, 0), "math"),
        (torch.bfloat16, 64, False, (8, 9), "flash"),
        (torch.bfloat16, 64, True, (8, 6), "efficient"),
        (torch.bfloat16, 64, False, (7, 5), "math"),
        (torch.float16, 64, False, (7, 5), "efficient"),
        (torch.float32, 64, False, None, "math"),
    ],
)
def test_attention_kernels(dtype, width, mask, capability, backend):
    q = torch.empty(1, 2, 8, width, dtype=dtype, device="meta")
    assert attention_backend(q, q, q, q if mask else None, capability) == backend


def test_dropout_within_plain_attention_keeps_a_mask_of_bytes():
    q = torch.empty(2, 4, 6, 30, device="meta", requires_grad=True)  # 30: no kernel takes it
    with OperationTracker("meta") as tracker, active():
        F.scaled_dot_product_attention(q, q, q, dropout_p=0.1)
    weights = 2 * 4 * 6 * 6
    assert [event.nbytes for event in tracker.events if event.nbytes == weights] == [weights]
    assert "native_dropout" in [op.name for op in tracker.ops]


@pytest.mark.parametrize("capability", [(9, 0), (8, 9), (7, 5), None])
def test_every_generation(capability):
    trace = trace_step(settings(precision="fp16"), 2, Gpu(compute_capability=capability))
    in_bf16 = sum(trace.float32_on_host) // 2
    assert trace.nbytes("weights") == 4 * trace.parameters - in_bf16


def test_values_are_zero_and_noted():
    with active() as cuda:
        assert torch.ones(1, device="meta").item() == 0
        assert not torch.ones((), dtype=torch.bool, device="meta")
        assert torch.ones(1).item() == 1  # a real tensor has one
    assert [point.name for point in cuda.sync_points] == ["item", "__bool__"]


def test_values_that_come_from_the_host_are_noted():
    with active() as cuda:
        on_meta = torch.empty(3, device="meta")
        for made in (torch.tensor(1.0, device="meta"), torch.as_tensor([1, 2], device="meta")):
            assert made.device.type == "meta"
        assert on_meta.new_tensor([1.0]).device.type == "meta"
        (
            torch.tensor(1.0),
            torch.as_tensor(on_meta),
            torch.as_tensor(on_meta, device="meta"),
            on_meta.new_zeros(2),
        )
        torch.arange(3, device="meta"), torch.full((3,), 2.0, device="meta")
    assert [point.name for point in cuda.sync_points] == ["tensor", "as_tensor", "new_tensor"]
