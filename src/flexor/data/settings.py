"""The settings of the data: the dataset, the cache of decoded frames, and the order of samples."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any, Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import setting


@dataclass(frozen=True)
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
    features: Literal["auto", "off", "ram", "disk", "gpu"] = setting("auto", may_change=True)
    """Encode each image once, before the first step, if the policy's image encoder is frozen: where its features are
    kept. auto: in ram or on disk, if there is enough room and the run reads each image more than once. off: never."""


@dataclass(frozen=True)
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


@dataclass(frozen=True)
class DatasetEntry:
    """One of several datasets of a run."""

    repo_id: str | None = None
    """Dataset on the Hub, or its name under $HF_LEROBOT_HOME."""
    root: str | None = None
    """Folder of the dataset, or a URL."""
    revision: str | None = None
    """Branch, tag or commit on the Hub."""
    name: str | None = None
    """Its name in the log; default: repo_id, or the name of the folder."""
    weight: float | None = setting(None, more_than=0)
    """Its share of the samples, relative to the other datasets; default: by size."""
    episodes: list[int] | str | None = None
    """Use only these episodes."""
    exclude_episodes: list[int] | str | None = None
    """Leave out these episodes."""
    tasks: list[str] | str | None = None
    """Use only episodes with these tasks."""
    episode_weights: str | None = None
    """How often to use some of its episodes."""
    rename_map: dict[str, str] = field(default_factory=dict)
    """Names of its features -> names in this run, such as {observation.image: observation.images.top}."""
    weights_path: str | None = None
    """File with weights or progress of its samples, for sample_weighting."""


@dataclass(frozen=True)
class ImageTransformConfig:
    """One kind of image augmentation, as LeRobot writes it."""

    weight: float = 1.0
    """How often it is chosen, relative to the others; 0: never."""
    type: str = "Identity"
    """torchvision's or LeRobot's name of the transform."""
    kwargs: dict[str, Any] = field(default_factory=dict)
    """Its arguments, such as {brightness: [0.8, 1.2]}."""


def default_transforms() -> dict[str, ImageTransformConfig]:
    """LeRobot's."""
    ranges: dict[str, tuple[str, dict[str, Any]]] = {
        "brightness": ("ColorJitter", {"brightness": [0.8, 1.2]}),
        "contrast": ("ColorJitter", {"contrast": [0.8, 1.2]}),
        "saturation": ("ColorJitter", {"saturation": [0.5, 1.5]}),
        "hue": ("ColorJitter", {"hue": [-0.05, 0.05]}),
        "sharpness": ("SharpnessJitter", {"sharpness": [0.5, 1.5]}),
        "affine": ("RandomAffine", {"degrees": [-5.0, 5.0], "translate": [0.05, 0.05]}),
    }
    return {name: ImageTransformConfig(1.0, kind, kwargs) for name, (kind, kwargs) in ranges.items()}


@dataclass(frozen=True)
class ImageTransformsConfig:
    enable: bool = False
    """Augment the images of training samples: each gets some of the transforms in `tfs`, by chance."""
    max_num_transforms: int = setting(3, at_least=1)
    """Number of different transforms per image; if there are fewer, all of them."""
    random_order: bool = False
    """Apply them in a random order instead of the order of `tfs`."""
    tfs: dict[str, ImageTransformConfig] = field(default_factory=default_transforms)
    """The transforms by name, each with weight, type and kwargs. A whole dictionary replaces the default; a dotted key
    such as tfs.hue.weight=0 changes it."""


@dataclass(frozen=True)
class DatasetConfig:
    repo_id: str | None = setting(None, may_change=True)
    """Dataset on the Hub, or its name under $HF_LEROBOT_HOME; `builtin/place` and
    `builtin/place_words` are datasets of the built-in task. Several: a,b."""
    root: str | None = setting(None, may_change=True)
    """Folder of the dataset, or a URL such as s3://bucket/dataset. Several: a,b."""
    revision: str | None = setting(None, may_change=True)
    """Branch, tag or commit on the Hub."""
    episodes: list[int] | str | None = None
    """Use only these episodes: indices and ranges such as 0,5:9,20: (a range's end is not included), or @file with a
    list (as `flexor data check` writes)."""
    exclude_episodes: list[int] | str | None = None
    """Leave out these episodes; written like `episodes`."""
    tasks: list[str] | str | None = None
    """Use only episodes with these tasks: a part of the task's text, or a pattern with * and ? for the whole text.
    Upper and lower case are the same. Several: [pick, "place * in the box"]."""
    mix: list[DatasetEntry] | None = setting(None, may_change=True)
    """Several datasets, each with settings of its own (repo_id, root, revision, name, weight, episodes,
    exclude_episodes, tasks, episode_weights, rename_map, weights_path), instead of repo_id and root."""
    weights: list[float] | None = setting(None, more_than=0)
    """Several datasets: the share of samples of each, such as [3, 1]; default: by size."""
    episode_weights: str | None = None
    """How often some episodes are used, such as 0:50=3,60=2: three times as often as others, and twice."""
    rename_map: dict[str, str] = field(default_factory=dict)
    """Names of the dataset's features -> names in this run, such as {observation.image: observation.images.top}.
    Several datasets: of each of them that has the name."""
    stats: Literal["merged", "per_dataset"] = "merged"
    """Several datasets: normalise states and actions by the statistics of all of them, or each by its own."""
    save_stats_of: str | None = None
    """stats=per_dataset: the dataset whose statistics are saved with the policy, for robots; default: the first."""
    on_missing_camera: Literal["raise", "mask", "drop"] = "raise"
    """Several datasets: what to do with a camera that some of them lack. raise: stop. mask: their samples get a black
    image, and a policy that supports it ignores it. drop: use only cameras that all of them have."""
    allow_different_fps: bool = False
    """Several datasets: train on them although their frame rates differ. Time is counted in frames."""
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
    image_transforms: ImageTransformsConfig = field(default_factory=ImageTransformsConfig)
    depth_output_unit: Literal["mm", "m"] = "mm"
    """Unit of depth maps: mm or m. Their statistics are converted too."""
    streaming: bool = setting(False, may_change=True)
    """Read a Hub dataset's videos over the network when they are needed, instead of downloading them first."""
    decoder: Literal["auto", "cpu", "nvdec"] = setting("auto", may_change=True)
    """Video decoder: cpu, or nvdec (the GPU's decoder). auto: nvdec if it is supported and there are few CPU cores."""
    decode_in: Literal["auto", "threads", "processes"] = setting("auto", may_change=True)
    """Where --num_workers decode videos on the CPU: in threads of the training process, or in processes of their own,
    which use many cores better. auto: processes if frames are streamed, and there are 3 or more workers or small
    images."""
    on_bad_frame: Literal["skip", "nearest", "raise"] = "skip"
    """What to do with a frame that can't be decoded. skip: leave out its samples. nearest: use the nearest good frame.
    raise: stop. Bad frames are counted."""
    cache: CacheConfig = field(default_factory=CacheConfig)
    order: OrderConfig = field(default_factory=OrderConfig)


@dataclass(frozen=True)
class SampleWeightingConfig:
    type: Literal["rabc", "file", "column", "uniform"] | None = None
    """Weight of each sample in the loss. rabc: from the progress of the task, as in RA-BC. file: from a parquet file.
    column: from a column of the dataset. uniform: the same for all. Default: uniform, or rabc if any other of these
    settings is given."""
    progress_path: str | None = None
    """rabc, file: parquet file with a row per frame, by `index`; default: sarm_progress.parquet in the dataset."""
    head_mode: str = "sparse"
    """rabc: use the column progress_<head_mode> of the file: sparse or dense."""
    column: str = "weight"
    """file, column: name of the column with the weights."""
    kappa: float = 0.01
    """rabc: progress within a chunk above which a sample has the full weight."""
    epsilon: float = setting(1e-6, more_than=0)
    """Added to sums and deviations that are divided by."""
    extra_params: dict[str, float] = field(default_factory=dict)
    """rabc: fallback_weight (default 1) for frames without progress, and chunk_size (default: the policy's)."""

    @property
    def resolved_type(self) -> str:
        """The type, also if it is not given."""
        if self.type is not None:
            return self.type
        return "uniform" if self == SampleWeightingConfig() else "rabc"


def parse_image_size(text: str | None) -> tuple[int, int] | None:
    """HEIGHTxWIDTH as (height, width)."""
    if text is None:
        return None
    size = re.fullmatch("0*([1-9][0-9]{0,8})x0*([1-9][0-9]{0,8})", text.lower())
    if size is None:
        raise ConfigError(
            f"dataset.cache.size={text!r} is not valid: give HEIGHTxWIDTH in pixels, such as 224x224."
        )
    return int(size[1]), int(size[2])
