"""Does LeRobot read what `flexor data repair` wrote, and does it read what was in the original?

    python -m parity.repair_lerobot repair ROOT    # in tests/, where flexor is installed
    python -m parity.repair_lerobot read ROOT      # in tests/, where lerobot is installed (0.6.1)

`repair` breaks datasets under ROOT, repairs them and keeps beside each what a good reader sees in the unbroken
one, as .npz. `read` opens each with LeRobotDataset, compares every row and frame, and exits 1 on a difference.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

TOP = "observation.images.top"
SAME = ("observation.state", "action", "next.done", TOP)


def cases() -> dict[str, tuple[str, Callable[[Path], object], dict]]:
    """name -> the dataset it begins with, what is done to it, and how it is repaired."""
    from support.damage import DATA, edit_json, edit_table, set_rows
    from support.samples import reencode

    def encode(**options: str) -> Callable[[Path], object]:
        return lambda root: [reencode(path, 10, **options) for path in sorted(root.rglob("*.mp4"))]

    def clock(root: Path) -> None:
        edit_table(root / DATA, timestamp=lambda values: [1.037 * t + 0.02 for t in values])

    def totals(root: Path) -> None:
        edit_json(root / "meta/info.json", lambda info: info.update(total_frames=1, total_episodes=7))
        (root / "meta/stats.json").unlink()
        (root / "meta/tasks.parquet").unlink()

    return {
        "as it is": ("one", lambda root: None, {}),
        "from v2.0": ("v2.0", lambda root: None, {}),
        "from v2.1": ("v2.1", lambda root: None, {}),
        "b-frames": ("v2.1", encode(bf="3", g="250"), {}),
        "av1": ("v2.0", encode(codec="libsvtav1", g="4"), {}),
        "b-frames, copied whole": ("one", encode(bf="3", g="250", sc_threshold="0"), {}),
        "clock": ("one", clock, {}),
        "totals, statistics, tasks": ("one", totals, {}),
        "NaN": ("one", lambda root: edit_table(root / DATA, action=set_rows(14, 15, [np.nan, 0])), {}),
        "a part": ("one", lambda root: None, {"episodes": [0, 2, 3]}),
    }


def repair(root: Path) -> None:
    import shutil

    repairs = cases()
    from flexor.data.check.check import check_dataset
    from flexor.data.dataset import open_dataset
    from flexor.data.repair.repair import repair_dataset
    from support.legacy import to_v2
    from support.small_datasets import write

    good = write(root / "good/one")
    for version in ("v2.0", "v2.1"):
        to_v2(good, root / "good" / version, version)
    for number, (name, (start, fault, options)) in enumerate(repairs.items()):
        original = Path(shutil.copytree(root / "good" / start, root / f"broken/{number}"))
        fault(original)
        report = repair_dataset(original, root / f"repaired/{number}", **options)
        assert report.ok and check_dataset(report.out).ok, str(report)
        encoded_again = "b-frames" in name or name == "av1"
        expected = open_dataset(root=original if encoded_again else good)
        expected = expected.select([plan.episode.index for plan in report.included])
        rows = expected.read(np.arange(len(expected)))
        lengths = np.array([plan.length for plan in report.included])
        columns = {key: rows[key] for key in SAME}
        np.savez(root / f"{number}.npz", length=lengths, task=rows["task"], **columns)
        (root / f"{number}.json").write_text(json.dumps(name))


def read(root: Path) -> int:
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    failures = 0
    for dump in sorted(root.glob("*.npz")):
        name = json.loads(dump.with_suffix(".json").read_text())
        dataset = LeRobotDataset("toy/repaired", root=root / "repaired" / dump.stem)
        problems = compare(dataset, dict(np.load(dump)))
        print(f"{'FAIL' if problems else 'ok':4} {name}", *problems[:8], sep="\n   ")
        failures += bool(problems)
    return failures


def compare(dataset, expected: dict[str, np.ndarray]) -> list[str]:
    """What is different between LeRobot's items and the rows that were kept."""
    length = expected["length"]
    if (dataset.num_episodes, dataset.num_frames) != (len(length), length.sum()):
        return [f"{dataset.num_episodes} episodes, {dataset.num_frames} frames"]
    problems, worst = [], 0.0
    frame = np.concatenate([np.arange(n) for n in length])
    for row in range(len(frame)):
        item = dataset[row]
        for key in SAME:
            reference, got = expected[key][row], item[key].numpy()
            if key == TOP:
                far = np.abs(np.round(got * 255.0) - reference).max()
                worst = max(worst, far)
                problems += [f"{key} row {row}: off by up to {far} of 255"] if far > 1 else []
            elif not np.array_equal(got.reshape(reference.shape), reference):
                problems.append(f"{key} row {row}: {got} instead of {reference}")
        place = (item["frame_index"].item(), item["index"].item(), item["task"])
        if place != (frame[row], row, expected["task"][row]):
            problems.append(f"row {row}: {place}")
    print(f"     {len(frame)} frames, {worst:g} of 255 apart at most")
    return problems


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("repair", "read"):
        sys.exit(__doc__)
    sys.exit(repair(Path(sys.argv[2])) if sys.argv[1] == "repair" else bool(read(Path(sys.argv[2]))))
