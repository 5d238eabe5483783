"""The settings of the data: which, where decoded frames stay, in which order samples come."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import setting


@dataclass
class CacheConfig:
    tier: Literal["auto", "stream", "ram", "disk", "gpu"] = setting("auto", may_change=True)
    """Where decoded frames stay: nowhere (stream), in memory, on disk, on the GPU; auto: what has room."""
    gb: float | None = setting(None, at_least=0, may_change=True)
    """Room for the tier in GB; unless given, a quarter of what is free there."""
    pool_gb: float | None = setting(None, at_least=0, may_change=True)
    """Memory on each node for frames on their way into batches, in GB; unless given, at most 2."""
    remote_gb: float | None = setting(None, at_least=0, may_change=True)
    """Disk for parts of videos that are read over a network, in GB; unless given, a quarter of what is free."""
    size: str | None = None
    """Keep and train on smaller pictures: HEIGHTxWIDTH, such as 224x224."""
    format: Literal["raw", "jpeg"] = "raw"
    """How frames are kept: raw, or jpeg, which is lossy, slower and takes a fifth of the room."""


@dataclass
class OrderConfig:
    kind: Literal["auto", "uniform", "streaming", "cached", "resident"] = "auto"
    """How samples are shuffled. cached: streaming in the first epoch, uniform in later ones. resident: in
    later ones over whole lanes, so that each GPU keeps to its own part of the data."""
    lanes: int | None = setting(None, at_least=1)
    """streaming: parts of the data that each batch takes equally many samples from."""
    pool: int | None = setting(None, at_least=1)
    """streaming: samples of a lane that are shuffled together."""
    unit: int | None = setting(None, at_least=1)
    """streaming: least number of samples that are decoded together."""


@dataclass
class DatasetConfig:
    repo_id: str | None = setting(None, may_change=True)
    """Dataset on the Hub, or its name under $HF_LEROBOT_HOME; `builtin/place` is the built-in task's."""
    root: str | None = setting(None, may_change=True)
    """Folder of the dataset, or an address such as s3://bucket/dataset."""
    revision: str | None = setting(None, may_change=True)
    """Branch, tag or commit on the Hub."""
    episodes: list[int] | None = None
    """Use only these episodes: a list, or @file with one (as `flexor data check` writes)."""
    exclude_episodes: list[int] | None = None
    """Leave these episodes out: a list, or @file with one."""
    on_bad_episode: Literal["raise", "skip"] = "raise"
    """An episode that can't be read (a file is missing, cut short or not what the metadata says): stop and name
    it, or leave it out. Counted."""
    frame_by: Literal["auto", "time", "index"] = "auto"
    """Which frame of a video is a row's: the one at its timestamp, or frame i for row i. auto: by index where a
    video has as many frames as its episode has rows."""
    eval_split: float = setting(0.0, at_least=0, less_than=1)
    """Share of episodes per task held out for the held-out loss."""
    use_imagenet_stats: bool = True
    """Normalise cameras with ImageNet's mean and standard deviation instead of the dataset's."""
    streaming: bool = setting(False, may_change=True)
    """Read a Hub dataset's videos over the network as they are needed instead of downloading them first."""
    decoder: Literal["auto", "cpu", "nvdec"] = setting("auto", may_change=True)
    """Who decodes videos: nvdec is the GPU's decoder; auto takes it where it can and the CPU has few cores."""
    on_bad_frame: Literal["skip", "nearest", "raise"] = "skip"
    """A frame that does not decode: leave its samples out, take the nearest good frame, or stop. Counted."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    order: OrderConfig = field(default_factory=OrderConfig)


def picture_size(text: str | None) -> tuple[int, int] | None:
    """HEIGHTxWIDTH as numbers."""
    if text is None:
        return None
    height, _, width = text.lower().partition("x")
    if not (height.isdigit() and width.isdigit() and int(height) > 0 and int(width) > 0):
        raise ConfigError(f"dataset.cache.size={text!r}: give HEIGHTxWIDTH in pixels, such as 224x224.")
    return int(height), int(width)
