"""`accelerate launch -m flexor train`: the same run as without it, and settings that can't both hold.

Some runs are launched for real, with config files as `accelerate config` writes them. Others are forked with the
environment that Accelerate's own functions make of a config: that saves importing torch over and over.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from test_sameness import LOSS_TOLERANCE, WEIGHT_TOLERANCE
from test_sameness import flags as sameness_flags

from flexor.config.for_gpu import settle_for_gpu
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from support import environment, ranks, runs
from support.limits import LIMIT_S

pytest.importorskip("accelerate")
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import is_deepspeed_available
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

pytestmark = pytest.mark.ranks

STEPS = 6  # more than an epoch
CONFIGS = Path(__file__).parent / "configs"
DDP, FSDP1, FSDP2, ZERO2 = (
    [f"--config_file={CONFIGS / name}.yaml"] for name in ("ddp", "fsdp1", "fsdp2", "deepspeed")
)
BY_SIZE = ["--fsdp_auto_wrap_policy=SIZE_BASED_WRAP", "--fsdp_min_num_params=2000"]
SIZES = [f"--parallelism_config_dp_{name}_size=2" for name in ("replicate", "shard")]
HYBRID = ["--use_fsdp", "--fsdp_version=2", "--num_processes=4", "--use_parallelism_config", *SIZES]
DEEPSPEED_BATCH = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 4,
}
ACCUMULATION = {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
QUIET = ["--num_machines=1", "--dynamo_backend=no"]


def told(*options: str) -> dict[str, str]:
    """What `accelerate launch` with these options tells the processes it starts."""
    args = launch_command_parser().parse_args([*QUIET, "--main_process_port=0", *options, "-m", "flexor"])
    args, defaults, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config if defaults else ())
        env = prepare_deepspeed_cmd_env(args)[1]
    elif args.use_fsdp or args.multi_gpu:
        env = prepare_multi_gpu_env(args)
    else:
        env = prepare_simple_launcher_cmd_env(args)[1]
    return {name: value for name, value in env.items() if os.environ.get(name) != value}


def need(options: list[str]) -> None:
    if ZERO2[0] in options and not is_deepspeed_available():
        pytest.skip("DeepSpeed is not installed")


def launch(python: str, options: list[str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """`accelerate launch OPTIONS -m flexor ARGUMENTS`, to its end."""
    command = [python, "-m", "accelerate.commands.launch", *options, "--main_process_port=0"]
    return subprocess.run(
        [*command, "-m", "flexor", *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment.for_cpu(),
    )


def flags(lowdim: Path, run: Path, tiny_act: list[str], *more: str) -> list[str]:
    return sameness_flags(lowdim, run, tiny_act, f"--steps={STEPS}", *more)


def train(dataset: Path, folder: Path, tiny: list[str], *more: str) -> list[str]:
    return flags(dataset, folder / "run", tiny, "--policy.dropout=0", *more)


@pytest.fixture(scope="module")
def alone(lowdim, tiny_act, tmp_path_factory) -> Path:
    """One process, eight samples a step, without Accelerate."""
    folder = tmp_path_factory.mktemp("alone")
    ranks.run(folder, 1, train(lowdim, folder, tiny_act, "--batch_size=8", "--save_freq=2"))
    return folder


def assert_same_run(run: Path, other: Path) -> None:
    """The figures of every step and the weights at the end, as near as another order of sums allows."""
    assert ranks.losses(run) == pytest.approx(ranks.losses(other), rel=LOSS_TOLERANCE)
    assert len(ranks.losses(run)) == STEPS
    assert ranks.apart(ranks.weights(run, STEPS), ranks.weights(other, STEPS)) < WEIGHT_TOLERANCE


LAUNCHED = {
    "fsdp2": (FSDP2, "--batch_size=4"),
    "zero2": (ZERO2, "--batch_size=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", LAUNCHED)
def test_launched_run_is_the_run_without_accelerate(way, alone, lowdim, tiny_act, warm_python, tmp_path):
    options, batch = LAUNCHED[way]
    need(options)
    done = launch(warm_python, options, *train(lowdim, tmp_path, tiny_act, batch))
    assert done.returncode == 0, done.stderr
    assert "by Accelerate" in done.stderr and "Warning" not in done.stderr, done.stderr
    assert_same_run(tmp_path / "run", alone / "run")


WAYS = {
    "one process": (1, [], {}, ["--batch_size=8"]),
    "ddp, accumulation": (2, DDP, ACCUMULATION, ["--batch_size=2"]),
    "fsdp 1": (2, FSDP1, {}, ["--batch_size=4"]),
    "fsdp 2, blocks of a size": (2, [*FSDP2, *BY_SIZE], {}, ["--batch_size=4"]),
    "zero 1": (2, [*ZERO2, "--zero_stage=1"], {}, ["--batch_size=2"]),
    "zero 2": (2, ZERO2, {}, ["--batch_size=2"]),
    "fsdp 2, 2x2": (4, HYBRID, {}, ["--batch_size=2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_any_config_computes_the_same_run(way, alone, lowdim, tiny_act, tmp_path):
    count, options, more, settings = WAYS[way]
    need(options)
    env = {**told(*options), **more}
    started = ranks.Ranks(tmp_path, count, train(lowdim, tmp_path, tiny_act, *settings), env=env)
    assert started.end() == [0] * count, started.errors()
    assert ("by Accelerate" in started.errors()) == (way not in ("one process", "ddp, accumulation"))
    assert ranks.computed(tmp_path) == ranks.computed(alone)
    assert_same_run(tmp_path / "run", alone / "run")


BITWISE = {"ddp": DDP, "fsdp": FSDP2}


@pytest.mark.slow
@pytest.mark.parametrize("strategy", BITWISE)
def test_what_accelerate_computes_is_bitwise_what_we_compute(strategy, lowdim, tiny_act, tmp_path):
    """In half precision, with dropout, a moving average and accumulation."""
    more = ("--steps=4", "--ema.enable", "--scheduler.type=cosine", "--gradient_accumulation_steps=2")
    ours = [*more, "--precision=bf16", f"--parallel.strategy={strategy}"]
    ranks.run(tmp_path / "1", 2, flags(lowdim, tmp_path / "ours", tiny_act, *ours))
    env = told(*BITWISE[strategy], "--mixed_precision=bf16")
    started = ranks.Ranks(tmp_path / "2", 2, flags(lowdim, tmp_path / "theirs", tiny_act, *more), env=env)
    assert started.end() == [0, 0], started.errors()
    assert runs.figures(tmp_path / "ours") == runs.figures(tmp_path / "theirs")
    ours, theirs = (ranks.everything(tmp_path / name, 4) for name in ("ours", "theirs"))
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


CHAINS = {
    "sharded": [(2, FSDP2), (1, None), (2, DDP)],
    "zero": [(2, ZERO2), (2, None), (2, ZERO2)],
}


@pytest.mark.slow
@pytest.mark.parametrize("chain", CHAINS)
def test_a_run_goes_on_with_accelerate_and_without(chain, alone, tmp_path):
    run, legs = runs.cut_back(alone / "run", tmp_path / "run", 2), CHAINS[chain]
    for number, (count, options) in enumerate(legs):
        need(options or [])
        stop = STEPS if number == len(legs) - 1 else 3 + number
        resume = ["resume", str(run), f"--batch_size={2 if options is ZERO2 else 4}", f"--steps={stop}"]
        env = told(*options) if options else {}
        started = ranks.Ranks(tmp_path / str(number), count, resume, env=env)
        assert started.end() == [0] * count, started.errors()
        assert ("by Accelerate" in started.errors()) == (options not in (None, DDP))
    records = [tmp_path / str(number) for number in range(len(legs))]
    assert ranks.computed(alone, *records) == ranks.computed(alone)
    assert sorted(ranks.computed(*records)) == list(range(2, STEPS))
    assert_same_run(run, alone / "run")


@pytest.mark.slow
def test_deepspeed_with_a_file_of_its_own_goes_on_bitwise(lowdim, tiny_act, tmp_path):
    need(ZERO2)
    zero = {"stage": 1, "reduce_bucket_size": "auto", "overlap_comm": False}
    file = tmp_path / "zero.json"
    file.write_text(json.dumps({"zero_optimization": zero, "bf16": {"enabled": True}, **DEEPSPEED_BATCH}))
    env = told("--use_deepspeed", f"--deepspeed_config_file={file}", "--num_processes=2")
    uninterrupted, cut = tmp_path / "run", tmp_path / "cut"
    more = ["--steps=12", "--save_freq=5", "--batch_size=2", "--ema.enable", "--scheduler.type=cosine"]
    for folder, arguments in ((1, train(lowdim, tmp_path, tiny_act, *more)), (2, ["resume", str(cut)])):
        started = ranks.Ranks(tmp_path / str(folder), 2, arguments, env=env)
        assert started.end() == [0, 0], started.errors()
        if folder == 1:
            runs.cut_back(uninterrupted, cut, 5)
    runs.assert_same(uninterrupted, cut, 12)
    assert started.errors().count("precision bf16") == 1
    assert "zero 1" in started.errors() and "accumulation 4" in started.errors()


CONTRADICTIONS = {
    "precision": ([*DDP, "--mixed_precision=bf16"], {}, "--precision=fp16", "mixed_precision: bf16"),
    "default precision": ([*DDP, "--mixed_precision=bf16"], {}, "--precision=no", "mixed_precision: bf16"),
    "accumulation": (
        DDP,
        ACCUMULATION,
        "--gradient_accumulation_steps=3",
        "gradient_accumulation_steps: 2",
    ),
    "strategy": (FSDP2, {}, "--parallel.strategy=ddp", "fsdp_version: 2"),
    "sharding": (FSDP1, {}, "--parallel.strategy=ddp", "fsdp_sharding_strategy: SHARD_GRAD_OP"),
    "no fsdp": (DDP, {"WORLD_SIZE": "2"}, "--parallel.strategy=fsdp", "no FSDP"),
    "offloading": (FSDP1, {}, "--parallel.cpu_offload=false", "fsdp_offload_params: true"),
    "recomputing": (FSDP1, {}, "--activation_checkpointing=no", "fsdp_activation_checkpointing: true"),
    "groups": (HYBRID, {}, "--parallel.dp_replicate=4", "parallelism_config_dp_replicate_size: 2"),
    "zero": (ZERO2, {}, "--parallel.strategy=fsdp", "zero_stage: 2"),
    "clipping": (ZERO2, {}, "--optimizer.grad_clip_norm=3", "gradient_clipping: 10.0"),
    "cpu": (["--cpu", "--num_processes=1"], {}, "--policy.device=cuda", "use_cpu: true"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_settings_that_contradict_the_accelerate_config_are_refused_by_name(name, lowdim, monkeypatch):
    options, more, ours, theirs = CONTRADICTIONS[name]
    for key, value in {**told(*options), **more}.items():
        monkeypatch.setenv(key, value)
    load_config([f"--dataset.root={lowdim}"])
    with pytest.raises(ConfigError) as refused:
        load_config([f"--dataset.root={lowdim}", ours])
    assert theirs in str(refused.value)
    assert ours.removeprefix("--").split("=")[0] in str(refused.value)


def told_by_deepspeed(name: str, value: str) -> dict[str, str]:
    return {"ACCELERATE_USE_DEEPSPEED": "true", f"ACCELERATE_DEEPSPEED_{name}": value}


UNSUPPORTED = {
    "zero_stage: 3": told_by_deepspeed("ZERO_STAGE", "3"),
    "offload_optimizer": told_by_deepspeed("OFFLOAD_OPTIMIZER_DEVICE", "cpu"),
    "distributed_type: MEGATRON_LM": {"ACCELERATE_USE_MEGATRON_LM": "true"},
    "parallelism_config_tp_size: 2": {"PARALLELISM_CONFIG_TP_SIZE": "2"},
    "fsdp_ignored_modules": {"FSDP_IGNORED_MODULES": ".*norm"},
}


@pytest.mark.parametrize("setting", UNSUPPORTED)
def test_what_is_not_done_here_is_refused(setting, lowdim, monkeypatch):
    for key, value in {**told(*FSDP2), **UNSUPPORTED[setting]}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=setting):
        load_config([f"--dataset.root={lowdim}"])


def test_fp8_is_for_whole_models(lowdim, monkeypatch):
    for key, value in {**told(*FSDP2), "ACCELERATE_MIXED_PRECISION": "fp8"}.items():
        monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match="precision=fp8 does not work with parallel"):
        settle_for_gpu(load_config([f"--dataset.root={lowdim}"]), (9, 0))
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "false")
    assert settle_for_gpu(load_config([f"--dataset.root={lowdim}"]), (9, 0)).precision == "fp8"


def test_settings_of_the_config_become_the_runs(lowdim, monkeypatch):
    for key, value in {**told(*FSDP1, "--mixed_precision=bf16"), **ACCUMULATION}.items():
        monkeypatch.setenv(key, value)
    config = load_config([f"--dataset.root={lowdim}", "--parallel.strategy=auto", "--precision=bf16"])
    assert config.precision == "bf16"
    assert config.gradient_accumulation_steps == 2
    assert config.activation_checkpointing
    assert config.parallel.strategy == "fsdp"
    assert config.parallel.cpu_offload
    assert not config.parallel.reshard_after_forward


def test_precision_of_a_run_can_not_change(alone, tmp_path):
    run = runs.cut_back(alone / "run", tmp_path / "run", 2)
    env = told(*DDP, "--mixed_precision=bf16")
    started = ranks.Ranks(tmp_path, 1, ["resume", str(run)], env=env)
    assert started.end() != [0]
    assert "precision can't change" in started.errors()


def test_cpu_launcher_that_starts_one_process_is_said(lowdim, monkeypatch, log_lines):
    for key, value in told("--cpu", "--num_processes=2", "--mixed_precision=no").items():
        monkeypatch.setenv(key, value)
    config = load_config([f"--dataset.root={lowdim}"])
    assert config.policy.device == "cpu"
    assert any("starts only one process" in line for line in log_lines)


@pytest.mark.slow
def test_refusal_reaches_the_user(lowdim, tiny_act, warm_python, tmp_path):
    done = launch(
        warm_python,
        ["--num_processes=1", *QUIET, "--mixed_precision=bf16"],
        *train(lowdim, tmp_path, tiny_act, "--precision=fp16"),
    )
    assert done.returncode != 0
    assert "flexor train: The Accelerate config has mixed_precision: bf16" in done.stderr
    assert not (tmp_path / "run").exists()
