"""Whether a run encodes its images once, where it keeps their features, and the pass that makes them."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from flexor.core.batch import IMAGE_FEATURES
from flexor.core.digest import hash_json
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.log import log
from flexor.core.machine import gigabytes
from flexor.data.dataset import Dataset
from flexor.data.frames.cache_folders import list_caches
from flexor.data.frames.features import FeatureFormat, FeatureStore
from flexor.data.loader.loader import Loader
from flexor.data.loader.open_features import (
    WHERE,
    FeaturePlan,
    NoRoom,
    feature_keys,
    open_feature_caches,
    pick_feature_tier,
)
from flexor.policies.base import Policy
from flexor.policies.fit import sample_of
from flexor.policies.image_encoder import digest_of, image_steps
from flexor.policies.processing.pipeline import Pipeline
from flexor.train.checkpoint.state import TrainState
from flexor.train.encode_images import CHUNK, FeaturePass, ImageEncoding

VERSION = 1
"""Of how features are computed and stored: a new one invalidates those on disk."""
LEAST_READS = 1.5
"""How often a run must read each image for a pass over all of them to be worth it."""


@dataclass(frozen=True)
class ImageFeatures:
    """What a run encodes its images with, and where it keeps their features."""

    encoding: ImageEncoding
    plan: FeaturePlan
    tier: str


def why_not_encoded(policy: Policy, processing: Pipeline, augmented: bool) -> str | None:
    """Why a run can't encode each image once; None if it can. Plans ask too."""
    encoder = policy.image_encoder()
    if encoder is None:
        return f"policy.type={policy.config.type} has no image encoder that can be frozen"
    if not encoder.is_frozen:
        return "the image encoder is trained"
    if augmented:
        return "dataset.image_transforms changes images at random"
    if image_steps(processing) is None:
        return "the policy's processing changes images together with other inputs"
    return None


def choose_features(state: TrainState, dataset: Dataset) -> ImageFeatures | None:
    """How the run reads features instead of images; None if it reads images. All ranks call it together."""
    cache, processes = state.config.dataset.cache, state.engine.processes
    if cache.features == "off" or not state.config.policy.images:
        return None
    reason = why_not_encoded(state.policy, state.preprocessor, state.augmentation is not None)
    if cache.features != "auto" and reason is not None:
        raise not_possible(cache.features, reason)
    if reason is None and cache.features == "auto":
        reason = processes.share(lambda: _why_not_worth_it(state, dataset))
    if reason is None:
        encoding, plan = _plan(state, dataset)
        reason, tier = processes.share(lambda: _pick(plan, state, dataset))
        if reason is None:
            return ImageFeatures(encoding, plan, tier)
    if state.policy.image_encoder() is not None:
        _log_off(reason)
    return None


def fill_features(features: ImageFeatures, state: TrainState, loader: Loader) -> bool:
    """Encode all images that the run will read, and let the loader read their features. False if they do not fit."""
    processes, started = state.engine.processes, time.perf_counter()
    store, reason = None, None
    with processes.main_first():
        try:
            store = _open(features, state, loader)
        except (DatasetError, OSError) as error:
            reason = str(error)
    reason = next(filter(None, processes.gather(reason)), None)
    if reason is None:
        assert store is not None
        ids = loader.frames_read(state.step, state.config.steps)
        filling = FeaturePass(features.encoding, store, per_rank=features.tier == "gpu")
        log.info(
            "encoding images once, for %s of features %s",
            gigabytes(features.plan.nbytes),
            WHERE[features.tier],
        )
        filling.run(ids)
        missing = max(processes.gather(filling.missing(ids)))
        if missing:
            reason = f"there was no room for those of {missing} images"
    if reason is not None:
        for cache in store.caches.values() if store is not None else ():
            cache.close()
        _log_off(reason)
        return False
    assert store is not None
    if state.engine.device.type == "cuda":
        torch.cuda.empty_cache()  # steps need memory of other sizes
    count, seconds = sum(map(len, ids.values())), time.perf_counter() - started
    log.info(
        "features of %d images are ready after %.1f s: steps neither decode nor encode them", count, seconds
    )
    loader.read_features(store, features.tier)
    return True


def _log_off(reason: str | None) -> None:
    log.info("images are encoded in every step (dataset.cache.features): %s", reason)


def _why_not_worth_it(state: TrainState, dataset: Dataset) -> str | None:
    """Why `auto` does without a pass over all images."""
    if state.config.dataset.cache.tier == "stream":
        return "dataset.cache.tier=stream"
    return None if any(info.features for info in list_caches()) else _too_rarely(state, dataset)


def _too_rarely(state: TrainState, dataset: Dataset) -> str | None:
    """Why a pass over all images does not pay."""
    return too_rarely(_reads(state), len(dataset))


def not_possible(tier: str, reason: str) -> ConfigError:
    """The error of a run that asks for features which it can't have."""
    return ConfigError(f"dataset.cache.features={tier}: {reason}. Leave it out.")


def too_rarely(reads: int, frames: int) -> str | None:
    """Why it does not pay to encode all images for so many reads of an image of a camera."""
    often = reads / max(1, min(reads, frames))
    return f"each would be read only {often:.1f} times" if often < LEAST_READS else None


def _reads(state: TrainState) -> int:
    """How often the run reads an image of a camera."""
    cameras, deltas = sample_of(state.config.policy, state.config.rename_map)
    samples = (state.config.steps - state.step) * state.split.global_batch
    return samples * max(len(deltas.get(camera, [0])) for camera in cameras)


def _plan(state: TrainState, dataset: Dataset) -> tuple[ImageEncoding, FeaturePlan]:
    """What features are, by encoding a black image of each camera."""
    engine, config = state.engine, state.config
    cameras, _ = sample_of(config.policy, config.rename_map)
    names = dict(zip(cameras, config.policy.images))
    processing, encoder = image_steps(state.preprocessor), state.policy.image_encoder()
    assert processing is not None and encoder is not None
    digest = digest_of(encoder, processing) if engine.sharded or engine.processes.is_main else ""
    digest = engine.processes.share(lambda: digest)
    encoding = ImageEncoding(state, processing, names)
    dataset.store.set_rgb(engine.device.type != "cuda")
    formats = {}
    for camera in cameras:
        features = encoding(dataset.store, camera, None)
        name = f"{IMAGE_FEATURES}{names[camera]}"
        formats[camera] = FeatureFormat(tuple(features.shape[1:]), features.dtype, name)
    gpu = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else engine.device.type
    # all that features depend on, rounding included
    content = [VERSION, CHUNK, digest, engine.precision, engine.sharded, gpu, torch.__version__]
    keys = feature_keys(dataset, cameras, hash_json(content))
    return encoding, FeaturePlan(formats, keys, min(len(dataset), _reads(state)))


def _pick(plan: FeaturePlan, state: TrainState, dataset: Dataset) -> tuple[str | None, str]:
    """Why there are no features, or their tier."""
    device, cache = state.engine.device, state.config.dataset.cache
    rare = _too_rarely(state, dataset) if cache.features == "auto" else None
    if rare is not None and not plan.complete_on_disk:
        return rare, ""
    try:
        tier = pick_feature_tier(plan, cache, device)
    except NoRoom as error:
        return str(error), ""
    return None, tier


def _open(features: ImageFeatures, state: TrainState, loader: Loader) -> FeatureStore:
    plan, frames = features.plan, loader.dataset.store
    caches = open_feature_caches(
        plan,
        state.config.dataset.cache,
        features.tier,
        frames.frames,
        state.engine.device,
        state.engine.processes.local_world_size,
    )
    return FeatureStore(frames, plan.formats, caches)
