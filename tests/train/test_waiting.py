"""The host issues a step's work and goes on: nothing in it may wait for the GPU."""

import pytest
import torch
from torch import nn

from flexor.config.schema import TrainConfig
from flexor.data.settings import DatasetConfig, ImageTransformConfig, ImageTransformsConfig
from flexor.plan.speed.measure import Stopwatch
from flexor.plan.trace.rehearsal import Rehearsal
from flexor.plan.trace.trace import trace_step
from flexor.policies import POLICIES
from flexor.train.stopping import OnTheWay
from parity.multi_task_dit.clips import make_clips
from parity.smolvla.vlms import make_vlms
from support.image_transforms import ALL
from support.plans import H200, settings


@pytest.fixture(params=POLICIES)
def config(request, tmp_path):
    if request.param == "smolvla":
        make_vlms(tmp_path)
        return settings("smolvla", policy={"vlm_model_name": str(tmp_path / "tiny-vlm")}, precision="bf16")
    if request.param != "multi_task_dit":
        return settings(request.param, precision="bf16")
    make_clips(tmp_path)
    clips = dict.fromkeys(("vision_encoder_name", "text_encoder_name"), str(tmp_path / "tiny-clip"))
    return settings("multi_task_dit", (32, 32), clips, precision="bf16")


def test_no_policy_asks_for_values_or_brings_them(config):
    asked = [asked.name for asked in trace_step(config, 2, H200).asked]
    once = ["item"] if config.policy.type == "vqbet" else []  # whether its vocabulary is there, as it begins
    assert asked == once


@pytest.fixture
def augmented() -> TrainConfig:
    """With every operation."""
    tfs = {name: ImageTransformConfig(1.0, *entry) for name, entry in ALL.items()}
    return settings(dataset=DatasetConfig(image_transforms=ImageTransformsConfig(True, 3, True, tfs)))


def test_augmentation_does_not_ask_for_values_or_bring_them(augmented):
    assert trace_step(augmented, 2, H200).asked == []


@pytest.mark.gpu
def test_torch_sees_no_augmented_step_wait(augmented):
    test_torch_sees_no_step_wait(augmented)


@pytest.mark.gpu
def test_torch_sees_no_step_wait(config):
    device = torch.device("cuda", 0)
    run = Rehearsal(config, 2, 1, Stopwatch(), device)
    number = run.steps_to_see()[-1]
    for _ in range(2):
        run.step(number)  # what is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_values_arrive():
    arrived = OnTheWay(torch.tensor([1.0, 0.0]), torch.tensor(2.5), nn.Parameter(torch.tensor(float("nan"))))
    (loss, signal), norm, own = arrived.arrived()
    assert (loss, signal, norm) == (1, 0, 2.5) and own != own


@pytest.mark.gpu
def test_values_arrive_while_the_gpu_works_on():
    loss = torch.full((1,), 3.0, device="cuda")
    torch.cuda.synchronize()
    on_the_way = OnTheWay(loss)
    torch.cuda._sleep(2_000_000_000)  # about a second
    assert on_the_way.arrived() == [[3.0]]
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
