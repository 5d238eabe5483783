"""The settings of a run: one dataclass tree, each field with its help text under it.

Names are `lerobot-train`'s where it has one. How they are filled in is in `settings.py`.
"""

from __future__ import annotations

import operator
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import field_types, to_plain
from flexor.data.settings import DatasetConfig, picture_size
from flexor.policies import PolicyConfig
from flexor.policies.adapters import LoraConfig

GROUPS = (
    "dataset",
    "dataset.cache",
    "dataset.order",
    "policy",
    "lora",
    "optimizer",
    "scheduler",
    "ema",
    "checkpoint",
    "parallel",
    "env",
    "eval",
    "wandb",
)


@dataclass
class EnvConfig:
    type: str | None = None
    """Environment to evaluate in: place (the built-in task), pusht, or any gymnasium id."""
    task: str | None = None
    """Which of the package's environments, if the type has several, such as AlohaInsertion-v0."""
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
    """Episodes that run side by side; 0 for as many as is sensible."""
    seed: int = 1_000_000
    """Seed of the first episode; training demonstrations of the built-in task start at 0."""
    videos: int = 0
    """Save a video of this many of the episodes."""


@dataclass
class OptimizerConfig:
    type: Literal["adamw", "adam", "sgd", "adamw_8bit"] | None = None
    """adamw, adam, sgd, or adamw_8bit, which takes a quarter of the memory (needs `pip install flexor[8bit]`); the
    policy's own choice unless given (so are the others)."""
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
    type: (
        Literal["constant", "constant_with_warmup", "cosine", "cosine_decay_with_warmup", "vqbet"] | None
    ) = None
    """How the learning rate changes; the policy's own choice unless given."""
    num_warmup_steps: int | None = None
    """Steps of linear warm-up."""
    num_decay_steps: int | None = None
    """cosine_decay_with_warmup: steps until the lowest learning rate (shortened to the run's length)."""
    peak_lr: float | None = None
    """cosine_decay_with_warmup: the learning rate that `decay_lr` is relative to."""
    decay_lr: float | None = None
    """cosine_decay_with_warmup: the lowest learning rate."""
    num_vqvae_training_steps: int | None = None
    """vqbet: steps at a constant learning rate before the warm-up and the cosine."""
    num_cycles: float | None = None
    """vqbet: waves of the cosine in `steps`; with more than 0.5 (default) it comes to zero before the end."""


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
    asynchronous: bool = False
    """Go on training while a checkpoint is written; it takes that much more of the host's memory."""
    export: bool = True
    """fsdp, hsdp: gather the weights for pretrained_model/ at every checkpoint; else only at the last one
    (`flexor export` makes them of any)."""


@dataclass
class ParallelConfig:
    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """What many processes share: nothing (ddp, each has the whole model), everything (fsdp), or everything within
    groups (hsdp); auto takes ddp if the model and its optimizer fit into half of the GPU's memory, else fsdp."""
    dp_replicate: int | None = None
    """hsdp: how many groups there are; each holds the model once."""
    dp_shard: int | None = None
    """hsdp: how many processes share one copy of the model; those of one host unless given."""
    cpu_offload: bool = False
    """fsdp, hsdp: keep weights and optimizer in the host's memory; slow, for models that do not fit otherwise."""
    reshard_after_forward: bool = True
    """fsdp, hsdp: let go of a block's weights between forward and backward; false is faster and takes more memory."""
    find_unused_parameters: bool = False
    """ddp: look at each step for parameters that had no part in the loss."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How GPUs talk: nccl, or gloo, which is slow but works everywhere."""
    timeout_s: float = 600
    """Seconds without progress after which a run of many processes is brought down."""


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
    epochs: float | None = None
    """Times to go through the data, instead of steps."""
    batch_size: int = 8
    """Samples per process and forward pass; with global_batch_size, the most of them."""
    gradient_accumulation_steps: int | None = None
    """Forward passes per optimizer step; 1 unless given, or what global_batch_size asks for."""
    global_batch_size: int | None = None
    """Samples per optimizer step over all processes, so that a step is the same on any number of them."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Multiply the learning rates by the number of times that batch_size goes into the global batch, or its root."""
    lr_factor: float | None = None
    """What learning rates are multiplied by; 1 unless given, or what scale_lr comes to."""
    num_workers: int = 4
    """Threads that read and decode ahead of training; 0 reads in the loop itself."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: no (float32), bf16, or fp16 with a gradient scaler."""
    weights_dtype: Literal["float32", "bf16"] = "float32"
    """What weights, and so their gradients and optimizer state, are kept in; bf16 takes half of the memory."""
    deterministic: bool = False
    """Only deterministic GPU kernels: bitwise equal repeats and resumes, a little slower."""
    activation_checkpointing: bool = False
    """Compute each block again in the backward pass instead of keeping what it computed: less memory, more time."""
    compile: bool = False
    """Compile each block of the policy with torch.compile: faster steps after a slow first one."""
    plan: bool = True
    """On a GPU: say before the first step what the run will take, and compare at the end."""
    auto: bool = False
    """On a GPU: let the plan choose batch size (of the same global batch), precision, recomputing and workers, where
    they are not given."""
    log_freq: int = 200
    """Steps between two lines of metrics."""
    save_checkpoint: bool = True
    """Save checkpoints."""
    save_freq: int = 20_000
    """Steps between two checkpoints; the last step is always saved, 0 or less saves only that."""
    eval_steps: int = 0
    """Steps between two held-out losses (needs dataset.eval_split); 0 for one at the end only."""
    max_eval_samples: int = 0
    """Samples in a held-out loss; 0 for all."""
    env_eval_freq: int = 20_000
    """Steps between two evaluations in the environment (needs env.type); 0 for never."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    env: EnvConfig = field(default_factory=EnvConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    wandb: WandBConfig = field(default_factory=WandBConfig)
    policy_path: str | None = None
    """Checkpoint folder or Hub repository the policy starts from (as a flag: --policy.path)."""

    def to_dict(self) -> dict[str, Any]:
        plain = to_plain(self)
        plain["policy"] = {"type": self.policy.type, **plain["policy"]}
        return plain


def group_type(group: str) -> type:
    """The dataclass of a group of settings, such as "dataset.cache"."""
    cls: type = TrainConfig
    for name in group.split("."):
        cls = field_types(cls)[name]
    return cls


def validate(config: TrainConfig) -> None:
    """Combinations that can't work, before anything is started."""
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
    config.lora.validate()
    validate_weights(config)
    picture_size(dataset.cache.size)
    _validate_episodes(dataset.episodes)
    _validate_ranges(config)


def validate_weights(config: TrainConfig) -> None:
    """Whether this policy's weights can be adapted, or kept in less than float32."""
    lower = config.weights_dtype == "bf16"
    if lower and config.precision != "bf16":
        raise ConfigError(
            f"weights_dtype=bf16 with precision={config.precision}: products of such weights are computed in "
            "bf16, so set --precision=bf16."
        )
    if config.policy.moves_weights and (lower or config.lora.r):
        setting = "weights_dtype=bf16" if lower else f"lora.r={config.lora.r}"
        raise ConfigError(
            f"{setting}: {config.policy.type} moves some of its weights itself, which needs all of them, in float32."
        )


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
    "steps": 1,
    "batch_size": 1,
    "gradient_accumulation_steps": 1,
    "global_batch_size": 1,
    "log_freq": 1,
    "num_workers": 0,
    "eval_steps": 0,
    "env_eval_freq": 0,
    "max_eval_samples": 0,
    "seed": 0,
    "dataset.cache.gb": 0,
    "dataset.cache.pool_gb": 0,
    "dataset.cache.remote_gb": 0,
    "dataset.order.lanes": 1,
    "dataset.order.pool": 1,
    "dataset.order.unit": 1,
    "lora.r": 0,
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
    "parallel.dp_replicate": 1,
    "parallel.dp_shard": 1,
    "parallel.timeout_s": 1,
    "env.max_steps": 1,
    "eval.n_episodes": 1,
    "eval.batch_size": 0,
    "eval.seed": 0,
    "eval.videos": 0,
}


def _validate_ranges(config: TrainConfig) -> None:
    for key, least in AT_LEAST.items():
        value = operator.attrgetter(key)(config)
        if value is not None and value < least:
            raise ConfigError(f"{key}={value} must be at least {least}.")
    for key in ("epochs", "lr_factor"):
        value = getattr(config, key)
        if value is not None and value <= 0:
            raise ConfigError(f"{key}={value} must be more than 0.")
    if config.scheduler.peak_lr is not None and config.scheduler.peak_lr <= 0:
        raise ConfigError(f"scheduler.peak_lr={config.scheduler.peak_lr} must be more than 0.")
    if not all(0 <= beta < 1 for beta in config.optimizer.betas or ()):
        raise ConfigError(
            f"optimizer.betas={list(config.optimizer.betas or ())} must be at least 0 and less than 1."
        )
