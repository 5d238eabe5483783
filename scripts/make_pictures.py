"""Draw the pictures of the README and the docs: the expert at the built-in task.

    python scripts/make_pictures.py [FOLDER]

Nothing in them depends on chance: the same code draws the same pictures.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import av.filter
import numpy as np

from flexor.pages.images import png
from flexor.sim.expert import expert_action
from flexor.sim.task import FPS, PlaceEnv

FOLDER = Path(__file__).parents[1] / "docs" / "images"
FILM_SEEDS = (17, 53, 39, 19)
STRIP_SEED = 53
REST = 10  # frames at the end, so that the eye sees that the block lies on the disc


def episode(seed: int, size: int) -> tuple[list[np.ndarray], list[str]]:
    """Pictures [size, size, 3] of an episode that the expert plays, and what it does in each."""
    env = PlaceEnv(image_size=size)
    observation, _ = env.reset(seed=seed)
    frames, phases = [observation["pixels"]], ["reach"]
    while not env.state.success:
        observation = env.step(expert_action(env.state))[0]
        frames.append(observation["pixels"])
        phases.append("done" if env.state.success else "carry" if env.state.grasped else "reach")
    return frames, phases


def film(path: Path, seeds: Sequence[int], size: int) -> None:
    """Episodes side by side as an animated GIF."""
    episodes = [episode(seed, size)[0] for seed in seeds]
    length = max(map(len, episodes)) + REST
    played = [frames + [frames[-1]] * (length - len(frames)) for frames in episodes]
    write_gif(path, [np.concatenate(row, axis=1) for row in zip(*played)])


def strip(path: Path, seed: int, size: int) -> None:
    """Six instants of one episode in a row: on the way, above the block, with it, and done."""
    frames, phases = episode(seed, size)
    grasp = phases.index("carry")
    last = len(frames) - 1
    moments = [0, grasp // 2, grasp, (grasp + last) // 2, last - 1, last]
    path.write_bytes(png(np.concatenate([frames[i] for i in moments], axis=1)))


def write_gif(path: Path, frames: Sequence[np.ndarray]) -> None:
    """With a palette made for these frames; FFmpeg's general one would make the table blotchy."""
    height, width = frames[0].shape[:2]
    with av.open(str(path), "w", format="gif") as container:
        stream = container.add_stream("gif", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = width, height, "pal8"
        graph = palette_graph(stream)
        for number, frame in enumerate(frames):
            picture = av.VideoFrame.from_ndarray(frame, format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, FPS)
            graph.push(picture)
        graph.push(None)
        for number in range(len(frames)):
            picture = graph.pull()
            picture.pts, picture.time_base = number, Fraction(1, FPS)
            container.mux(stream.encode(picture))
        container.mux(stream.encode())


def palette_graph(stream: av.VideoStream) -> av.filter.Graph:
    """Frames in, the same frames with 256 colours chosen from all of them out."""
    graph = av.filter.Graph()
    source = graph.add_buffer(
        width=stream.width, height=stream.height, format="rgb24", time_base=Fraction(1, FPS)
    )
    split = graph.add("split")
    palette = graph.add("palettegen", "stats_mode=full")
    use = graph.add("paletteuse", "dither=none:diff_mode=rectangle")
    source.link_to(split)
    split.link_to(palette, output_idx=0)
    split.link_to(use, output_idx=1, input_idx=0)
    palette.link_to(use, input_idx=1)
    use.link_to(graph.add("buffersink"))
    graph.configure()
    return graph


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    film(folder / "place.gif", FILM_SEEDS, size=200)
    strip(folder / "place.png", STRIP_SEED, size=160)
    for path in (folder / "place.gif", folder / "place.png"):
        print(f"{path}: {path.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
