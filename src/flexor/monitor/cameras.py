"""Images that a policy can't learn from: a camera that was unplugged, or normalisation that does not fit.

A run checks the images of one batch per log line, at every eighth pixel or so. There training waits for its figures
anyway.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import Batch
from flexor.core.findings import Finding, Fix
from flexor.data.check.episode_names import EpisodeNames
from flexor.data.check.images import BLANK, MIN_BLANK
from flexor.data.check.sampled_images import blank_by_statistics, faulty_images
from flexor.data.dataset import Dataset
from flexor.data.frames.clips import BlankClip
from flexor.policies.processing.normalize import Normalize
from flexor.runs.text import figure

PIXELS = 32  # rows and columns of an image that are checked, about
# normalised mean and deviation of images; with ImageNet's statistics no mean reaches 3
FAR, NARROW = 4.0, 0.05


class CameraHealth:
    """Faults in the images of a run so far."""

    def __init__(
        self,
        dataset: Dataset,
        cameras: Mapping[str, str],
        deltas: Mapping[str, Sequence[int]],
        normalize: Normalize | None,
        renamed: bool = False,
    ):
        """`cameras`: the policy's names by those of the dataset; `renamed`: batches have the policy's names."""
        self.renamed = renamed
        self.dataset, self.cameras, self.deltas, self.normalize = dataset, cameras, deltas, normalize
        self.blank = defaultdict[str, set[int]](
            set,
            {camera: {*episodes} for camera, episodes in blank_by_statistics(dataset, [*cameras]).items()},
        )
        self.frozen = defaultdict[str, set[int]](set)
        for camera, faults in faulty_images(dataset, [*cameras]).items():
            for episode, fault in faults.items():
                (self.blank if fault.name == "blank camera" else self.frozen)[camera].add(episode)
        self._blank_frames: dict[str, dict[int, set[int]]] = {camera: defaultdict(set) for camera in cameras}
        self._far: dict[str, tuple[float, float]] = {}

    def update(self, batches: Sequence[Batch]) -> None:
        """Check the images of a step."""
        for batch in batches:
            episodes, frames = (_numbers(batch[name]) for name in ("episode_index", "frame_index"))
            for camera, renamed in self.cameras.items():
                name = renamed if self.renamed else camera
                if name not in batch:  # cut into patches before the batch came to the device
                    continue
                images = self._now(batch[name], camera)
                ranges, means, stds = _figures(images)
                for episode, frame, span in zip(episodes, frames, ranges):
                    if span <= BLANK / 255 and not self._is_missing(camera, episode):
                        blank_frames = self._blank_frames[camera][episode]
                        blank_frames.add(frame)
                        if len(blank_frames) >= min(MIN_BLANK, self._length(episode)):
                            self.blank[camera].add(episode)
                self._compare(camera, means, stds)

    def findings(self) -> list[Finding]:
        return [
            *(self._blank(camera, sorted(episodes)) for camera, episodes in self.blank.items()),
            *(self._frozen(camera, sorted(episodes)) for camera, episodes in self.frozen.items()),
            *(self._wrong(camera, *normalised) for camera, normalised in self._far.items()),
        ]

    def _now(self, images: Tensor, camera: str) -> Tensor:
        """The images of the present [B, C, H, W]."""
        steps = list(self.deltas.get(camera, [0]))
        return images[:, steps.index(0) if 0 in steps else -1] if images.ndim == 5 else images

    def _is_missing(self, camera: str, episode: int) -> bool:
        """Black by choice: the episode's dataset does not have the camera."""
        return isinstance(self.dataset.store.clips.get((camera, episode)), BlankClip)

    def _length(self, episode: int) -> int:
        return int(self.dataset.episodes.length[self.dataset.episodes.index == episode][0])

    def _compare(self, camera: str, means: list[float], stds: list[float]) -> None:
        """Note images that normalisation does not bring near 0 and 1. One batch is enough: it has many pixels."""
        stats = self._statistics(camera)
        if stats is None or camera in self._far or len(stats[0]) != len(means) or min(stds) <= BLANK / 255:
            return
        mean, std = max(
            (((now - m) / s, spread / s) for now, spread, m, s in zip(means, stds, *stats)),
            key=lambda normalised: abs(normalised[0]),
        )
        if abs(mean) > FAR or std < NARROW:
            self._far[camera] = mean, std

    def _statistics(self, camera: str) -> tuple[list[float], list[float]] | None:
        """Means and standard deviations that the images are normalised with; None if there are none."""
        name, step = self.cameras[camera], self.normalize
        if step is None or name not in step.features or step.mode(name) != "MEAN_STD":
            return None
        if not {"mean", "std"} <= step.stats.get(name, {}).keys():
            return None
        mean, std = (step.stats[name][key].reshape(-1) for key in ("mean", "std"))
        return mean.tolist(), (std + step.eps).tolist()

    def _blank(self, camera: str, episodes: list[int]) -> Finding:
        names = EpisodeNames.of(self.dataset)
        return Finding(
            "blank camera",
            f"{camera} is blank (one colour) in {names.in_words(episodes)}",
            [Fix(f"leave them out: {names.exclude(episodes)}; `flexor data show DIR` shows them")],
        )

    def _frozen(self, camera: str, episodes: list[int]) -> Finding:
        names = EpisodeNames.of(self.dataset)
        return Finding(
            "frozen camera",
            f"{camera} shows the same image in {names.in_words(episodes)}, while the robot moves",
            [Fix(f"leave them out: {names.exclude(episodes)}; `flexor data check DIR` looks at all images")],
        )

    def _wrong(self, camera: str, mean: float, std: float) -> Finding:
        fix = (
            "the statistics are those of other images, or of values up to 255: compute them with "
            "`flexor data stats DIR --write`, or use --dataset.use_imagenet_stats=true"
        )
        return Finding(
            "wrong image statistics",
            f"{camera} has images with a mean of {figure(mean)} and a standard deviation of {figure(std)} "
            "after normalisation, instead of about 0 and 1",
            [Fix(fix)],
        )


@torch.no_grad()
def _figures(images: Tensor) -> tuple[list[float], list[float], list[float]]:
    """The largest range of a channel in each image [B], mean and deviation of each channel [C]; bytes as 0 to 1."""
    step = max(1, min(images.shape[-2:]) // PIXELS)
    some = images[..., ::step, ::step].flatten(2).float()  # [B, C, n]
    some = some / 255 if images.dtype == torch.uint8 else some
    spans = (some.amax(2) - some.amin(2)).amax(1)
    stds, means = torch.std_mean(some, (0, 2), correction=0)
    values = torch.cat((spans, means, stds)).tolist()  # one transfer
    count, channels = len(spans), len(means)
    return values[:count], values[count : count + channels], values[count + channels :]


def _numbers(values: Any) -> list[int]:
    return values.reshape(-1).tolist()
