"""Datasets that Flexor edits, opened in LeRobot: every item is that of the original.

    python -m parity.edit_lerobot edit ROOT        # in tests/, where flexor is installed
    python -m parity.edit_lerobot read ROOT        # in tests/, where lerobot is installed (0.6.1)

`edit` writes datasets under ROOT and new ones made of them, and beside each of these, as .json, which row of which
original each of its rows is. `read` opens both with LeRobotDataset, compares all items, and exits 1 on a difference.
LeRobot's decoder gives the same pixels for the same packets, so images must be equal bit by bit.
"""

import json
import sys
from pathlib import Path


def edit(root: Path) -> None:
    import shutil

    from data.edit.test_edit import B_FRAMES, encoded, idle, with_language
    from flexor.data.edit import edit
    from flexor.data.edit.trim import TrimSettings
    from support.small_datasets import write

    one, still, long = (root / "originals" / name for name in ("one", "still", "b-frames"))
    write(one)
    write(still, still=True)
    idle(shutil.copytree(one, long), {0: (3, 7), 1: (0, 4), 3: (5, 9)})
    encoded(**B_FRAMES)(long)
    av1 = write(root / "originals/av1", codec="av1", gop=4)
    idle(av1, {0: (3, 7), 3: (5, 7)})
    spoken = with_language(shutil.copytree(long, root / "originals/spoken"))
    new = root / "new"
    reports = [
        edit.delete_episodes(one, new / "deleted", "1"),
        edit.delete_episodes(still, new / "deleted images", "0,2"),
        edit.split_dataset(one, new / "parts", {"train": "0.75", "val": "rest"}),
        edit.merge_datasets([one, long, one], new / "merged"),
        edit.retask(one, new / "tasks", ["push=push the cube"], ["3=lift it"]),
        edit.trim_dataset(long, new / "trimmed", TrimSettings(keep=0)),
        edit.trim_dataset(av1, new / "trimmed av1", TrimSettings(keep=0.1)),
        edit.delete_episodes(spoken, new / "spoken", "1"),
    ]
    for report in reports:
        assert report.ok, str(report)
        for dataset in report.datasets:
            parts = [
                {
                    "root": str(part.source.root),
                    "episode": part.plan.episode.index,
                    "first": part.first,
                    "length": part.length,
                    "complete": part.is_complete,
                    "tasks": part.task_texts(),
                }
                for part in dataset.parts
            ]
            name = f"{len(list(root.glob('*.json')))}.json"
            (root / name).write_text(json.dumps({"folder": str(dataset.folder), "parts": parts}))


def read(root: Path) -> int:
    failures = 0
    for file in sorted(root.glob("*.json")):
        case = json.loads(file.read_text())
        problems = compare(case)
        print(f"{'FAIL' if problems else 'ok':4} {case['folder']}", *problems[:8], sep="\n   ")
        failures += bool(problems)
    return failures


def opened(root: str):
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    return LeRobotDataset("toy/edited", root=root)


def compare(case: dict) -> list[str]:
    new = opened(case["folder"])
    originals = {part["root"]: opened(part["root"]) for part in case["parts"]}
    length = sum(part["length"] for part in case["parts"])
    if (new.num_episodes, new.num_frames) != (len(case["parts"]), length):
        return [f"{new.num_episodes} episodes, {new.num_frames} frames"]
    problems, row = [], 0
    for number, part in enumerate(case["parts"]):
        original = originals[part["root"]]
        start = original.meta.episodes[part["episode"]]["dataset_from_index"] + part["first"]
        for frame in range(part["length"]):
            ours, theirs = new[row], original[start + frame]
            place = (
                ours["index"].item(),
                ours["episode_index"].item(),
                ours["frame_index"].item(),
                ours["task"],
            )
            if place != (row, number, frame, part["tasks"][frame]):
                problems.append(f"row {row}: {place}")
            problems += [
                f"row {row}: {key}" for key in theirs if not same(key, ours.get(key), theirs[key], part)
            ]
            row += 1
    print(f"     {row} rows")
    return problems


def same(key: str, ours: object, theirs: object, part: dict) -> bool:
    import torch

    if key in ("index", "episode_index", "frame_index", "timestamp", "task", "task_index"):
        return True
    if key == "next.done" and not part["complete"]:
        return isinstance(ours, torch.Tensor)  # its end is elsewhere
    return torch.equal(ours, theirs) if isinstance(theirs, torch.Tensor) else ours == theirs


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in ("edit", "read"):
        sys.exit(__doc__)
    sys.exit(edit(Path(sys.argv[2])) if sys.argv[1] == "edit" else bool(read(Path(sys.argv[2]))))
