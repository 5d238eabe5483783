"""The optimizer's state of policies of which LeRobot's have weights without use, which its optimizer numbers too.

Called by run.py. `lerobot-train` can't make these policies small, so its functions are called instead: see
optimizers_lerobot.py. Runs with other policies are resumed by `lerobot-train` itself: see exchange_flexor.py.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from flexor.cli.main import main
from flexor.sim.record import record_dataset
from flexor.train.checkpoint.state import Snapshot
from parity.inputs import BATCH
from parity.kinds import part, placed, prepared
from parity.limits import Row
from parity.records import difference, direction

KINDS = ("pi0", "pi05")


def rows(lerobot: Path, folder: Path) -> Iterator[Row]:
    record_dataset(folder / "data", episodes=3, image_size=32)
    for kind in KINDS:
        ours = train(kind, folder)
        words = [lerobot, "-m", "parity.optimizers_lerobot", kind, folder / kind]
        done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"LeRobot did not take the optimizer's state:\n{done.stderr[-3000:]}")
        theirs = json.loads((folder / kind / "optimizer.json").read_text())
        assert len(ours) > 20
        yield Row(f"{kind}: optimizer's state, by name, loaded there", difference(ours, theirs))


def train(kind: str, folder: Path) -> dict[str, list[float]]:
    """Two steps of a small policy; the averages of its gradients by name, before they are numbered."""
    files, directions = folder / kind / "files", {}
    cases = part(kind, "cases")
    cases.make_files(files)
    case = cases.CASES["default"]
    settings = {**case["settings"], **placed(case["ours"], files), "load_vlm_weights": False}
    flags = [f"--policy.{name}={json.dumps(value)}".replace('"', "") for name, value in settings.items()]
    flags += [f"--dataset.root={folder / 'data'}", f"--output_dir={folder / kind / 'run'}"]
    write = Snapshot.write

    def noted(snapshot: Snapshot, *arguments: Any) -> None:
        averages = {name: each for name, each in snapshot.tensors.items() if name.endswith(".exp_avg")}
        for name, average in averages.items():
            directions[name.removeprefix("optimizer.").removesuffix(".exp_avg")] = direction(average)
        write(snapshot, *arguments)

    with prepared(kind, "flexor", files), patch.object(Snapshot, "write", noted):
        always = [f"--policy.type={kind}", "--policy.device=cpu", "--steps=2", f"--batch_size={BATCH}"]
        assert main(["train", *always, *flags]) == 0
    return directions
