"""Take the pictures of docs/ui.md in a real browser (Chromium).

    python scripts/make_ui_pictures.py RUNS [FOLDER]

RUNS is a folder of runs, such as two short trainings of the demo:

    flexor train --config=demo --steps=240 --log_freq=5 --env_eval_freq=80 --dataset.eval_split=0.1 \\
        --eval_steps=40 --output_dir=runs/place_lr1e-4 --optimizer.lr=1e-4
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser that the tests use

from flexor.ui.application import make_server  # noqa: E402
from support.browser import Browser, find_browser  # noqa: E402
from support.ui_pages import resize  # noqa: E402

WIDTH, HEIGHT = 1280, 800
PICTURES = {
    "runs": "document.querySelectorAll('.plots path.curve').length > 8",
    "plan": "document.querySelector('.results')?.dataset.done === 'true'",
}
"""Each part of the application, and when it is complete."""


def take_pictures(runs: Path, folder: Path) -> list[Path]:
    program = find_browser()
    if program is None:
        sys.exit("There is no Chromium here: install it, or name it in FLEXOR_TEST_BROWSER.")
    server = make_server(0, [runs])
    threading.Thread(target=server.serve_forever, daemon=True).start()
    files = []
    with Browser(program) as browser:
        resize(browser, WIDTH, HEIGHT)
        for part, complete in PICTURES.items():
            browser.open(f"{server.link}#{part}")
            browser.wait(complete)
            files.append(folder / f"ui_{part}.png")
            browser.screenshot(files[-1])
    server.shutdown()
    return files


def main(arguments: Sequence[str]) -> None:
    if not arguments:
        sys.exit("Name a folder of runs: python scripts/make_ui_pictures.py RUNS")
    folder = Path(arguments[1]) if len(arguments) > 1 else ROOT / "docs" / "images"
    for path in take_pictures(Path(arguments[0]), folder):
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
