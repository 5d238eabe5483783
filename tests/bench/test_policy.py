"""`flexor bench policy`: real predictions on this machine, by batch and cameras."""

import json

import pytest
import torch

from flexor.cli import main as cli
from flexor.policies.pretrained import Pretrained
from support import runs

ROBOT = ["--cameras=2x32x32", "--state=3", "--action=2"]


def bench(capsys: pytest.CaptureFixture, *flags: str) -> dict:
    capsys.readouterr()
    assert cli.main(["bench", "policy", "--json", "--calls=1", *flags]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_untrained_policy_by_cameras_and_batch(tiny_act, capsys):
    report = bench(capsys, *tiny_act, *ROBOT, "--batches", "1", "3")
    assert [(row["cameras"], row["batch"]) for row in report["rows"]] == [(1, 1), (1, 3), (2, 1), (2, 3)]
    assert all(row["way"] == "eager" and 0 < row["median_ms"] <= row["slowest_ms"] for row in report["rows"])
    assert report["policy"] == "act" and report["chunk"] >= report["executed"]
    assert report["dtype"] == "float32"


def test_the_precision_asked_for(tiny_act, monkeypatch, capsys):
    computed = []
    chunk = Pretrained.chunk

    def noted(*arguments):
        computed.append(torch.is_autocast_enabled("cpu"))
        return chunk(*arguments)

    monkeypatch.setattr(Pretrained, "chunk", noted)
    for dtype, by_autocast in {"bfloat16": True, "tf32": False}.items():
        report = bench(capsys, *tiny_act, *ROBOT, "--batches", "1", f"--dtype={dtype}")
        assert report["dtype"] == dtype and set(computed) == {by_autocast}
        computed.clear()


def test_a_checkpoint(lowdim, tiny_act, tmp_path, capsys):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    report = bench(capsys, str(run), "--batches", "2", "--policy.device=cpu")
    assert [row["batch"] for row in report["rows"]] == [2]
    assert cli.main(["bench", "policy", str(run), "--calls=1", "--policy.device=cpu"]) == 0
    assert "median, ms" in capsys.readouterr().out
    assert cli.main(["bench", "policy", str(run), "--seed=3"]) == 2
    assert "--seed: a checkpoint has its own settings" in capsys.readouterr().err
    assert cli.main(["bench", "policy", *tiny_act, *ROBOT, "--batches", "0"]) == 2
    assert "at least 1" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_eager_and_graph(tiny_act, capsys):
    flags = [flag for flag in tiny_act if "device" not in flag]
    report = bench(capsys, *flags, *ROBOT, "--batches", "1", "--policy.device=cuda")
    assert [row["way"] for row in report["rows"]] == ["eager", "graph"] * 2
    assert all(row["peak_memory_bytes"] > 0 for row in report["rows"])
