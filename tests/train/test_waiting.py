"""The host issues a step's work and goes on: nothing in it may wait for the GPU."""

from pathlib import Path

import pytest
import torch
from torch import nn

from flexor.config.schema import TrainConfig
from flexor.core.batch import MEMORY, Batch
from flexor.core.rng import Noise
from flexor.data.settings import DatasetConfig, ImageTransformConfig, ImageTransformsConfig
from flexor.plan.speed.measure import Stopwatch
from flexor.plan.trace.cuda_on_meta import CudaOnMeta
from flexor.plan.trace.rehearsal import META, Rehearsal, policy_on, rehearsed_processing
from flexor.plan.trace.trace import trace_step
from flexor.policies import POLICIES, Policy, PolicyConfig
from flexor.policies.autoregressive import AutoregressivePolicy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn.denoising import DenoisingPolicy
from flexor.policies.nn.diffusion import DiffusionSchedule
from flexor.policies.pi0_fast.action_tokens import ActionVocabulary
from flexor.policies.processing.pipeline import StepContext
from flexor.train.stopping import AsyncHostCopy
from parity.multi_task_dit.clips import make_clips
from parity.smolvla.vlms import make_vlms
from support.image_transforms import ALL
from support.plans import H200, settings

TINY_QWEN = f"{Path(__file__).parents[1]}/support/tiny_qwen_policy/policy.py:TinyQwenPolicy"

# A prediction repeats the same operations: twice is enough.
FEW = {
    "diffusion": {"num_train_timesteps": 2},
    "multi_task_dit": {"num_train_timesteps": 2},
    "tdmpc": {"cem_iterations": 2},
}


@pytest.fixture(params=[*POLICIES, TINY_QWEN], ids=[*POLICIES, "tiny_qwen"])
def config(request, tmp_path):
    if request.param == "smolvla":
        make_vlms(tmp_path)
        return settings("smolvla", policy={"vlm_model_name": str(tmp_path / "tiny-vlm")}, precision="bf16")
    few = FEW.get(request.param, {})
    if request.param != "multi_task_dit":
        return settings(request.param, policy=few, precision="bf16")
    make_clips(tmp_path)
    clips = dict.fromkeys(("vision_encoder_name", "text_encoder_name"), str(tmp_path / "tiny-clip"))
    return settings("multi_task_dit", (32, 32), {**clips, **few}, precision="bf16")


def test_training_steps_read_no_value_on_the_host(config):
    names = [sync_point.name for sync_point in trace_step(config, 2, H200).sync_points]
    once = ["item"] if config.policy.type == "vqbet" else []  # whether its vocabulary is there, as it begins
    assert names == once


def observation(policy: PolicyConfig) -> Batch:
    """Of two robots, without values."""
    deltas = policy.observation_deltas
    steps = [] if deltas is None else [len(deltas)]

    def empty(feature: PolicyFeature) -> torch.Tensor:
        dtype = torch.uint8 if feature.type is Kind.VISUAL else torch.float32
        return torch.empty(2, *steps, *feature.shape, dtype=dtype, device=META)

    return {name: empty(feature) for name, feature in policy.observed.items()} | {"task": ["push", "pull"]}


def predict(policy: Policy, batch: Batch, noise: Noise) -> None:
    if isinstance(policy, AutoregressivePolicy) and policy.writes_tokens:  # values are read between segments
        policy.vocabulary = ActionVocabulary(bos=1, prefix=[4, 5], suffix=[2], end=2, first=400)
        policy.decode_segment(policy.prefill(batch, noise))
    else:
        policy.predict(batch, noise)


def test_predictions_read_no_value_on_the_host(config):
    """So they can be captured in a CUDA graph."""
    dialect = CudaOnMeta(H200.compute_capability)
    with torch.inference_mode(), dialect.active():
        policy = policy_on(config).eval()
        if isinstance(policy, DenoisingPolicy):
            with torch.device("cpu"):  # its noise levels are values of the host
                policy.objective = DiffusionSchedule(config.policy)
        noise = Noise(0, 0, torch.empty(2, dtype=torch.int64, device=META))
        batch = rehearsed_processing(config.policy)(observation(config.policy), StepContext(noise=noise))
        dialect.sync_points.clear()
        predict(policy, {**batch, MEMORY: {}}, noise)
    assert [sync_point.name for sync_point in dialect.sync_points] == []


@pytest.fixture
def augmented() -> TrainConfig:
    """With every operation."""
    tfs = {name: ImageTransformConfig(1.0, *entry) for name, entry in ALL.items()}
    return settings(dataset=DatasetConfig(image_transforms=ImageTransformsConfig(True, 3, True, tfs)))


def test_augmentation_does_not_ask_for_values_or_bring_them(augmented):
    assert trace_step(augmented, 2, H200).sync_points == []


@pytest.mark.gpu
def test_torch_sees_no_augmented_step_wait(augmented):
    test_torch_sees_no_step_wait(augmented)


@pytest.mark.gpu
def test_torch_sees_no_step_wait(config):
    device = torch.device("cuda", 0)
    run = Rehearsal(config, 2, 1, Stopwatch(), device)
    number = run.steps_to_trace()[-1]
    for _ in range(2):
        run.step(number)  # what is made once
    torch.cuda.set_sync_debug_mode("error")
    try:
        run.step(number)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_values_arrive():
    nan = nn.Parameter(torch.tensor(float("nan")))
    (loss, signal), norm, local_loss = AsyncHostCopy(
        torch.tensor([1.0, 0.0]), torch.tensor(2.5), nan
    ).values()
    assert (loss, signal, norm) == (1, 0, 2.5) and local_loss != local_loss


@pytest.mark.gpu
def test_values_arrive_while_the_gpu_works_on():
    loss = torch.full((1,), 3.0, device="cuda")
    torch.cuda.synchronize()
    copy = AsyncHostCopy(loss)
    torch.cuda._sleep(2_000_000_000)  # about a second
    assert copy.values() == [[3.0]]
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
