"""The card of a dataset on the Hub: what is in it, and how to use it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import yaml

from flexor.core.hub import LICENSE, MADE_BY
from flexor.core.published import published
from flexor.core.secrets import redacted
from flexor.core.text import markdown

VIEWER = "https://huggingface.co/spaces/lerobot/visualize_dataset?path="
TASKS = 20  # that are listed


def dataset_card(
    info: dict[str, Any],
    tasks: Sequence[str],
    repo_id: str,
    license: str | None = None,
    tags: Sequence[str] | None = None,
) -> str:
    """`info` is the content of meta/info.json. Its texts, and the tasks, may be a stranger's: they stay texts."""
    info = published(info)
    front = {
        "license": license or LICENSE,
        "task_categories": ["robotics"],
        "tags": list(dict.fromkeys(["LeRobot", *(tags or [])])),
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    parts = [
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---",
        MADE_BY,
        f"# {repo_id}",
        f"Demonstrations of a robot as a [LeRobot](https://github.com/huggingface/lerobot) dataset, "
        f"format {markdown(str(info.get('codebase_version')))}. [Watch the episodes]({VIEWER}{repo_id}).",
        _contents(info),
        _tasks(tasks),
        "## Train on it\n\n```console\n"
        f"flexor train --policy.type=act --dataset.repo_id={repo_id} --output_dir=runs/act\n"
        f"lerobot-train --policy.type=act --dataset.repo_id={repo_id} --policy.push_to_hub=false\n```",
        f"## meta/info.json\n\n```json\n{json.dumps(info, indent=2)}\n```",
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _contents(info: dict[str, Any]) -> str:
    features = info.get("features", {})
    cameras = [name for name, f in features.items() if f.get("dtype") in ("video", "image")]
    rows = {
        "robot": info.get("robot_type"),
        "episodes": info.get("total_episodes"),
        "frames": info.get("total_frames"),
        "frames per second": info.get("fps"),
        "cameras": ", ".join(f"{name} {features[name].get('shape')}" for name in cameras),
        "action": features.get("action", {}).get("shape"),
        "state": features.get("observation.state", {}).get("shape"),
    }
    lines = [f"| {name} | {markdown(str(value))} |" for name, value in rows.items() if value]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def _tasks(tasks: Sequence[str]) -> str:
    if not tasks:
        return ""
    more = [f"- and {len(tasks) - TASKS} more"] if len(tasks) > TASKS else []
    lines = [f"- {markdown(' '.join(redacted(task).split()))}" for task in tasks[:TASKS]]
    return "\n".join(["## Tasks", "", *lines, *more])
