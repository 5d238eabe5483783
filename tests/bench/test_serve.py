"""`flexor bench serve`: what it measures adds up, with a model and without."""

import json

import pytest

from flexor.bench.serve import PARTS
from flexor.cli.main import main
from support import runs

pytestmark = pytest.mark.ranks


def test_without_a_model(capsys):
    flags = ["--clients", "2", "--cameras", "1x32x48", "2x32x48", "--requests", "24"]
    assert main(["bench", "serve", *flags, "--encoding", "raw", "jpeg", "--processes=0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policy"] is None and report["processes"] == 0 and len(report["rows"]) == 2 * 2
    for row in report["rows"]:
        ms = row["ms"]
        assert all(0 <= ms[part]["p50"] <= ms[part]["p95"] <= ms[part]["p99"] for part in PARTS)
        assert 0 < ms["without_model"]["p50"] <= ms["round_trip"]["p50"]
        assert row["requests_per_s"] > 0 and row["requests"] * row["clients"] == 24
    raw = [row for row in report["rows"] if row["encoding"] == "raw"]
    assert raw[-1]["frame_bytes"] - raw[0]["frame_bytes"] >= 32 * 48 * 3  # another camera


def test_with_a_checkpoint(lowdim, tiny_act, tmp_path, capsys):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    capsys.readouterr()
    flags = ["--clients", "1", "2", "--encoding", "raw", "--requests", "8", "--device=cpu"]
    assert main(["bench", "serve", str(run), *flags]) == 0
    text = capsys.readouterr().out
    assert text.startswith("act; ") and "p50 without model" in text


def test_with_random_weights(tiny_act, capsys):
    flags = [
        "--cameras",
        "1x32x32",
        "--clients",
        "1",
        "--encoding",
        "raw",
        "--requests",
        "2",
        "--dtype=bfloat16",
    ]
    assert main(["bench", "serve", *tiny_act, *flags, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["policy"] == "act" and report["rows"][0]["cameras"] == [[3, 32, 32]]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--clients", "0"], "--clients must be at least 1"),
        (["--steps=3"], "--steps=3: settings of a policy need a checkpoint or --policy.type"),
        (["x", "--cameras", "1x2x3"], "a checkpoint has cameras of its own"),
    ],
)
def test_what_is_wrong_is_said(flags, words, capsys):
    assert main(["bench", "serve", *flags]) == 2
    assert words in capsys.readouterr().err
