"""Names tests as soon as they fail, and why: a run that is cut off has no summary."""

from __future__ import annotations

import pytest


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # the process that prints
        config.pluginmanager.register(NamesFailures(config))


class NamesFailures:
    def __init__(self, config: pytest.Config):
        self.config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            why = f"\n{crash.path}:{crash.lineno}: {crash.message}" if crash else ""
            worker = getattr(report, "worker_id", "this process")
            self.config.get_terminal_writer().line(f" {report.nodeid} failed in {worker}{why}")
