"""The settings of a run: one dataclass tree, filled from a YAML file, flags and key=value, later wins.

Names are `lerobot-train`'s where it has one. Anything unknown, of the wrong type or impossible is
refused here, before a run folder, a dataset or a GPU is touched.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml

from flexor.errors import ConfigError
from flexor.log import log
from flexor.policies import PolicyConfig, policy_class
from flexor.tree import Text, coerce, from_plain, parse_yaml, to_plain

PACKAGED = Path(__file__).parent / "configs"
DEFAULT_POLICY = "act"
GROUPS = ("dataset", "policy", "optimizer", "scheduler", "ema", "checkpoint", "env", "eval", "wandb")


@dataclass
class DatasetConfig:
    repo_id: str | None = None
    """Dataset on the Hub, or its name under $HF_LEROBOT_HOME; `builtin/place` is the built-in task's."""
    root: str | None = None
    """Folder of the dataset, or an address such as s3://bucket/dataset."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    episodes: list[int] | None = None
    """Use only these episodes: a list, or @file with one (as `flexor data check` writes)."""
    eval_split: float = 0.0
    """Share of episodes per task held out for the held-out loss."""
    use_imagenet_stats: bool = True
    """Normalise cameras with ImageNet's mean and standard deviation instead of the dataset's."""
    cache_gb: float | None = None
    """Memory for decoded frames in GB; unless given, a quarter of what is free."""


@dataclass
class EnvConfig:
    type: str | None = None
    """Environment to evaluate in: place (the built-in task), pusht, or any gymnasium id."""
    package: str | None = None
    """Package to import so that the environment is registered, such as gym_pusht."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Arguments for the environment, such as {obs_type: pixels_agent_pos}."""
    max_steps: int | None = None
    """Steps after which an episode ends; unless given, the environment's own limit."""


@dataclass
class EvalConfig:
    n_episodes: int = 50
    """Episodes per evaluation."""
    batch_size: int = 25
    """Episodes that run side by side."""
    seed: int = 1_000_000
    """Seed of the first episode; training demonstrations of the built-in task start at 0."""
    videos: int = 0
    """Save a video of this many of the episodes."""


@dataclass
class OptimizerConfig:
    type: Literal["adamw", "adam", "sgd"] | None = None
    """adamw, adam or sgd; the policy's own choice unless given (so are the others)."""
    lr: float | None = None
    """Learning rate."""
    weight_decay: float | None = None
    """Weight decay."""
    betas: tuple[float, float] | None = None
    """Adam's decay rates."""
    eps: float | None = None
    """Adam's epsilon."""
    momentum: float | None = None
    """SGD's momentum."""
    grad_clip_norm: float | None = None
    """Largest gradient norm; 0 turns clipping off."""


@dataclass
class SchedulerConfig:
    type: Literal["constant", "constant_with_warmup", "cosine", "cosine_decay_with_warmup"] | None = None
    """How the learning rate changes; the policy's own choice unless given."""
    num_warmup_steps: int | None = None
    """Steps of linear warm-up."""
    num_decay_steps: int | None = None
    """cosine_decay_with_warmup: steps until the lowest learning rate (shortened to the run's length)."""
    peak_lr: float | None = None
    """cosine_decay_with_warmup: the learning rate that `decay_lr` is relative to."""
    decay_lr: float | None = None
    """cosine_decay_with_warmup: the lowest learning rate."""


@dataclass
class EMAConfig:
    enable: bool = False
    """Keep an exponential moving average of the weights; it is what is evaluated and exported."""
    decay: float = 0.999
    """How much of the average is kept at each step (less during the first steps)."""


@dataclass
class CheckpointConfig:
    keep_last: int | None = None
    """Keep only this many of the newest checkpoints; all unless given."""
    keep_every: int | None = None
    """Always keep checkpoints whose step is a multiple of this."""


@dataclass
class WandBConfig:
    enable: bool = False
    """Log to Weights & Biases too (needs `pip install flexor[wandb]`)."""
    project: str = "flexor"
    """Project there."""
    entity: str | None = None
    """Team or user there."""
    notes: str | None = None
    """A note shown with the run."""
    run_id: str | None = None
    """Continue the run with this id there."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """online, offline or disabled."""


@dataclass
class TrainConfig:
    output_dir: str | None = None
    """Run folder; runs/<date>_<job name> unless given. Never one that holds another run."""
    job_name: str | None = None
    """Name of the run; the policy's type unless given."""
    seed: int = 1000
    """Everything random follows from it."""
    steps: int = 100_000
    """Optimizer steps."""
    batch_size: int = 8
    """Samples per process and forward pass."""
    gradient_accumulation_steps: int = 1
    """Forward passes per optimizer step."""
    num_workers: int = 4
    """Threads that read and decode ahead of training; 0 reads in the loop itself."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: no (float32), bf16, or fp16 with a gradient scaler."""
    deterministic: bool = False
    """Only deterministic GPU kernels: bitwise equal repeats and resumes, a little slower."""
    log_freq: int = 200
    """Steps between two lines of metrics."""
    save_checkpoint: bool = True
    """Save checkpoints."""
    save_freq: int = 20_000
    """Steps between two checkpoints; the last step is always saved, 0 saves only that."""
    eval_steps: int = 0
    """Steps between two held-out losses (needs dataset.eval_split); 0 for never."""
    max_eval_samples: int = 0
    """Samples in a held-out loss; 0 for all."""
    env_eval_freq: int = 20_000
    """Steps between two evaluations in the environment (needs env.type); 0 for never."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandBConfig = field(default_factory=WandBConfig)
    policy_path: str | None = None
    """Checkpoint folder or Hub repository the policy starts from (as a flag: --policy.path)."""

    def to_dict(self) -> dict[str, Any]:
        plain = to_plain(self)
        plain["policy"] = {"type": self.policy.type, **plain["policy"]}
        return plain


# Settings of LeRobot's that nothing here depends on: taken, so that a command works unchanged, and
# named in the log, because a setting that is silently ignored is a lie.
IGNORED = {
    "prefetch_factor": "batches are read ahead by threads",
    "persistent_workers": "batches are read ahead by threads",
    "dataloader_multiprocessing_context": "batches are read ahead by threads, not processes",
    "tolerance_s": "a frame within half a frame period of its time is taken",
    "use_policy_training_preset": "presets fill what is not given; what is given counts",
    "dataset.video_backend": "videos are decoded by PyAV",
    "dataset.return_uint8": "frames travel as uint8 always",
    "dataset.streaming": "data is read from disk; streaming comes with the data engine",
    "eval.use_async_envs": "environments run side by side in one process",
    "wandb.disable_artifact": "no artifacts are uploaded",
    "wandb.add_tags": "the configuration is logged as such",
    "policy.push_to_hub": "nothing is uploaded: use `hf upload REPO RUN/checkpoints/last/pretrained_model`",
    "policy.repo_id": "nothing is uploaded",
    "policy.private": "nothing is uploaded",
    "policy.tags": "nothing is uploaded",
    "policy.license": "nothing is uploaded",
    "policy.use_peft": "adapters are not supported yet",
    "peft": "adapters are not supported yet",
    "reward_model": "reward models are not trained here",
    "sample_weighting": "samples all weigh the same",
    "rename_map": "the policy and the dataset must use the same names",
    "job": "the run starts on this machine",
    "save_checkpoint_to_hub": "nothing is uploaded",
    "checkpoint_path": "a run goes on with `flexor resume RUN`",
    "resume": "a run goes on with `flexor resume RUN`",
    "dataset.repo_type": "only dataset repositories are read",
    "dataset.image_transforms": "pictures are not augmented yet",
    "dataset.depth_output_unit": "depth maps are not read yet",
    "eval.recording": "evaluation episodes are not recorded as datasets; --eval.videos films them",
    "eval.recording_repo_id": "evaluation episodes are not recorded as datasets",
    "eval.recording_private": "evaluation episodes are not recorded as datasets",
    "policy.pretrained_path": "--policy.path names the checkpoint to start from",
    "policy.pretrained_revision": "--policy.path=REPO@REVISION names it",
}
# Any other value of these asks for something Flexor does not do: better refused than ignored.
HARMLESS: dict[str, tuple[Any, ...]] = {
    "policy.push_to_hub": (False,),
    "policy.use_peft": (False,),
    "peft": (None,),
    "reward_model": (None,),
    "sample_weighting": (None,),
    "rename_map": ({}, None),
    "job.target": (None, "local"),
    "save_checkpoint_to_hub": (False,),
    "checkpoint_path": (None,),
    "resume": (False,),
    "dataset.streaming": (False,),
    "dataset.repo_type": ("dataset",),
    "dataset.image_transforms.enable": (False,),
    "eval.recording": (False,),
    "use_policy_training_preset": (True,),
}
# LeRobot's name -> ours
ALIASES = {
    "cudnn_deterministic": "deterministic",
    "policy.path": "policy_path",
    "config_path": "config",
}


def parse_flags(argv: Sequence[str]) -> dict[str, Any]:
    """--a.b=c, --a.b c, --flag and a.b=c -> {"a.b": Text("c"), ...}."""
    flags: dict[str, Any] = {}
    arguments = list(argv)
    while arguments:
        word = arguments.pop(0)
        if word.startswith("--"):
            key, equals, value = word[2:].partition("=")
            if not equals:
                follows = arguments and not arguments[0].startswith("--")
                value = arguments.pop(0) if follows else "true"
        elif "=" in word:
            key, _, value = word.partition("=")
        else:
            raise ConfigError(f"Can't read {word!r}: settings are --key=value, --key value or key=value.")
        key = key.replace("-", "_")
        flags[ALIASES.get(key, key)] = Text(value)
    return flags


def nest(flat: dict[str, Any]) -> dict[str, Any]:
    """{"a.b": 1} -> {"a": {"b": 1}}."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            node = node.setdefault(section, {})
            if not isinstance(node, dict):
                raise ConfigError(f"{key}={value}: {section} is a setting itself, not a group of settings.")
        node[name] = value
    return tree


def flatten(tree: dict[str, Any], where: str = "") -> dict[str, Any]:
    """The inverse of `nest`, one level of settings groups deep."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        if not where and key in GROUPS and isinstance(value, dict):
            flat.update(flatten(value, key))
        elif not where and key in GROUPS and value is None:
            continue  # LeRobot writes `env: null` for a group that was not given
        else:
            name = f"{where}.{key}" if where else str(key)
            flat[ALIASES.get(name, name)] = value
    return flat


def read_file(name: str | Path) -> dict[str, Any]:
    """A YAML or JSON file of settings; a bare name such as `demo` is one that comes with Flexor."""
    path = Path(name)
    packaged = PACKAGED / f"{name}.yaml"
    try:
        if not path.is_file() and packaged.is_file():
            path = packaged
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        names = ", ".join(p.stem for p in sorted(PACKAGED.glob("*.yaml")))
        raise ConfigError(
            f"Can't read the settings file {name}: {error.strerror}. Built in: {names}."
        ) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: not text at all
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no settings: expected `key: value` lines.")
    return data


def load_config(argv: Sequence[str]) -> TrainConfig:
    """The command line's settings on top of the file they name; the built-in demo if none names data."""
    flags = parse_flags(argv)
    file = flags.pop("config", None)
    if file is None and not {"dataset.repo_id", "dataset.root"} & flags.keys():
        file = "demo"
    layers = [flatten(read_file(file))] if file is not None else []
    return build_config(*layers, flags)


def build_config(*layers: dict[str, Any]) -> TrainConfig:
    """Settings in layers ({"policy.type": "act", ...}), later ones first, checked."""
    flat: dict[str, Any] = {}
    for layer in layers:
        before = str(flat.get("policy.type", DEFAULT_POLICY))
        if str(layer.get("policy.type", before)) != before or layer.get("policy_path") is not None:
            # another policy: the settings of the one before mean nothing to it
            flat = {k: v for k, v in flat.items() if not k.startswith("policy.")}
        flat.update(layer)
    return _build(drop_ignored(flat))


def drop_ignored(flat: dict[str, Any]) -> dict[str, Any]:
    """The settings without those of LeRobot's that have no effect here, which are named in the log."""
    kept = {}
    for key, value in flat.items():
        reason = next((why for name, why in IGNORED.items() if f"{key}.".startswith(f"{name}.")), None)
        if reason is None:
            kept[key] = value
            continue
        plain = parse_yaml(value) if isinstance(value, Text) else value
        asked = {key: plain} | (
            {f"{key}.{k}": v for k, v in plain.items()} if isinstance(plain, dict) else {}
        )
        for name, wanted in asked.items():
            harmless = HARMLESS.get(name, HARMLESS.get(name.rpartition(".")[0], (wanted,)))
            if wanted not in harmless:
                raise ConfigError(f"{name}={wanted} is not supported: {reason}.")
        if isinstance(value, Text) and key not in HARMLESS:
            log.warning("--%s has no effect here: %s", key, reason)
    return kept


def _build(flat: dict[str, Any]) -> TrainConfig:
    use_amp = coerce(flat.pop("policy.use_amp", False), bool, "policy.use_amp")
    if use_amp and "precision" not in flat:
        flat["precision"] = "bf16"
    if "dataset.episodes" in flat:
        flat["dataset.episodes"] = _read_episodes(flat["dataset.episodes"])
    tree = nest(flat)
    policy_settings = tree.pop("policy", {})
    policy = _build_policy(policy_settings, flat.get("policy_path"))
    config = from_plain(TrainConfig, {**tree, "policy": policy})
    _validate(config)
    return config


def _build_policy(settings: Any, path: str | None) -> PolicyConfig:
    if not isinstance(settings, dict):
        raise ConfigError(f"policy={settings}: say which with --policy.type={settings} or --policy.path=...")
    if path is not None:
        from flexor.policies.pretrained import read_config

        return read_config(str(path), settings)
    # LeRobot's way to say that the features come from the dataset, which they do anyway
    nulls = [
        k for k in ("input_features", "output_features") if str(settings.get(k)).lower() in ("none", "null")
    ]
    settings = {key: value for key, value in settings.items() if key not in nulls}
    cls = policy_class(str(settings.pop("type", DEFAULT_POLICY))).Config
    policy = from_plain(cls, settings, "policy")
    policy.validate()
    return policy


def _read_episodes(value: Any) -> Any:
    if not isinstance(value, str) or not value.startswith("@"):
        return value
    try:
        return json.loads(Path(value[1:]).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"dataset.episodes={value}: can't read a list of episodes such as [0, 1, 2] from there ({error})."
        ) from error


def _validate(config: TrainConfig) -> None:
    """Combinations that can't work, before anything is started."""
    positive = ("steps", "batch_size", "gradient_accumulation_steps", "log_freq")
    for name in positive:
        if getattr(config, name) < 1:
            raise ConfigError(f"{name}={getattr(config, name)} must be at least 1.")
    for name in ("num_workers", "save_freq", "eval_steps", "env_eval_freq", "max_eval_samples", "seed"):
        if getattr(config, name) < 0:
            raise ConfigError(f"{name}={getattr(config, name)} must not be negative.")
    dataset = config.dataset
    if dataset.repo_id is None and dataset.root is None:
        raise ConfigError(
            "No dataset: give --dataset.repo_id=USER/NAME, --dataset.root=FOLDER or --config=demo."
        )
    if not 0 <= dataset.eval_split < 1:
        raise ConfigError(f"dataset.eval_split={dataset.eval_split} must be at least 0 and less than 1.")
    if config.eval_steps and not dataset.eval_split:
        raise ConfigError(
            f"eval_steps={config.eval_steps} needs held-out episodes: set --dataset.eval_split=0.1."
        )
    if not 0 < config.ema.decay < 1:
        raise ConfigError(f"ema.decay={config.ema.decay} must lie between 0 and 1.")
    _validate_episodes(dataset.episodes)
    _validate_ranges(config)


def _validate_episodes(episodes: list[int] | None) -> None:
    if episodes is None:
        return
    if not episodes:
        raise ConfigError("dataset.episodes is an empty list: leave it out to use all episodes.")
    negative = [e for e in episodes if e < 0]
    twice = sorted(e for e, times in Counter(episodes).items() if times > 1)
    if negative or twice:
        raise ConfigError(
            f"dataset.episodes: negative: {negative}, named twice: {twice}. List each index once."
        )


AT_LEAST = {
    "dataset.cache_gb": 0,
    "optimizer.lr": 0,
    "optimizer.weight_decay": 0,
    "optimizer.grad_clip_norm": 0,
    "optimizer.momentum": 0,
    "optimizer.eps": 0,
    "scheduler.num_warmup_steps": 0,
    "scheduler.num_decay_steps": 1,
    "scheduler.decay_lr": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_every": 1,
    "env.max_steps": 1,
    "eval.n_episodes": 1,
    "eval.batch_size": 1,
    "eval.seed": 0,
    "eval.videos": 0,
}


def _validate_ranges(config: TrainConfig) -> None:
    for key, least in AT_LEAST.items():
        group, name = key.split(".")
        value = getattr(getattr(config, group), name)
        if value is not None and value < least:
            raise ConfigError(f"{key}={value} must be at least {least}.")
    if config.scheduler.peak_lr is not None and config.scheduler.peak_lr <= 0:
        raise ConfigError(f"scheduler.peak_lr={config.scheduler.peak_lr} must be more than 0.")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas or ()):
        raise ConfigError(
            f"optimizer.betas={list(config.optimizer.betas or ())} must be at least 0 and less than 1."
        )
