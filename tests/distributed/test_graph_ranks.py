"""CUDA graphs of several ranks compute what eager ranks compute, and what one process computes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flexor.cli.main import main
from flexor.launch.local import free_port
from flexor.train import loop
from flexor.train.graph import WARM_UP, GraphStep
from flexor.train.ranks.processes import Processes
from flexor.train.ranks.watchdog import STOPPED
from support import ranks, runs
from support.graphs import assert_same, figures, note_replays, without_device
from support.limits import LIMIT_S
from support.small_policies import SMALL, WITH_CAMERAS, small_flags

pytestmark = pytest.mark.gpu

STEPS = 9
CUDA = ["--policy.device=cuda", "--deterministic=true"]
FLAGS = {
    "float32": ["--precision=no"],
    "bf16, EMA": ["--precision=bf16", "--ema.enable=true", "--channels_last=true"],
    "accumulation": ["--gradient_accumulation_steps=2", "--precision=no"],
    "fp16": ["--precision=fp16"],
    "bf16 weights": ["--precision=bf16", "--weights_dtype=bf16"],
}


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """The steps that were replayed."""
    return note_replays(monkeypatch)


@pytest.fixture
def over_nccl(monkeypatch):
    """One rank, which exchanges gradients with itself: all that NCCL can do on one GPU."""

    def joined() -> Processes:
        processes = Processes()
        processes.join(torch.device("cuda", 0), 600)
        return processes

    monkeypatch.setattr(loop, "find_processes", joined)


@pytest.fixture(scope="module", params=["act", *SMALL])
def small(request, lowdim, dataset, tiny_act, tmp_path_factory) -> tuple[Path, list[str]]:
    if request.param == "act":
        return dataset, without_device(tiny_act)
    flags = small_flags(request.param, tmp_path_factory.mktemp("models"))
    return (dataset if request.param in WITH_CAMERAS else lowdim), without_device(flags)


@pytest.mark.parametrize("more", FLAGS.values(), ids=FLAGS)
def test_one_rank_over_nccl_computes_what_one_process_computes(more, small, tmp_path, replays, request):
    data, policy = small
    if "--weights_dtype=bf16" in more and "tdmpc" in policy[0]:
        pytest.skip("TD-MPC moves some weights itself, which are not kept in bf16")
    flags = [*CUDA, f"--steps={STEPS}", *more]
    alone = runs.train(data, tmp_path / "alone", policy, *flags, "--step=graph")
    vocabulary = 3 if "vqbet" in policy[0] else 0
    replayed = list(range(vocabulary + WARM_UP, STEPS))
    assert replays == replayed
    request.getfixturevalue("over_nccl")
    graph = runs.train(data, tmp_path / "graph", policy, *flags, "--step=graph")
    assert replays == 2 * replayed
    eager = runs.train(data, tmp_path / "eager", policy, *flags, "--step=eager")
    assert replays == 2 * replayed
    assert_same(graph, eager)
    assert_same(graph, alone)


def test_fsdp_as_a_graph_computes_what_eager_steps_compute(small, tmp_path, replays):
    """One rank, which gathers its own shards; with accumulation, a graph of three different passes."""
    data, policy = small
    check_fsdp(data, policy, ["--precision=bf16", "--gradient_accumulation_steps=3"], tmp_path, replays)


@pytest.mark.parametrize("more", FLAGS.values(), ids=FLAGS)
def test_settings_of_fsdp_as_a_graph(more, dataset, tiny_act, tmp_path, replays):
    check_fsdp(dataset, without_device(tiny_act), more, tmp_path, replays)


def check_fsdp(data: Path, policy: list[str], more: list[str], tmp_path: Path, replays: list[int]) -> None:
    flags = [*CUDA, f"--steps={STEPS}", "--parallel.strategy=fsdp", *more]
    graph = runs.train(data, tmp_path / "graph", policy, *flags, "--step=graph")
    vocabulary = 3 if "vqbet" in policy[0] else 0
    assert replays == list(range(vocabulary + WARM_UP, STEPS))
    assert_same(graph, runs.train(data, tmp_path / "eager", policy, *flags, "--step=eager"))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_over_nccl_a_run_is_resumed_saved_and_evaluated_between_replays(
    strategy, dataset, tiny_act, tmp_path, replays, log_lines, request
):
    """With an uneven last batch of each epoch, which gets a graph of its own."""
    flags = [*CUDA, f"--steps={2 * STEPS}", "--save_freq=4", "--dataset.eval_split=0.25", "--eval_steps=5"]
    flags.append(f"--parallel.strategy={strategy}")
    if strategy == "ddp":
        request.getfixturevalue("over_nccl")
    policy = without_device(tiny_act)
    whole = runs.train(dataset, tmp_path / "whole", policy, *flags, "--step=graph")
    exchanges = any("which contains the exchange of gradients" in line for line in log_lines)
    assert exchanges == (strategy == "ddp")
    eager = runs.train(dataset, tmp_path / "eager", policy, *flags, "--step=eager")
    assert_same(whole, eager)
    cut = runs.cut_back(whole, tmp_path / "cut", 12)
    replays.clear()
    assert main(["resume", str(cut)]) == 0 and replays
    assert_same(whole, cut)
    if exchanges:
        line = [line for line in runs.metrics(whole) if "loss" in line][-1]
        assert 0 <= line["communication_s"] <= line["step_s"]


def test_over_nccl_a_signal_stops_between_replays(
    dataset, tiny_act, tmp_path, replays, over_nccl, monkeypatch
):
    """It saves, and the run goes on to where it would have come without."""
    flags = [*CUDA, f"--steps={STEPS}", "--step=graph"]
    whole = runs.train(dataset, tmp_path / "whole", without_device(tiny_act), *flags)
    replay = GraphStep._replay

    def with_signal(self, *arguments):
        if self.state.step == STEPS - 3:
            signal.raise_signal(signal.SIGTERM)
        return replay(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(GraphStep, "_replay", with_signal)
        run = tmp_path / "run"
        assert main(["train", *runs.flags(dataset, run, without_device(tiny_act), *flags)]) == STOPPED
    assert len(figures(run)) < STEPS
    assert main(["resume", str(run)]) == 0
    assert_same(whole, run)


RANKS = {
    "flexor": None,  # two processes with the environment of a launcher
    "torchrun": ["torch.distributed.run", "--standalone", "--nproc-per-node=2"],
    "accelerate": ["accelerate.commands.launch", "--multi_gpu", "--num_processes=2", "--num_machines=1"],
}


def start(launcher: str, arguments: list[str]) -> str:
    """Two ranks that share the GPU, to their end. Returns what they printed."""
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "CUDA_VISIBLE_DEVICES": "0"}
    train, port = ["-m", "flexor", "train", *arguments, "--parallel.backend=gloo"], free_port()
    command, environments = RANKS[launcher], [environment]
    if command is None:
        environments = [{**environment, **ranks.environment(rank, 2, port)} for rank in range(2)]
    elif launcher == "accelerate":
        pytest.importorskip("accelerate")
        command = [*command, f"--main_process_port={port}", "--mixed_precision=no", "--dynamo_backend=no"]
    processes = [
        subprocess.Popen(
            [sys.executable, *(["-m", *command] if command else []), *train],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for env in environments
    ]
    output = "\n".join(process.communicate(timeout=LIMIT_S)[0] for process in processes)
    assert [process.returncode for process in processes] == [0] * len(processes), output
    return output


@pytest.mark.parametrize(
    ("launcher", "more"),
    [
        ("flexor", FLAGS["float32"]),
        ("flexor", FLAGS["bf16, EMA"]),
        ("torchrun", FLAGS["accumulation"]),
        ("accelerate", FLAGS["float32"]),
    ],
)
def test_two_ranks_over_gloo_compute_the_same_as_graphs_and_eager(launcher, more, lowdim, tiny_act, tmp_path):
    policy = without_device(tiny_act)
    for step in ("graph", "eager"):
        flags = runs.flags(lowdim, tmp_path / step, policy, *CUDA, f"--steps={STEPS}", *more)
        output = start(launcher, [*flags, f"--step={step}"])
        assert ("between which the ranks exchange gradients" in output) == (step == "graph")
    assert_same(tmp_path / "graph", tmp_path / "eager")
