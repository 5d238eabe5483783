"""LeRobot's settings of processes, precision and averages since 0.6.1: in its files, and as flags."""

import json

import pytest

from flexor.config.lerobot_runtime import TRANSLATED
from flexor.config.parse import load_config
from flexor.config.schema import EMAConfig, TrainConfig
from flexor.core.errors import ConfigError

DATA = "--dataset.root=x"
DEFAULTS = {  # as LeRobot writes them into train_config.json
    "dataset": {"repo_id": "me/data", "repo_type": "dataset", "exclude_episodes": None, "eval_split": 0.0},
    "policy": {"type": "act"},
    "checkpoint_format": "safetensors",
    "parallelism": {
        "dp_replicate": 1,
        "dp_shard": 1,
        "context_parallel": {"ring_degree": 1, "ulysses_degree": 1},
        "cfg_parallel": 1,
    },
    "accelerator": {
        "mixed_precision": "no",
        "gradient_accumulation": {"steps": 1},
        "fsdp": {
            "reshard_after_forward": True,
            "wrap_modules": None,
            "min_num_params": None,
            "cpu_offload": False,
            "ignored_modules": None,
        },
        "ddp": {"find_unused_parameters": True, "gradient_as_bucket_view": False, "static_graph": False},
        "compile": {"enabled": False, "backend": "inductor", "mode": None, "regional": True},
        "activation_checkpointing": {"mode": "none"},
    },
    "ema": {
        "enable": False,
        "decay": None,
        "update_after_step": 0,
        "inv_gamma": 1.0,
        "power": 0.75,
        "min_decay": 0.0,
        "max_decay": 0.9999,
        "use_for_eval": True,
    },
}


@pytest.fixture
def from_file(tmp_path):
    """The settings of such a file with changes ({"a.b": value}), and flags."""

    def load(*flags: str, **changes: object) -> TrainConfig:
        settings = json.loads(json.dumps(DEFAULTS))
        for key, value in changes.items():
            *groups, name = key.split("__")
            node = settings
            for group in groups:
                node = node[group]
            assert name in node, key
            node[name] = value
        file = tmp_path / "train_config.json"
        file.write_text(json.dumps(settings))
        return load_config([f"--config_path={file}", *flags])

    return load


def test_defaults_in_a_file_ask_for_nothing(from_file, log_lines):
    config, plain = from_file(), load_config(["--dataset.repo_id=me/data", "--policy.type=act"])
    assert config.to_dict() == plain.to_dict()
    assert not log_lines


@pytest.mark.parametrize(
    ("replicate", "shard", "expected"),
    [
        (8, 1, ("ddp", None, None)),
        (1, 8, ("fsdp", None, None)),
        (1, -1, ("fsdp", None, None)),
        (2, 4, ("hsdp", 2, 4)),
        (2, -1, ("hsdp", 2, None)),
    ],
)
def test_processes(from_file, replicate, shard, expected):
    flags = [f"--parallelism.dp_replicate={replicate}", f"--parallelism.dp_shard={shard}"]
    saved = {"parallelism__dp_replicate": replicate, "parallelism__dp_shard": shard}
    for config in (load_config([DATA, *flags]), from_file(**saved)):
        parallel = config.parallel
        assert (parallel.strategy, parallel.dp_replicate, parallel.dp_shard) == expected


def test_the_accelerator(from_file):
    config = from_file(
        accelerator__mixed_precision="bf16",
        accelerator__fsdp__cpu_offload=True,
        accelerator__fsdp__reshard_after_forward=False,
        accelerator__activation_checkpointing__mode="full",
        checkpoint_format="dcp",
    )
    assert config.precision == "bf16" and config.activation_checkpointing and not config.checkpoint.export
    assert config.parallel.cpu_offload and not config.parallel.reshard_after_forward
    flags = ["--accelerator.mixed_precision=no", "--accelerator.ddp.find_unused_parameters=true"]
    config = load_config([DATA, *flags, "--accelerator.compile.enabled=true"])
    assert config.precision == "no" and config.parallel.find_unused_parameters and config.compile
    assert load_config([DATA, "--accelerator.mixed_precision=bf16", "--precision=fp16"]).precision == "fp16"


def test_forward_passes_are_not_steps(log_lines):
    config = load_config([DATA, "--accelerator.gradient_accumulation.steps=4", "--steps=1000"])
    assert config.gradient_accumulation_steps == 4 and config.steps == 1000
    assert "LeRobot's 1000 steps are 250 here: set --steps=250" in " ".join(log_lines)


def test_moving_averages(from_file):
    assert from_file("--ema.enable=true").ema == EMAConfig(True, 0.9999, power=0.75)
    changes = {
        "ema__enable": True,
        "ema__max_decay": 0.99,
        "ema__update_after_step": 7,
        "ema__inv_gamma": 2.0,
    }
    expected = EMAConfig(True, 0.99, power=0.75, inv_gamma=2.0, update_after_step=7)
    assert from_file(**changes).ema == expected
    constant = from_file(ema__enable=True, ema__decay=0.9).ema
    assert [constant.decay_at(update) for update in (2, 3, 1000)] == [0.9] * 3
    ours = load_config([DATA, "--ema.enable=true", "--ema.decay=0.9"]).ema
    assert ours == EMAConfig(True, 0.9) and ours.decay_at(1) == pytest.approx(2 / 11)
    with pytest.raises(ConfigError, match="use_for_eval=false is not supported: evaluation uses the average"):
        from_file(ema__enable=True, ema__use_for_eval=False)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("parallelism.context_parallel.ring_degree=2", "does not split sequences"),
        ("parallelism.context_parallel.ulysses_degree=2", "does not split sequences"),
        ("parallelism.cfg_parallel=2", "does not split guidance"),
        ("accelerator.fsdp.ignored_modules=x", "all parameters are sharded"),
        ("parallelism.dp_shard=0", "not a number of processes"),
        ("parallelism.dp_replicate=many", "not a number of processes"),
        ("checkpoint_format=zip", "expected safetensors, dcp or safetensors_dcp"),
        ("accelerator.activation_checkpointing.mode=some", "expected none or full"),
        ("accelerator.mixed_precision=fp4", "precision"),
        ("accelerator.other=1", "Unknown setting accelerator.other"),
        ("policy.type=molmoact2", "a policy of LeRobot's that Flexor does not have"),
    ],
)
def test_what_is_not_supported_is_named(flag, message):
    with pytest.raises(ConfigError, match=message):
        load_config([DATA, f"--{flag}"])


@pytest.mark.parametrize(
    "flag",
    ["fsdp.wrap_modules=[a]", "fsdp.min_num_params=9", "ddp.static_graph=true", "compile.mode=default"],
)
def test_what_has_no_effect_is_said(flag, log_lines):
    load_config([DATA, f"--accelerator.{flag}"])
    assert f"--accelerator.{flag.partition('=')[0]} has no effect" in " ".join(log_lines)


def test_every_translated_setting_is_one_of_the_file():
    def leaves(tree: dict, where: str = "") -> set[str]:
        nested = [(f"{where}{k}", v) for k, v in tree.items()]
        below = {
            leaf for key, value in nested if isinstance(value, dict) for leaf in leaves(value, f"{key}.")
        }
        return below | {key for key, value in nested if not isinstance(value, dict)}

    assert set(TRANSLATED) <= leaves(DEFAULTS)


# pi0.5


PI05 = [DATA, "--policy.type=pi05", "--policy.load_vlm_weights=false"]


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("use_visual_memory=true", "no memory of earlier images"),
        ("use_proprioceptive_memory=true", "no memory of earlier states"),
        ("rtc_training_max_delay=5", "does not train policies to continue a chunk"),
    ],
)
def test_what_pi05_has_only_in_lerobot(setting, message):
    name = setting.partition("=")[0]
    off = "0" if name.startswith("rtc") else "false"
    load_config([*PI05, f"--policy.{name}={off}", "--policy.memory_frames=6", "--policy.memory_stride=10"])
    with pytest.raises(ConfigError, match=f"policy.{name}=.* is not supported: .*{message}"):
        load_config([*PI05, f"--policy.{setting}"])
