"""What is logged cannot control a terminal or imitate another line."""

import logging

from flexor.core.log import log, log_file


def test_names_from_outside_are_shown_not_obeyed(tmp_path, monkeypatch):
    monkeypatch.setattr(log, "level", logging.INFO)
    with log_file(tmp_path / "train.log"):
        log.info("camera %s is dark", "\x1b[2J\x1b[1;1Htop\r")
        log.info("task %s", "pick\n2026-01-01 00:00:00 I saved checkpoints/000100")
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert lines[0].endswith(r"camera \x1b[2J\x1b[1;1Htop\r is dark")
    assert [line[:1] for line in lines[1:]] == ["2", " "]
