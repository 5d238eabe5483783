"""Take the pictures of every page that Flexor shows, in a real browser (Chromium), for the README and the docs.

    python scripts/make_ui_pictures.py [--work=DIR] [--output=DIR] [PICTURE ...]

What the pages show is made first, with the program: two datasets, two short trainings, and a policy server with a
robot. It stays in the work folder, so that a second call takes only the pictures. These have a palette of at most 256
colours, which keeps them small.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser that the tests use

from flexor.ui.application import make_server  # noqa: E402
from flexor.ui.policy_server import WatchedServer  # noqa: E402
from flexor_client import RemotePolicy  # noqa: E402
from support.browser import Browser, find_browser  # noqa: E402
from support.ui_pages import resize  # noqa: E402

WIDTH, HEIGHT = 1280, 800
WORK = Path(tempfile.gettempdir()) / "flexor-pictures"  # pages show its path
MOST_BYTES = 150_000
LEARNING_RATES = ("1e-4", "3e-4")
PLACE, LARGE = "data/place", "data/place_128"


@dataclass(frozen=True)
class Picture:
    """A page, and when it is complete. `page`: a file of the work folder, or a part of the application."""

    page: str
    complete: str
    height: int = HEIGHT
    before: str = ""  # what is clicked first, as JavaScript


CURVES = "document.querySelectorAll('path.curve').length > 8"
CURVES_OF_FILE = "document.querySelectorAll('path').length > 2"
LINK = "[...document.querySelectorAll('a')].find((link) => link.innerText === '{}')"
PICTURES = {
    "ui_runs": Picture("#runs", "document.querySelectorAll('.plots path.curve').length > 8"),
    "ui_run": Picture("#runs", CURVES, before="document.querySelector('#place a[href^=\"#runs/\"]')"),
    "ui_plan": Picture("#plan", "document.querySelector('.results')?.dataset.done === 'true'"),
    "ui_data": Picture("#data", "document.querySelectorAll('.episode-plots path.curve').length > 0"),
    "ui_serve": Picture("#serve", "document.querySelector('.robot') !== null"),
    "report": Picture("report.html", CURVES_OF_FILE, before=LINK.format("Curves")),
    "data_show": Picture("data_show.html", CURVES_OF_FILE, before=LINK.format("episodes")),
    "open_loop": Picture("open_loop.html", CURVES_OF_FILE, before=LINK.format("errors")),
}
READY = "[...document.querySelectorAll('video')].every((video) => video.readyState >= 2)"


# --- what the pages show


def prepare(work: Path, steps: int) -> None:
    """Make what is not there yet."""
    work.mkdir(parents=True, exist_ok=True)
    training = [
        *("--config=demo", f"--dataset.root={PLACE}", "--dataset.repo_id=null", "--dataset.eval_split=0.1"),
        *("--log_freq=5", "--eval.n_episodes=10", "--eval.videos=2", f"--steps={steps}"),
        *(f"--save_freq={steps // 2}", f"--env_eval_freq={steps // 3}", f"--eval_steps={steps // 3}"),
    ]
    runs = [f"runs/place_lr{rate}" for rate in LEARNING_RATES]
    made = {
        PLACE: ["record", PLACE, "--episodes=40"],
        LARGE: ["record", LARGE, "--image-size=128", "--episodes=8"],
        **{
            run: ["train", *training, f"--optimizer.lr={rate}", f"--output_dir={run}"]
            for run, rate in zip(runs, LEARNING_RATES)
        },
        "report.html": ["report", "runs", "--output=report.html"],
        "data_show.html": ["data", "show", LARGE, "--output=data_show.html"],
        "open_loop.html": ["eval", runs[-1], "--open_loop", "--samples=40", "--output=open_loop.html"],
    }
    for name, words in made.items():
        if not (work / name).exists():
            flexor(work, *words)


def flexor(work: Path, *words: str) -> None:
    subprocess.run([sys.executable, "-m", "flexor", *words], cwd=work, check=True)


@contextmanager
def policy_server(work: Path, run: str) -> Iterator[str]:
    """The address of a `flexor serve` that has answered a robot."""
    command = [sys.executable, "-m", "flexor", "serve", run, "--port=0", "--json"]
    with subprocess.Popen(command, cwd=work, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            observation = {
                "observation.image": np.full((32, 32, 3), 128, np.uint8),
                "observation.state": np.zeros(3, np.float32),
            }
            with RemotePolicy(url) as robot:
                for _ in range(20):
                    robot.chunk(observation, "put the red block on the green disc")
                yield url
        finally:
            server.terminate()


# --- the pictures


def take_pictures(work: Path, folder: Path, names: Sequence[str]) -> list[Path]:
    program = find_browser()
    if program is None:
        sys.exit("There is no Chromium here: install it, or name it in FLEXOR_TEST_BROWSER.")
    with ExitStack() as stack:
        url = WatchedServer().url
        if "ui_serve" in names:
            url = stack.enter_context(policy_server(work, f"runs/place_lr{LEARNING_RATES[-1]}"))
        browser = stack.enter_context(Browser(program))
        os.chdir(work)  # what the pages name is relative to it
        server = make_server(0, [Path("runs"), Path(LARGE)], policy_server=WatchedServer(url, None))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        files = [take(browser, server.link, PICTURES[name], work, folder / f"{name}.png") for name in names]
        server.shutdown()
    return files


def take(browser: Browser, link: str, picture: Picture, work: Path, file: Path) -> Path:
    resize(browser, WIDTH, picture.height)
    browser.open(f"{link}{picture.page}" if picture.page.startswith("#") else work / picture.page)
    if picture.before:
        browser.wait(f"!!{picture.before}")
        browser.run(f"{picture.before}.click()")
    browser.wait(picture.complete)
    if picture.page == "#data":
        browser.wait(READY)
    browser.screenshot(file)
    shrink(file)
    return file


def shrink(file: Path) -> None:
    """With a palette, of fewer colours if the file is too large."""
    image = Image.open(file).convert("RGB")
    for colours in (256, 128, 64, 32):
        image.quantize(colours, dither=Image.Dither.NONE).save(file, optimize=True)
        if file.stat().st_size <= MOST_BYTES:
            return
    sys.exit(f"{file} has more than {MOST_BYTES / 1e3:.0f} kB: take a smaller picture.")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pictures", nargs="*", metavar="PICTURE", help=f"of {', '.join(PICTURES)}; default: all"
    )
    parser.add_argument("--work", type=Path, default=WORK, help=f"default: {WORK}")
    parser.add_argument("--output", type=Path, default=ROOT / "docs/images", help="default: docs/images")
    parser.add_argument("--steps", type=int, default=240, help="of each training, default 240")
    options = parser.parse_args(arguments)
    if unknown := {*options.pictures} - {*PICTURES}:
        parser.error(f"no such picture: {', '.join(sorted(unknown))}")
    prepare(options.work, options.steps)
    output = options.output.resolve()
    for path in take_pictures(options.work.resolve(), output, options.pictures or list(PICTURES)):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main()
