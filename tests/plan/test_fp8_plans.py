"""Plans of runs in fp8: less memory and shorter products than in bf16, and the refusals of the trainer."""

from dataclasses import replace

import pytest

from flexor.core.errors import ConfigError
from flexor.plan.data.host import Data
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.rank import Ranking
from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.speed.time import step_time, steps_ops
from flexor.plan.trace.traces import Traces
from flexor.policies import fp8
from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.vlm import paligemma
from flexor.policies.vlm.paligemma import PaliGemmaSize, gemma
from support import small_pi
from support.plans import Gpu, plan_memory, settings

HARDWARE = load_hardware()
SIZE = gemma(width=1024, depth=2, mlp_width=4096, heads=8, head_dim=128)


@pytest.fixture(autouse=True)
def wide_layers(monkeypatch) -> None:
    monkeypatch.setitem(paligemma.GEMMA, "gemma_1024", SIZE)
    vision = SiglipSize(width=1024, depth=1, mlp_width=4096, heads=8)
    monkeypatch.setitem(paligemma.PALIGEMMA, "gemma_1024", PaliGemmaSize(SIZE, vision, small_pi.VOCABULARY))


def config_in(precision: str, **more):
    policy = {"paligemma_variant": "gemma_1024", "action_expert_variant": "gemma_1024", "chunk_size": 50}
    policy |= {"image_resolution": (224, 224), "tokenizer_max_length": 48}
    return settings("pi0", policy=policy, precision=precision, **more)


def test_activations_take_less_memory():
    lower, ours = (plan_memory(config_in(precision), Gpu(), 32) for precision in ("bf16", "fp8"))
    for part in ("weights", "gradients", "optimizer"):
        assert ours.parts[part] == lower.parts[part]
    assert ours.parts["activations"] < 0.96 * lower.parts["activations"]
    assert ours.total < lower.total


def test_products_take_half_of_the_time():
    gpu, kinds, flops = HARDWARE.find("H200"), {}, {}
    for precision in ("bf16", "fp8"):
        config = config_in(precision, step="graph")
        trace = Traces(config, scalable=False).at(64, 1, gpu)
        step = step_time(trace, gpu, config=config)
        kinds[precision], flops[precision] = step.gpu["matmul"], step.flops
        names = {op.name for op in steps_ops(trace)}
        assert ({"_scaled_mm", "flexor::fp8_cast", "flexor::fp8_maxima"} <= names) == (precision == "fp8")
        assert step.mfu == pytest.approx(step.flops / step.seconds / gpu.flops(precision))
    assert flops["fp8"] == pytest.approx(flops["bf16"])
    assert 0.45 < kinds["fp8"] / kinds["bf16"] < 0.65


@pytest.mark.parametrize(("batch_size", "error"), [(48, 0), (24, 0.02)])
def test_any_batch_size_follows_from_two_traces(batch_size, error):
    """But for the last rows of matrices, where their number is no multiple of 16."""
    config = config_in("fp8")
    scaled = MemoryPlanner(config, Gpu()).at(batch_size)
    assert scaled.total == pytest.approx(plan_memory(config, Gpu(), batch_size).total, rel=error, abs=0)


def test_few_rows_stay_in_bf16(monkeypatch):
    """A batch of less than the traced ones is traced by itself."""
    monkeypatch.setattr(fp8, "LEAST_ROWS", 10_000)
    config = config_in("fp8")
    ops = steps_ops(Traces(config).at(2, 1, HARDWARE.find("H200")))
    assert not any(op.name == "_scaled_mm" for op in ops)


@pytest.mark.parametrize("name", ["RTX 4090", "H200", "B200"])
def test_gpus_that_share_traces(name):
    gpu = HARDWARE.find(name)
    trace = Traces(config_in("fp8")).at(16, 1, gpu)
    assert any(op.name == "_scaled_mm" for op in steps_ops(trace))


def test_other_gpus_are_refused_and_left_out_of_comparisons():
    config, old, new = config_in("fp8"), HARDWARE.find("A100 80GB"), HARDWARE.find("RTX 4090")
    with pytest.raises(ConfigError, match="precision=fp8 needs"):
        MemoryPlanner(config, old)
    job = replace(config, batch_size=16, global_batch_size=16, steps=10)
    ranking = Ranking(job, Data(frames=100, cameras=()), HARDWARE, assumed())
    assert [choice.gpu for choice in ranking.each([old, new], (1,))] == [new]


def test_policies_without_wide_layers_are_refused():
    with pytest.raises(ConfigError, match="=act has no linear layers"):
        plan_memory(settings("act", precision="fp8"), Gpu(), 2)
