"""`flexor data`: inspect, check, repair and decode datasets."""

from __future__ import annotations

import argparse
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.cli import augmented, edit
from flexor.cli.flags import dashed
from flexor.cli.push import add_repository_flags
from flexor.core.console import RED, YELLOW, print_json, print_result, progress
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.findings import ERROR
from flexor.core.log import log
from flexor.core.option_parser import OptionParser
from flexor.core.output_paths import check_output_file, check_output_folder
from flexor.core.typed import Text, coerce

if TYPE_CHECKING:
    from flexor.data.check.report import CheckReport

SEVERITIES = {r"^ *ERROR\b": RED, r"^ *WARNING\b": YELLOW}
LISTED = "indices and half-open ranges such as 0,1,5:9, or @FILE with a JSON list"


def run(arguments: list[str]) -> int:
    from flexor.data.loader import cache_flags

    parser = OptionParser(
        prog="flexor data", description="Inspect, check and repair a dataset before training on it."
    )
    verbs = parser.add_subparsers(dest="verb", required=True)
    _add_readers(verbs)
    _add_show(verbs)
    _add_repair(verbs)
    edit.add_verbs(verbs)
    _add_tokenizer(verbs)
    _add_push(verbs)
    cache_flags.add_verb(verbs)
    parsed, settings = parser.parse_known_args(dashed(arguments))
    if getattr(parsed, "augmented", None):
        return augmented.run(parsed, _address(parsed.root), settings)
    if parsed.verb in edit.VERBS:
        return edit.run(parsed, edit.shares(parser, parsed, settings, arguments), _local)
    parser.refuse(parsed, settings)
    verbs_run = {
        "info": _info,
        "check": _check,
        "stats": _stats,
        "show": _show,
        "repair": _repair,
        "tokenizer": _tokenizer,
        "push": _push,
        "cache": _cache,
    }
    return verbs_run[parsed.verb](parsed)


def _add_readers(verbs: Any) -> None:
    for name, text in (
        ("info", "describe a dataset"),
        ("check", "find problems in a dataset; the exit code is 1 if there are any"),
        ("stats", "compute a dataset's statistics"),
    ):
        verb = verbs.add_parser(name, help=text, description=text)
        verb.add_argument("root", help="folder, Hub repository or fsspec address of the dataset")
        verb.add_argument("--json", action="store_true", help="print one JSON object")
        if name == "check":
            verb.add_argument("--quick", action="store_true", help="do not decode the videos")
            verb.add_argument(
                "--good-episodes",
                type=Path,
                help="write the list of good episodes to this file, for --dataset.episodes=@FILE",
            )
            verb.add_argument(
                "--policy.path",
                "--policy-path",
                dest="policy",
                metavar="POLICY",
                help="also check whether the data fits this policy: a run, a checkpoint or a Hub repository",
            )
            _add_rename_map(verb)
        if name == "stats":
            verb.add_argument(
                "--write",
                action="store_true",
                help="write the statistics to meta/stats.json, and back up the previous ones beside it",
            )
            verb.add_argument("--episodes", metavar="LIST", help=f"only these episodes: {LISTED}")
            verb.add_argument(
                "--exclude_episodes", "--exclude-episodes", metavar="LIST", help=f"without these: {LISTED}"
            )
            verb.add_argument(
                "--on_bad_episode",
                "--on-bad-episode",
                choices=("raise", "skip"),
                default="raise",
                help="skip: leave out episodes that can't be read, and name them (default: raise an error)",
            )


def _add_show(verbs: Any) -> None:
    text = "write one HTML page about a dataset: filmstrips, curves, statistics and problems"
    verb = verbs.add_parser("show", help=text, description=f"{text}. The page needs no network.")
    verb.add_argument("root", help="folder, Hub repository or fsspec address of the dataset")
    verb.add_argument("--episodes", "--episode", metavar="LIST", help=f"show only these episodes: {LISTED}")
    verb.add_argument(
        "--output", type=Path, metavar="FILE", help="the page; default: the dataset's name with .html"
    )
    verb.add_argument(
        "--max-mb", type=float, default=20, help="largest size of the page, in MB (default: 20)"
    )
    verb.add_argument("--deep", action="store_true", help="decode every frame for the check")
    verb.add_argument(
        "--terminal",
        action="store_true",
        help="instead of writing a page, draw the episodes (default: the first one) in this terminal",
    )
    verb.add_argument(
        "--graphics",
        choices=("auto", "kitty", "iterm2", "sixel", "blocks"),
        default="auto",
        help="how --terminal draws images (default: auto, the best that the terminal supports; blocks work everywhere)",
    )
    augmented.add_flags(verb)
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def _add_repair(verbs: Any) -> None:
    text = "write the good and the repairable episodes of a dataset to a new one, in format v3.0"
    verb = verbs.add_parser("repair", help=text, description=f"{text}. The original is not changed.")
    verb.add_argument("root", help="folder, Hub repository or fsspec address of the dataset")
    verb.add_argument("out", type=Path, help="folder for the new dataset")
    verb.add_argument("--episodes", metavar="LIST", help=f"keep only these episodes: {LISTED}")
    verb.add_argument(
        "--exclude_episodes", "--exclude-episodes", metavar="LIST", help=f"leave out these episodes: {LISTED}"
    )
    _add_rename_map(verb)
    verb.add_argument("--quick", action="store_true", help="decode only the frames that the statistics need")
    verb.add_argument("--dry-run", action="store_true", help="report what would be done, but write nothing")
    verb.add_argument("--json", action="store_true", help="print one JSON object, episode by episode")


def _add_tokenizer(verbs: Any) -> None:
    text = "train a FAST tokenizer on a dataset's actions, for pi0_fast"
    verb = verbs.add_parser("tokenizer", help=text, description=text)
    verb.add_argument("root", help="folder, Hub repository or fsspec address of the dataset")
    verb.add_argument(
        "--output", type=Path, required=True, metavar="FOLDER", help="new folder for the tokenizer"
    )
    _add_rename_map(verb)
    verb.add_argument("--chunk-size", type=int, default=50, help="steps of a chunk, as policy.chunk_size")
    verb.add_argument(
        "--normalization",
        choices=("MEAN_STD", "QUANTILES", "QUANTILE10", "MIN_MAX", "IDENTITY"),
        default="MEAN_STD",
        help="how the policy normalises actions (policy.normalization_mapping.ACTION)",
    )
    verb.add_argument("--use-relative-actions", action="store_true", help="as policy.use_relative_actions")
    verb.add_argument(
        "--relative-exclude-joints",
        type=lambda text: [word for word in text.strip("[]").split(",") if word],
        default=["gripper"],
        metavar="NAMES",
        help="as policy.relative_exclude_joints: gripper,wrist",
    )
    verb.add_argument("--vocab-size", type=int, default=1024, help="number of tokens")
    verb.add_argument(
        "--scale", type=float, default=10.0, help="larger: more accurate actions, and more tokens"
    )
    verb.add_argument("--fraction", type=float, default=0.1, help="part of all chunks to train on")
    verb.add_argument("--seed", type=int, default=0, help="which chunks are trained on")
    verb.add_argument("--json", action="store_true", help="print one JSON object")


def _add_rename_map(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "--rename_map",
        "--rename-map",
        default="{}",
        metavar="NAMES",
        help="names of its features and other names for them, such as '{actions: action, state: observation.state}'",
    )


def _add_push(verbs: Any) -> None:
    text = "push a dataset to the Hugging Face Hub"
    verb = verbs.add_parser(
        "push",
        help=text,
        description=f"{text}, in LeRobot's layout, with a card and the tag of its format. Run it again after an "
        "interruption: what is there already is not uploaded again.",
    )
    verb.add_argument("root", type=Path, help="folder of the dataset")
    verb.add_argument("repo_id", metavar="USER/NAME", help="repository on the Hub")
    add_repository_flags(verb)
    verb.add_argument(
        "--delete-extra",
        action="store_true",
        help="delete files of a dataset in the repository that this dataset does not have",
    )


def _info(parsed: argparse.Namespace) -> int:
    from flexor.data.check.info import describe, render

    info = describe(_local(parsed.root))
    print_result(info, parsed.json, render(info))
    return 0


def _check(parsed: argparse.Namespace) -> int:
    from flexor.data.check.check import check_dataset
    from flexor.data.repair.repair import repair_advice

    if parsed.good_episodes:
        check_output_file(parsed.good_episodes, "--good-episodes")
    report = check_dataset(_local(parsed.root), deep=not parsed.quick, progress=progress("checking"))
    if not report.ok:
        report.repair = repair_advice(report)
    if parsed.policy is not None:
        _check_fit(parsed, report)
    if parsed.good_episodes:
        report.write_good_episodes(parsed.good_episodes)
        log.info("%d good episodes listed in %s", len(report.good_episodes), parsed.good_episodes)
    print_result(report.to_json(), parsed.json, str(report), SEVERITIES)
    return 0 if report.ok else 1


def _check_fit(parsed: argparse.Namespace, report: CheckReport) -> None:
    """Add what the check of data and policy finds. Episodes that can't be read are left out."""
    from flexor.data.dataset import open_dataset
    from flexor.evaluate.data_fit.check_fit import check_fit
    from flexor.evaluate.data_fit.trained_on import read_trained_on

    trained = read_trained_on(parsed.policy)
    names = {**trained.rename_map, **coerce(Text(parsed.rename_map), dict[str, str], "--rename_map")}
    try:
        dataset = open_dataset(root=_local(parsed.root), on_bad_episode="skip")
    except DatasetError as error:
        raise ConfigError(
            f"--policy.path: the data can't be compared with that of the policy: {error}"
        ) from error
    for finding in check_fit(dataset, trained, names).findings:
        kind = finding.name.replace(" ", "-")
        add = report.error if finding.severity == ERROR else report.warning
        add(kind, finding.evidence, finding.fix)


def _show(parsed: argparse.Namespace) -> int:
    from flexor.data.format.episode_list import parse_episodes

    episodes = None if parsed.episodes is None else parse_episodes(parsed.episodes, "--episodes")
    if parsed.terminal:
        from flexor.data.show.terminal import show_in_terminal

        if parsed.json or parsed.output:
            raise ConfigError("--terminal writes no page: leave out --json and --output.")
        show_in_terminal(_local(parsed.root), episodes, parsed.graphics)
        return 0
    from flexor.data.show.page import render, show_dataset
    from flexor.pages.page import check_writable

    name = parsed.root.rstrip("/").rpartition("/")[2] or "dataset"
    output = parsed.output or Path(f"{name}.html")
    check_writable(output)
    result = show_dataset(
        _local(parsed.root),
        output,
        episodes=episodes,
        limit=int(parsed.max_mb * 1e6),
        deep=parsed.deep,
        checking=progress("checking"),
        drawing=progress("drawing"),
    )
    print_result(result, parsed.json, render(result))
    return 0


def _repair(parsed: argparse.Namespace) -> int:
    from flexor.data.format.episode_list import parse_episodes
    from flexor.data.repair.repair import repair_dataset

    lists = {
        name: parse_episodes(text, f"--{name}")
        for name in ("episodes", "exclude_episodes")
        if (text := getattr(parsed, name)) is not None
    }
    report = repair_dataset(
        _local(parsed.root),
        parsed.out,
        episodes=lists.get("episodes"),
        exclude=lists.get("exclude_episodes", ()),
        decode=not parsed.quick,
        dry_run=parsed.dry_run,
        rename_map=coerce(Text(parsed.rename_map), dict[str, str], "--rename_map"),
        progress=progress("repairing"),
    )
    print_result(report.to_json(), parsed.json, str(report), SEVERITIES)
    return 0 if report.ok else 1


def _stats(parsed: argparse.Namespace) -> int:
    from flexor.data.dataset import open_dataset
    from flexor.data.format.stats import to_json, write_stats
    from flexor.data.statistics import compute_stats, in_stored_unit

    selection = {"episodes": parsed.episodes, "exclude_episodes": parsed.exclude_episodes}
    try:
        dataset = open_dataset(root=_local(parsed.root), on_bad_episode=parsed.on_bad_episode, **selection)
    except DatasetError as error:  # its advice names the flags of training
        raise DatasetError(str(error).replace("--dataset.", "--")) from error
    if parsed.write:
        check_output_file(dataset.root / "meta" / "stats.json", "--write")
    computed = compute_stats(dataset, None, progress("statistics"), parsed.on_bad_episode)
    stats = in_stored_unit(dataset, computed)
    if parsed.write:
        backup = write_stats(dataset.root, stats)
        log.info("wrote %s", dataset.root / "meta/stats.json")
        if backup is not None:
            log.info(
                "the earlier statistics are kept as %s. Runs that were trained with them resume with them, from their "
                "checkpoints; new runs use the new ones",
                backup,
            )
    print_json(to_json(stats), indent=None if parsed.json else 2)
    return 0


def _tokenizer(parsed: argparse.Namespace) -> int:
    from flexor.data.dataset import open_dataset
    from flexor.data.mixture.mixed import Member, join_datasets
    from flexor.policies.pi0_fast.train_tokenizer import (
        TokenizerSettings,
        render,
        save_tokenizer,
        tokenizer_of,
    )

    check_output_folder(parsed.output, "--output")
    if parsed.output.exists() and any(parsed.output.iterdir()):
        raise ConfigError(f"--output={parsed.output} is not empty: name a new folder.")
    names = [field.name for field in fields(TokenizerSettings) if hasattr(parsed, field.name)]
    settings = TokenizerSettings(**{name: getattr(parsed, name) for name in names})
    dataset = open_dataset(root=_local(parsed.root))
    if names := coerce(Text(parsed.rename_map), dict[str, str], "--rename_map"):
        dataset = join_datasets([Member(dataset.repo_id, dataset, rename_map=names)])
    tokenizer, report = tokenizer_of(dataset, settings, progress("reading actions"))
    save_tokenizer(tokenizer, report, parsed.output)
    print_result({"folder": str(parsed.output), **report}, parsed.json, render(report, parsed.output))
    return 0


def _push(parsed: argparse.Namespace) -> int:
    from flexor.data.push.push import plan_push, push_dataset

    if parsed.dry_run:
        plan = plan_push(parsed.root, parsed.repo_id, parsed.license, parsed.tags)
        files = [*plan.tables_and_videos, *plan.metadata]
        report = {"repo_id": parsed.repo_id, "dry_run": True, "files": files, "bytes": plan.bytes}
        text = (
            f"{plan.card}\n{len(files)} files, {plan.bytes / 1e6:.1f} MB would be pushed to {parsed.repo_id}"
        )
        print_result(report | {"card": plan.card}, parsed.json, text)
        return 0
    result = push_dataset(
        parsed.root,
        parsed.repo_id,
        parsed.private,
        parsed.license,
        parsed.tags,
        parsed.delete_extra,
        progress("comparing"),
        progress("uploading"),
    )
    text = "pushed {files} files ({uploaded_files} new) to {url}, tag {tag}".format(**result)
    print_result(result, parsed.json, text)
    return 0


def _cache(parsed: argparse.Namespace) -> int:
    from flexor.data.frames import cache_folders
    from flexor.data.loader import cache_flags

    cache_flags.check(parsed)
    if parsed.list:
        infos = cache_folders.list_caches()
        print_result({"caches": [info.to_json() for info in infos]}, parsed.json, cache_folders.render(infos))
        return 0
    if parsed.prune:
        removed = cache_folders.prune(
            older_than=parsed.older_than, limit_bytes=parsed.to, dataset=parsed.dataset, everything=parsed.all
        )
        nbytes = sum(info.nbytes for info in removed)
        report = {"removed": [info.to_json() for info in removed], "nbytes": nbytes}
        print_result(report, parsed.json, f"removed {len(removed)} caches, {nbytes / 1e9:.3f} GB")
        return 0
    return _build_cache(parsed)


def _build_cache(parsed: argparse.Namespace) -> int:
    from flexor.data.dataset import open_dataset
    from flexor.data.loader.precache import precache, render
    from flexor.data.settings import parse_image_size

    dataset = open_dataset(**_address(parsed.root), size=parse_image_size(parsed.size))
    result = precache(
        dataset,
        cameras=parsed.cameras,
        format=parsed.format or "raw",
        workers=parsed.workers,
        progress=progress("decoding"),
    )
    print_result(result, parsed.json, render(result))
    return 0 if result["complete"] else 1


def _local(root: str) -> Path:
    """The dataset's folder on this machine. A remote dataset is downloaded, the built-in one is recorded."""
    from flexor.data.format.metadata import read_metadata
    from flexor.data.storage.source import find_source

    address = _address(root)
    if "repo_id" not in address and "://" not in root:
        return Path(root)
    source = find_source(address.get("repo_id"), address.get("root"), None)
    names = read_metadata(source).episodes.files()
    source.fetch(names)
    report = progress("fetching")
    for done, name in enumerate(names, 1):
        if source.exists(name):  # `check` reports missing files
            source.local(name)
        report(done, len(names))
    return source.root


def _address(root: str) -> dict[str, Any]:
    """The arguments of `open_dataset` for a folder, a URL or a Hub repository."""
    from flexor.core.model_files import is_repo_id
    from flexor.sim.record import BUILTIN, builtin_dataset

    if root in BUILTIN:
        return {"repo_id": root, "root": builtin_dataset(root)}
    if is_repo_id(root) and not Path(root).exists():
        return {"repo_id": root}
    return {"root": root}
