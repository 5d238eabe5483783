"""Runs on a GPU with and without CUDA graphs, which must compute the same bits."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from flexor.train.graph import GraphStep


def without_device(policy: list[str]) -> list[str]:
    return [flag for flag in policy if not flag.startswith("--policy.device")]


def note_replays(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that will be replayed."""
    steps: list[int] = []
    replay = GraphStep._replay

    def noted(self: GraphStep, *arguments: Any) -> Any:
        steps.append(self.state.step)
        return replay(self, *arguments)

    monkeypatch.setattr(GraphStep, "_replay", noted)
    return steps


def figures(run: Path) -> list[dict[str, Any]]:
    """What each step computed, the parts of its loss included, without how long it took."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    computed = re.compile(r"step|lr|epoch|grad_norm|.*(loss|error|code_rate)")
    return [{k: v for k, v in line.items() if computed.fullmatch(k)} for line in lines if "loss" in line]


def assert_same(run: Path, other: Path) -> None:
    """Losses and norms of every step, weights, their moving average and the optimizer's state."""
    assert figures(run) == figures(other)
    last = run / "checkpoints/last"
    files = [path.relative_to(run) for path in last.rglob("*.safetensors") if "rng" not in path.name]
    assert files
    for file in files:
        left, right = load_file(run / file), load_file(other / file)
        assert left.keys() == right.keys()
        assert [name for name in left if not torch.equal(left[name], right[name])] == [], file
