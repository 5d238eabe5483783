"""`flexor data split`, `merge`, `delete`, `tasks` and `trim`: edit datasets."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flexor.core.console import print_result, progress, table
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser

VERBS = ("split", "merge", "delete", "tasks", "trim")
LISTED = "indices and half-open ranges such as 0,1,5:9 or 10:, or @FILE with a JSON list"
COPIED = "Nothing is re-encoded, and the original is not changed."
ROOT = "folder, Hub repository or fsspec address of the dataset"


def add_verbs(verbs: Any) -> None:
    """Add the parsers of these verbs."""
    _add_split(verbs)
    _add_merge(verbs)
    _add_delete(verbs)
    _add_tasks(verbs)
    _add_trim(verbs)


def _verb(verbs: Any, name: str, text: str, more: str = "") -> Any:
    description = " ".join(part for part in (f"{text}.", more, COPIED) if part)
    verb = verbs.add_parser(name, help=text, description=description, allow_abbrev=False)
    verb.add_argument("--dry-run", action="store_true", help="report what would be done, but write nothing")
    verb.add_argument("--json", action="store_true", help="print one JSON object")
    return verb


def _add_split(verbs: Any) -> None:
    more = "Name each part and its share: --train 0.9 --val 0.1, or --train rest --val 20, or --test 3,5:9."
    verb = _verb(verbs, "split", "divide a dataset into several, by episodes", more)
    verb.usage = (
        "flexor data split [-h] [--seed N] [--dry-run] [--json] ROOT OUT --NAME SHARE [--NAME SHARE ...]"
    )
    verb.add_argument("root", help=ROOT)
    verb.add_argument("out", type=Path, help="folder for the parts: OUT/NAME is a dataset")
    verb.add_argument("--seed", type=int, metavar="N", help="choose episodes at random instead of in order")


def _add_merge(verbs: Any) -> None:
    text = "put the episodes of several datasets with equal features into one"
    verb = _verb(verbs, "merge", text, "Equal tasks become one.")
    verb.add_argument("roots", nargs="+", metavar="ROOT", help=ROOT)
    verb.add_argument("out", type=Path, help="folder for the new dataset")
    verb.add_argument("--robot-type", metavar="NAME", help="the robot, if the datasets name different ones")


def _add_delete(verbs: Any) -> None:
    verb = _verb(verbs, "delete", "copy a dataset without some of its episodes")
    verb.add_argument("root", help=ROOT)
    verb.add_argument("out", type=Path, help="folder for the new dataset")
    verb.add_argument("--episodes", metavar="LIST", required=True, help=f"episodes to leave out: {LISTED}")


def _add_tasks(verbs: Any) -> None:
    more = "Without OUT, list the tasks."
    verb = _verb(verbs, "tasks", "rename tasks, or set those of episodes, in a copy of a dataset", more)
    verb.add_argument("root", help=ROOT)
    verb.add_argument("out", type=Path, nargs="?", help="folder for the new dataset")
    rename = "give a task another text; two tasks with the same text become one. May be repeated"
    verb.add_argument("--rename", action="append", default=[], metavar="OLD=NEW", help=rename)
    setting = f"set the task of all frames of these episodes: {LISTED}. May be repeated"
    verb.add_argument("--set", action="append", default=[], metavar="LIST=TASK", help=setting)


def _add_trim(verbs: Any) -> None:
    more = "Idle are the frames before the state or the action moves, and those after it has moved."
    verb = _verb(verbs, "trim", "cut idle beginnings and ends off episodes", more)
    verb.add_argument("root", help=ROOT)
    verb.add_argument(
        "out", type=Path, nargs="?", help="folder for the new dataset; not needed for --dry-run"
    )
    verb.add_argument("--episodes", metavar="LIST", help=f"cut only these, and copy the others: {LISTED}")
    verb.add_argument(
        "--threshold",
        type=float,
        default=0.02,
        metavar="FRACTION",
        help="smallest motion, as a fraction of each value's range in the dataset (default: 0.02)",
    )
    verb.add_argument(
        "--keep",
        type=float,
        default=0.5,
        metavar="SECONDS",
        help="idle time that stays before and after the motion (default: 0.5)",
    )
    verb.add_argument(
        "--features",
        metavar="NAMES",
        help="the values that show motion (default: observation.state,action, as far as the dataset has them)",
    )


def shares(
    parser: OptionParser,
    parsed: argparse.Namespace,
    words: Sequence[str],
    arguments: Sequence[str],
) -> dict[str, str]:
    """The parts of `split` and their shares, from the flags that no parser knows. Other verbs have none."""
    if parsed.verb != "split":
        parser.refuse(parsed, words)
    written = {word.partition("=")[0].replace("_", "-"): word.partition("=")[0] for word in arguments}
    result: dict[str, str] = {}
    rest = list(words)
    while rest:
        flag, equals, share = rest.pop(0).partition("=")
        if not flag.startswith("--") or not (equals or rest):
            parser.error(f"{flag} has no value. Name a part and its share: --train 0.9")
        name = written.get(flag, flag)[2:]
        if name in result:
            parser.error(f"--{name} is given twice")
        result[name] = share if equals else rest.pop(0)
    return result


def run(parsed: argparse.Namespace, parts: dict[str, str], local: Callable[[str], Path]) -> int:
    """Edit. `local` gives the folder of a dataset on this machine."""
    from flexor.data.edit import edit
    from flexor.data.edit.trim import TrimSettings

    roots = [local(root) for root in (parsed.roots if parsed.verb == "merge" else [parsed.root])]
    common: dict[str, Any] = {"dry_run": parsed.dry_run, "progress": progress("copying")}
    if parsed.verb == "split":
        report = edit.split_dataset(roots[0], parsed.out, parts, parsed.seed, **common)
    elif parsed.verb == "merge":
        report = edit.merge_datasets(roots, parsed.out, parsed.robot_type, **common)
    elif parsed.verb == "delete":
        report = edit.delete_episodes(roots[0], parsed.out, parsed.episodes, **common)
    elif parsed.verb == "tasks":
        if parsed.out is None:
            return _list_tasks(parsed, roots[0])
        report = edit.retask(roots[0], parsed.out, parsed.rename, parsed.set, **common)
    else:
        if parsed.out is None and not parsed.dry_run:
            raise ConfigError("Name a folder for the new dataset, or list what would be cut with --dry_run.")
        features = parsed.features and tuple(parsed.features.strip("[]").split(","))
        settings = TrimSettings(parsed.threshold, parsed.keep, features)
        report = edit.trim_dataset(roots[0], parsed.out, settings, parsed.episodes, **common)
    print_result(report.to_json(), parsed.json, str(report))
    return 0 if report.ok else 1


def _list_tasks(parsed: argparse.Namespace, root: Path) -> int:
    from flexor.data.edit.edit import tasks_table

    if parsed.rename or parsed.set:
        raise ConfigError("Name a folder for the new dataset: the original is not changed.")
    tasks = tasks_table(root)
    rows = [("episodes", "task"), *((str(count), task) for task, count in tasks)]
    result = {"root": str(root), "tasks": [{"task": task, "episodes": count} for task, count in tasks]}
    print_result(result, parsed.json, table(rows))
    return 0
