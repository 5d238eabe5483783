"""The part of a check about images: cameras that show nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from flexor.data.check.images import ImageWatch, Motion, image_faults
from flexor.data.check.layout import EpisodeEntry, Layout
from flexor.data.check.report import CheckReport
from flexor.data.check.sampled_images import recorded_blank
from flexor.data.storage.source import find_source

LEAVE_OUT = "look at it with `flexor data show DIR`; leave the episode out with --dataset.exclude_episodes"


def add_image_faults(
    watch: ImageWatch,
    episode: EpisodeEntry,
    fps: float,
    motion: Motion | None,
    report: CheckReport,
    place: dict[str, Any],
) -> None:
    """Report what is wrong with the images of an episode. The watch has its frames by their numbers."""
    if not watch.keys:
        return
    blank, since = np.array(watch.blank), np.array(watch.since)
    for fault in image_faults(watch.keys, blank, since, episode.length, fps, motion):
        report.warning(fault.name.replace(" ", "-"), fault.evidence, LEAVE_OUT, frame=fault.first, **place)


def check_recorded_images(layout: Layout, report: CheckReport) -> None:
    """Report blank cameras by the statistics of episodes, where images were not looked at."""
    looked = {(f.feature, f.episode) for f in report.findings if f.name == "blank-camera"}
    source = find_source(None, layout.root, None)
    for name, feature in layout.features.items():
        if not feature.is_camera or feature.depth is not None:
            continue
        for episode in recorded_blank(source, name, report.checked):
            if (name, episode) not in looked:
                message = "it is blank (one colour) by the episode's statistics"
                report.warning("blank-camera", message, LEAVE_OUT, episode=episode, frame=0, feature=name)
