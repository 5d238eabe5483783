"""The settings of the data: the dataset, the cache of decoded frames, and the order of samples."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import setting


@dataclass
class CacheConfig:
    tier: Literal["auto", "stream", "ram", "disk", "gpu"] = setting("auto", may_change=True)
    """Where decoded frames are cached: stream (no cache), ram, disk or gpu. auto: the first of ram, disk and stream
    that has enough room."""
    gb: float | None = setting(None, at_least=0, may_change=True)
    """Size budget of the cache in GB; default: a quarter of the free memory (ram) or disk space (disk)."""
    pool_gb: float | None = setting(None, at_least=0, may_change=True)
    """Host memory per node for decoded frames that wait for their batch, in GB; default: at most 2."""
    remote_gb: float | None = setting(None, at_least=0, may_change=True)
    """Disk cache for video data that is read over a network, in GB; default: a quarter of the free disk space."""
    size: str | None = None
    """Scale images to HEIGHTxWIDTH, such as 224x224, for the cache and for training."""
    format: Literal["raw", "jpeg"] = "raw"
    """How frames are cached: raw, or jpeg, which is lossy and slower, and takes about a fifth of the space."""


@dataclass
class OrderConfig:
    kind: Literal["auto", "uniform", "streaming", "cached", "resident"] = "auto"
    """How samples are shuffled. uniform: over the whole dataset. streaming: within a pool of each lane. cached:
    streaming in the first epoch, uniform in later epochs. resident: streaming in the first epoch, over whole lanes in
    later epochs, so that each GPU keeps its own part of the data."""
    lanes: int | None = setting(None, at_least=1)
    """streaming: number of parts (lanes) of the dataset; each batch takes the same number of samples from each."""
    pool: int | None = setting(None, at_least=1)
    """streaming: number of samples of a lane that are shuffled together."""
    unit: int | None = setting(None, at_least=1)
    """streaming: minimum number of samples that are decoded together."""


@dataclass
class DatasetConfig:
    repo_id: str | None = setting(None, may_change=True)
    """Dataset on the Hub, or its name under $HF_LEROBOT_HOME; `builtin/place` and
    `builtin/place_words` are datasets of the built-in task."""
    root: str | None = setting(None, may_change=True)
    """Folder of the dataset, or a URL such as s3://bucket/dataset."""
    revision: str | None = setting(None, may_change=True)
    """Branch, tag or commit on the Hub."""
    episodes: list[int] | None = None
    """Use only these episodes: a list, or @file with one (as `flexor data check` writes)."""
    exclude_episodes: list[int] | None = None
    """Leave out these episodes: a list, or @file with one."""
    on_bad_episode: Literal["raise", "skip"] = "raise"
    """What to do with an episode that can't be read (a file is missing, truncated or does not match the metadata).
    raise: stop and name it. skip: leave it out and log how many were skipped."""
    frame_by: Literal["auto", "time", "index"] = "auto"
    """How rows are matched to video frames. time: the frame at the row's timestamp. index: frame i for row i. auto:
    by index if the video has exactly one frame per row of its episode, else by time."""
    eval_split: float = setting(0.0, at_least=0, less_than=1)
    """Fraction of the episodes of each task that is held out for the held-out loss."""
    use_imagenet_stats: bool = True
    """Normalise images with ImageNet's mean and standard deviation instead of the dataset's."""
    depth_output_unit: Literal["mm", "m"] = "mm"
    """Unit of depth maps: mm or m. Their statistics are converted too."""
    streaming: bool = setting(False, may_change=True)
    """Read a Hub dataset's videos over the network when they are needed, instead of downloading them first."""
    decoder: Literal["auto", "cpu", "nvdec"] = setting("auto", may_change=True)
    """Video decoder: cpu, or nvdec (the GPU's decoder). auto: nvdec if it is supported and there are few CPU cores."""
    on_bad_frame: Literal["skip", "nearest", "raise"] = "skip"
    """What to do with a frame that can't be decoded. skip: leave out its samples. nearest: use the nearest good frame.
    raise: stop. Bad frames are counted."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    order: OrderConfig = field(default_factory=OrderConfig)


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    """HEIGHTxWIDTH as (height, width)."""
    if text is None:
        return None
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) > 0 and int(width) > 0):
        raise ConfigError(
            f"dataset.cache.size={text!r} is not valid: give HEIGHTxWIDTH in pixels, such as 224x224."
        )
    return int(height), int(width)
