"""Compare Flexor with LeRobot, live: what `make parity` runs.

    python tests/parity/run.py [PART ...]

Parts are data, writer, repair, edit, colour, augment, depth, adapters, classifier, hub, renamed, optimizers, robot; a
folder beside this file (act, vqbet, ...) for what a kind of policy computes; exchange-KIND for its checkpoints, and
exchange for those of all. Without any, all of them.

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
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))  # where it is a package
from parity import (
    adapters,
    augment_flexor,
    classifier,
    colour,
    compare_data,
    depth,
    flexor_side,
    hub,
    optimizers,
    renamed,
    robot,
)
from parity.environment import lerobot_python
from parity.exchange_flexor import Exchange
from parity.kinds import KINDS, cases_of, golden, policies
from parity.limits import Row, live_limit, stored_limit
from parity.records import difference

TESTS = Path(__file__).parents[1]


def call(python: Path, module: str, *arguments: object) -> None:
    words = [str(python), "-m", f"parity.{module}", *map(str, arguments)]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{module} failed:\n{(done.stdout + done.stderr)[-3000:]}")


def compare(kind: str, lerobot: Path, folder: Path) -> Iterator[Row]:
    """LeRobot's numbers made again, against the stored ones and against ours."""
    call(lerobot, "lerobot_side", kind, folder / "live.json")
    live, stored = load(folder / "live.json"), golden(kind)
    cases, with_same_torch = cases_of(kind, folder / "files"), {}
    if any(case.get("in_bf16") for case in cases.values()):
        call(lerobot, "flexor_side", kind, folder / "files", folder / "ours.json")
        with_same_torch = load(folder / "ours.json")
    for name, case in cases.items():
        theirs, before = live[name], stored.get(name, {})
        ours = with_same_torch.get(name) or flexor_side.measure(kind, case)
        for field in sorted(theirs.keys() | before.keys() | ours.keys()):
            far = difference(before.get(field), theirs.get(field))
            yield Row(f"{kind} {field}, as stored", far, stored_limit(kind, field))
            far = difference(ours.get(field), theirs.get(field))
            yield Row(f"{kind} {field}", far, live_limit(kind, field))


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def data(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Every row that LeRobot reads of the committed datasets, some with windows and fewer episodes."""
    for dump in sorted((TESTS / "golden/data").glob("*.json")):
        root = dump.with_name(dump.stem.removesuffix("_windows"))
        if not root.is_dir():
            continue
        golden, live = load(dump), folder / dump.name
        episodes = [f"--episodes={','.join(map(str, golden['episodes']))}"] if golden["episodes"] else []
        windows = [f"--deltas={json.dumps(golden['deltas'])}"] if golden["deltas"] else []
        call(lerobot, "data_lerobot", "--root", root, "--out", live, *episodes, *windows)
        differences = compare_data.compare(root, load(live))
        yield Row(f"dataset {dump.stem}: {len(golden['rows'])} rows", float(len(differences)))


def writer(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Datasets written here, read there, statistics computed again there."""
    call(Path(sys.executable), "writer_lerobot", "write", folder)
    call(lerobot, "writer_lerobot", "read", folder)
    yield Row("datasets written here, read there", 0.0)


def repair(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Datasets broken and repaired here, read there."""
    call(Path(sys.executable), "repair_lerobot", "repair", folder)
    call(lerobot, "repair_lerobot", "read", folder)
    yield Row("datasets repaired here, read there", 0.0)


def edit(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Datasets edited here, read there: every item is that of the original."""
    call(Path(sys.executable), "edit_lerobot", "edit", folder)
    call(lerobot, "edit_lerobot", "read", folder)
    yield Row("datasets edited here, read there", 0.0)


def colours(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Clips of many codecs and colour tags, read on both sides."""
    colour.write(folder)
    call(lerobot, "colour", "read", folder)
    for name, far in colour.rows(folder):
        yield Row(name, far)


def augment(lerobot: Path, folder: Path) -> Iterator[Row]:
    """torchvision's augmented images and drawn parameters, made again, against the stored ones and against ours."""
    call(lerobot, "augment_torchvision", folder / "live.npz")
    with np.load(folder / "live.npz") as live, np.load(augment_flexor.GOLDEN) as stored:
        for name in stored:
            if name.startswith("image "):
                yield Row(
                    f"augmented {name}, as stored", float(np.abs(live[name] - stored[name]).max()), 1e-6
                )
        for name, far, limit in augment_flexor.differences(live):
            yield Row(f"augmented {name}", far, limit)


def depth_maps(lerobot: Path, folder: Path) -> Iterator[Row]:
    """Depth maps that LeRobot writes, read on both sides."""
    call(lerobot, "depth", "write", folder)
    for name, far in depth.rows(folder):
        yield Row(name, far)


def exchange(kind: str, lerobot: Path, folder: Path) -> Iterator[Row]:
    yield from Exchange(kind, lerobot, folder).rows()


EXCHANGES = {f"exchange-{kind}": partial(exchange, kind) for kind in policies()}
PARTS: dict[str, Callable[[Path, Path], Iterator[Row]]] = {
    "data": data,
    "writer": writer,
    "repair": repair,
    "edit": edit,
    "colour": colours,
    "augment": augment,
    "depth": depth_maps,
    "adapters": adapters.rows,
    "classifier": classifier.rows,
    "hub": hub.rows,
    "renamed": renamed.rows,
    "optimizers": optimizers.rows,
    "robot": robot.rows,
    **{kind: partial(compare, kind) for kind in KINDS},
    **EXCHANGES,
}


def main(names: list[str]) -> int:
    torch.set_num_threads(1)
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    paths = str(TESTS), str(TESTS.parent / "src"), os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    lerobot = lerobot_python(TESTS.parent)
    worst: dict[str, Row] = {}
    broken = []
    for name in [
        part for argument in names or PARTS for part in (EXCHANGES if argument == "exchange" else [argument])
    ]:
        print(f"comparing {name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            try:
                for row in PARTS[name](lerobot, Path(folder)):
                    worst[row.name] = max(row, worst.get(row.name, row), key=lambda each: each.far)
            except Exception:  # the other parts are still worth comparing
                traceback.print_exc()
                broken.append(name)
    far = [row.name for row in worst.values() if not row.far <= row.limit]
    print(f"{'compared':52} largest difference")
    for row in worst.values():
        print(f"{row.name:52} {row.far:.1e}{'  TOO LARGE' if row.name in far else ''}")
    for name in broken:
        print(f"{name:52} failed, see above")
    return 1 if far or broken else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
