"""The machine and the time of a job, where the user leaves them to the plan."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flexor.config.parse import load_config, parse_flags
from flexor.core.errors import ConfigError
from flexor.launch.hf.jobs import launch_hf_jobs
from flexor.launch.hf.plan import timeout_of
from flexor.plan.data.from_dataset import open_for_plan
from flexor.plan.plan import Plan, Site, make_plan, rented
from flexor.plan.site.hardware import load_hardware
from flexor.plan.speed.speeds import assumed
from support.jobs_server import JobsServer, logged_in

pytestmark = [pytest.mark.installed, pytest.mark.usefixtures("shared_traces")]
PENS = "--dataset.repo_id=ann/pens"
SUBMIT = ("POST", "/api/jobs/ann")


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with logged_in(monkeypatch, tmp_path) as server:
        yield server


@pytest.fixture
def pens(lowdim, tmp_path) -> Path:
    """The dataset, as the user has it here."""
    return shutil.copytree(lowdim, tmp_path / "datasets/ann/pens")


def submitted(hub: JobsServer, *arguments: str) -> dict[str, Any]:
    assert launch_hf_jobs(["--detach", *arguments]) == 0
    return hub.bodies(*SUBMIT)[-1]


def flags_of(body: dict[str, Any]) -> dict[str, str]:
    """Settings that the job trains with."""
    words = shlex.split(body["command"][2].splitlines()[-1])
    return parse_flags(words[words.index("train") + 1 :])


def plan_on(flavor: str, *flags: str) -> Plan:
    """By hand, of the settings as they are."""
    hardware = load_hardware()
    (offer,) = (offer for offer in hardware.flavors if (offer.cloud, offer.name) == ("hf-jobs", flavor))
    config, data = open_for_plan(load_config([PENS, *flags]))
    site = rented(Site(hardware.gpus[offer.gpu], offer.gpus), offer)
    return make_plan(config, data, site, hardware, speeds=assumed(), search=False)


def give_memory(monkeypatch: pytest.MonkeyPatch, folder: Path, bytes_of: dict[str, float]) -> None:
    """GPUs with other memory than they have."""
    file = folder / "gpus.toml"
    file.write_text(
        "".join(f'[gpus."{gpu}"]\nmemory_gib = {memory / 2**30}\n' for gpu, memory in bytes_of.items())
    )
    monkeypatch.setenv("FLEXOR_GPUS", str(file))


# The flavor


def test_the_cheapest_by_the_prices_of_the_hub(hub, pens, tiny_act, log_lines):
    hub.usd_per_minute |= {"l4x1": 0.01, "a10g-largex4": 0.05}
    body = submitted(hub, "--", PENS, *tiny_act, "--steps=50000")
    assert body["flavor"] == "l4x1"
    plan = plan_on("l4x1", *tiny_act, "--steps=50000")
    minutes = -(-plan.run_time.seconds // 60)
    (line,) = [line for line in log_lines if line.startswith("flavor l4x1: ")]
    assert f"{plan.peak / 1e9:.2f} GB of {plan.site.gpu.memory / 1e9:.2f} GB" in line
    assert f"{plan.run_time.hours:.1f} h (give or take 25 %), {0.01 * minutes:.2f} $" in line
    assert not {"batch_size", "global_batch_size"} & flags_of(body).keys()  # as it was asked for
    hub.usd_per_minute |= {"l4x1": 0.5, "a10g-largex4": 0.01}
    assert submitted(hub, "--", PENS, *tiny_act, "--steps=50000")["flavor"] == "a10g-largex4"


@pytest.mark.parametrize("scaled, factor", [([], None), (["--scale_lr=linear"], "3.0")])
def test_the_global_batch_is_the_same_on_many_gpus(scaled, factor, hub, pens, tiny_act):
    hub.usd_per_minute["l4x1"] = 1
    batch = ["--batch_size=8", "--gradient_accumulation_steps=3", *scaled]
    flags = flags_of(submitted(hub, "--", PENS, *tiny_act, *batch))
    assert (flags["global_batch_size"], flags["batch_size"], flags["gpus"]) == ("24", "6", "all")
    assert flags.get("lr_factor") == factor
    words = [f"--{k}={v}" for k, v in flags.items() if k not in ("gpus", "resume", "output_dir")]
    assert load_config(words).gradient_accumulation_steps is None


def test_fewer_samples_at_a_time_where_not_all_fit(hub, pens, tiny_act, monkeypatch, tmp_path):
    flags = [*tiny_act, "--policy.dim_feedforward=4096", "--batch_size=4096"]
    full, half = (plan_on("l4x1", *flags, f"--global_batch_size={n}").peak for n in (4096, 2048))
    assert half < 0.9 * full
    give_memory(monkeypatch, tmp_path, {"L4": (full + half) / 2, "A10G": 1e8})
    body = submitted(hub, "--", PENS, *flags)
    settings = flags_of(body)
    assert body["flavor"] == "l4x1" and settings["global_batch_size"] == "4096"
    assert int(settings["batch_size"]) in (2048, 1024)


def test_only_machines_with_as_many_gpus_as_asked_for(hub, pens, tiny_act):
    hub.usd_per_minute["a10g-largex4"] = 1
    body = submitted(hub, "--", PENS, *tiny_act, "--gpus=2", "--batch_size=8")
    assert body["flavor"] == "a10g-largex4" and flags_of(body)["gpus"] == "2"
    assert flags_of(body)["batch_size"] == "8"


def test_what_fits_nowhere_is_refused_with_what_to_change(hub, pens, tiny_act, monkeypatch, tmp_path):
    wide = ["--policy.dim_model=512", "--policy.dim_feedforward=16384"]
    large = [*tiny_act, *wide, "--parallel.strategy=ddp"]
    give_memory(
        monkeypatch,
        tmp_path,
        {"L4": 1e8, "A10G": 0.9 * plan_on("a10g-largex4", *large, "--batch_size=2").peak},
    )
    with pytest.raises(
        ConfigError, match=r"any machine of Hugging Face Jobs\. On a10g-largex4, .*fit with (--\S+)"
    ) as caught:
        launch_hf_jobs(["--", PENS, *large])
    assert not hub.bodies(*SUBMIT)
    remedy = re.findall(r"--\S+[^.\s]", str(caught.value))
    assert submitted(hub, "--", PENS, *large, *remedy)["flavor"] == "a10g-largex4"


def test_what_nothing_helps(hub, pens, tiny_act, monkeypatch, tmp_path):
    give_memory(monkeypatch, tmp_path, {"L4": 1e8, "A10G": 1e8})
    with pytest.raises(ConfigError, match="train a smaller policy"):
        launch_hf_jobs(["--", PENS, *tiny_act, "--batch_size=1"])


def test_a_disk_that_is_too_small(hub, pens, tiny_act, monkeypatch, tmp_path):
    file = tmp_path / "gpus.toml"
    tiny = "usd_per_hour = 1, cores = 8, ram_gb = 30, disk_gb = 1e-6 }\n"
    file.write_text(
        f'[clouds.hf-jobs.flavors]\n"l4x1" = {{ gpu = "L4", gpus = 1, {tiny}'
        f'"a10g-largex4" = {{ gpu = "A10G", gpus = 4, {tiny}'
    )
    monkeypatch.setenv("FLEXOR_GPUS", str(file))
    with pytest.raises(ConfigError, match=r"of disk \(--checkpoint\.keep_last"):
        launch_hf_jobs(["--", PENS, *tiny_act])


def test_a_flavor_that_is_named_but_too_small(hub, pens, tiny_act, monkeypatch, tmp_path, log_lines):
    give_memory(monkeypatch, tmp_path, {"L4": 1e8})
    assert submitted(hub, "--flavor=l4x1", "--", PENS, *tiny_act)["flavor"] == "l4x1"
    assert any("does not fit" in line and "--gpu='L4' --gpus=1" in line for line in log_lines)


# The time


def test_an_hour_at_least(hub, pens, tiny_act):
    assert submitted(hub, "--", PENS, *tiny_act, "--steps=10")["timeoutSeconds"] == 3600


def test_the_time_has_room_for_what_is_not_certain(pens, tiny_act, hub):
    plan = plan_on("l4x1", *tiny_act)
    step = replace(plan.run_time.step, spread=0.25)
    ten_hours = replace(plan, run_time=replace(plan.run_time, seconds=36_000.0, step=step))
    assert timeout_of(ten_hours) == 15 * 3600  # 30 min + 10 h x 1.35 + 10 min, rounded up


def test_the_time_on_a_flavor_that_is_named(hub, pens, tiny_act, log_lines):
    body = submitted(hub, "--flavor=a10g-largex4", "--", PENS, *tiny_act, "--steps=3000000")
    plan = plan_on("a10g-largex4", *tiny_act, "--steps=3000000")
    assert body["timeoutSeconds"] == timeout_of(plan) > 2 * plan.run_time.seconds * 0.75
    assert "batch_size" not in flags_of(body)
    assert any(line.startswith("flavor a10g-largex4: ") and "cheapest" not in line for line in log_lines)


def test_a_time_that_is_too_short(hub, pens, tiny_act, log_lines):
    arguments = ["--timeout=1h", "--", PENS, *tiny_act, "--steps=3000000"]
    assert submitted(hub, *arguments)["timeoutSeconds"] == 3600
    assert any("--timeout may be too short" in line for line in log_lines)


# What can't be planned


def test_a_dataset_that_can_not_be_opened_here(hub, tiny_act, log_lines):
    body = submitted(hub, "--", PENS, *tiny_act)
    assert body["flavor"] in ("l4x1", "a10g-largex4")
    (line,) = [line for line in log_lines if "can't be opened on this machine" in line]
    assert "ann/pens" in line and "45000 frames of observation.images.camera0 [3, 480, 640]" in line


def test_a_dataset_that_the_policy_can_not_use(hub, pens):
    with pytest.raises(ConfigError, match="one camera"):
        launch_hf_jobs(["--", PENS, "--policy.type=vqbet"])
    assert not hub.bodies(*SUBMIT)


def test_machines_without_a_gpu_are_not_planned(hub, pens, tiny_act, log_lines):
    assert submitted(hub, "--flavor=cpu-basic", "--", PENS, *tiny_act)["timeoutSeconds"] == 24 * 3600
    assert any("timeout of 24h" in line and "cpu-basic" in line for line in log_lines)
    with pytest.raises(ConfigError, match=r"the plan does not support training on the CPU.*--flavor"):
        launch_hf_jobs(["--", PENS, *tiny_act, "--processes=2"])


def test_nothing_is_planned_if_both_are_given(hub, log_lines):
    submitted(hub, "--flavor=l4x1", "--timeout=2h", "--", PENS)
    assert not any("can't be opened" in line or line.startswith("flavor ") for line in log_lines)
