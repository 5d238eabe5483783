"""`flexor plan` as it is typed: answers, mistakes, and the faces."""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flexor.cli import main as cli
from flexor.cli import plan as verb
from flexor.plan.compare import Comparison
from flexor.plan.show.table import hardware_guide
from flexor.plan.site.hardware import Hardware, load_hardware
from flexor.policies import POLICIES
from flexor.sim.record import record_dataset
from support import small_resnet

pytestmark = pytest.mark.usefixtures("shared_traces")
ROOT = Path(__file__).parents[2]
SMALL = [
    small_resnet.FLAG,
    "--policy.dim_model=64",
    "--policy.n_heads=4",
    "--policy.dim_feedforward=128",
    "--policy.n_encoder_layers=1",
    "--policy.n_vae_encoder_layers=1",
    "--policy.chunk_size=10",
]
JOB = [*SMALL, "--policy.n_action_steps=10", "--cameras=1x64x64", "--frames=1000", "--epochs=2"]


ONE_GPU = "--gpus=1"  # for plans of which the comparison with more GPUs is not looked at


@pytest.fixture(scope="module", autouse=True)
def studied_once() -> Iterator[None]:
    """Tests ask for the same plan, as text and as JSON: what is shown is found out once."""
    study, result = verb._study, {}

    def once(parsed: argparse.Namespace, flags: dict[str, Any], hardware: Hardware) -> Comparison:
        key = repr(({**vars(parsed), "json": None}, flags))
        if key not in result:
            result[key] = study(parsed, flags, hardware)
        return result[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verb, "_study", once)
        yield


@functools.cache
def plan(*arguments: str) -> tuple[int, dict]:
    """Several tests ask for the same plan."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = cli.main(["plan", *JOB, "--json", *arguments])
    return code, json.loads(out.getvalue())


def test_the_answer_comes_first(capsys):
    images = ["--policy.vision_backbone=resnet18", "--batch_size=64"]
    assert cli.main(["plan", *JOB, *images, "--gpu=4090", ONE_GPU]) == 0
    out = capsys.readouterr().out
    assert re.match(r"act fits on an RTX 4090: \d\.\d\d of 25\.39 GB at peak\.\nA step takes ", out)
    for part in (
        "activations",
        "total at peak",
        "host work, in parallel",
        "memory, total",
        "Mbit/s from robot to server",
        "kWh",
        "buying",
    ):
        assert part in out
    assert "No dataset is given. Assumed: 1,000 frames, 1 camera of 64x64" in out


def test_a_run_with_a_graph_is_not_bound_by_the_host(capsys):
    _, graph = plan("--gpu=4090")
    _, eager = plan("--gpu=4090", "--step=eager", ONE_GPU)
    assert (graph["time"]["graph"], graph["time"]["bound"]) == (True, "gpu")
    assert (eager["time"]["graph"], eager["time"]["bound"]) == (False, "host")
    assert graph["time"]["step_s"] == pytest.approx(eager["time"]["at_best_s"])
    notes = []
    never = ["--gpus=2", "--parallel.find_unused_parameters=true"]
    for more in ([], ["--step=eager", ONE_GPU], ["--step=eager", *never]):
        cli.main(["plan", *JOB, "--gpu=4090", *more])
        notes.append(capsys.readouterr().out)
    assert "Steps are replayed as a CUDA graph" in notes[0] and "--step=auto" not in notes[0]
    assert "With --step=auto, as a CUDA graph, a step would take" in notes[1]
    assert "Without launch overhead, a step would take" in notes[2] and "--step=auto" not in notes[2]


def test_the_precision_is_that_of_the_gpu(capsys):
    for gpu, precision in ((["--gpu=4090"], "bf16"), (["--gpu=T4", ONE_GPU], "float32")):
        cli.main(["plan", *JOB, *gpu])
        assert f"Batch size 8 in {precision}" in capsys.readouterr().out
    _, expected = plan("--gpu=4090", "--precision=no", ONE_GPU)
    _, auto = plan("--gpu=4090")
    assert auto["memory"]["activations_bytes"] < expected["memory"]["activations_bytes"]


def test_compiled_blocks_have_bounds(capsys):
    code, result = plan("--gpu=4090", "--compile=true", ONE_GPU)
    times = result["time"]
    assert code == 0 and 0 < times["compiled_at_best_s"] < times["at_best_s"] <= times["step_s"]
    cli.main(["plan", *JOB, "--gpu=4090", "--compile=true", ONE_GPU])
    assert "Compiled blocks" in capsys.readouterr().out


def test_where_a_policy_of_ones_own_waits_is_said(capsys, tmp_path: Path):
    file = tmp_path / "own.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "from flexor.policies.act.policy import ACT, ACTConfig\n"
        "@dataclass\n"
        "class OwnConfig(ACTConfig): pass\n"
        "class Own(ACT):\n"
        "    Config = OwnConfig\n"
        "    def loss(self, batch, noise):\n"
        "        found = super().loss(batch, noise)\n"
        "        if found.per_sample.mean() > 1e9:\n"
        "            raise ValueError\n"
        "        return found\n"
    )
    assert cli.main(["plan", *JOB, f"--policy.type={file}:Own", "--gpu=4090", ONE_GPU]) == 0
    assert (
        "makes the host wait for the GPU: bool in own.py, line 9. Host and GPU then"
        in capsys.readouterr().out
    )
    assert plan(f"--policy.type={file}:Own", "--gpu=4090", ONE_GPU)[1]["time"]["waits"] == [
        "bool in own.py, line 9"
    ]
    assert plan("--gpu=4090")[1]["time"]["waits"] == []


def test_json_has_units_and_adds_up():
    code, result = plan("--gpu=4090")
    assert code == 0 and result["fits"] and result["steps"] == 250
    memory = result["memory"]
    parts = [v for k, v in memory.items() if k.endswith("_bytes")]
    assert memory["peak_bytes"] == memory["reserved_bytes"] + memory["context_bytes"]
    assert all(isinstance(size, int) for size in parts)
    assert {choice["gpus"] for choice in result["choices"]} == {1, 2, 4, 8}
    assert {choice["gpu"] for choice in result["choices"]} == {"RTX 4090"}


def test_without_a_gpu_all_are_compared_and_the_cheapest_is_described(monkeypatch):
    monkeypatch.setattr("flexor.plan.site.hardware.gpu_here", lambda hardware: None)
    _, result = plan("--gpus=1")
    assert {choice["gpu"] for choice in result["choices"]} == set(load_hardware().gpus)
    assert result["gpu"] == result["choices"][0]["gpu"]


def test_what_does_not_fit_ends_with_1_and_says_what_to_change_and_what_it_would_take(capsys, tmp_path):
    file = tmp_path / "gpus.toml"
    file.write_text(
        '[gpus."Small"]\nmemory_gib = 0.6\nbandwidth_gb_s = 100\ntflops = { fp32 = 5, bf16 = 10 }\ntdp_w = 50\n'
        'capability = "8.6"\n'
    )
    words = (f"--gpus-file={file}", "--gpu=small", "--batch_size=512", "--price=2", ONE_GPU)
    code, result = plan(*words)
    assert code == 1 and not result["fits"]
    assert result["remedy"] and result["changes"][0]["saves_bytes"] > 0
    assert cli.main(["plan", *JOB, *words]) == 1
    out = capsys.readouterr().out
    assert "\nA step would take " in out and "The run would take " in out and "and cost " in out


def test_a_dataset_that_is_there_is_opened(capsys, tmp_path):
    record_dataset(tmp_path / "data", episodes=2)
    words = [
        "--gpu=4090",
        f"--dataset.root={tmp_path / 'data'}",
        *SMALL,
        "--policy.n_action_steps=10",
        "--steps=10",
    ]
    assert cli.main(["plan", "--json", *words]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["data"]["frames"] > 10 and result["host"]["disk_dataset_bytes"] > 0
    assert result["robot"]["rate_hz"] == 10  # the dataset's
    assert cli.main(["plan", "--frames=100", *words]) == 2
    assert (
        "--frames describes a dataset that is not recorded yet, but a dataset is given too"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpu=RTX 9999"], "Unknown GPU 'RTX 9999'"),
        (["--gpu=4090", "--cameras=2x480"], "--cameras=2x480 must be NUMBERxHEIGHTxWIDTH"),
        (["--gpu=4090", "--gpus=0"], "--gpus=0 must be at least 1"),
        (["--gpu=4090", "--batchsize=4"], "batchsize"),
        (
            ["--gpu=4090", "--bench=nowhere/report.json"],
            "--bench=nowhere/report.json is not a readable report of",
        ),
        (["--gpu=4090", f"--bench={__file__}"], "test_plan_cli.py is not a readable report of"),
        (["--gpu=4090", "--executed=1000"], "--executed=1000: a chunk has only 10 actions. Use at most 10"),
    ],
)
def test_mistakes_are_named(flags, message, capsys):
    assert cli.main(["plan", *JOB[:-2], *[word for word in JOB[-2:] if "cameras" not in word], *flags]) == 2
    assert message in capsys.readouterr().err


def test_html_is_one_file(capsys, tmp_path):
    file = tmp_path / "plan.html"
    assert cli.main(["plan", *JOB, "--gpu=4090,a100 80gb", f"--html={file}"]) == 0
    page = file.read_text()
    assert page.count("<svg") == 2 and "prefers-color-scheme: dark" in page
    assert not re.search(r"""(src|href)=(?!["']?data:)|https?://(?!www\.w3\.org/)""", page)
    assert page.count("<circle") > 3 and page.count(">nan") == 0


def test_help_needs_no_torch():
    code = (
        "import sys; sys.argv = ['flexor', 'plan', '--help']\n"
        "from flexor.cli.plan import parser; parser().format_help(); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


SEVERAL = ["--policy.chunk_size=100", "--batch_size=16", "--gpu=4090", "--gpus=4"]


def test_what_several_gpus_gain_is_said(capsys):
    assert cli.main(["plan", *JOB, *SEVERAL]) == 0
    out = capsys.readouterr().out
    assert "communication between GPUs" in out and "communication that is not overlapped" in out
    assert re.search(
        r"Each of the 4 GPUs does \d+% of the work of one GPU alone \(\d+\.\d ms per step\)", out
    )
    assert "They communicate over PCIe (31.504 GB/s) in a node; " in out and "was not measured" in out
    _, pcie = plan(*SEVERAL)
    _, faster = plan(*SEVERAL, "--interconnect=200")
    _, nodes = plan(*SEVERAL, "--nodes=2", "--network=ethernet:10")
    _, one = plan(*SEVERAL[:-1], ONE_GPU)
    time = pcie["time"]
    assert time["graph"] and 0 < time["exposed_s"] <= time["communication_s"]
    assert time["step_s"] == pytest.approx(time["exposed_s"] + sum(time["gpu_s"].values()))
    assert time["gpu_s"]["copies into buckets"] > 0
    assert time["efficiency"] == time["alone_s"] / time["step_s"] and time["alone_s"] == one["time"]["step_s"]
    efficiencies = [result["time"]["efficiency"] for result in (nodes, pcie, faster, one)]
    assert efficiencies == sorted(efficiencies) and efficiencies[0] < 0.5 and efficiencies[-1] == 1
    assert nodes["time"]["links"] == "PCIe (31.504 GB/s) in a node, Ethernet (1.25 GB/s) between nodes"
    assert one["time"]["links"] is None and one["time"]["communication_s"] == 0


def test_a_link_that_the_gpu_does_not_have_is_refused(capsys):
    assert cli.main(["plan", *JOB, *SEVERAL, "--interconnect=nvlink"]) != 0
    assert "the RTX 4090 has no NVLink: use pcie" in capsys.readouterr().err


def test_the_hardware_page_is_what_the_table_prints():
    """For one policy of all; the others take a minute."""
    page = (ROOT / "docs/hardware.md").read_text()
    made = hardware_guide(load_hardware(), ["act"])
    other_flags = "".join(
        line for line in page.splitlines(keepends=True) if re.match(r"\| (?!act |Policy|---)", line)
    )
    assert page.replace(other_flags, "") == made, "run `flexor plan --table > docs/hardware.md`"
    assert {line.split()[1] for line in page.splitlines() if line.startswith("| ")} - {"Policy", "---"} == {
        *POLICIES
    }


def test_the_hardware_page_of_some_policies_and_gpus(capsys):
    assert cli.main(["plan", "--table", "--policy.type=tdmpc", "--gpu=RTX 3060,H200"]) == 0
    table = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| tdmpc")]
    assert len(table) == 2 and all(line.count("RTX 3060") + line.count("H200") >= 2 for line in table)
    assert not any(name in line for line in table for name in ("A100", "L4", "B200"))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--price=-1"], "--price=-1 must be above 0."),
        (["--table", "--policy.type=atc"], "'atc' is not known. Did you mean sac or act?"),
        (["--table", "--steps=3"], "leave out --steps"),
    ],
)
def test_what_a_plan_can_not_do_is_refused(flags, message, capsys):
    assert cli.main(["plan", *flags]) == 2
    assert message in capsys.readouterr().err
