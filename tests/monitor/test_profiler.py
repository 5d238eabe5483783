"""`--profile=STEP:COUNT`: a trace of these steps, a snapshot on a GPU, and the costliest operations."""

import gzip
import json
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.config.profile import parse_profile
from flexor.core.errors import ConfigError
from flexor.monitor.profiler import Profiling, costliest
from support import runs

CPU = torch.device("cpu")


@pytest.mark.parametrize("text", ["5", "0:5", "5:0", "-1:5", "a:b", "1:2:3", ""])
def test_wrong_settings_are_named(text):
    with pytest.raises(ConfigError, match=r"expected STEP:COUNT.*100:5"):
        parse_profile(text)


def test_steps_that_never_come_are_refused():
    assert parse_profile("100:5") == (100, 104)
    flags = ["--dataset.root=x", "--policy.type=act", "--steps=50"]
    assert load_config([*flags, "--profile=50:10"]).profile == "50:10"
    with pytest.raises(ConfigError, match=r"profile=51:10 begins after the last step"):
        load_config([*flags, "--profile=51:10"])


def steps_of(profiling: Profiling, first: int, last: int) -> list[str]:
    weights = torch.ones(64, 64)
    for step in range(first, last + 1):
        profiling.begin(step)
        (weights @ weights).relu()
        profiling.end(step)
    profiling.close()
    folder = profiling.folder
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def trace_of(path) -> set[str]:
    return {str(event.get("name")) for event in json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]}


def test_only_the_steps_asked_for_are_in_the_trace(tmp_path):
    profiling = Profiling("2:2", tmp_path, CPU)
    assert steps_of(profiling, 1, 5) == ["steps-2-3.trace.json.gz", "steps-2-3.txt"]
    names = trace_of(profiling.folder / "steps-2-3.trace.json.gz")
    assert {"aten::mm", "aten::relu", "step 2", "step 3"} <= names and not {"step 1", "step 4"} & names
    table = (profiling.folder / "steps-2-3.txt").read_text().splitlines()
    assert table[0].split()[0] == "operation" and any(line.startswith("aten::mm ") for line in table)
    assert len(table) <= 11


def test_resumed_within_the_steps_the_rest_is_profiled(tmp_path):
    assert steps_of(Profiling("2:4", tmp_path, CPU), 4, 9) == ["steps-4-5.trace.json.gz", "steps-4-5.txt"]


def test_resumed_after_them_it_says_so(tmp_path, caplog):
    assert steps_of(Profiling("2:2", tmp_path, CPU), 9, 10) == []
    assert "no step was profiled" in caplog.text


def test_a_run_that_stops_within_them_writes_what_there_is(tmp_path):
    names = steps_of(Profiling("2:100", tmp_path, CPU), 1, 3)
    assert names == ["steps-2-unfinished.trace.json.gz", "steps-2-unfinished.txt"]


def test_rank_0_alone_unless_all_are_asked_for(tmp_path):
    assert steps_of(Profiling("1:1", tmp_path, CPU, rank=3), 1, 1) == []
    names = steps_of(Profiling("1:1", tmp_path, CPU, rank=3, all_ranks=True), 1, 1)
    assert names == ["steps-1-1-rank3.trace.json.gz", "steps-1-1-rank3.txt"]


def test_a_disk_that_can_not_be_written_is_a_warning(tmp_path, caplog):
    (tmp_path / "profile").write_text("a file where the folder should be")
    profiling = Profiling("1:1", tmp_path, CPU)
    profiling.begin(1)
    profiling.end(1)
    profiling.close()
    assert "was not written" in caplog.text


def event(key: str, device: DeviceType, self_time: float, label: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        key=key, device_type=device, self_device_time_total=self_time, count=2, is_user_annotation=label
    )


def test_operations_of_eager_steps_kernels_of_a_graph():
    kernels = [event("gemm", DeviceType.CUDA, 900.0), event("step 7", DeviceType.CUDA, 5000.0, label=True)]
    eager = costliest([*kernels, event("aten::mm", DeviceType.CPU, 900.0)], on_gpu=True)
    assert "operation" in eager and "aten::mm" in eager and "gemm" not in eager
    graph = costliest([*kernels, event("cudaGraphLaunch", DeviceType.CPU, 0.0)], on_gpu=True)
    assert graph.splitlines()[0].startswith("kernel") and "gemm" in graph and "step 7" not in graph
    many = [event(f"k{n}", DeviceType.CUDA, float(n)) for n in range(1, 40)]
    assert [line.split()[0] for line in costliest(many, on_gpu=True).splitlines()[1:]] == [
        f"k{n}" for n in range(39, 29, -1)
    ]


def test_a_run_writes_its_profile_and_computes_the_same(lowdim, tiny_act, tmp_path, capsys):
    plain = runs.train(lowdim, tmp_path / "plain", tiny_act, "--steps=4")
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=4", "--profile=2:2")
    runs.assert_same(plain, run, 4)
    assert {"step 2", "step 3"} <= trace_of(run / "profile" / "steps-2-3.trace.json.gz")
    assert "CPU time" in capsys.readouterr().err
    assert main(["resume", str(run), "--steps=6", "--profile=6:1"]) == 0
    assert "step 6" in trace_of(run / "profile" / "steps-6-6.trace.json.gz")


@pytest.mark.gpu
@pytest.mark.parametrize("graph", [False, True])
def test_on_a_gpu_there_is_a_snapshot_too(graph, tmp_path):
    device = torch.device("cuda", 0)
    weights = torch.ones(512, 512, device=device)
    work, captured = (lambda: (weights @ weights).relu()), torch.cuda.CUDAGraph()
    work()
    with torch.cuda.graph(captured):
        work()
    profiling = Profiling("1:2", tmp_path, device)
    for step in (1, 2, 3):
        profiling.begin(step)
        captured.replay() if graph else work()
        profiling.end(step)
    profiling.close()
    assert (profiling.folder / "steps-1-2.memory.pickle").stat().st_size > 100
    first = (profiling.folder / "steps-1-2.txt").read_text().split()[0]
    assert first == ("kernel" if graph else "operation")
