"""`flexor push`: push a run to the Hugging Face Hub."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from flexor.cli.flags import dashed
from flexor.core.console import print_result
from flexor.core.option_parser import OptionParser


def run(arguments: list[str]) -> int:
    parser = OptionParser(
        prog="flexor push",
        description="Push the policy of a run to the Hugging Face Hub, with a model card, its settings and metrics. "
        "After an interruption, run it again: what is already on the Hub is not uploaded again.",
    )
    parser.add_argument(
        "run", type=Path, help="run folder (its newest checkpoint is pushed) or checkpoint folder"
    )
    add_repository_flags(parser, "policy.repo_id of the run")
    parser.add_argument(
        "--checkpoints",
        action="store_true",
        help="also push all checkpoints of the run that are not on the Hub yet, so that it can be resumed with "
        "`flexor resume hub:USER/NAME`",
    )
    parsed = parser.parse_args(dashed(arguments))
    result, text = push_run(parsed)
    print_result(result, parsed.json, text)
    return 0


def add_repository_flags(parser: Any, default: str | None = None) -> None:
    """The flags that describe a repository. `default`: what --repo-id is by default; None: it is an argument."""
    if default is not None:
        parser.add_argument(
            "--repo-id", metavar="USER/NAME", help=f"repository on the Hub (default: {default})"
        )
    parser.add_argument(
        "--private", action="store_true", default=None, help="make the repository private, if it is new"
    )
    parser.add_argument(
        "--tags",
        type=lambda text: [word.strip() for word in text.strip("[]").split(",") if word.strip()],
        metavar="A,B",
        help="additional tags for the card",
    )
    parser.add_argument("--license", help="license in the card (default: apache-2.0)")
    parser.add_argument(
        "--dry-run", action="store_true", help="show the card and the list of files, but upload nothing"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def push_run(parsed: argparse.Namespace) -> tuple[dict[str, Any], str]:
    """Push, and what to print about it."""
    from flexor.core.console import progress
    from flexor.core.hub_errors import persist
    from flexor.train.checkpoint import folder as checkpoint
    from flexor.train.checkpoint.export import export, find_checkpoint
    from flexor.train.hub.upload import RunOnHub, policy_files, settings_of

    newest = find_checkpoint(parsed.run)
    folder = newest.resolve().parents[1]
    settings = {name: getattr(parsed, name) for name in ("repo_id", "private", "tags", "license")}
    hub = RunOnHub(folder, settings_of(folder, **settings))
    about: dict[str, Any] = {
        "repo_id": hub.settings.repo_id,
        "url": hub.repository.url,
        "checkpoint": newest.name,
    }
    if parsed.dry_run:
        card = hub.card(int(newest.name), parsed.checkpoints)
        files = ["README.md", *policy_files(newest)]
        return about | {"dry_run": True, "files": files, "card": card}, card
    export(newest)
    task = f"pushing {folder}"
    persist(task, hub.prepare)
    earlier = persist(task, hub.missing) if parsed.checkpoints else []
    for source in earlier:
        checkpoint.verify(source)
    for source in [*(f for f in earlier if f.name != newest.name), newest]:
        commit = persist(
            task,
            lambda source=source: hub.push(  # type: ignore[misc]
                source, source.name, parsed.checkpoints, progress=progress(f"uploading {source.name}")
            ),
        )
    about |= {"commit": commit, "checkpoints": [f.name for f in earlier]}
    return about, f"pushed checkpoint {newest.name} of {folder} to {hub.repository.url}"
