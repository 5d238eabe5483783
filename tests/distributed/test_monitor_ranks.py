"""What is sampled, tracked and profiled in a run of several processes: by the first one alone."""

import json
import os

import pytest

from support import ranks, runs

pytestmark = pytest.mark.ranks


def test_one_process_of_a_host_samples_tracks_and_profiles(lowdim, tiny_act, tmp_path):
    run = tmp_path / "run"
    more = ["--steps=12", "--global_batch_size=8", "--system_every_s=0.1", "--profile=2:2"]
    started = ranks.Ranks(tmp_path / "out", 2, ["train", *runs.flags(lowdim, run, tiny_act, *more)])
    assert started.end() == [0, 0], started.errors()
    assert [line["step"] for line in runs.metrics(run)] == list(range(1, 13))
    assert sorted(path.name for path in run.glob("system*")) == ["system.jsonl"]
    names = sorted(path.name for path in (run / "profile").iterdir())
    assert names == ["steps-2-3.trace.json.gz", "steps-2-3.txt"]
    samples = [json.loads(line) for line in (run / "system.jsonl").read_text().splitlines()]
    assert samples and all(sample["host"] == os.uname().nodename for sample in samples)
