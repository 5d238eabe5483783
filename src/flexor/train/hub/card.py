"""The model card of a run: what was trained on what, how well, how it compares with the plan, and how to load it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import yaml

from flexor.config.parse import read_run
from flexor.core.hub import LICENSE, MADE_BY
from flexor.core.machine import gigabytes
from flexor.core.model_files import is_repo_id
from flexor.core.published import published
from flexor.core.run_files import METRICS
from flexor.core.text import markdown
from flexor.policies.external import is_code, short_name
from flexor.runs.jsonl import GrowingLines
from flexor.sim.record import BUILTIN
from flexor.train.checkpoint.run_record import read_record

SETTINGS = (
    ("steps", "optimizer steps"),
    ("batch_size", "samples per process and pass"),
    ("global_batch_size", "samples per step"),
    ("optimizer.type", "optimizer"),
    ("optimizer.lr", "learning rate"),
    ("scheduler.type", "schedule"),
    ("precision", "precision"),
    ("ema.enable", "moving average of the weights"),
    ("lora.r", "rank of the adapters (LoRA)"),
    ("seed", "seed"),
)


def model_card(
    run: Path,
    step: int,
    repo_id: str,
    license: str | None = None,
    tags: Sequence[str] | None = None,
    checkpoints: bool = False,
) -> str:
    """`checkpoints`: whether the repository has the whole checkpoint, so that the run can be resumed from it."""
    settings, record = published(read_run(run)), published(read_record(run))
    kind = str(settings["policy"]["type"])
    title, dataset = markdown(short_name(kind)), record.get("dataset") or {}
    trained_on = dataset.get("name") or settings["dataset"].get("repo_id") or "a local dataset"
    parts = [
        _front_matter(settings, kind, license, tags),
        MADE_BY,
        f"# {title}, trained on {markdown(trained_on)}",
        f"A robot policy of type {title}, trained with Flexor on {_linked(trained_on)}: step {step} of "
        f"{settings['steps']}.",
        _how_to_load(kind, repo_id, checkpoints),
        _section("Data", _data(dataset, settings)),
        _section("Settings", _settings(settings), "All settings are in `config.yaml`."),
        _section("Metrics", _metrics(run, step), "All metrics are in `metrics.jsonl`."),
        _section("Plan and reality", _plan(record.get("plan") or {})),
        _section("Where", _machine(record.get("machine") or {})),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(
    settings: dict[str, Any], kind: str, license: str | None, tags: Sequence[str] | None
) -> str:
    dataset, base = settings["dataset"].get("repo_id"), settings.get("policy_path")
    values: dict[str, Any] = {
        "license": license or LICENSE,
        "library_name": "lerobot",
        "pipeline_tag": "robotics",
        "tags": list(dict.fromkeys(["robotics", "lerobot", "flexor", short_name(kind), *(tags or [])])),
    }
    if _on_hub(dataset):
        values["datasets"] = [dataset]
    if base and not Path(base).exists() and is_repo_id(base.partition("@")[0]):
        values["base_model"] = base.partition("@")[0]
    return f"---\n{yaml.safe_dump(values, sort_keys=False)}---"


def _on_hub(dataset: Any) -> bool:
    return isinstance(dataset, str) and is_repo_id(dataset) and dataset not in BUILTIN


def _linked(dataset: str) -> str:
    url = f"https://huggingface.co/datasets/{dataset}"
    return f"[{dataset}]({url})" if _on_hub(dataset) else markdown(dataset)


WITH_FLEXOR = """\
## Load it

With Flexor:

```python
from flexor import load_pretrained

policy = load_pretrained("{repo_id}", device="cuda"{overrides})
actions = policy.chunk(observation, task=[...])  # [robots, steps, action], in the robot's units
```

```console
flexor eval {repo_id} --env.type=...
flexor train --policy.path={repo_id} --dataset.repo_id=... --output_dir=...
{resume}```"""
WITH_LEROBOT = """

With LeRobot:

```python
from lerobot.policies.factory import get_policy_class, make_pre_post_processors

policy = get_policy_class("{kind}").from_pretrained("{repo_id}")
before, after = make_pre_post_processors(policy.config, pretrained_path="{repo_id}")
```

```console
lerobot-train --policy.path={repo_id} --dataset.repo_id=... --policy.push_to_hub=false
```"""


def _how_to_load(kind: str, repo_id: str, checkpoints: bool) -> str:
    resume = f"flexor resume hub:{repo_id}\n" if checkpoints else ""
    if not is_code(kind):
        return (WITH_FLEXOR + WITH_LEROBOT).format(repo_id=repo_id, kind=kind, resume=resume, overrides="")
    overrides = f", overrides={{'type': 'FILE.py:{short_name(kind)}'}}"
    return WITH_FLEXOR.format(repo_id=repo_id, resume=resume, overrides=overrides)


def _section(title: str, rows: Iterable[tuple[str, Any]], note: str = "") -> str:
    rows = [(name, value) for name, value in rows if value not in (None, "", [])]
    if not rows:
        return ""
    table = "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {_cell(value)} |" for name, value in rows)])
    return f"## {title}\n\n{table}" + (f"\n\n{note}" if note else "")


def _cell(value: Any) -> str:
    return markdown(", ".join(map(str, value)) if isinstance(value, list) else str(value))


def _data(dataset: dict[str, Any], settings: dict[str, Any]) -> list[tuple[str, Any]]:
    selection = settings["dataset"].get("episodes")
    return [
        ("dataset", dataset.get("name")),
        ("revision", settings["dataset"].get("revision")),
        ("episodes", dataset.get("episodes")),
        ("which episodes", "a selection: see config.yaml" if selection else None),
        ("frames", dataset.get("frames")),
        ("frames per second", dataset.get("fps")),
        ("robot", dataset.get("robot_type")),
        ("cameras", dataset.get("cameras")),
        ("tasks", dataset.get("tasks")),
    ]


def _settings(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    rows = []
    for key, text in SETTINGS:
        value: Any = settings
        for name in key.split("."):
            value = value.get(name) if isinstance(value, dict) else None
        rows.append((text, None if value in (False, 0) and key != "seed" else value))
    return rows


def _metrics(run: Path, step: int) -> list[tuple[str, Any]]:
    """The newest value of each metric up to this step."""
    newest: dict[str, tuple[float, int]] = {}
    for values in GrowingLines(run / METRICS).read()[1]:
        for name, value in values.items():
            if isinstance(value, int | float) and values.get("step", step + 1) <= step:
                newest[name] = (value, values["step"])
    names = ("loss", "held_out_loss", "samples_per_s", "epoch", *(n for n in newest if n.startswith("eval_")))
    return [(n, f"{newest[n][0]:.5g} (step {newest[n][1]})") for n in names if n in newest]


def _plan(plan: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if {"planned_allocated_bytes", "allocated_bytes"} <= {*plan}:  # the second comes with the end of the run
        planned, measured = (gigabytes(int(plan[k])) for k in ("planned_allocated_bytes", "allocated_bytes"))
        rows.append(("peak memory per GPU", f"{planned} planned, {measured} measured"))
    if {"planned_step_s", "step_s"} <= {*plan}:
        planned, measured = (f"{1e3 * plan[k]:.0f} ms" for k in ("planned_step_s", "step_s"))
        rows.append(("time per step", f"{planned} planned, {measured} measured"))
    return rows


def _machine(machine: dict[str, Any]) -> list[tuple[str, Any]]:
    if not machine:
        return []
    return [
        ("device", f"{machine['processes']} x {machine['device']}"),
        ("strategy", machine["strategy"] if machine["processes"] > 1 else None),
        ("precision", machine["precision"]),
        ("versions", f"flexor {machine['flexor']}, torch {machine['torch']}"),
    ]
