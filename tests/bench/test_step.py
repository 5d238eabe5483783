"""`flexor bench step`: the real step on this machine's CPU, its figures, and on a GPU the graph and the kernels."""

import functools
import json
from pathlib import Path

import pytest
import torch

from flexor.bench.step import StepCost, synthetic, with_shares
from flexor.bench.step_report import render_step
from flexor.cli import main as cli
from flexor.plan.speed import ceilings
from flexor.plan.speed.ceilings import Ceilings
from support.own_policy import own_policy

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
ROBOT = ["--cameras=1x32x32", "--state=3", "--action=2"]
LINEAR = """\
        self.layer = torch.nn.Linear(2, 2)
    def loss(self, batch, noise):
        error = (self.layer(batch["observation.state"]) - batch["action"][:, 0]).square().mean(-1)
        if self.config.asks and error.detach().cpu().numpy().max() > 1e9:
            raise ValueError
        return Loss(error, {})
    def shard_units(self):
        return [self.layer]
"""


@pytest.fixture(autouse=True)
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ceilings are measured for real, but not for a second each, and with little memory."""
    monkeypatch.setattr(ceilings, "WINDOW_S", 0.001)
    monkeypatch.setattr(ceilings, "WINDOWS", 2)
    monkeypatch.setattr(ceilings, "CPU_EDGE", 64)
    monkeypatch.setattr(ceilings, "CPU_COPY", 1 << 20)


@pytest.fixture
def affine(tmp_path: Path) -> list[str]:
    """A policy of a matrix, which can be told to ask for a value on the host."""
    (tmp_path / "own.py").write_text(own_policy(LINEAR, settings="    asks: bool = False"))
    return [
        *(f"--policy.type={tmp_path / 'own.py'}:Own", "--policy.device=cpu"),
        *("--cameras=0x1x1", "--state=2", "--action=2"),
    ]


def test_a_step_that_reads_features_has_no_encoder(capsys):
    flags = [
        *("--policy.type=smolvla", "--policy.device=cpu", "--policy.vlm_model_name=builtin/tiny-vlm"),
        *("--policy.load_vlm_weights=false", "--policy.num_vlm_layers=2", "--policy.chunk_size=4"),
        *("--policy.n_action_steps=4", "--policy.resize_imgs_with_padding=[32,32]", *ROBOT, "--batch_size=2"),
    ]
    images, features = (bench(capsys, *flags, f"--dataset.cache.features={tier}") for tier in ("auto", "ram"))
    assert features["flops_per_step"] < images["flops_per_step"]
    assert features["rows"][0]["step_ms"] > 0
    trained = ["--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"]
    assert cli.main(["bench", "step", *flags, *trained, "--dataset.cache.features=ram"]) != 0
    assert "the image encoder is trained" in capsys.readouterr().err


def bench(capsys: pytest.CaptureFixture, *flags: str) -> dict:
    capsys.readouterr()
    assert cli.main(["bench", "step", "--json", "--steps=1", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_cpu_without_data(tiny_act, affine, capsys):
    report = bench(capsys, *tiny_act, *ROBOT, "--batch_size=4")
    (row,) = report["rows"]
    assert {*row} == {"way", "step_ms", "samples_per_s", "of_arithmetic", "of_bandwidth"}
    assert row["way"] == "eager" and row["samples_per_s"] == pytest.approx(4 / row["step_ms"] * 1e3)
    reached = report["flops_per_step"] / row["step_ms"] * 1e3
    assert row["of_arithmetic"] == pytest.approx(reached / report["ceilings"]["flops_per_s"])
    assert report["ceilings"]["bytes_per_s"] > 0 and report["ceilings"]["arithmetic"] == "float32"
    assert report["note"].startswith("no NVIDIA GPU: ")
    assert cli.main(["bench", "step", "--steps=1", *affine]) == 0
    printed = capsys.readouterr()
    assert "batch 8 on cpu" in printed.out and "no NVIDIA GPU: " in printed.out
    assert "kernels" not in printed.out.splitlines()[4] and "graph" not in printed.out.splitlines()[5]


def test_a_step_of_several_passes_computes_more(affine, capsys):
    single = bench(capsys, *affine, "--batch_size=2")
    three = bench(capsys, *affine, "--batch_size=2", "--global_batch_size=6")
    assert three["gradient_accumulation_steps"] == 3
    assert three["flops_per_step"] == pytest.approx(3 * single["flops_per_step"])
    assert three["rows"][0]["samples_per_s"] == pytest.approx(6 / three["rows"][0]["step_ms"] * 1e3)


def test_features_are_those_of_a_dataset(dataset, tiny_act, capsys):
    from flexor.data.dataset import open_dataset

    opened = open_dataset(root=dataset)
    _, height, width = opened.features[opened.cameras[0]].chw
    sizes = [opened.features[name].shape[0] for name in ("observation.state", "action")]
    robot = [
        f"--cameras={len(opened.cameras)}x{height}x{width}",
        f"--state={sizes[0]}",
        f"--action={sizes[1]}",
    ]
    read = bench(capsys, *tiny_act, f"--dataset.root={dataset}")
    described = bench(capsys, *tiny_act, *robot)
    assert read["flops_per_step"] == described["flops_per_step"]
    assert cli.main(["bench", "step", *tiny_act, f"--dataset.root={dataset}", robot[0]]) == 2
    assert "--cameras describes a dataset" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--steps=0", "--steps=0 must be at least 1"),
        ("--parallel.strategy=fsdp", "one process"),
        ("--cameras=2", "NUMBERxHEIGHTxWIDTH"),
        ("--batchsize=2", "batch_size"),
    ],
)
def test_mistakes_are_named(flag, message, tiny_act, capsys):
    assert cli.main(["bench", "step", *tiny_act, flag]) == 2
    assert message in capsys.readouterr().err


def test_only_a_graph_on_a_cpu_says_why_there_is_none(affine, capsys):
    report = bench(capsys, *affine, "--step=graph")
    assert report["rows"] == [{"way": "graph", "reason": "the run does not use an NVIDIA GPU."}]
    assert "graph  the run does not use an NVIDIA GPU." in render_step(report)


def test_a_policy_that_cant_be_planned_is_measured_all_the_same(affine, capsys, log_lines):
    report = bench(capsys, *affine, "--policy.asks=true")
    assert report["flops_per_step"] is None and report["rows"][0]["of_arithmetic"] is None
    assert report["rows"][0]["step_ms"] > 0
    assert any("can't be planned" in line and "shares of the ceilings" in line for line in log_lines)
    assert "-  " in render_step(report).splitlines()[-3]


def test_compiled_blocks_are_measured(affine, capsys, monkeypatch):
    """All of the compiler but its last part, which takes long."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    report = bench(capsys, *affine, "--compile=true")
    assert report["compile"] and report["rows"][0]["compile_s"] > 0
    assert "compiling, s" in render_step(report)


def test_synthetic_values_vary_and_samples_differ():
    batch = {
        "observation.image": torch.zeros(3, 3, 4, 4, dtype=torch.uint8),
        "action": torch.zeros(3, 2),
        "action_is_pad": torch.zeros(3, 2, dtype=torch.bool),
        "index": torch.zeros(3, dtype=torch.int64),
        "task": ["do something"] * 3,
    }
    made = synthetic(batch)
    assert {name: value.dtype for name, value in made.items() if name != "task"} == {
        name: value.dtype for name, value in batch.items() if name != "task"
    }
    assert made["observation.image"].float().std() > 50 and 0 < made["action"].abs().max() <= 1
    assert not made["action_is_pad"].any() and made["task"] == batch["task"]
    assert made["index"].tolist() == [0, 1, 2]
    assert torch.equal(made["action"], synthetic(batch)["action"])


def test_the_table_has_a_row_for_each_way_or_the_reason():
    work, ceilings = StepCost(flops=2e12, bytes=4e9), Ceilings(500e12, 4e12, "TF32")
    row = {"way": "eager", "step_ms": 20.0, "samples_per_s": 400.0, "kernels": 1234, "idle_share": 0.25}
    eager = with_shares({**row, "peak_memory_bytes": 3.5e9}, work, ceilings)
    assert (eager["of_arithmetic"], eager["of_bandwidth"]) == pytest.approx((0.2, 0.05))
    report = {
        "policy": "act",
        "device": "NVIDIA H200",
        "torch": "2.11",
        "batch_size": 8,
        "gradient_accumulation_steps": 1,
        "flops_per_step": 2e12,
        "bytes_per_step": 4e9,
        "note": None,
        "ceilings": {"flops_per_s": 500e12, "bytes_per_s": 4e12, "arithmetic": "TF32"},
        "rows": [eager, {"way": "graph", "reason": "activation_checkpointing=true asks for too much."}],
    }
    lines = render_step(report).splitlines()
    assert "500.00 TFLOP/s (TF32 matrix product), 4.00 TB/s (copy)" in lines[1]
    assert lines[-2].split() == ["eager", "20.00", "400.0", "20.0%", "5.0%", "1,234", "25%", "3.50", "GB"]
    assert lines[-1] == "graph  activation_checkpointing=true asks for too much."


# On a GPU


def on_gpu(flags: list[str]) -> list[str]:
    return [*(flag for flag in flags if "policy.device" not in flag), "--policy.device=cuda"]


@pytest.mark.gpu
@pytest.mark.parametrize("more", [[], ["--precision=bf16"], ["--gradient_accumulation_steps=2"]])
def test_eager_and_graph_side_by_side(more, tiny_act, capsys):
    report = bench(capsys, *on_gpu(tiny_act), *ROBOT, *more)
    assert [row["way"] for row in report["rows"]] == ["eager", "graph"] and report["note"] is None
    for row in report["rows"]:
        assert "reason" not in row and row["kernels"] > 50 and 0 <= row["idle_share"] < 1
        assert 0 < row["peak_memory_bytes"] <= row["peak_reserved_bytes"]
        assert 0 < row["of_arithmetic"] < 1 and row["of_bandwidth"] > 0
    eager, graph = report["rows"]
    assert graph["kernels"] == pytest.approx(eager["kernels"], rel=0.3)  # of the same step
    (only,) = bench(capsys, *on_gpu(tiny_act), *ROBOT, *more, "--step=graph")["rows"]
    assert only["way"] == "graph"


@pytest.mark.gpu
def test_compiled_blocks_in_a_graph(affine, capsys):
    eager, graph = bench(capsys, *on_gpu(affine), "--compile=true")["rows"]
    assert eager["compile_s"] > 0 and graph["kernels"] > 0


@pytest.mark.gpu
def test_what_cant_be_captured_is_told_in_its_row(affine, tmp_path, capsys):
    eager, graph = bench(capsys, *on_gpu(affine), "--policy.asks=true")["rows"]
    assert eager["step_ms"] > 0 and "can't be captured" in graph["reason"] and "own.py" in graph["reason"]
    refused = bench(capsys, *on_gpu(affine), "--activation_checkpointing=true", "--compile=true")["rows"][1]
    assert "activation_checkpointing=true" in refused["reason"]


@pytest.mark.gpu
def test_too_little_gpu_memory_says_what_to_change(capsys):
    torch.cuda.set_per_process_memory_fraction(0.001)
    try:
        assert cli.main(["bench", "step", "--policy.type=act", *ROBOT, "--batch_size=64"]) == 1
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    message = capsys.readouterr().err
    assert "batch_size=64 does not fit" in message and "smaller --batch_size" in message


@pytest.mark.parametrize("file", sorted(RESULTS.glob("step_speed*.json")), ids=lambda file: file.stem)
def test_the_page_compares_with_lerobot_as_measured(file: Path):
    page = (RESULTS.parents[1] / "docs" / "bench.md").read_text()
    assert file.name in page
    for case in json.loads(file.read_text())["cases"]:
        ways = case["ways"]
        theirs = [ways[f"LeRobot, {precision}"] for precision in ("float32", "bf16")]
        best = min(theirs, key=lambda way: way["ms"])
        flexor_way = ways.get("graph, bf16, channels last") or ways["graph, bf16"]
        times = " / ".join(f"{way['ms']:,.1f}" for way in theirs)
        peaks = " / ".join(f"{way['peak_mb'] / 1e3:.1f}" for way in (best, flexor_way))
        ratio = f"{best['ms'] / flexor_way['ms']:.1f}x"
        row = f"batch {case['batch']} | {times} | {flexor_way['ms']:.1f} | {ratio} | {peaks} |"
        assert row in page, case["policy"]
