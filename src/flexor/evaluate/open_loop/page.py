"""An open-loop evaluation as one HTML page: verdicts, errors by joint and step, what the policy looks at, episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flexor.core.batch import ACTION
from flexor.evaluate.open_loop.open_loop import OpenLoop, as_json
from flexor.pages.images import as_base64, jpeg, scaled
from flexor.pages.page import page, write_page

STYLES = (("flexor.evaluate.open_loop", "open_loop.css"),)
SCRIPTS = (("flexor.evaluate.open_loop", "open_loop.js"),)
EPISODES = 12  # on the page
JOINTS = 32  # plots of an episode
IMAGES = 12  # columns of an episode's strip
HEIGHT = 96  # of a thumbnail
MOST_TEXT = 300


def write_open_loop(result: OpenLoop, output: Path, title: str, notes: list[str]) -> None:
    data = {"title": title, "notes": notes, **as_json(result), "episode_curves": episodes(result)}
    write_page(output, page(f"Open loop: {title}", data=data, styles=STYLES, scripts=SCRIPTS))


def episodes(result: OpenLoop) -> list[dict[str, Any]]:
    """Recorded and predicted actions of some episodes, and images at the frames at which the policy was asked."""
    numbers = np.unique(result.samples.episode)
    places = np.unique(np.linspace(0, len(numbers) - 1, min(len(numbers), EPISODES)).round().astype(int))
    return [_episode(result, int(number)) for number in numbers[places]]


def _episode(result: OpenLoop, number: int) -> dict[str, Any]:
    samples, dataset = result.samples, result.dataset
    assert dataset is not None
    position = int(np.flatnonzero(dataset.episodes.index == number)[0])
    start, length = int(dataset.episodes.start[position]), int(dataset.episodes.length[position])
    recorded = dataset.columns[ACTION][start : start + length].reshape(length, -1)[:, :JOINTS]
    places = np.flatnonzero(samples.episode == number)
    chunks = [
        {
            "frame": int(samples.frame[place]),
            "actions": _columns(result.predicted[place][samples.valid[place]]),
        }
        for place in places
    ]
    return {
        "index": number,
        "length": length,
        "task": samples.task[places[0]][:MOST_TEXT],
        "error": float(np.nanmean(result.target.sample_scores(result.predicted)[places])),
        "recorded": _columns(recorded),
        "chunks": chunks,
        **_strip(result, places),
    }


def _columns(actions: np.ndarray) -> list[list[float]]:
    """A list for each joint."""
    return [[float(f"{value:.5g}") for value in column] for column in actions.T[:JOINTS].astype(float)]


def _strip(result: OpenLoop, places: np.ndarray) -> dict[str, Any]:
    """One image with a row for each camera and a column for each of some samples."""
    samples = result.samples
    if not samples.colour:
        return {"image": "", "frames": []}
    places = places[np.unique(np.linspace(0, len(places) - 1, min(len(places), IMAGES)).round().astype(int))]
    rows = []
    for camera in samples.colour:
        images = samples.observation[camera][places]
        images = images[:, -1] if images.ndim == 5 else images  # of several time steps the last is now
        width = max(1, round(HEIGHT * images.shape[-1] / images.shape[-2]))
        rows.append(np.concatenate([scaled(_rgb(image), HEIGHT, width) for image in images], axis=1))
    widest = max(row.shape[1] for row in rows)
    sheet = np.concatenate([np.pad(row, ((0, 0), (0, widest - row.shape[1]), (0, 0))) for row in rows])
    return {
        "image": as_base64(jpeg(sheet)),
        "frames": samples.frame[places].tolist(),
        "cameras": samples.colour,
    }


def _rgb(image: np.ndarray) -> np.ndarray:
    """[C, H, W] as [H, W, 3]."""
    pixels = np.moveaxis(image, 0, -1)
    return np.repeat(pixels, 3, axis=2) if pixels.shape[2] == 1 else pixels[:, :, :3]
