"""Compare Flexor with LeRobot, live: what `make parity` runs.

    python tests/parity/run.py [PART ...]

Parts are data, writer, repair, colour, a kind of policy (act, diffusion, vqbet, tdmpc, multi_task_dit), whose
golden files are made anew, exchange-KIND for its checkpoints, and exchange for those of all. Without any, all of
them.

Prints what was compared and the largest difference, and exits with 1 if one is too large. LeRobot runs
in an environment of its own: $LEROBOT_PYTHON, or .venv-lerobot, which is made if it is not there.
"""

import json
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path

import act_flexor
import colour
import compare_data
import torch
from environment import lerobot_python
from exchange_flexor import Exchange
from inputs import POLICIES
from multi_task_dit_clip import make_clips
from records import difference

HERE = Path(__file__).parent
GOLDEN = HERE.parent / "golden"
TOLERANCE = 1e-5
Row = tuple[str, float]  # what was compared, the largest difference (relative to the scale of the values)


def call(python: Path, script: str, *arguments: object) -> None:
    words = [str(python), str(HERE / script), *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{script} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def golden(kind: str, lerobot: Path, folder: Path) -> Iterator[Row]:
    """LeRobot's numbers made again, against the committed ones and against ours."""
    measure = import_module(f"{kind}_flexor").measure
    if kind == "multi_task_dit":
        make_clips(folder / "clips")
        measure = partial(measure, clips=folder / "clips")
    call(lerobot, f"{kind}_lerobot.py", folder)
    yield from compare(kind, folder / f"{kind}.json", measure)
    if kind == "act":
        yield from compare(kind, folder / "resnet.json", act_flexor.resnet)
    if kind == "diffusion":
        call(lerobot, "diffusion_schedules.py", folder)
        yield from compare(kind, folder / "schedules.json")


def compare(kind: str, file: Path, measure: Callable[[str], dict] | None = None) -> Iterator[Row]:
    live = load(file)
    yield (
        f"golden {kind}/{file.name} is what LeRobot computes",
        difference(load(GOLDEN / kind / file.name), live),
    )
    for name, theirs in live.items() if measure else ():
        ours = measure(name)
        for field in theirs.keys() | ours.keys():
            yield f"{file.stem} {field}", difference(ours.get(field), theirs.get(field))


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def data(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Every row that LeRobot reads of the committed datasets, some with windows and fewer episodes."""
    for dump in sorted((GOLDEN / "data").glob("*.json")):
        root = dump.with_name(dump.stem.removesuffix("_windows"))
        if not root.is_dir():
            continue
        golden, live = load(dump), folder / dump.name
        chosen = [f"--episodes={','.join(map(str, golden['episodes']))}"] if golden["episodes"] else []
        windows = [f"--deltas={json.dumps(golden['deltas'])}"] if golden["deltas"] else []
        call(lerobot, "data_lerobot.py", "--root", root, "--out", live, *chosen, *windows)
        found = compare_data.compare(root, load(live))
        yield f"dataset {dump.stem}: {len(golden['rows'])} rows", float(len(found))


def writer(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Datasets written here, read there, statistics computed again there."""
    call(Path(sys.executable), "writer_lerobot.py", "write", folder)
    call(lerobot, "writer_lerobot.py", "read", folder)
    yield "datasets written here, read there", 0.0


def repair(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Datasets broken and repaired here, read there."""
    call(Path(sys.executable), "repair_lerobot.py", "repair", folder)
    call(lerobot, "repair_lerobot.py", "read", folder)
    yield "datasets repaired here, read there", 0.0


def colours(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Clips of many codecs and colour tags, read on both sides."""
    colour.write(folder)
    call(lerobot, "colour.py", "read", folder)
    yield from colour.rows(folder)


def exchange(kind: str, lerobot: Path, folder: Path) -> Iterator[Row]:
    yield from Exchange(kind, lerobot, folder).rows()


PARTS: dict[str, Callable[[Path, Path], Iterator[Row]]] = {
    "data": data,
    "writer": writer,
    "repair": repair,
    "colour": colours,
    **{kind: partial(golden, kind) for kind in POLICIES},
    **{f"exchange-{kind}": partial(exchange, kind) for kind in POLICIES},
}
GROUPS = {"exchange": [f"exchange-{kind}" for kind in POLICIES]}


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    lerobot = lerobot_python(HERE.parents[1])
    worst: dict[str, float] = {}
    broken = []
    for name in [part for given in names or PARTS for part in GROUPS.get(given, [given])]:
        print(f"comparing {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                for what, far in PARTS[name](lerobot, Path(folder)):
                    worst[what] = max(far, worst.get(what, 0.0))
            except Exception:  # the other parts are still worth comparing
                traceback.print_exc()
                broken.append(name)
    far = [what for what, value in worst.items() if not value <= TOLERANCE]
    print(f"{'compared':52} largest difference")
    for what, value in worst.items():
        print(f"{what:52} {value:.1e}{'  TOO LARGE' if what in far else ''}")
    for name in broken:
        print(f"{name:52} failed, see above")
    return 1 if far or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
