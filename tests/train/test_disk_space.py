"""Whether the disk has room for checkpoints is said before the first step."""

import logging
from collections import namedtuple
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.config.schema import CheckpointConfig, TrainConfig
from flexor.train import disk_space
from flexor.train.disk_space import checkpoints_at_once
from support import runs

Usage = namedtuple("Usage", "total used free")


@pytest.mark.parametrize(
    ("settings", "keep", "step", "expected"),
    [
        ({"steps": 100, "save_freq": 10}, {}, 0, 10),
        ({"steps": 100, "save_freq": 10}, {}, 50, 5),
        ({"steps": 105, "save_freq": 10}, {}, 0, 11),  # and the last step
        ({"steps": 100, "save_freq": 0}, {}, 0, 1),
        ({"steps": 100, "save_freq": 10}, {"keep_last": 2}, 0, 3),
        ({"steps": 100, "save_freq": 10}, {"keep_last": 2, "keep_every": 50}, 0, 5),
    ],
)
def test_how_many_checkpoints_a_run_keeps(settings: dict, keep: dict, step: int, expected: int):
    config = TrainConfig(**settings, checkpoint=CheckpointConfig(**keep))
    assert checkpoints_at_once(config, step) == expected


def test_no_room_is_an_error_before_the_first_step(
    lowdim, tiny_act, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, "--steps=2")
    with monkeypatch.context() as patched:
        patched.setattr(disk_space.shutil, "disk_usage", lambda _: Usage(10, 9, 1))
        assert main(["train", *flags]) == 2
    error = capsys.readouterr().err
    assert "A checkpoint takes about" in error and "step 1" not in error
    assert "--save_checkpoint=false" in error and not [*(tmp_path / "run").glob("checkpoints/*")]


def test_too_little_room_for_all_is_a_warning(
    lowdim, tiny_act, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(logging.getLogger("flexor"), "propagate", True)
    sizes = []
    measure = disk_space.checkpoint_bytes
    monkeypatch.setattr(
        disk_space, "checkpoint_bytes", lambda state: sizes.append(measure(state)) or sizes[-1]
    )
    monkeypatch.setattr(disk_space.shutil, "disk_usage", lambda _: Usage(10**9, 0, int(1.5 * sizes[-1])))
    flags = runs.flags(lowdim, tmp_path / "run", tiny_act, "--steps=2", "--save_freq=1")
    assert main(["train", *flags]) == 0
    assert "2 checkpoints of about" in caplog.text
    tensors = (tmp_path / "run/checkpoints/000002").rglob("*.safetensors")
    assert sizes[0] == pytest.approx(sum(path.stat().st_size for path in tensors), rel=0.3)
