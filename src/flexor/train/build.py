"""From settings to the parts of a run: dataset, policy, processing, optimizer."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flexor.config.accelerate_flags import started_by_accelerate, uses_deepspeed
from flexor.config.for_gpu import COMPUTE_IN_BF16
from flexor.config.schedules import build_scheduler
from flexor.config.schema import SHARDED, TrainConfig
from flexor.core.devices import settle_rounding
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.machine import gigabytes, total_memory
from flexor.core.rng import seed_everything
from flexor.core.typed import with_settings
from flexor.data.dataset import Dataset
from flexor.data.loader.loader import Loader
from flexor.data.loader.open import open_loader
from flexor.data.mixture.mixed import MixedDataset
from flexor.data.settings import DatasetConfig
from flexor.policies import make_policy as new_policy
from flexor.policies.adapters import add_adapters
from flexor.policies.augment.step import AugmentImages, augmentation
from flexor.policies.base import Policy
from flexor.policies.fit import sample_of, statistics
from flexor.policies.fp8 import compute_in_fp8
from flexor.policies.frozen_in_bf16 import store_frozen_in_bf16
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.nn.recompute import recompute
from flexor.policies.pretrained import find_folder, saved_rename_map, verify, without_initial_weights
from flexor.policies.processing.normalize import Normalize, NormalizeByDataset
from flexor.policies.processing.pipeline import Pipeline, Stats, read_steps
from flexor.policies.processing.rename_and_move import RenameObservations
from flexor.train.checkpoint.state import TrainState
from flexor.train.compile import compile_blocks
from flexor.train.engine.base import Engine
from flexor.train.image_features import choose_features, fill_features
from flexor.train.optim.bf16_copies import DEVICES, Bf16Copies
from flexor.train.optim.ema import EMA
from flexor.train.optim.optimizers import build_optimizer
from flexor.train.ranks.processes import Processes
from flexor.train.ranks.split import Split


def mention_rename_map(config: TrainConfig) -> None:
    """Log the rename_map that the initial policy was trained with, if this run has none."""
    assert config.policy_path is not None
    saved = saved_rename_map(find_folder(config.policy_path, ("*.json",)))
    if saved and not config.rename_map:
        flag = f"--rename_map='{json.dumps(saved)}'"
        log.info("the rename_map of %s is not used here; to use it, give %s", config.policy_path, flag)


def mention_other_steps(config: TrainConfig) -> None:
    """Log the steps of the initial policy's processing that are not in this run: only its settings are taken over."""
    assert config.policy_path is not None
    folder = find_folder(config.policy_path, ("*.json",))
    for pipeline in config.policy.pipelines({}, "cpu"):
        file = folder / f"{pipeline.name}.json"
        saved = {str(step.get("registry_name")) for step in read_steps(file)} if file.is_file() else set()
        names = saved - {step.name for step in pipeline.steps} - {RenameObservations.name}
        if names:
            log.warning(
                "%s is not part of this run, nor of the policies that it saves: %s has it, but the settings of "
                "policy.type=%s do not say so. If your robot needs it, add it to the saved %s",
                *(", ".join(sorted(names)), file, config.policy.type, file.name),
            )


def build_engine(config: TrainConfig, processes: Processes, device: torch.device) -> Engine:
    """The engine: one process, or several that each hold the whole model or a shard of it."""
    settings = (device, config.precision, config.deterministic, processes, config.parallel)
    if started_by_accelerate() and (engine := _accelerate_engine(config)) is not None:
        return engine(*settings)
    strategy: str = config.parallel.strategy
    if strategy == "auto" and processes.world_size > 1:
        strategy = pick_strategy(config, processes, device)
    if strategy in SHARDED:
        from flexor.train.engine.fsdp import ShardedEngine

        return ShardedEngine(*settings, strategy=strategy)
    if config.parallel.cpu_offload:
        raise ConfigError("parallel.cpu_offload=true requires --parallel.strategy=fsdp or hsdp.")
    return Engine(*settings)


def captures_steps(config: TrainConfig) -> bool:
    """The `captures` of the engine that the run will have: plans have none."""
    by_accelerate = started_by_accelerate() and config.parallel.strategy in SHARDED
    return not (by_accelerate or uses_deepspeed() or config.parallel.cpu_offload)


def keep_copies(config: TrainConfig, engine: Engine, split: Split, optimizer: torch.optim.Optimizer) -> None:
    """From here on, the steps of a run that can do so compute with bfloat16 copies of its weights."""
    if (
        engine.device.type in DEVICES
        and engine.captures
        and not engine.sharded
        and may_keep_copies(config, split)
    ):
        engine.copies = Bf16Copies(engine.policy, optimizer)


def may_keep_copies(config: TrainConfig, split: Split) -> bool:
    """Whether the settings allow it. The optimizer and the precision are settled."""
    plain = not (config.compile or config.activation_checkpointing or config.lora.r)
    lower = config.precision in COMPUTE_IN_BF16 and config.weights_dtype != "bf16"
    adam = config.optimizer.type in ("adam", "adamw")
    unsharded = config.parallel.strategy not in SHARDED
    return (
        split.accumulation == 1
        and plain
        and lower
        and adam
        and unsharded
        and config.policy.computes_with_bf16_copies
    )


def may_store_frozen_in_bf16(config: TrainConfig) -> bool:
    """Whether the settings allow it. The precision is settled."""
    lower = config.precision in COMPUTE_IN_BF16 and config.weights_dtype != "bf16"
    whole_model = config.parallel.strategy not in SHARDED and not uses_deepspeed()
    return lower and whole_model and not config.ema.enable and config.policy.stores_frozen_in_bf16


def _accelerate_engine(config: TrainConfig) -> type[Engine] | None:
    """The engine that runs on Accelerate, if the settings and the Accelerate config ask for one."""
    parallel = config.parallel
    sharded = parallel.strategy in SHARDED
    if parallel.cpu_offload and (uses_deepspeed() or not sharded):
        raise ConfigError("parallel.cpu_offload=true requires FSDP: select it in the Accelerate config.")
    if (sharded or uses_deepspeed()) and config.precision == "fp8":
        raise ConfigError(
            "precision=fp8 does not work with FSDP and DeepSpeed: choose neither in the Accelerate config."
        )
    if uses_deepspeed():
        from flexor.train.engine.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine
    if sharded:
        from flexor.train.engine.accelerate import AccelerateShardedEngine

        return AccelerateShardedEngine
    return None


def pick_strategy(config: TrainConfig, processes: Processes, device: torch.device) -> str:
    """ddp if weights, gradients and Adam's state fit in half of the smallest device; the rest is for activations."""
    with parameters_without_memory():
        policy = make_policy(config)
    if config.lora.base or config.precision == "fp8":  # whole on each GPU
        return "ddp"
    if device.type in DEVICES and may_store_frozen_in_bf16(config):
        store_frozen_in_bf16(policy, keep_float32=False, host="meta")
    parameters = list(policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    average = sum(4 * p.numel() for p in trained) if config.ema.enable else 0
    need = sum(p.nbytes for p in parameters) + 3 * sum(p.nbytes for p in trained) + average
    memory = total_memory() // processes.local_world_size
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory
    limit = min(processes.gather(memory)) // 2
    local = min(processes.gather(processes.local_world_size))
    several_hosts = processes.world_size > local
    strategy = "ddp" if need <= limit else "hsdp" if several_hosts and need / local <= limit else "fsdp"
    log.info(
        "parallel.strategy=%s: the model and its optimizer need %s; half of the smallest device's memory is %s",
        *(strategy, gigabytes(need), gigabytes(limit)),
    )
    return strategy


def build_loader(state: TrainState, training: Dataset, held_out: Dataset | None) -> Loader:
    """The loader of the run's batches. If it reads features of images, all of them are encoded here."""
    features = choose_features(state, training)
    loader = _choose_loader(state, training, held_out, reads_frames=features is None)
    if features is not None and not fill_features(features, state, loader):
        loader = _choose_loader(state, training, held_out, reads_frames=True)
    return loader


def _choose_loader(
    state: TrainState, training: Dataset, held_out: Dataset | None, reads_frames: bool
) -> Loader:
    """Rank 0 chooses the settings that were left open; all ranks use its choice."""
    settings, opened = state.config.dataset, []

    def choose() -> dict[str, Any]:
        loader = _open_loader(state, settings, training, held_out, reads_frames)
        opened.append(loader)
        left_open = settings.cache.tier == "auto" and loader.tier != "none"
        return {
            "order": loader.order_config,
            "cache.tier": loader.tier if left_open else settings.cache.tier,
        }

    choice = state.engine.processes.share(choose)
    if opened:
        return opened[0]
    return _open_loader(state, with_settings(settings, choice), training, held_out, reads_frames)


def _open_loader(
    state: TrainState,
    settings: DatasetConfig,
    training: Dataset,
    held_out: Dataset | None,
    reads_frames: bool,
) -> Loader:
    config, engine, split = state.config, state.engine, state.split
    cameras, deltas = sample_of(config.policy, config.rename_map)
    return open_loader(
        training,
        settings,
        deltas,
        cameras=cameras,
        batch_size=split.batch_size,
        accumulation=split.accumulation,
        seed=config.seed,
        num_workers=config.num_workers,
        rank=engine.rank,
        world_size=engine.world_size,
        device=engine.device,
        drop_last_frames=config.policy.drop_last_frames,
        also=[held_out] if held_out is not None else [],
        host_steps=state.host_steps,
        reads_frames=reads_frames,
    )


def build_policy(config: TrainConfig, engine: Engine, resuming: bool = False) -> Policy:
    """The policy with its initial weights, which depend on the seed. When resuming, a checkpoint loads them later."""

    def make() -> Policy:
        seed_everything("weights", config.seed)
        with nullcontext() if weights is None else without_initial_weights(config.policy):
            return make_policy(config)

    weights: Path | str | None = None
    if resuming:
        weights = "later"
    elif config.policy_path is not None:
        with engine.processes.main_first():  # one process per host downloads
            weights = find_folder(config.policy_path)
            if engine.processes.local_rank == 0:
                verify(weights)
    elif config.lora.r:
        warning = "lora.r=%d without --policy.path: the adapters are added to a policy that was never trained"
        log.warning(warning, config.lora.r)
    if engine.device.type in DEVICES and engine.strategy in ("one process", "ddp"):
        engine.frozen_in_bf16 = may_store_frozen_in_bf16(config)
    engine.base_bits = config.lora.base_bits
    return engine.build(make, weights)


def make_policy(config: TrainConfig) -> Policy:
    """The policy as the run trains it. Its weights are not the initial ones yet."""
    policy = new_policy(config.policy)
    if config.activation_checkpointing:
        _recompute_blocks(policy)
    if config.weights_dtype == "bf16":
        _lower_weights(policy)
    if config.channels_last:
        _channels_last(policy)
    if config.lora.r:
        add_adapters(policy, config.lora, config.seed, config.policy.lora_targets())
    if config.precision == "fp8":
        compute_in_fp8(policy)
    return policy


def _channels_last(policy: Policy) -> None:
    """The memory layout that NVIDIA's convolutions compute in. In another one they transpose every weight."""

    def convert(tensor: Tensor) -> Tensor:
        return tensor.to(memory_format=torch.channels_last) if tensor.dim() == 4 else tensor

    policy._apply(convert)
    for module in policy.modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d):
            module.weight.data = module.weight.data.mT.contiguous().mT


def _lower_weights(policy: Policy) -> None:
    """Store matrices and convolutions in bfloat16. Vectors (as in norm layers) and buffers keep their type."""
    for parameter in policy.parameters():
        if parameter.ndim > 1 and parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()


def _recompute_blocks(policy: Policy) -> None:
    """Each block stores only its input, and is recomputed in the backward pass."""
    blocks = policy.shard_units()
    if not blocks:
        raise ConfigError(
            f"activation_checkpointing=true: policy.type={policy.config.type} has no blocks to recompute "
            "(its shard_units() is empty): leave it out."
        )
    for block in blocks:
        recompute(block)


def build_state(
    config: TrainConfig, dataset: Dataset, engine: Engine, split: Split, resuming: bool = False
) -> TrainState:
    """The complete training state at step 0."""
    before, after = build_processing(config, dataset, engine.device)
    policy = build_policy(config, engine, resuming)
    if config.optimizer.type == "adamw_8bit" and engine.strategy not in ("one process", "ddp"):
        raise ConfigError(
            f"optimizer.type=adamw_8bit does not support a sharded optimizer state ({engine.strategy}): use "
            "--optimizer.type=adamw, or ddp."
        )
    optimizer = build_optimizer(config.optimizer, policy, config.lr_factor or 1.0)
    if engine.precision in COMPUTE_IN_BF16 or any(p.dtype == torch.bfloat16 for p in policy.parameters()):
        settle_rounding(engine.device)
    optimizer = engine.prepare(policy, optimizer)
    keep_copies(config, engine, split, optimizer)
    if config.compile:
        compile_blocks(policy, engine.device)
    return TrainState(
        config=config,
        fingerprint=dataset.fingerprint(),
        engine=engine,
        policy=policy,
        preprocessor=before,
        postprocessor=after,
        optimizer=optimizer,
        scheduler=build_scheduler(config.scheduler, optimizer, config.steps),
        ema=EMA(policy, config.ema.decay_at) if config.ema.enable else None,
        split=split,
        augmentation=build_augmentation(config, engine.device, dataset),
    )


def build_augmentation(
    config: TrainConfig, device: torch.device, dataset: Dataset | None = None
) -> AugmentImages | None:
    """The augmentation of the policy's images; not of depth maps, which the dataset declares."""
    features = {} if dataset is None else dataset.features
    depth = [config.rename_map.get(name, name) for name, f in features.items() if f.depth is not None]
    step = augmentation(config.dataset.image_transforms, config.policy.images, skip=depth)
    if step is not None:
        step.to(str(device))
    return step


def build_processing(
    config: TrainConfig, dataset: Dataset, device: torch.device
) -> tuple[Pipeline, Pipeline]:
    """The processing before and after the policy, with the statistics of the dataset."""
    policy = config.policy
    stats = statistics(dataset, policy, config.dataset.use_imagenet_stats, config.rename_map)
    if config.dataset.stats == "per_dataset" and isinstance(dataset, MixedDataset):
        before, after = _pipelines_by_dataset(config, dataset, stats, str(device))
    else:
        before, after = policy.pipelines(stats, str(device), config.rename_map)
    before.prepare()
    after.prepare()
    return before, after


def _pipelines_by_dataset(
    config: TrainConfig, dataset: MixedDataset, merged: Stats, device: str
) -> tuple[Pipeline, Pipeline]:
    """Each dataset is normalised by its own statistics, images by those of all. Those of one dataset are saved."""
    policy, imagenet, renames = config.policy, config.dataset.use_imagenet_stats, config.rename_map
    saved = config.dataset.save_stats_of or dataset.names[0]
    log.info("each dataset is normalised by its own statistics; those of %s are saved with the policy", saved)
    pipelines = []
    for number in range(len(dataset.members)):
        stats = statistics(dataset.only(number), policy, imagenet, renames)
        images = {name: merged[name] for name in policy.images}
        pipelines.append(policy.pipelines({**stats, **images}, device, renames))
    before, after = pipelines[dataset.names.index(saved)]
    for number, step in enumerate([*before.steps]):
        if isinstance(step, Normalize):
            by_dataset = [pipeline.steps[number] for pipeline, _ in pipelines]
            normalizers = [other for other in by_dataset if isinstance(other, Normalize)]
            before.steps[number] = NormalizeByDataset(step, normalizers)
    return before, after
