"""What `flexor ui` costs: time until its first content, and the processor time that it takes while a page is open.

python benchmarks/ui.py [RUNS]      runs in the folder, the last of which reports every half second (default 50)
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser that the tests use, and runs as they are written

from flexor.ui.application import make_server  # noqa: E402
from support.browser import Browser, find_browser  # noqa: E402
from support.run_folders import add_lines, report, write_run  # noqa: E402

WATCHED_S = 30.0
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? 0"
ALL_READ = "[...document.querySelectorAll('.run-row')].every((row) => row.querySelector('.chip'))"
DRAWN = "document.querySelectorAll('.plots path.curve').length > 0"


def main(count: int) -> None:
    program = find_browser()
    if program is None:
        sys.exit("There is no Chromium here: install it, or name it in FLEXOR_TEST_BROWSER.")
    with tempfile.TemporaryDirectory() as folder:
        runs = [write_run(Path(folder) / f"run{n:03}", last=100_000, steps=200_000) for n in range(count)]
        server = make_server(0, [Path(folder)])
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with Browser(program) as browser:
            begun = time.perf_counter()
            browser.open(f"{server.link}#runs")
            browser.wait(f"{PAINT} > 0")
            paint = browser.run(PAINT) / 1e3
            browser.wait(DRAWN)
            curves = time.perf_counter() - begun
            browser.wait(ALL_READ)
            share = watched(runs[-1])
        result = {"runs": count, "first_content_s": paint, "curves_s": curves, "processor_share": share}
        print(json.dumps({name: round(value, 4) for name, value in result.items()}))


def watched(run: Path) -> float:
    """The share of one core that the server takes while a run reports and a page shows it."""
    process = psutil.Process()
    before, begun = process.cpu_times(), time.perf_counter()
    step = 100_000
    while time.perf_counter() - begun < WATCHED_S:
        time.sleep(0.5)
        step += 10
        add_lines(run / "metrics.jsonl", report(step))
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.perf_counter() - begun)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 50)
