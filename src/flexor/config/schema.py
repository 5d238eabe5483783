"""The settings of a run: one dataclass tree, each field with its help text under it.

Names are `lerobot-train`'s where it has one. How they are filled in is in `settings.py`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import check_values, field_types, setting, to_plain
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
    max_steps: int | None = setting(None, at_least=1)
    """Steps after which an episode ends; unless given, the environment's own limit."""


@dataclass
class EvalConfig:
    n_episodes: int = setting(50, at_least=1)
    """Episodes per evaluation."""
    batch_size: int = setting(25, at_least=0)
    """Episodes that run side by side; 0 for as many as is sensible."""
    seed: int = setting(1_000_000, at_least=0)
    """Seed of the first episode; training demonstrations of the built-in task start at 0."""
    videos: int = setting(0, at_least=0)
    """Save a video of this many of the episodes."""


@dataclass
class OptimizerConfig:
    type: Literal["adamw", "adam", "sgd", "adamw_8bit"] | None = None
    """adamw, adam, sgd, or adamw_8bit, which takes a quarter of the memory (needs `pip install flexor[8bit]`); the
    policy's own choice unless given (so are the others)."""
    lr: float | None = setting(None, at_least=0)
    """Learning rate."""
    weight_decay: float | None = setting(None, at_least=0)
    """Weight decay."""
    betas: tuple[float, float] | None = setting(None, at_least=0, less_than=1)
    """Adam's decay rates."""
    eps: float | None = setting(None, at_least=0)
    """Adam's epsilon."""
    momentum: float | None = setting(None, at_least=0)
    """SGD's momentum."""
    grad_clip_norm: float | None = setting(None, at_least=0)
    """Largest gradient norm; 0 turns clipping off."""


@dataclass
class SchedulerConfig:
    type: (
        Literal["constant", "constant_with_warmup", "cosine", "cosine_decay_with_warmup", "vqbet"] | None
    ) = None
    """How the learning rate changes; the policy's own choice unless given."""
    num_warmup_steps: int | None = setting(None, at_least=0)
    """Steps of linear warm-up."""
    num_decay_steps: int | None = setting(None, at_least=1)
    """cosine_decay_with_warmup: steps until the lowest learning rate (shortened to the run's length)."""
    peak_lr: float | None = setting(None, more_than=0)
    """cosine_decay_with_warmup: the learning rate that `decay_lr` is relative to."""
    decay_lr: float | None = setting(None, at_least=0)
    """cosine_decay_with_warmup: the lowest learning rate."""
    num_vqvae_training_steps: int | None = None
    """vqbet: steps at a constant learning rate before the warm-up and the cosine."""
    num_cycles: float | None = None
    """vqbet: waves of the cosine in `steps`; with more than 0.5 (default) it comes to zero before the end."""


@dataclass
class EMAConfig:
    enable: bool = False
    """Keep an exponential moving average of the weights; it is what is evaluated and exported."""
    decay: float = setting(0.999, more_than=0, less_than=1)
    """How much of the average is kept at each step (less during the first steps)."""


@dataclass
class CheckpointConfig:
    keep_last: int | None = setting(None, at_least=1)
    """Keep only this many of the newest checkpoints; all unless given."""
    keep_every: int | None = setting(None, at_least=1)
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
    dp_replicate: int | None = setting(None, at_least=1)
    """hsdp: how many groups there are; each holds the model once."""
    dp_shard: int | None = setting(None, at_least=1)
    """hsdp: how many processes share one copy of the model; those of one host unless given."""
    cpu_offload: bool = False
    """fsdp, hsdp: keep weights and optimizer in the host's memory; slow, for models that do not fit otherwise."""
    reshard_after_forward: bool = True
    """fsdp, hsdp: let go of a block's weights between forward and backward; false is faster and takes more memory."""
    find_unused_parameters: bool = False
    """ddp: look at each step for parameters that had no part in the loss."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """How GPUs talk: nccl, or gloo, which is slow but works everywhere."""
    timeout_s: float = setting(600, at_least=1)
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
    output_dir: str | None = setting(None, may_change=True)
    """Run folder; runs/<date>_<job name> unless given. Never one that holds another run."""
    job_name: str | None = setting(None, may_change=True)
    """Name of the run; the policy's type unless given."""
    seed: int = setting(1000, at_least=0)
    """Everything random follows from it."""
    steps: int = setting(100_000, at_least=1, may_change=True)
    """Optimizer steps."""
    epochs: float | None = setting(None, more_than=0, may_change=True)
    """Times to go through the data, instead of steps."""
    batch_size: int = setting(8, at_least=1, may_change=True)
    """Samples per process and forward pass; with global_batch_size, the most of them."""
    gradient_accumulation_steps: int | None = setting(None, at_least=1, may_change=True)
    """Forward passes per optimizer step; 1 unless given, or what global_batch_size asks for."""
    global_batch_size: int | None = setting(None, at_least=1)
    """Samples per optimizer step over all processes, so that a step is the same on any number of them."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Multiply the learning rates by the number of times that batch_size goes into the global batch, or its root."""
    lr_factor: float | None = setting(None, more_than=0)
    """What learning rates are multiplied by; 1 unless given, or what scale_lr comes to."""
    num_workers: int = setting(4, at_least=0, may_change=True)
    """Threads that read and decode ahead of training; 0 reads in the loop itself."""
    precision: Literal["no", "bf16", "fp16"] = "no"
    """Mixed precision: no (float32), bf16, or fp16 with a gradient scaler."""
    weights_dtype: Literal["float32", "bf16"] = "float32"
    """What weights, and so their gradients and optimizer state, are kept in; bf16 takes half of the memory."""
    deterministic: bool = False
    """Only deterministic GPU kernels: bitwise equal repeats and resumes, a little slower."""
    activation_checkpointing: bool = setting(False, may_change=True)
    """Compute each block again in the backward pass instead of keeping what it computed: less memory, more time."""
    step: Literal["auto", "graph", "eager"] = setting("auto", may_change=True)
    """How an NVIDIA GPU runs a step: graph replays one CUDA graph, which takes the host almost no time; eager launches
    every operation by itself; auto uses a graph if the policy allows it."""
    compile: bool = False
    """Compile each block of the policy with torch.compile: faster steps after a slow first one."""
    plan: bool = setting(True, may_change=True)
    """On a GPU: say before the first step what the run will take, and compare at the end."""
    auto: bool = setting(False, may_change=True)
    """On a GPU: let the plan choose batch size (of the same global batch), precision, recomputing and workers, where
    they are not given."""
    log_freq: int = setting(200, at_least=1, may_change=True)
    """Steps between two lines of metrics."""
    save_checkpoint: bool = setting(True, may_change=True)
    """Save checkpoints."""
    save_freq: int = setting(20_000, may_change=True)
    """Steps between two checkpoints; the last step is always saved, 0 or less saves only that."""
    eval_steps: int = setting(0, at_least=0, may_change=True)
    """Steps between two held-out losses (needs dataset.eval_split); 0 for one at the end only."""
    max_eval_samples: int = setting(0, at_least=0, may_change=True)
    """Samples in a held-out loss; 0 for all."""
    env_eval_freq: int = setting(20_000, at_least=0, may_change=True)
    """Steps between two evaluations in the environment (needs env.type); 0 for never."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = setting(CheckpointConfig, may_change=True)
    parallel: ParallelConfig = setting(ParallelConfig, may_change=True)
    env: EnvConfig = setting(EnvConfig, may_change=True)
    eval: EvalConfig = setting(EvalConfig, may_change=True)
    wandb: WandBConfig = setting(WandBConfig, may_change=True)
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
    if config.eval_steps and not dataset.eval_split:
        raise ConfigError(
            f"eval_steps={config.eval_steps} needs held-out episodes: set --dataset.eval_split=0.1."
        )
    config.lora.validate()
    validate_weights(config)
    picture_size(dataset.cache.size)
    _validate_episodes(dataset.episodes)
    check_values(config)


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
