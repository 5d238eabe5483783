"""Flexor's reading of a dataset against a dump of LeRobot's (see data_lerobot.py).

    cd tests; python -m parity.compare_data ROOT dump.json

ROOT may be the v2.x original of the dataset that was dumped after conversion to v3.0. Pixels are compared
bit by bit if both sides run the same PyAV on the same kind of processor, else by thumbnail.
"""

import argparse
import json
import platform
import sys
from pathlib import Path
from typing import Any

import av
import numpy as np

from flexor.data.dataset import Dataset, open_dataset
from flexor.data.format.windows import deltas_from_timestamps
from parity.data_lerobot import digest, thumbnail


def compare(root: str | Path, dump: dict, batch: int = 64) -> list[str]:
    """Every difference, one line each; none means that both read the same."""
    dataset = open_dataset(root=root, episodes=dump["episodes"])
    deltas = {k: deltas_from_timestamps(v, dataset.fps) for k, v in (dump["deltas"] or {}).items()}
    differences = [] if len(dataset) == dump["length"] else [f"length {len(dataset)}, not {dump['length']}"]
    rows = [int(row) for row in dump["rows"]]
    for start in range(0, len(rows), batch):
        some = rows[start : start + batch]
        read = dataset.read(np.array(some), deltas)
        for i, row in enumerate(some):
            ours = {key: value[i] for key, value in read.items()}
            differences += _compare_row(row, ours, dump["rows"][str(row)], exact_pixels(dump))
    return differences + _compare_stats(dataset, dump["stats"])


def exact_pixels(dump: dict) -> bool:
    return dump["pixels"] == f"PyAV {av.__version__} on {platform.machine()}"


def _compare_row(row: int, ours: dict[str, Any], theirs: dict[str, Any], exact: bool) -> list[str]:
    if "error" in theirs:
        return [f"row {row}: LeRobot fails: {theirs['error']}"]
    differences = [f"row {row}: {key} is only in LeRobot's item" for key in theirs if key not in ours]
    differences += [f"row {row}: {key} is only in Flexor's item" for key in ours if key not in theirs]
    for key in ours.keys() & theirs.keys():
        if not _same(ours[key], theirs[key], exact):
            differences.append(f"row {row}: {key} differs")
    return differences


def _same(ours: Any, theirs: Any, exact: bool) -> bool:
    if isinstance(ours, str | list):
        return ours == theirs
    value = np.asarray(ours)
    if value.dtype != np.uint8:
        return digest(value) == theirs
    if exact:
        # LeRobot drops the time axis of a video window of one step; the pixels are the same.
        squeezed = value[0] if value.ndim == 4 and len(value) == 1 else value
        return theirs[0] in (digest(value), digest(squeezed))
    return bool(np.abs(thumbnail(value) - np.array(theirs[1])).max() <= 4)


def _compare_stats(dataset: Dataset, theirs: dict) -> list[str]:
    differences = []
    for key in sorted(theirs.keys() | dataset.stats.keys()):
        if key not in theirs or key not in dataset.stats:
            differences.append(f"stats of {key} are only {'ours' if key in dataset.stats else 'theirs'}")
            continue
        for name, value in theirs[key].items():
            ours = dataset.stats[key].get(name)
            if ours is None or ours.shape != np.shape(value) or not np.allclose(ours, value, 1e-9, 1e-12):
                differences.append(f"stats of {key}: {name} differs")
    return differences


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root")
    parser.add_argument("dump")
    arguments = parser.parse_args()
    dump = json.loads(Path(arguments.dump).read_text())
    differences = compare(arguments.root, dump)
    print("\n".join(differences[:40]))
    how = "bit by bit" if exact_pixels(dump) else "by thumbnail"
    print(f"{len(dump['rows'])} rows compared (pixels {how}), {len(differences)} differences")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
