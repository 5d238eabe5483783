"""The path of a new user, timed: from a clone to the first trained policy seen in `flexor ui`, in a real browser.

    python benchmarks/fresh_user.py [SOURCE] [--work=DIR] [--output=FILE]

Five commands are all that a person types; the fifth opens the page, which Chromium then loads here. SOURCE is what is
cloned, by default this repository. It counts as done when the page of the run shows its curve of the loss. At most 8
minutes on two cores that do nothing else are promised. How long the installation takes depends on the network, too.

The clone is new, and so are the home folder and the caches of Flexor; pip's settings are those of this machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))  # the browser that the tests use

from support.browser import Browser, find_browser  # noqa: E402

MOST_MINUTES = 8.0
COMMANDS = (
    "git clone {source} flexor",
    "cd flexor",
    "make demo",
    "source .venv/bin/activate",
    "flexor ui runs",
)
LAST = "flexor ui runs --port=0"  # any port: the usual one may be taken here
SHOWN = (
    "document.querySelectorAll('.plots path.curve').length > 0 && document.body.innerText.includes('demo')"
)


@dataclass
class Timing:
    command: str
    seconds: float


def follow(source: str, work: Path, browser: str) -> tuple[list[Timing], str]:
    """Type the commands into one shell; returns how long each took, and what the page says at the end."""
    timings = []
    with subprocess.Popen(
        ["bash", "--noprofile", "--norc"],
        cwd=work,
        env=fresh_environment(work),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as shell:
        try:
            for command in COMMANDS[:-1]:
                started = time.monotonic()
                run_in(shell, command.format(source=source))
                timings.append(Timing(command, time.monotonic() - started))
            started = time.monotonic()
            text = open_page(shell, browser, work / "first_policy.png")
            timings.append(Timing(COMMANDS[-1], time.monotonic() - started))
        finally:
            shell.terminate()
    return timings, text


def fresh_environment(work: Path) -> dict[str, str]:
    """This environment, but for what Flexor and Python keep at home."""
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("FLEXOR_", "PYTHON", "VIRTUAL_ENV"))
    }
    home = work / "home"
    home.mkdir()
    return environment | {"HOME": str(home), "NO_COLOR": "1"}


def run_in(shell: subprocess.Popen[str], command: str) -> None:
    """Type a command and wait until it is done. An error ends the measurement."""
    assert shell.stdin is not None and shell.stdout is not None
    shell.stdin.write(f"{command} < /dev/null\necho done:$?\n")  # not from this script
    shell.stdin.flush()
    lines = []
    for line in shell.stdout:
        if result := re.fullmatch(r"done:(\d+)\n", line):
            if result[1] != "0":
                sys.exit(f"{command} failed:\n{''.join(lines[-40:])}")
            return
        lines.append(line)
        print(f"  {line}", end="", flush=True)
    sys.exit(f"the shell ended during: {command}")


def open_page(shell: subprocess.Popen[str], browser: str, picture: Path) -> str:
    """`flexor ui`, and a browser that opens its link; returns the page's text."""
    assert shell.stdin is not None and shell.stdout is not None
    shell.stdin.write(f"exec {LAST}\n")
    shell.stdin.flush()
    for line in shell.stdout:
        if link := re.search(r"http://127\.0\.0\.1:\d+/\S+", line):
            with Browser(browser) as page:
                page.open(link[0])
                page.wait(SHOWN)
                page.screenshot(picture)
                return str(page.run("document.body.innerText"))
    sys.exit("flexor ui printed no link")


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "source", nargs="?", default=str(ROOT), help="what is cloned; default: this repository"
    )
    parser.add_argument("--work", type=Path, help="an empty folder; default: a temporary one")
    parser.add_argument("--output", type=Path, help="also write the result as JSON")
    options = parser.parse_args(arguments)
    browser = find_browser()
    if browser is None:
        sys.exit("There is no Chromium here: install it, or name it in FLEXOR_TEST_BROWSER.")
    with tempfile.TemporaryDirectory(prefix="fresh-user-") as temporary:
        work = options.work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        timings, text = follow(options.source, work, browser)
    for timing in timings:
        print(f"{timing.seconds:7.1f} s  {timing.command}")
    minutes = sum(timing.seconds for timing in timings) / 60
    print(
        f"{minutes:7.1f} min in {len(timings)} commands, at most {MOST_MINUTES:g} promised; {os.cpu_count()} cores"
    )
    success = re.search(r"\d+ % success", text)
    print(f"the page says: {success[0] if success else 'no success rate'}")
    if options.output is not None:
        result = {"minutes": minutes, "cores": os.cpu_count(), "commands": [asdict(t) for t in timings]}
        options.output.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if minutes <= MOST_MINUTES else 1


if __name__ == "__main__":
    sys.exit(main())
