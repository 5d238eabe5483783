"""The bottleneck of a run while it trains: a line in the log when it changes. See `runs/diagnosis`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexor.config.schema import TrainConfig
from flexor.core.log import log
from flexor.data.loader.loader import Loader
from flexor.data.loader.work_time import over_ranks
from flexor.monitor.host import ThreadTime, mean_shares
from flexor.runs.diagnosis.live import LiveDiagnosis
from flexor.train.checkpoint.run_record import note, read_record
from flexor.train.ranks.processes import Processes


class RunDiagnosis:
    """Every rank measures its own time; rank 0 makes the diagnosis. Create it in the training thread."""

    def __init__(self, config: TrainConfig, folder: Path, loader: Loader, processes: Processes):
        self.loader, self.folder, self.processes = loader, folder, processes
        self.thread = ThreadTime()
        self.live = LiveDiagnosis(config.to_dict(), read_record(folder)) if processes.is_main else None

    def add_to(self, step: int, values: dict[str, Any]) -> None:
        """Complete a line of the metrics, and log a verdict that is new. Called by all ranks together."""
        ranks = self.processes.gather((self.loader.work(), self.thread.take()))
        values["loader"] = over_ranks([work for work, _ in ranks])
        values["main_thread"] = mean_shares([shares for _, shares in ranks])
        if self.live is None:
            return
        changed = self.live.add({"step": step, **values})
        if not (verdict := self.live.for_line()):
            return
        values["verdict"] = verdict
        if changed:
            change = f". {verdict['change']}" if verdict["change"] and not changed.healthy else ""
            log.info("diagnosis: %s: %s%s", verdict["verdict"], verdict["evidence"], change)

    def close(self) -> None:
        """Note the last verdict in the run's record."""
        if self.live is not None and self.live.now.verdict is not None:
            note(self.folder, diagnosis=self.live.now.to_json())
