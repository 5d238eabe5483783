"""Learning health of a run while it trains: findings about its metrics and data, in the log and in its record.

Only rank 0 checks. Each finding is logged once, when it begins, and is in the `health` of that line of `metrics.jsonl`;
`run.json` has all of them. A resumed run forgets those of the steps that it repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.batch import Batch
from flexor.core.findings import Finding
from flexor.core.log import log
from flexor.core.run_files import METRICS
from flexor.data.loader.loader import Loader
from flexor.evaluate.data_fit.check_fit import findings_before_tuning
from flexor.monitor.cameras import CameraHealth
from flexor.monitor.inputs import value_findings
from flexor.policies.processing.normalize import Normalize
from flexor.policies.rename import in_dataset
from flexor.runs.health import LearningHealth, from_record, to_json
from flexor.runs.jsonl import GrowingLines
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.run_folder import Run
from flexor.train.checkpoint.run_record import note, read_record
from flexor.train.checkpoint.state import TrainState

HEALTH = "health"  # in the record, and in a line of the metrics


class MetricsHealth:
    """Findings about the metrics of a run."""

    def __init__(self, config: TrainConfig, run: Run, step: int):
        """`step`: from which the run goes on."""
        self.run = run
        self.rules = LearningHealth(config.to_dict(), lambda: [*checkpoint.complete(run.checkpoints)])
        for line in GrowingLines(run.folder / METRICS).read()[1]:  # of a resumed run
            self.rules.update(line)
        self.recorded = from_record(read_record(run.folder).get(HEALTH))
        self.findings = [finding for finding in self.recorded if (finding.step or 0) <= step]
        self.new: list[Finding] = []

    def check_metrics(self, step: int, values: dict[str, Any]) -> None:
        """Check a line of the metrics before it is written, and add the findings that begin with it."""
        for finding in self.rules.update({"step": step, **values}):
            self._begin(step, finding)
        if self.new:
            values[HEALTH], self.new = [to_json(finding) for finding in self.new], []
            self._record()

    def _begin(self, step: int, finding: Finding) -> None:
        self.findings.append(replace(finding, step=step))
        self.new.append(finding)
        log.warning("%s: %s. What to do: %s", finding.name, finding.evidence, finding.fix)

    def _record(self) -> None:
        """Write all findings to the run's record."""
        entries = [{**to_json(finding), "step": int(finding.step or 0)} for finding in self.findings]
        note(self.run.folder, **{HEALTH: entries})


class Health(MetricsHealth):
    """Of a run that learns from a dataset: its data, too. On rank 0."""

    def __init__(self, state: TrainState, run: Run, loader: Loader):
        config, dataset = state.config, loader.dataset
        super().__init__(config, run, state.step)
        steps = state.preprocessor.steps
        normalize = next((step for step in steps if isinstance(step, Normalize)), None)
        named = zip(in_dataset(config.policy.images, config.rename_map), config.policy.images)
        cameras = {name: feature for name, feature in named if name in loader.cameras}
        renamed = state.host_steps is not None
        self.cameras = CameraHealth(dataset, cameras, loader.deltas, normalize, renamed)
        self._merge(state.step, value_findings(dataset, state.preprocessor, config.rename_map))
        self._merge(state.step, self.cameras.findings())
        if config.policy_path is not None and state.step == 0:
            self._merge(0, findings_before_tuning(config.policy_path, dataset, config.rename_map))
        if self.findings != self.recorded:
            self._record()

    def check_images(self, step: int, batches: Sequence[Batch]) -> None:
        """Check the images of a step."""
        self.cameras.update(batches)
        self._merge(step, self.cameras.findings())

    def _merge(self, step: int, findings: Sequence[Finding]) -> None:
        """Add findings about data, which last. One that concerns more episodes than before is updated."""
        subjects = [_subject(finding) for finding in self.findings]
        for finding in findings:
            if _subject(finding) not in subjects:
                self._begin(step, finding)
                continue
            index = subjects.index(_subject(finding))
            if self.findings[index].evidence != finding.evidence:
                self.findings[index] = replace(finding, step=self.findings[index].step)
                self._record()


def _subject(finding: Finding) -> tuple[str, str]:
    """Its name and the feature that it concerns: the evidence begins with it."""
    return finding.name, finding.evidence.partition(" ")[0]
