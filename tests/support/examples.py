"""Settings of `examples/`, which may start from a published policy: the same without a network."""

from __future__ import annotations

from pathlib import Path

import yaml

FOLDER = Path(__file__).parents[2] / "examples"
PUBLISHED = {
    "lerobot/smolvla_base": "smolvla",
    "lerobot/pi0_base": "pi0",
    "lerobot/pi05_base": "pi05",
    "lerobot/pi0fast-base": "pi0_fast",
    "lerobot/xvla-base": "xvla",
}


def policy_of(file: Path) -> str:
    policy = yaml.safe_load(file.read_text())["policy"]
    return policy["type"] if "type" in policy else PUBLISHED[policy["path"]]


def as_new_policy(file: Path, folder: Path) -> Path:
    """A copy that begins with a new policy of its type instead of a published one."""
    settings = yaml.safe_load(file.read_text())
    settings["policy"].pop("path", None)
    settings["policy"]["type"] = policy_of(file)
    copy = folder / file.name
    copy.write_text(yaml.safe_dump(settings))
    return copy
