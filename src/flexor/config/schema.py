"""The settings of a run: one dataclass tree, each field with its help text under it.

Names are those of `lerobot-train` where it has the same setting. `parse.py` reads and fills in the settings.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Literal

from flexor.config.environment import EnvConfig
from flexor.config.profile import parse_profile
from flexor.config.rl import RLConfig
from flexor.core.errors import ConfigError
from flexor.core.model_files import is_repo_id
from flexor.core.secrets import redacted_values
from flexor.core.typed import check_values, field_types, setting, to_plain
from flexor.data.mixture.entries import check_entries
from flexor.data.settings import DatasetConfig, SampleWeightingConfig, parse_image_size
from flexor.policies import PolicyConfig
from flexor.policies.adapters import LoraConfig
from flexor.policies.augment.operations import check_transform_names, read_transforms
from flexor.policies.rename import check_names

GROUPS = (
    "dataset",
    "dataset.cache",
    "dataset.order",
    "dataset.image_transforms",
    "policy",
    "sample_weighting",
    "lora",
    "optimizer",
    "scheduler",
    "ema",
    "checkpoint",
    "parallel",
    "env",
    "env.processor",
    "env.processor.image_preprocessing",
    "env.processor.gripper",
    "env.processor.reset",
    "env.processor.inverse_kinematics",
    "eval",
    "wandb",
    "trackio",
    "rl",
    "rl.serve",
)


@dataclass(frozen=True)
class EvalConfig:
    n_episodes: int = setting(50, at_least=1)
    """Episodes per evaluation."""
    batch_size: int = setting(25, at_least=0)
    """Episodes that run in parallel; 0: n_episodes, at most 25."""
    seed: int = setting(1_000_000, at_least=0)
    """Seed of the first episode; the built-in task's training demonstrations use seeds from 0."""
    videos: int = setting(0, at_least=0)
    """Save a video of this many of the episodes."""


@dataclass(frozen=True)
class OptimizerConfig:
    type: Literal["adamw", "adam", "sgd", "adamw_8bit"] | None = None
    """adamw, adam, sgd, or adamw_8bit, whose state takes a quarter of the memory.
    Default of this and the other optimizer settings: the policy's preset."""
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
    """Clip gradients to this norm; 0 turns clipping off."""


@dataclass(frozen=True)
class SchedulerConfig:
    type: (
        Literal["constant", "constant_with_warmup", "cosine", "cosine_decay_with_warmup", "vqbet"] | None
    ) = None
    """Learning-rate schedule; default: the policy's preset."""
    num_warmup_steps: int | None = setting(None, at_least=0)
    """Steps of linear warm-up."""
    num_decay_steps: int | None = setting(None, at_least=1)
    """cosine_decay_with_warmup: steps until the lowest learning rate; scaled down if the run is shorter."""
    peak_lr: float | None = setting(None, more_than=0)
    """cosine_decay_with_warmup: the peak learning rate, which `decay_lr` is relative to."""
    decay_lr: float | None = setting(None, at_least=0)
    """cosine_decay_with_warmup: the lowest learning rate."""
    num_vqvae_training_steps: int | None = None
    """vqbet: steps at a constant learning rate before the warm-up and the cosine."""
    num_cycles: float | None = None
    """vqbet: cosine cycles in `steps`, default 0.5; with more, the learning rate reaches zero before the end."""


@dataclass(frozen=True)
class EMAConfig:
    enable: bool = False
    """Keep an exponential moving average of the weights; evaluation and export use the average."""
    decay: float = setting(0.999, more_than=0, less_than=1)
    """Decay of the average per step (lower during the first steps)."""
    min_decay: float = setting(0.0, at_least=0, less_than=1)
    """Smallest decay; the same as `decay` for a constant one."""
    power: float | None = setting(None, more_than=0)
    """The decay rises as 1 - (1 + step / inv_gamma)^-power, as in LeRobot and diffusers; default: as
    (1 + step) / (10 + step)."""
    inv_gamma: float = setting(1.0, more_than=0)
    """With `power`: steps in which the decay rises."""
    update_after_step: int = setting(0, at_least=0)
    """For this many steps, the average is just a copy of the weights."""

    def decay_at(self, update: int) -> float:
        """The decay in the update of this number, counted from 1."""
        follows_lerobot = self.power is not None or self.min_decay or self.update_after_step
        if not follows_lerobot:
            return min(self.decay, (1 + update) / (10 + update))  # forget the start quickly
        step = update - self.update_after_step - 1
        if step <= 0:
            return 0.0
        rising = (
            (1 + step) / (10 + step) if self.power is None else 1 - (1 + step / self.inv_gamma) ** -self.power
        )
        return max(self.min_decay, min(self.decay, rising))


@dataclass(frozen=True)
class CheckpointConfig:
    keep_last: int | None = setting(None, at_least=1)
    """Keep only this many of the newest checkpoints; default: keep all."""
    keep_every: int | None = setting(None, at_least=1)
    """Always keep checkpoints whose step is a multiple of this."""
    asynchronous: bool = True
    """Continue training while a checkpoint is written; needs extra host memory of the checkpoint's size. If there is
    too little, training waits."""
    export: bool = True
    """fsdp, hsdp: gather the weights for pretrained_model/ at every checkpoint. false: only at the last one;
    `flexor export` creates it for any other checkpoint."""


SHARDED = ("fsdp", "hsdp")  # strategies that store a part of the model in each process


@dataclass(frozen=True)
class ParallelConfig:
    strategy: Literal["auto", "ddp", "fsdp", "hsdp"] = "auto"
    """How several processes split the model: not at all (ddp: each holds the whole model), over all processes (fsdp),
    or over the processes of a group (hsdp). auto: ddp if the model and its optimizer fit into half of the GPU's
    memory, else fsdp."""
    dp_replicate: int | None = setting(None, at_least=1)
    """hsdp: number of groups; each group holds one copy of the model."""
    dp_shard: int | None = setting(None, at_least=1)
    """hsdp: number of processes that share one copy of the model; default: all processes of one host."""
    cpu_offload: bool = False
    """fsdp, hsdp: keep weights and optimizer state in host memory; slow, for models that do not fit otherwise."""
    reshard_after_forward: bool = True
    """fsdp, hsdp: free a block's gathered weights between forward and backward; false: faster, but more memory."""
    find_unused_parameters: bool = False
    """ddp: at each step, find parameters that did not contribute to the loss."""
    backend: Literal["auto", "nccl", "gloo"] = "auto"
    """Communication backend: nccl, or gloo, which is slow but works everywhere."""
    timeout_s: float = setting(600, at_least=1)
    """Seconds without progress after which a run of several processes is stopped."""


@dataclass(frozen=True)
class WandBConfig:
    enable: bool = False
    """Log to Weights & Biases too (needs `pip install flexor[wandb]`)."""
    project: str = "flexor"
    """W&B project."""
    entity: str | None = None
    """W&B team or user."""
    notes: str | None = None
    """A note shown with the run."""
    run_id: str | None = None
    """Id of the W&B run to continue."""
    mode: Literal["online", "offline", "disabled"] | None = None
    """W&B mode: online, offline or disabled."""


@dataclass(frozen=True)
class TrackioConfig:
    project: str = "flexor"
    """trackio project."""
    space_id: str | None = None
    """Space on the Hub that shows the metrics, such as USER/trackio; default: only on this machine."""


@dataclass(frozen=True)
class TrainConfig:
    output_dir: str | None = setting(None, may_change=True)
    """Run folder; default: runs/<date>_<job name>. It must not contain another run."""
    job_name: str | None = setting(None, may_change=True)
    """Name of the run; default: the policy's type."""
    seed: int = setting(1000, at_least=0)
    """Seed of all random numbers."""
    steps: int = setting(100_000, at_least=1, may_change=True)
    """Optimizer steps."""
    epochs: float | None = setting(None, more_than=0, may_change=True)
    """Number of epochs, instead of steps."""
    batch_size: int = setting(8, at_least=1, may_change=True)
    """Samples per process and forward pass; with global_batch_size, the maximum."""
    gradient_accumulation_steps: int | None = setting(None, at_least=1, may_change=True)
    """Forward passes per optimizer step; default: 1, or as many as global_batch_size requires."""
    global_batch_size: int | None = setting(None, at_least=1)
    """Samples per optimizer step over all processes: a step is the same for any number of processes."""
    scale_lr: Literal["linear", "sqrt"] | None = None
    """Multiply the learning rates by global batch size / batch_size (linear), or by its square root (sqrt)."""
    lr_factor: float | None = setting(None, more_than=0)
    """Factor on all learning rates; default: 1, or the factor from scale_lr."""
    num_workers: int = setting(4, at_least=0, may_change=True)
    """Threads that read and decode ahead of training; 0: the training loop reads the data itself."""
    precision: Literal["auto", "no", "bf16", "fp16", "fp8"] = "auto"
    """Mixed precision: no (float32), bf16, fp16 with a gradient scaler, or fp8: bf16, with the wide linear layers of
    large policies in fp8 (NVIDIA since Ada and Hopper; not yet measured on a GPU). auto: bf16 if the GPU computes in it
    (NVIDIA since Ampere) and the policy trains as well in it, else no."""
    weights_dtype: Literal["float32", "bf16"] = "float32"
    """Data type of the weights, their gradients and the optimizer state; bf16 takes half of the memory."""
    deterministic: bool = False
    """Use only deterministic GPU kernels: repeated and resumed runs are bitwise equal; a little slower."""
    activation_checkpointing: bool = setting(False, may_change=True)
    """Recompute each block in the backward pass instead of storing its activations: less memory, more time."""
    step: Literal["auto", "graph", "eager"] = setting("auto", may_change=True)
    """How an NVIDIA GPU runs a step: eager launches every operation by itself; graph replays CUDA graphs, which take
    the host almost no time; auto uses graphs if the run allows it."""
    channels_last: bool | None = None
    """Store the weights of convolutions in channels-last memory format: faster on NVIDIA GPUs, above all in bf16.
    Default: only there."""
    compile: bool = False
    """Compile each block of the policy with torch.compile: faster steps after a slow first one."""
    plan: bool = setting(True, may_change=True)
    """On a GPU: log a plan of memory and time before the first step, and compare it with the run at the end."""
    auto: bool = setting(False, may_change=True)
    """On a GPU: let the plan choose batch_size (the global batch stays the same), activation_checkpointing and
    num_workers, unless they are given."""
    log_freq: int = setting(200, at_least=1, may_change=True)
    """Steps between two log lines of metrics."""
    trackers: list[Literal["tensorboard", "trackio"]] = setting(list, may_change=True)
    """Send metrics to these too: [tensorboard], [trackio], or both (each needs `pip install flexor[NAME]`). For Weights
    & Biases: wandb.enable."""
    system_every_s: float = setting(5.0, at_least=0, may_change=True)
    """Seconds between two samples of GPU, processors, memory, disk and network in system.jsonl; 0: none."""
    profile: str | None = setting(None, may_change=True)
    """STEP:COUNT: write a trace of these steps and a snapshot of the GPU's memory to RUN/profile, and print the
    costliest operations. 100:5 profiles the steps 100 to 104."""
    profile_all_ranks: bool = setting(False, may_change=True)
    """profile: every process writes a trace, not only rank 0."""
    save_checkpoint: bool = setting(True, may_change=True)
    """Save checkpoints."""
    save_freq: int = setting(20_000, may_change=True)
    """Steps between two checkpoints; the last step is always saved. 0 or less: save only the last step."""
    save_checkpoint_to_hub: bool = setting(False, may_change=True)
    """Push every checkpoint to the Hub (needs policy.repo_id) while training continues, so that the run can be resumed
    on another machine with `flexor resume hub:USER/NAME`."""
    eval_steps: int = setting(0, at_least=0, may_change=True)
    """Steps between two evaluations of the held-out loss (needs dataset.eval_split); 0: only at the end."""
    max_eval_samples: int = setting(0, at_least=0, may_change=True)
    """Maximum samples for the held-out loss; 0: all."""
    env_eval_freq: int = setting(20_000, at_least=0, may_change=True)
    """Steps between two evaluations in the environment (needs env.type); 0: never."""
    rename_map: dict[str, str] = field(default_factory=dict)
    """The dataset's names of features and the policy's, if they differ:
    {observation.images.top: observation.images.camera1, actions: action, ...}. Observations are also renamed for the
    trained policy; other features only in the dataset."""
    dataset: DatasetConfig = field(default_factory=DatasetConfig)
    policy: PolicyConfig = field(default_factory=PolicyConfig)
    sample_weighting: SampleWeightingConfig = field(default_factory=SampleWeightingConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    ema: EMAConfig = field(default_factory=EMAConfig)
    checkpoint: CheckpointConfig = setting(CheckpointConfig, may_change=True)
    parallel: ParallelConfig = setting(ParallelConfig, may_change=True)
    env: EnvConfig = setting(EnvConfig, may_change=True)
    eval: EvalConfig = setting(EvalConfig, may_change=True)
    wandb: WandBConfig = setting(WandBConfig, may_change=True)
    trackio: TrackioConfig = setting(TrackioConfig, may_change=True)
    rl: RLConfig = field(default_factory=RLConfig)
    policy_path: str | None = None
    """Checkpoint folder or Hub repository the policy starts from (as a flag: --policy.path)."""

    def to_dict(self) -> dict[str, Any]:
        plain = to_plain(self)
        plain["policy"] = {"type": self.policy.type, **plain["policy"]}
        return plain

    def to_saved(self) -> dict[str, Any]:
        """The settings as they are written to files and sent to trackers: without the passwords of URLs."""
        saved: dict[str, Any] = redacted_values(self.to_dict())
        return saved


def group_type(group: str) -> type:
    """The dataclass of a group of settings, such as "dataset.cache"."""
    cls: type = TrainConfig
    for name in group.split("."):
        cls = field_types(cls)[name]
    return cls


def validate(config: TrainConfig) -> None:
    """Raise an error for combinations that can't work, before the run starts."""
    dataset = config.dataset
    if config.policy.learns_online:
        _validate_online(config)
    elif dataset.repo_id is None and dataset.root is None and dataset.mix is None:
        raise ConfigError(
            "No dataset: give --dataset.repo_id=USER/NAME, --dataset.root=FOLDER or --config=demo."
        )
    if config.eval_steps and not dataset.eval_split:
        raise ConfigError(
            f"eval_steps={config.eval_steps} needs held-out episodes: set --dataset.eval_split=0.1."
        )
    if config.profile is not None:
        _validate_profile(config)
    check_names(config.rename_map)
    config.lora.validate()
    validate_weights(config)
    _validate_hub(config)
    parse_image_size(dataset.cache.size)
    check_transform_names(dataset.image_transforms)
    if dataset.image_transforms.enable:
        read_transforms(dataset.image_transforms)
    _validate_episodes(dataset.episodes)
    check_values(config)
    check_entries(dataset)


def _validate_online(config: TrainConfig) -> None:
    config.rl.check_algorithm()
    config.rl.check_actors()
    if config.env.type is None and config.rl.serve.port is None:
        raise ConfigError(
            f"policy.type={config.policy.type} learns while it acts: say where with --env.type=place (or any gymnasium "
            "id), or let actors connect with --rl.serve.port=8000. A dataset is optional: it has demonstrations."
        )
    without_effect = {
        "ema.enable": config.ema.enable,
        "lora.r": config.lora.r,
        "compile": config.compile,
        "epochs": config.epochs,
        "gradient_accumulation_steps": config.gradient_accumulation_steps,
        "weights_dtype": config.weights_dtype != "float32" and config.weights_dtype,
        "precision": config.precision in ("bf16", "fp16", "fp8") and config.precision,
        "dataset.eval_split": config.dataset.eval_split,
    }
    for name, value in without_effect.items():
        if value:
            raise ConfigError(
                f"{name}={value} has no effect on a policy that learns while it acts: leave it out."
            )
    if config.rl.online_ratio > 1:
        raise ConfigError(f"rl.online_ratio={config.rl.online_ratio} is a share of a batch: use 0 to 1.")


def _validate_profile(config: TrainConfig) -> None:
    first = parse_profile(str(config.profile))[0]
    if config.epochs is None and first > config.steps:
        raise ConfigError(
            f"profile={config.profile} begins after the last step: choose a step up to steps={config.steps}."
        )


def validate_weights(config: TrainConfig) -> None:
    """Raise an error if this policy does not support LoRA or bf16 weights as set."""
    lower = config.weights_dtype == "bf16"
    if lower and config.precision in ("no", "fp16"):  # auto is checked again when the GPU is known
        raise ConfigError(
            f"weights_dtype=bf16 does not work with precision={config.precision}: bf16 weights are multiplied in "
            "bf16. Set --precision=bf16."
        )
    if config.policy.moves_weights and (lower or config.lora.r):
        setting = "weights_dtype=bf16" if lower else f"lora.r={config.lora.r}"
        raise ConfigError(
            f"{setting} is not supported by {config.policy.type}: this policy updates some of its weights itself, "
            "so all weights must be trained, in float32."
        )
    if config.lora.base:
        _validate_quantized(config)


def _validate_quantized(config: TrainConfig) -> None:
    unsupported = {
        f"parallel.strategy={config.parallel.strategy}": config.parallel.strategy in SHARDED,
        "ema.enable=true": config.ema.enable,
        "compile=true": config.compile,
    }
    for other, is_set in unsupported.items():
        if is_set:
            raise ConfigError(f"lora.base={config.lora.base} does not work with {other}: leave out one.")


def _validate_hub(config: TrainConfig) -> None:
    repo = config.policy.repo_id
    request = next(
        (
            name
            for name, on in (
                ("policy.push_to_hub=true", config.policy.push_to_hub),
                ("save_checkpoint_to_hub=true", config.save_checkpoint_to_hub),
                (f"policy.repo_id={repo}", pushes_policy(config)),
            )
            if on
        ),
        None,
    )
    if request and repo is None:
        raise ConfigError(f"{request} needs the name of a repository: give --policy.repo_id=USER/NAME.")
    if repo is not None and not is_repo_id(repo):
        raise ConfigError(
            f"policy.repo_id={repo} is not the name of a repository on the Hub: give USER/NAME."
        )
    if request and not config.save_checkpoint:
        raise ConfigError(
            f"{request} pushes what a checkpoint contains, but save_checkpoint=false. Leave out one of them."
        )


def pushes_policy(config: TrainConfig) -> bool:
    """Whether the policy is pushed at the end of the run. As in LeRobot, naming a repository asks for it."""
    policy = config.policy
    return policy.repo_id is not None if policy.push_to_hub is None else policy.push_to_hub


def _validate_episodes(episodes: list[int] | str | None) -> None:
    if episodes is None or isinstance(episodes, str):
        return
    if not episodes:
        raise ConfigError("dataset.episodes is an empty list: leave it out to use all episodes.")
    negative = [e for e in episodes if e < 0]
    twice = sorted(e for e, times in Counter(episodes).items() if times > 1)
    if negative or twice:
        raise ConfigError(
            f"dataset.episodes has negative indices {negative} and repeated indices {twice}. "
            "List each episode index once."
        )
