"""The help of `flexor train`, made from the settings themselves."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from typing import Any

from flexor.config.schema import GROUPS, TrainConfig, group_type
from flexor.core.typed import field_types, help_texts, to_plain, type_name
from flexor.policies import BUILT_IN, policy_class
from flexor.policies.external import installed

WIDTH = 100
COLUMN = 34


def train_help(policy: str = "act") -> str:
    """Every setting with its type, default and one line of help, by group."""
    sections = [
        "usage: flexor train [--config FILE.yaml] [--key=value | --key value | key=value ...]",
        "",
        "Train a policy. Names are lerobot-train's; later settings override earlier ones. Without a dataset",
        "or a config file, Flexor trains on its built-in task. Write a key of a group with a dot:",
        "--optimizer.lr=1e-4.",
        "",
        _line("--config", "YAML or JSON file of settings, or the name of a built-in one: demo", "path", None),
        _line("--policy.path", "checkpoint folder or Hub repository to start from", "path", None),
        _line("--gpus", "number of GPUs on this machine, one process for each; or all", "number", None),
        _line("--processes", "number of processes, training on the CPU instead", "number", None),
        _line("--resume", "auto: resume the run in output_dir if there is one, else start it", "auto", None),
        _line("--verbose", "also log how frames are cached, decoded and shuffled", "flag", None),
        _line("--json", "print one JSON object about the finished run", "flag", None),
        "",
        "run",
        *_section(TrainConfig, "", skip={*GROUPS, "policy_path"}),
    ]
    for group in GROUPS:
        cls = policy_class(policy).Config if group == "policy" else group_type(group)
        title = f"policy ({policy}; --policy.type is {_types()})" if group == "policy" else group
        nested = {other.rpartition(".")[2] for other in GROUPS if other.startswith(f"{group}.")}
        sections += ["", title, *_section(cls, f"{group}.", nested)]
    return "\n".join(sections)


def _types() -> str:
    return f"{', '.join([*BUILT_IN, *installed()])} or path/to/file.py:CLASS"


def _section(cls: type, prefix: str, skip: Any = ()) -> list[str]:
    texts, types = help_texts(cls), field_types(cls)
    default = cls()
    return [
        _line(
            f"--{prefix}{f.name}", texts.get(f.name, ""), type_name(types[f.name]), getattr(default, f.name)
        )
        for f in dataclasses.fields(cls)
        if f.name not in skip
    ]


def _line(flag: str, text: str, kind: str, default: Any) -> str:
    plain = to_plain(default)
    default_text = (
        ""
        if plain in (None, {}, [])
        else f" (default {plain if isinstance(plain, str) else json.dumps(plain)})"
    )
    first = f"  {flag}"
    body = textwrap.wrap(f"{text} [{kind}]{default_text}", WIDTH - COLUMN)
    lines = [first.ljust(COLUMN) + body[0]] if len(first) < COLUMN - 1 else [first, " " * COLUMN + body[0]]
    return "\n".join(lines + [" " * COLUMN + line for line in body[1:]])
