"""Features of a run's images: whether it encodes each image once, what they take, and how long the first pass is."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from flexor.config.schema import TrainConfig
from flexor.core.typed import with_settings
from flexor.data.settings import CacheConfig
from flexor.plan.data.host import GATHER_S, GB, REACHED, VGA, Data, Speed, expected_speed
from flexor.plan.site.hardware import GPU
from flexor.plan.speed.speeds import Speeds, assumed, limit, load
from flexor.plan.trace.encoding import NOTHING, Encoding, trace_encoding
from flexor.train.encode_images import CHUNK
from flexor.train.image_features import not_possible, too_rarely


@dataclass(frozen=True)
class PlannedFeatures:
    """What steps read instead of images."""

    tier: str = "off"
    """ram, disk or gpu; off: steps encode images."""
    why_off: str | None = None
    """None also if the policy has no encoder."""
    image_bytes: int = 0
    """Of the features of one image of every camera."""
    frames: int = 0
    """Of each camera."""
    first_pass_s: float = 0.0
    """To decode and encode all images, before the first step."""

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.frames * self.image_bytes

    def stored_in(self, tier: str) -> int:
        """Bytes that they take there."""
        return self.nbytes if self.tier == tier else 0

    def speed(self, data: Data) -> Speed:
        """How fast a machine hands them on."""
        steps = max((camera.steps for camera in data.cameras), default=1)
        gather = GATHER_S * steps * self.image_bytes / (VGA * 3 // 2)
        return replace(expected_speed(data), decode_s=0.0, gather_s=gather)


@dataclass(frozen=True)
class Around:
    """The machine of a node, as far as features depend on it."""

    memory: int
    disk: int
    cores: int
    gpus: int


NONE = PlannedFeatures()


def plan_features(
    config: TrainConfig,
    data: Data,
    gpu: GPU,
    around: Around,
    samples: int,
    *,
    speeds: Speeds | None = None,
    speed: Speed | None = None,
) -> PlannedFeatures:
    """Features of a run of so many samples. `speed`: the measured loading speed of the data, if there is one."""
    cache = config.dataset.cache
    if cache.features == "off" or not data.cameras:
        return NONE
    encoding = trace_encoding(config, gpu)
    if encoding.why_not is not None and cache.features != "auto":
        raise not_possible(cache.features, encoding.why_not)
    if encoding.why_not is not None:
        return NONE if encoding.why_not == NOTHING else PlannedFeatures(why_off=encoding.why_not)
    image_bytes = sum(format.nbytes for format in encoding.formats.values())
    reads = samples * max(camera.steps for camera in data.cameras)
    planned = PlannedFeatures(image_bytes=image_bytes, frames=min(data.frames, reads))
    tier, reason = _tier(cache, planned, around, reads, data.frames)
    if reason is not None:
        return PlannedFeatures(why_off=reason)
    seconds = _first_pass(config, encoding, planned, data, gpu, around, speeds, speed)
    return replace(planned, tier=tier, first_pass_s=seconds)


def with_features(config: TrainConfig, features: PlannedFeatures) -> TrainConfig:
    """The settings as they are settled."""
    return with_settings(config, {"dataset.cache.features": features.tier})


def _tier(
    cache: CacheConfig, planned: PlannedFeatures, around: Around, reads: int, frames: int
) -> tuple[str, str | None]:
    """Where they are, or why not: as the trainer chooses."""
    if cache.features != "auto":
        return cache.features, None
    if cache.tier == "stream":
        return "off", "dataset.cache.tier=stream"
    if reason := too_rarely(reads, frames):
        return "off", reason
    budget = None if cache.gb is None else int(cache.gb * GB)
    rooms = {"ram": around.memory // 4, "disk": around.disk // 4}
    tiers = (cache.tier,) if cache.tier in rooms else tuple(rooms)
    for tier in tiers:
        if planned.nbytes <= (rooms[tier] if budget is None else budget):
            return tier, None
    return "off", f"their features take {planned.nbytes / GB:.1f} GB, more than the budget"


def _first_pass(
    config: TrainConfig,
    encoding: Encoding,
    planned: PlannedFeatures,
    data: Data,
    gpu: GPU,
    around: Around,
    speeds: Speeds | None,
    speed: Speed | None,
) -> float:
    """Seconds to decode and encode all images: the slower of the two. Each node encodes all of them."""
    speeds = speeds or load(gpu) or assumed()
    decode_s = (speed or expected_speed(data)).decode_s / REACHED / max(1, around.cores)
    kernels = [op for op in encoding.ops if op.kind != "view"]
    on_gpu = sum(speeds.times(op) * limit(op, gpu) for op in kernels)
    launching = sum(speeds.launch_s(op, config.policy.type) for op in encoding.ops)
    chunks = math.ceil(planned.frames / CHUNK / around.gpus)
    return max(planned.frames * decode_s, chunks * max(on_gpu, launching))
