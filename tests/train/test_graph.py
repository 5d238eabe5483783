"""A step as a CUDA graph: the same run as without one, bitwise, and what can't be captured runs all the same."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flexor.cli.main import main
from flexor.config.optimizer import DEFAULTS, resolve_optimizer
from flexor.config.schema import OptimizerConfig, ParallelConfig, TrainConfig
from flexor.core.errors import ConfigError
from flexor.core.rng import GraphNoise, Noise, NoiseKeys
from flexor.data.loader.loader import Loader
from flexor.monitor.meters import Meters
from flexor.monitor.step_times import StepTimes
from flexor.policies.act.config import ACTConfig
from flexor.policies.base import ParamGroup
from flexor.train import graph
from flexor.train.build import captures_steps
from flexor.train.engine.base import Engine, takes_tensor_rates
from flexor.train.engine.fsdp import ShardedEngine
from flexor.train.graph import WARM_UP, _Pieces, wants_graph, why_not
from flexor.train.optim.optimizers import build_optimizer
from support import runs
from support.graphs import assert_same, figures, note_replays, without_device
from support.own_policy import own_policy
from support.small_policies import SMALL, WITH_CAMERAS, small_flags

STEPS = 9
LONG = 200
OWN_POLICY = own_policy(
    """\
        self.layer = torch.nn.Linear(2, 2)
    def loss(self, batch, noise):
        state = torch.nn.functional.dropout(batch["observation.state"], 0.1)
        error = (self.layer(state) - batch["action"][:, 0]).square().mean(-1)
        if self.config.asks and error.mean().item() > 1e9:
            raise ValueError
        return Loss(error, {})
""",
    settings="""    asks: bool = True""",
)


def test_noise_of_a_graph_is_the_noise_of_the_step():
    ids = torch.tensor([3, 8, 2**40])
    keys = NoiseKeys(ids.device)
    noise = GraphNoise(keys, ids)
    (
        noise.normal("a", (3, 2)),
        noise.uniform("a", (3,)),
        noise.integers("b", (3,), 7),
    )  # as while it is captured
    for step in (0, 7):
        keys.write(5, step)
        plain = Noise(5, step, ids)
        assert torch.equal(noise.normal("a", (3, 2)), plain.normal("a", (3, 2)))
        assert torch.equal(noise.integers("b", (3,), 7), plain.integers("b", (3,), 7))
        assert torch.equal(noise.to(ids.device).uniform("a", (3,)), plain.uniform("a", (3,)))


def test_a_graph_without_a_gpu_is_refused_by_name(lowdim, tiny_act, tmp_path, capsys):
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, "--step=graph", "--steps=1")
    assert main(["train", *flags]) == 2
    assert "step=graph: the run does not use an NVIDIA GPU" in capsys.readouterr().err


def test_what_a_plan_asks_is_what_the_trainer_asks():
    """Without an engine and an optimizer."""
    policy = torch.nn.Linear(2, 2)
    policy.param_groups = lambda: [ParamGroup([*policy.parameters()])]  # type: ignore[assignment]
    for kind in DEFAULTS:
        optimizer = resolve_optimizer(OptimizerConfig(type=kind, lr=1e-3), ACTConfig())
        config = TrainConfig(optimizer=optimizer, policy=ACTConfig())
        assert why_not(config, on_nvidia=True) is None
        assert takes_tensor_rates(build_optimizer(optimizer, policy))
    config = TrainConfig(policy=ACTConfig())
    assert captures_steps(config) == Engine.captures
    for strategy in ("fsdp", "hsdp"):
        sharded = replace(config, parallel=ParallelConfig(strategy=strategy))
        assert captures_steps(sharded) == ShardedEngine.captures
        offloaded = replace(config, parallel=ParallelConfig(strategy=strategy, cpu_offload=True))
        assert not captures_steps(offloaded)
        assert "cpu_offload" in (why_not(offloaded, on_nvidia=True, strategy=strategy, captures=False) or "")
    assert (
        why_not(config, on_nvidia=True, strategy="deepspeed", captures=False) == "deepspeed can't be captured"
    )


@pytest.mark.parametrize(
    ("engine", "more", "named"),
    [
        ({"on_nvidia": False}, {}, "NVIDIA"),
        (
            {"on_nvidia": True, "strategy": "ddp"},
            {"parallel": ParallelConfig(find_unused_parameters=True)},
            "find_unused",
        ),
        (
            {"on_nvidia": True},
            {"activation_checkpointing": True, "compile": True},
            "activation_checkpointing",
        ),
    ],
)
def test_runs_without_a_graph(engine, more, named):
    config = TrainConfig(policy=ACTConfig(), **more)
    reason = why_not(config, **engine)
    assert reason is not None and named in reason and not wants_graph(config, reason)
    with pytest.raises(ConfigError, match="step=graph"):
        wants_graph(replace(config, step="graph"), reason)
    assert wants_graph(config, None) and not wants_graph(replace(config, step="eager"), None)


def test_one_process_has_no_unused_parameters_to_look_for():
    config = TrainConfig(policy=ACTConfig(), parallel=ParallelConfig(find_unused_parameters=True))
    assert why_not(config, on_nvidia=True) is None


def test_a_graph_for_each_part_of_which_the_time_is_taken(monkeypatch):
    """Without times it is one. After an error, marks are marks again."""
    graphs_of_torch = type("Graph", (), {"replay": None})
    monkeypatch.setattr(torch.cuda, "CUDAGraph", graphs_of_torch)  # torch without CUDA has none
    done: list[str] = []

    @contextmanager
    def captured(*_):
        done.append("(")
        yield
        done.append(")")

    monkeypatch.setattr(graph, "capture", captured)
    for times, graphs in (
        (StepTimes(), "(forward backward optimizer)"),
        (StepTimes(torch.device("cpu")), "(forward)(backward)(optimizer)"),
    ):
        done.clear()
        with _Pieces(times, "optimizer", None, None) as pieces:
            for part in ("forward", "backward"):
                done.append(part)
                times.mark(part)
            done.append("optimizer")
        assert "".join(done) == graphs.replace(" ", "")
        assert [part for part, _ in pieces] == ["forward", "backward", "optimizer"][-graphs.count("(") :]
        with pytest.raises(ValueError, match="mistake"), _Pieces(times, "optimizer", None, None):
            raise ValueError("mistake")
        assert times.cut is None


# On a GPU


@pytest.fixture
def replays(monkeypatch) -> list[int]:
    """The steps that were replayed."""
    return note_replays(monkeypatch)


def train(data: Path, folder: Path, policy: list[str], *more: str) -> Path:
    return runs.train(
        data, folder, [*without_device(policy), "--policy.device=cuda"], "--deterministic=true", *more
    )


@pytest.fixture(scope="module", params=["act", *SMALL])
def small(request, lowdim, dataset, tiny_act, tmp_path_factory) -> tuple[Path, list[str]]:
    name = request.param
    if name == "act":
        return dataset, [*tiny_act]
    flags = small_flags(name, tmp_path_factory.mktemp("models"))
    return (dataset if name in WITH_CAMERAS else lowdim), flags


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [
        ["--precision=no", "--channels_last=false"],
        ["--precision=bf16", "--ema.enable=true", "--channels_last=true"],
        ["--gradient_accumulation_steps=2", "--precision=no"],
        ["--precision=fp16"],
        ["--dataset.image_transforms.enable=true", "--dataset.image_transforms.random_order=true"],
        [
            "--scheduler.type=cosine",
            "--scheduler.num_warmup_steps=4",
            "--precision=bf16",
            "--weights_dtype=bf16",
        ],
    ],
)
def test_a_graph_computes_what_steps_without_one_compute(more, small, tmp_path, replays):
    data, policy = small
    if "--weights_dtype=bf16" in more and "tdmpc" in policy[0]:
        pytest.skip("TD-MPC moves some weights itself, which are not kept in bf16")
    eager = train(data, tmp_path / "eager", policy, f"--steps={STEPS}", "--step=eager", *more)
    assert replays == []
    graph = train(data, tmp_path / "graph", policy, f"--steps={STEPS}", "--step=graph", *more)
    vocabulary = 3 if "vqbet" in policy[0] else 0
    assert replays == list(range(vocabulary + WARM_UP, STEPS))
    assert_same(eager, graph)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("small", ["act", "diffusion"], indirect=True)
def test_two_hundred_steps_are_the_same_bits(small, precision, tmp_path, replays):
    """Losses and norms of every step, weights, their moving average and the optimizer's state.

    Both ways run the same kernels, so that there is nothing to tolerate, in bf16 either.
    """
    data, policy = small
    flags = [f"--steps={LONG}", "--ema.enable=true", f"--precision={precision}", "--channels_last=true"]
    eager, graph = (
        train(data, tmp_path / way, policy, f"--step={way}", *flags) for way in ("eager", "graph")
    )
    assert replays == list(range(WARM_UP, LONG))
    assert len(figures(eager)) == LONG
    assert_same(eager, graph)
    assert {path.name for path in (eager / "checkpoints/last").rglob("*.safetensors")} >= {
        "ema_state.safetensors",
        "optimizer_state.safetensors",
    }


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "fp16", "bf16"])
@pytest.mark.parametrize(
    "optimizer",
    [["sgd", "--optimizer.momentum=0.9"], ["sgd"], ["adamw_8bit", "--policy.dim_feedforward=512"]],
)
@pytest.mark.parametrize("small", ["act"], indirect=True)
def test_other_optimizers_are_captured(optimizer, precision, small, tmp_path, replays):
    """A run that goes on eagerly, and one that goes on as a graph, are the uninterrupted eager one."""
    data, policy = small
    kind, *settings = optimizer
    flags = [f"--optimizer.type={kind}", *settings, f"--precision={precision}", "--channels_last=true"]
    flags += [
        f"--steps={STEPS}",
        "--save_freq=4",
        "--scheduler.type=cosine",
        "--scheduler.num_warmup_steps=4",
    ]
    eager, graph = (
        train(data, tmp_path / way, policy, f"--step={way}", *flags) for way in ("eager", "graph")
    )
    assert replays == list(range(WARM_UP, STEPS))
    for way, run in (("graph", eager), ("eager", graph)):
        cut = runs.cut_back(run, tmp_path / f"cut {way}", 4)
        assert main(["resume", str(cut), f"--step={way}"]) == 0
        assert_same(eager, cut)
    assert_same(eager, graph)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more", [["--precision=bf16"], ["--gradient_accumulation_steps=2", "--precision=no"]]
)
@pytest.mark.parametrize("small", ["act", "diffusion", "smolvla"], indirect=True)
def test_recomputed_blocks_are_captured(more, small, tmp_path, replays):
    """ACT has dropout. In float32, a run without recomputing is the same, as a graph and where one is resumed so.

    In bf16 it has copies of the weights, and another kernel for them.
    """
    data, policy = small
    flags = [f"--steps={STEPS}", "--save_freq=4", *more]
    eager, graph = (
        train(data, tmp_path / way, policy, f"--step={way}", "--activation_checkpointing=true", *flags)
        for way in ("eager", "graph")
    )
    assert replays == list(range(WARM_UP, STEPS))
    assert_same(eager, graph)
    if "--precision=bf16" in more:
        return
    plain = train(data, tmp_path / "plain", policy, "--step=graph", *flags)
    assert_same(eager, plain)
    cut = runs.cut_back(graph, tmp_path / "cut", 4)
    assert main(["resume", str(cut), "--activation_checkpointing=false"]) == 0
    assert_same(eager, cut)


@pytest.mark.gpu
def test_compiled_blocks_are_captured(dataset, tiny_act, tmp_path, replays):
    """They are compiled in the eager steps before the capture."""
    eager = train(dataset, tmp_path / "eager", tiny_act, f"--steps={STEPS}", "--step=eager", "--compile=true")
    graph = train(dataset, tmp_path / "graph", tiny_act, f"--steps={STEPS}", "--step=graph", "--compile=true")
    assert replays == list(range(WARM_UP, STEPS))
    assert_same(eager, graph)


@pytest.mark.gpu
def test_a_resumed_run_is_the_uninterrupted_one(small, tmp_path, replays):
    data, policy = small
    uninterrupted = train(
        data,
        tmp_path / "whole",
        policy,
        f"--steps={STEPS}",
        "--save_freq=4",
        "--ema.enable=true",
        "--step=graph",
    )
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 4)
    assert main(["resume", str(cut)]) == 0
    assert replays
    assert_same(uninterrupted, cut)


@pytest.mark.gpu
def test_adapters_and_held_out_losses_between_replays(dataset, tiny_act, tmp_path, replays):
    base = train(dataset, tmp_path / "base", tiny_act, "--steps=1")
    flags = [
        f"--policy.path={base}",
        "--lora.r=2",
        f"--steps={STEPS}",
        "--dataset.eval_split=0.25",
        "--eval_steps=2",
    ]
    eager = train(dataset, tmp_path / "eager", [], *flags, "--step=eager")
    graph = train(dataset, tmp_path / "graph", [], *flags, "--step=auto")
    assert replays
    assert_same(eager, graph)


@pytest.mark.gpu
def test_what_cant_be_captured_runs_without_a_graph_and_is_named(lowdim, tmp_path, replays, capsys, caplog):
    (tmp_path / "own.py").write_text(OWN_POLICY)
    settings = [f"--policy.type={tmp_path / 'own.py'}:Own"]
    eager = train(lowdim, tmp_path / "eager", settings, "--steps=6", "--step=eager")
    auto = train(lowdim, tmp_path / "auto", settings, "--steps=6", "--step=auto")
    assert_same(eager, auto)
    number = next(number for number, text in enumerate(OWN_POLICY.splitlines(), 1) if "item()" in text)
    line = f"{tmp_path / 'own.py'}:{number}"
    assert replays == [] and line in caplog.text
    flags = runs.flags(
        lowdim, tmp_path / "no", [*settings, "--policy.device=cuda"], "--steps=6", "--step=graph"
    )
    assert main(["train", *flags]) == 2
    assert line in capsys.readouterr().err
    again = train(lowdim, tmp_path / "again", [*settings, "--policy.asks=false"], "--steps=6", "--step=graph")
    assert replays == list(range(WARM_UP, 6)) and again


@pytest.mark.gpu
def test_the_warm_up_is_no_part_of_the_time_left(lowdim, tiny_act, tmp_path, replays, monkeypatch):
    left_out = []

    def noted(self):
        left_out.append(self.steps)
        leave_out(self)

    leave_out = Meters.leave_out_step
    monkeypatch.setattr(Meters, "leave_out_step", noted)
    train(lowdim, tmp_path / "run", tiny_act, f"--steps={STEPS}", "--step=graph", f"--log_freq={STEPS}")
    assert left_out == [*range(WARM_UP + 1)] and replays


@pytest.mark.gpu
def test_a_loss_that_is_no_number_is_found_at_the_same_step(
    lowdim, tiny_act, tmp_path, capsys, replays, monkeypatch
):
    """A sample of step 6 is spoiled."""
    losses = []
    real = Loader.steps

    def spoiled(self, start, stop):
        for step, batches in enumerate(real(self, start, stop), start):
            if step == 6:
                batches[0]["observation.state"][2, 0] = torch.nan
            yield batches

    monkeypatch.setattr(Loader, "steps", spoiled)
    for how in ("eager", "graph"):
        flags = ["--policy.device=cuda", "--steps=30", f"--step={how}", "--deterministic=true"]
        act = [flag for flag in tiny_act if "device" not in flag]
        assert main(["train", *runs.flags(lowdim, tmp_path / how, act, *flags)]) == 1
        losses.append(capsys.readouterr().err.splitlines()[-1].replace(how, ""))
    assert losses[0] == losses[1] and "The loss of step 7 is nan" in losses[0] and replays
