"""Runs that are made slow for real, one way each, and a healthy one: the diagnosis names it while they train.

Other programs on the machine may take its cores meanwhile. Then the runs are starved too, and saying so is right: what
was done on purpose must be among the findings, and nothing else may be.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flexor.cli import main as cli
from flexor.runs.diagnosis.read import diagnose_run
from flexor.runs.diagnosis.verdict import Diagnosis, for_line
from flexor.runs.state import is_alarm
from support import ranks, runs, slow_runs
from support.file_server import FileServer

STARVED = "starved by neighbours"
UNCACHED = (
    "--dataset.cache.tier=stream",
    "--dataset.cache.pool_gb=0.0001",
    "--dataset.order.kind=uniform",
    "--num_workers=1",
    "--batch_size=2",
)
QUICK = ("--save_checkpoint=false", "--log_freq=2", "--system_every_s=0.5")


def train(
    folder: Path,
    data: Any,
    tiny: list[str],
    *flags: str,
    before: Callable[[], Any] | None = None,
    meanwhile: Callable[[runs.Forked], Any] = lambda process: None,
) -> Path:
    """A run in a process of its own, until it has a verdict. `meanwhile` is done to it again and again."""
    run = folder / "run"
    arguments = runs.flags(data, run, tiny, *QUICK, *flags, "--steps=100000")
    begin = functools.partial(slow_runs.look_often, before)
    process = runs.Forked(folder / "out", "train", *arguments, before=begin)
    process.wait_for(lambda: _last_line(run))
    process.wait_for(lambda: meanwhile(process) or '"verdict"' in _last_line(run))
    process.send_signal(signal.SIGTERM)
    _, errors = process.end()
    assert "SIGTERM: stopped after step" in errors
    return run


def _last_line(run: Path) -> str:
    time.sleep(0.02)
    try:
        return (run / "metrics.jsonl").read_text().splitlines()[-1]
    except (OSError, IndexError):
        return ""


def assert_named(run: Path, verdict: str, *, others_allowed: bool = True) -> Diagnosis:
    """The only finding is `verdict`. If other processes use the machine, there may be further findings."""
    diagnosis = diagnose_run(run).diagnosis
    names = [finding.name for finding in diagnosis.findings]
    if others_allowed and slow_runs.others_use(run) > 0.3:
        if is_alarm(verdict) and verdict not in names:
            pytest.skip(f"other processes use this machine: {names}")
        return diagnosis
    assert names == [verdict], diagnosis.to_json()
    return diagnosis


@pytest.mark.ranks(waits=True)
def test_a_slow_disk(dataset, tiny_act, tmp_path, capsys):
    slow = functools.partial(slow_runs.slow_disk, 0.15)
    run = train(tmp_path, dataset, tiny_act, *UNCACHED, before=slow)
    diagnosis = assert_named(run, "data-bound (disk)")
    assert any(fix.flag == "--num_workers=2" for finding in diagnosis.findings for fix in finding.fixes)
    # and so say the log, the record, the lines of the metrics, and the command
    lines = runs.metrics(run)
    read, decode = (sum(line["loader"][part] for line in lines) for part in ("read_s", "decode_s"))
    assert read > decode
    last = lines[-1]
    assert last["verdict"]["verdict"] in ("data-bound (disk)", STARVED)
    assert json.loads((run / "run.json").read_text())["diagnosis"]["verdict"] == last["verdict"]["verdict"]
    assert f"diagnosis: {last['verdict']['verdict']}" in (run / "train.log").read_text()
    assert cli.main(["diagnose", str(run), "--json"]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert told["verdict"] == diagnosis.findings[0].name and told["evidence"] and told["figures"]


@pytest.mark.ranks(waits=True)
def test_a_slow_network(dataset, tiny_act, tmp_path, monkeypatch):
    pytest.importorskip("aiohttp")
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    with FileServer(dataset) as server:
        server.latency = 0.4
        keep_nothing = functools.partial(_forget_blocks, str(tmp_path / "cache"))
        run = train(
            tmp_path,
            server.address,
            tiny_act,
            *UNCACHED,
            "--dataset.cache.remote_gb=0",
            before=keep_nothing,
        )
    assert_named(run, "data-bound (network)")
    assert runs.metrics(run)[-1]["loader"]["source"] == "bucket"


def _forget_blocks(cache: str) -> None:
    """Blocks that were read are not kept, as those of a dataset that is larger than the disk."""
    from flexor.data.storage import block_cache

    os.environ["FLEXOR_CACHE"] = cache
    block_cache.BlockCache.get = lambda *_: None
    block_cache.BlockCache.has = lambda *_: False


@pytest.mark.ranks(waits=True)
def test_decoding(tiny_act, tmp_path):
    data = slow_runs.write_large_videos(tmp_path / "data")
    flags = (*UNCACHED, "--dataset.cache.size=32x32")
    run = train(tmp_path, data, tiny_act, *flags)
    diagnosis = assert_named(run, "data-bound (decode)")
    (decoding,) = [finding for finding in diagnosis.findings if finding.name == "data-bound (decode)"]
    assert "--dataset.cache.tier=ram" in [fix.flag for fix in decoding.fixes]
    assert sum(line["loader"]["frames_decoded"] for line in runs.metrics(run)) > 0


@pytest.mark.ranks(waits=True)
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs Linux to share a core")
def test_neighbours_on_the_same_core(lowdim, tiny_act, tmp_path):
    core = max(os.sched_getaffinity(0))
    pinned = functools.partial(slow_runs.on_core, core)
    with slow_runs.neighbours(core, 3):
        run = train(tmp_path, lowdim, tiny_act, before=pinned)
    assert_named(run, STARVED, others_allowed=False)


def stop_for_a_while(process: runs.Forked) -> None:
    """What cpulimit does: it stops a process whenever it has used its share."""
    for _ in range(5):
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.18)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.02)


@pytest.mark.ranks(waits=True)
def test_a_process_that_is_stopped_again_and_again(lowdim, tiny_act, tmp_path):
    run = train(tmp_path, lowdim, tiny_act, meanwhile=stop_for_a_while)
    diagnosis = diagnose_run(run).diagnosis  # what waits for a stopped thread may be listed after it
    names = [finding.name for finding in diagnosis.findings if finding.name != STARVED]
    assert names[:1] == ["starved by its CPU limit"], diagnosis.to_json()


@pytest.mark.ranks(waits=True)
@pytest.mark.parametrize(
    ("verdict", "flags", "before"),
    [
        (
            "saving-bound",
            ("--save_checkpoint=true", "--save_freq=1"),
            functools.partial(slow_runs.slow_saves, 0.2),
        ),
        ("evaluation-bound", ("--dataset.eval_split=0.5", "--eval_steps=1"), None),
    ],
)
def test_pauses_at_every_step(lowdim, tiny_act, tmp_path, verdict, flags, before):
    run = train(tmp_path, lowdim, tiny_act, *flags, before=before)
    findings = {finding.name: finding for finding in assert_named(run, verdict).findings}
    assert flags[-1].replace("=1", "=") in for_line(findings[verdict])["change"]


@pytest.mark.ranks(waits=True)
def test_a_healthy_run_gets_no_alarm(lowdim, tiny_act, tmp_path):
    run = train(tmp_path, lowdim, tiny_act, "--log_freq=10")
    diagnosis = assert_named(run, "compute-bound (CPU)")
    if diagnosis.healthy:
        assert "compute-bound (CPU)" in (run / "train.log").read_text()


@pytest.mark.ranks(waits=True)
def test_a_slow_rank(lowdim, tiny_act, tmp_path):
    run = tmp_path / "run"
    slow = functools.partial(slow_runs.slow_steps, 0.2)
    flags = runs.flags(lowdim, run, tiny_act, *QUICK, "--steps=24")
    both = ranks.Ranks(tmp_path / "ranks", 2, ["train", *flags], {1: slow})
    assert both.end() == [0, 0], both.errors()
    if "slowest" not in runs.metrics(run)[-1]:
        pytest.skip("this version does not measure which rank is the slowest")
    assert_named(run, "straggler rank 1")


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("flags", "verdict"),
    [
        (("--batch_size=1", "--step=eager", "--steps=600"), "host-launch-bound"),
        (("--batch_size=256", "--step=auto", "--steps=150"), "GPU-bound"),
    ],
)
def test_on_a_gpu(dataset, tmp_path, flags, verdict):
    run = tmp_path / "run"
    base = (
        f"--dataset.root={dataset}",
        f"--output_dir={run}",
        "--policy.type=act",
        "--policy.device=cuda",
        "--policy.pretrained_backbone_weights=null",
        "--dataset.cache.tier=gpu",
        "--plan=false",
        "--log_freq=25",
        "--save_checkpoint=false",
        "--system_every_s=0.5",
    )
    assert cli.main(["train", *base, *flags]) == 0
    diagnosis = diagnose_run(run).diagnosis
    if diagnosis.verdict is not None and "compute on its GPU" in diagnosis.verdict.evidence:
        pytest.skip(f"this GPU is not free: {diagnosis.verdict.evidence}")
    assert diagnosis.verdict is not None and diagnosis.verdict.name == verdict, diagnosis.to_json()
