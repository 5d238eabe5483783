"""Plans of runs that encode each image once: what the steps are, what features take, how long the first pass is."""

from dataclasses import replace

import pytest

from flexor.core.errors import ConfigError
from flexor.core.typed import with_settings
from flexor.plan.data.host import Camera, Data
from flexor.plan.plan import Host, make_plan, site_of
from flexor.plan.rank import Ranking
from flexor.plan.show.as_json import _data
from flexor.plan.show.report import _host
from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.speeds import assumed
from flexor.plan.trace.traces import Traces
from flexor.policies.vlm.smolvlm_size import read_size
from support.plans import settings

HARDWARE = load_hardware()
HOST = Host(cores=16, memory=64_000_000_000, disk=1_000_000_000_000, source="a test")
DATA = Data(frames=20_000, cameras=(Camera(64, 64),))
VLM = "builtin/tiny-vlm"
SIZE = read_size(VLM)
TOKENS = (32 // SIZE.vision.patch // SIZE.shuffle) ** 2
BYTES = 2 * TOKENS * SIZE.text.width  # of the features of an image of 32 x 32, in bfloat16


def config_of(kind="smolvla", policy=None, **more):
    policy = {"vlm_model_name": VLM, **(policy or {})} if kind == "smolvla" else policy
    run = settings(kind, policy=policy, precision="bf16", step="auto", batch_size=8, steps=10_000)
    return with_settings(run, more)


def plan_of(config, data=DATA, host=HOST, gpu="H200", **options):
    site = site_of(HARDWARE, HARDWARE.find(gpu), host=host)
    return make_plan(config, data, site, HARDWARE, search=False, speeds=assumed(), **options)


@pytest.fixture(scope="module")
def plans():
    on, off = (plan_of(config_of(**{"dataset.cache.features": tier})) for tier in ("auto", "off"))
    return on, off


def test_a_step_has_no_encoder(plans):
    on, off = plans
    assert on.features.tier == "ram" and off.features.tier == "off"
    assert on.config.dataset.cache.features == "ram"
    assert on.run_time.step.flops < off.run_time.step.flops
    assert on.run_time.step.gpu_seconds < off.run_time.step.gpu_seconds
    assert on.memory.allocated < off.memory.allocated
    assert on.memory.parts["weights"] == off.memory.parts["weights"]


def test_what_features_take_and_how_long_the_pass_is(plans):
    on, off = plans
    assert on.features.nbytes == DATA.frames * BYTES == on.host_memory.features
    assert on.host_memory.cache == 0 < off.host_memory.cache
    assert off.host_memory.features == on.disk.features == on.frames_on_gpu == 0
    assert 0 < on.features.first_pass_s < 600
    steps = on.run_time.seconds - on.features.first_pass_s
    assert steps == pytest.approx(on.config.steps * on.run_time.step.seconds, rel=0.1)
    more = plan_of(config_of(), replace(DATA, frames=40_000))
    assert more.features.first_pass_s == pytest.approx(2 * on.features.first_pass_s, rel=0.01)


@pytest.mark.parametrize("tier", ["ram", "disk", "gpu"])
def test_memory_by_tier(tier, plans):
    plan = plan_of(config_of(**{"dataset.cache.features": tier}))
    nbytes = DATA.frames * BYTES
    places = plan.host_memory.features, plan.disk.features, plan.frames_on_gpu
    assert places == tuple(nbytes * (each == tier) for each in ("ram", "disk", "gpu"))
    assert plan.memory.allocated == plans[0].memory.allocated


def test_any_batch_size_follows_from_two(plans):
    config = config_of(**{"dataset.cache.features": "ram"})
    traced = Traces(config, scalable=False)
    gpu = HARDWARE.find("H200")
    scaled, exact = (traces.at(6, 1, gpu, features=True) for traces in (Traces(config), traced))
    assert scaled.inputs == exact.inputs
    assert [(e.kind, e.nbytes) for e in scaled.events] == [(e.kind, e.nbytes) for e in exact.events]


def off_because(config, data=DATA, host=HOST) -> str | None:
    plan = plan_of(config, data, host)
    assert plan.features.tier == "off" and plan.features.nbytes == 0 and plan.features.first_pass_s == 0
    return plan.features.why_off


def test_off_with_the_reason_of_the_run():
    assert "read only 1.0 times" in off_because(config_of(steps=2000))
    trained = {"train_expert_only": False, "freeze_vision_encoder": False}
    assert off_because(config_of(policy=trained)) == "the image encoder is trained"
    assert "more than the budget" in off_because(config_of(**{"dataset.cache.gb": 0.001}))
    small = replace(HOST, memory=10_000_000, disk=10_000_000)
    assert "more than the budget" in off_because(config_of(), host=small)
    assert off_because(config_of(**{"dataset.cache.tier": "stream"})) == "dataset.cache.tier=stream"
    augmented = config_of(**{"dataset.image_transforms.enable": True})
    assert "image_transforms" in off_because(augmented)
    assert off_because(config_of("act")) is None
    with pytest.raises(ConfigError, match=r"dataset\.cache\.features=ram: the image encoder is trained"):
        plan_of(config_of(policy=trained, **{"dataset.cache.features": "ram"}))


def test_little_memory_means_disk():
    plan = plan_of(config_of(), host=replace(HOST, memory=10_000_000))
    assert plan.features.tier == "disk" and plan.disk.features == plan.features.nbytes


def test_pi0_stores_what_its_projector_takes():
    plan = plan_of(config_of("pi0", policy={"freeze_vision_encoder": True}))
    assert plan.features.nbytes == DATA.frames * 4 * 16 * 2  # 28 x 28 pixels are four patches


def test_the_comparison_of_gpus_has_them_too(plans):
    on, _ = plans
    job = replace(config_of(), global_batch_size=8)
    ranking = Ranking(job, DATA, HARDWARE, assumed(), traces=Traces(job), calibrated=False)
    site = site_of(HARDWARE, HARDWARE.find("H200"), host=HOST)
    choice = ranking.on(site)
    assert choice.peak == pytest.approx(on.peak, rel=1e-3)
    assert choice.hours == pytest.approx(on.run_time.hours, rel=1e-3)


def test_the_reports(plans):
    on, off = plans
    assert "Images: each is encoded once, in " in _host(on) and "are in host memory" in _host(on)
    assert "Frames: cached in host memory" in _host(off) and "encoded" not in _host(off)
    late = plan_of(config_of(steps=2000))
    assert "Images are encoded in every step: each would be read only 1.0 times" in _host(late)
    assert _data(on)["features"] == {
        "tier": "ram",
        "why_off": None,
        "bytes": on.features.nbytes,
        "first_pass_s": on.features.first_pass_s,
    }
