"""Learning health of a run that trains: what its figures, values and images say, in the log and in its record.

Only rank 0 looks. Each finding is logged once, when it begins, and is in the `health` of that line of `metrics.jsonl`;
`run.json` has all of them. A resumed run forgets those of the steps that it repeats.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flexor.core.batch import Batch
from flexor.core.log import log
from flexor.core.run_files import METRICS
from flexor.data.loader.loader import Loader
from flexor.monitor.cameras import CameraHealth
from flexor.monitor.inputs import value_findings
from flexor.policies.processing.normalize import Normalize
from flexor.policies.rename import in_dataset
from flexor.runs.health import Finding, LearningHealth
from flexor.runs.jsonl import GrowingLines
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.run_record import note, read_record
from flexor.train.checkpoint.state import TrainState

HEALTH = "health"  # in the record, and in a line of the metrics


class Health:
    """Rank 0 of a run."""

    def __init__(self, state: TrainState, run: Run, loader: Loader):
        config, dataset = state.config, loader.dataset
        self.run = run
        self.rules = LearningHealth(config.to_dict(), lambda: [*checkpoint.complete(run.checkpoints)])
        for line in GrowingLines(run.folder / METRICS).read()[1]:  # of a resumed run
            self.rules.see(line)
        steps = state.preprocessor.steps
        normalize = next((step for step in steps if isinstance(step, Normalize)), None)
        named = zip(in_dataset(config.policy.images, config.rename_map), config.policy.images)
        cameras = {name: own for name, own in named if name in loader.cameras}
        self.cameras = CameraHealth(dataset, cameras, loader.deltas, normalize)
        known = read_record(run.folder).get(HEALTH) or []
        self.found = [one for one in known if one.get("step", 0) <= state.step]
        self.new: list[Finding] = []
        self._keep(state.step, value_findings(dataset, state.preprocessor, config.rename_map))
        self._keep(state.step, self.cameras.findings())
        if self.found != known:
            note(run.folder, health=self.found)

    def look(self, step: int, batches: Sequence[Batch]) -> None:
        """See the images of a step."""
        self.cameras.look(batches)
        self._keep(step, self.cameras.findings())

    def see(self, step: int, values: dict[str, Any]) -> None:
        """See a line of the metrics before it is written, and add to it what begins with it."""
        for finding in self.rules.see({"step": step, **values}):
            self._begin(step, finding)
        if self.new:
            values[HEALTH], self.new = self.new, []
            note(self.run.folder, health=self.found)

    def _keep(self, step: int, findings: Sequence[Finding]) -> None:
        """Findings about data last. One whose episodes have become more is the same one."""
        for finding in findings:
            same = next((one for one in self.found if _subject(one) == _subject(finding)), None)
            if same is None:
                self._begin(step, finding)
            elif same["evidence"] != finding["evidence"]:
                same |= finding
                note(self.run.folder, health=self.found)

    def _begin(self, step: int, finding: Finding) -> None:
        self.found.append({**finding, "step": step})
        self.new.append(finding)
        log.warning("%s: %s. What to do: %s", *(finding[name] for name in ("what", "evidence", "change")))


def _subject(finding: Mapping[str, Any]) -> tuple[str, str]:
    """What it is about: the evidence begins with the name of a feature."""
    return finding["what"], finding["evidence"].partition(" ")[0]
