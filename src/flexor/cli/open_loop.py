"""`flexor eval --open_loop`: the policy's predictions beside recorded actions, without a robot or an environment."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.core.console import print_result, progress
from flexor.core.errors import ConfigError
from flexor.core.log import log

if TYPE_CHECKING:
    from flexor.config.schema import TrainConfig
    from flexor.data.dataset import Dataset

GROUPS = ("dataset", "policy")
WITHOUT_EFFECT = ("env", "eval")
TOP_LEVEL = ("seed", "rename_map")
HELD_OUT = 0.2  # share of episodes, where a run held out none


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("without a robot")
    add = group.add_argument
    add(
        "--open_loop",
        "--open-loop",
        action="store_true",
        help="compare predictions with the recorded actions of episodes that training held out, or of those that "
        "--dataset.episodes names, and write a page",
    )
    add(
        "--samples",
        type=int,
        metavar="N",
        help="number of frames for which the policy predicts (default: 200)",
    )
    add("--output", type=Path, metavar="FILE", help="the page (default: open_loop.html)")
    add(
        "--errors_only",
        "--errors-only",
        action="store_true",
        help="only compute errors: skip the checks of the policy's inputs and of the data, which takes less time",
    )


def run(path: str, settings: list[str], parsed: argparse.Namespace) -> int:
    from flexor.config.parse import DATASETS, parse_flags
    from flexor.evaluate.data_fit.check_fit import check_fit
    from flexor.evaluate.data_fit.trained_on import read_trained_on
    from flexor.evaluate.open_loop.open_loop import SAMPLES, DataEvidence, as_json, render, run_open_loop
    from flexor.evaluate.open_loop.page import write_open_loop
    from flexor.pages.page import check_writable
    from flexor.policies.pretrained import find_folder

    if parsed.samples is not None and parsed.samples < 1:
        raise ConfigError(f"--samples={parsed.samples}: at least one is needed.")
    output = parsed.output or Path("open_loop.html")
    check_writable(output)
    folder = find_folder(path)
    config = _config(folder, settings)
    dataset, reference, note = _episodes(config, bool(DATASETS & parse_flags(settings).keys()))
    trained = read_trained_on(str(folder))
    fit = check_fit(dataset, trained, config.rename_map or trained.rename_map)
    result = run_open_loop(
        _load(folder, config),
        dataset,
        reference=reference,
        evidence=DataEvidence(fit.findings, [*trained.tasks], fit.sizes),
        count=parsed.samples or SAMPLES,
        seed=config.seed,
        inputs=not parsed.errors_only,
        progress=progress("looking for faults"),
    )
    write_open_loop(result, output, str(path), [note] if note else [])
    report = {"policy": str(folder), "file": str(output), "note": note, **as_json(result)}
    lines = [render(result), f"wrote {output}"]
    print_result(report, parsed.json, "\n".join([f"note: {note}", *lines] if note else lines))
    return 0


def _config(folder: Path, settings: list[str]) -> TrainConfig:
    """The settings of a training with this policy: those of its run, and the given ones, which override."""
    from flexor.config.parse import DATASETS, config_from_flags, parse_flags
    from flexor.core.typed import closest

    flags = parse_flags(settings)
    for key in [key for key in flags if key.split(".")[0] in WITHOUT_EFFECT]:
        log.warning("--%s=%s has no effect with --open_loop: nothing is played", key, flags.pop(key))
    for key in flags:
        if key.split(".")[0] not in GROUPS and key not in TOP_LEVEL:
            valid = [*(f"{group}." for group in GROUPS), *TOP_LEVEL]
            raise ConfigError(f"--open_loop: unknown setting {key}={flags[key]!r}. {closest(key, valid)}")
    saved = {} if DATASETS & flags.keys() else _saved_dataset(folder)
    if not DATASETS & flags.keys() and not saved:
        raise ConfigError(
            f"{folder} does not say which data it was trained on: name a dataset with --dataset.root=DIR or "
            "--dataset.repo_id=NAME."
        )
    if "dataset.episodes" in flags:
        saved = {key: value for key, value in saved.items() if key != "dataset.eval_split"}
    return config_from_flags({**saved, "policy_path": str(folder), **flags})


def _saved_dataset(folder: Path) -> dict[str, Any]:
    """The settings of the data of the run that contains the policy, or of LeRobot's, beside it."""
    from flexor.config.parse import flatten, read_run
    from flexor.core.foreign_files import read_json_object
    from flexor.core.run_files import RUN_CONFIG

    run_folder = next((p for p in folder.absolute().parents[:3] if (p / RUN_CONFIG).is_file()), None)
    if run_folder is not None:
        flat = flatten(read_run(run_folder))
        return {
            key: value for key, value in flat.items() if key.startswith("dataset.") or key == "rename_map"
        }
    file = folder / "train_config.json"
    saved: Mapping[str, Any] = read_json_object(file).get("dataset") or {} if file.is_file() else {}
    keys = ("repo_id", "root", "revision", "episodes")
    return {f"dataset.{key}": saved[key] for key in keys if saved.get(key) is not None}


def _episodes(config: TrainConfig, is_other: bool) -> tuple[Dataset, Dataset, str]:
    """The episodes to compare with, those that means are computed of, and what to know about them.

    `is_other`: the dataset is not that of the run, so that all of its episodes are new.
    """
    from flexor.train.datasets import build_datasets, split_episodes

    training, held_out = build_datasets(config.dataset)
    if held_out is not None:
        return held_out, training, ""
    if is_other or config.dataset.episodes is not None or len(training.episodes) < 5:
        return training, training, ""
    rest, last = split_episodes(training, HELD_OUT)
    note = (
        f"no episode was held out in training (--dataset.eval_split): these are the last {len(last)}, which the "
        "policy may have been trained on"
    )
    return training.select(last), training.select(rest), note


def _load(folder: Path, config: TrainConfig) -> Any:
    from flexor.core.devices import find_device
    from flexor.policies.pretrained import load_pretrained
    from flexor.policies.processing.rename_and_move import with_renaming

    pretrained = load_pretrained(str(folder), str(find_device(config.policy.device)))
    if config.rename_map:
        pretrained.preprocessor = with_renaming(pretrained.preprocessor, config.rename_map)
    return pretrained
