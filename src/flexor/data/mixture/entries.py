"""The datasets that a run's settings name, and the settings of each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

from flexor.core.errors import ConfigError
from flexor.core.secrets import redacted
from flexor.core.typed import check_values
from flexor.data.format.episode_list import episode_setting, parse_episodes
from flexor.data.settings import DatasetConfig, DatasetEntry

# Settings that each dataset has of its own, so that they are ambiguous for several.
PER_DATASET = ("episodes", "exclude_episodes", "episode_weights", "rename_map")


def entries_of(config: DatasetConfig) -> list[DatasetEntry]:
    """The datasets of a run, named, in order. `tasks` apply to all of them that have none of their own."""
    entries = [replace(entry) for entry in config.mix] if config.mix is not None else _listed(config)
    if len(entries) == 1 and config.mix is None:
        overrides = {name: getattr(config, name) for name in PER_DATASET}
        entries = [replace(entries[0], **overrides)]
    names = _names(entries)
    if config.weights is not None:
        if len(config.weights) != len(entries):
            raise ConfigError(
                f"dataset.weights={config.weights} has {len(config.weights)} weights, but there are {len(entries)} "
                f"datasets: {', '.join(names)}. Give one weight for each."
            )
        entries = [replace(entry, weight=weight) for entry, weight in zip(entries, config.weights)]
    return [
        replace(entry, name=name, tasks=config.tasks if entry.tasks is None else entry.tasks)
        for entry, name in zip(entries, names)
    ]


def check_entries(config: DatasetConfig) -> None:
    """Raise an error for settings that contradict each other."""
    if config.mix is not None:
        if config.repo_id is not None or config.root is not None:
            raise ConfigError("dataset.mix replaces dataset.repo_id and dataset.root: give only one of them.")
        if not config.mix:
            raise ConfigError("dataset.mix is an empty list: name at least one dataset.")
    entries = entries_of(config)
    for number, entry in enumerate(entries):
        _check_entry(entry, f"dataset.mix[{number}]" if len(entries) > 1 else "dataset")
    if config.mix is not None or len(entries) > 1:
        _check_ambiguous(config, len(entries))
    unweighted = [str(entry.name) for entry in entries if entry.weight is None]
    if 0 < len(unweighted) < len(entries):
        raise ConfigError(f"Give each dataset a weight, or none: {', '.join(unweighted)} lack one.")
    names = [str(entry.name) for entry in entries]
    if config.save_stats_of is not None and config.save_stats_of not in names:
        raise ConfigError(
            f"dataset.save_stats_of={config.save_stats_of} is not one of the datasets: {', '.join(names)}."
        )


def absolute_roots(config: DatasetConfig) -> DatasetConfig:
    """The settings with absolute folders: a resume may start elsewhere."""

    def absolute(root: str) -> str:
        return root if "://" in root else str(Path(root).absolute())

    root = config.root and ",".join(map(absolute, _split(config.root)))
    mix = config.mix and [
        replace(entry, root=absolute(entry.root)) if entry.root else entry for entry in config.mix
    ]
    return replace(config, root=root, mix=mix)


def parse_episode_weights(text: str, count: int, where: str) -> dict[int, float]:
    """ "0:50=3,60=2" as the weight of each episode."""
    weights: dict[int, float] = {}
    for part in text.split(","):
        episodes, equals, number = (word.strip() for word in part.partition("="))
        try:
            weight = float(number) if equals else 0.0
        except ValueError:
            weight = 0.0
        if not 0 < weight < float("inf"):
            raise ConfigError(
                f"{where}={text}: {part.strip()!r} is not EPISODES=WEIGHT with a weight of more than 0. Write it as "
                "0:50=3,60=2."
            )
        weights |= dict.fromkeys(parse_episodes(episodes, where, count), weight)
    return weights


def _listed(config: DatasetConfig) -> list[DatasetEntry]:
    """The datasets of repo_id=a,b, root=c,d or both."""
    lists = {
        name: _split(value)
        for name in ("repo_id", "root", "revision")
        if (value := getattr(config, name)) is not None
    }
    count = max((len(lists.get(name, [])) for name in ("repo_id", "root")), default=0)
    for name, values in lists.items():
        if len(values) != count:
            listed = "; ".join(f"dataset.{key}={getattr(config, key)}" for key in lists)
            raise ConfigError(f"dataset.{name} names {len(values)} datasets, not {count}: {listed}.")
    unset: dict[str, list[str | None]] = {name: [None] * count for name in ("repo_id", "root", "revision")}
    return [DatasetEntry(*each) for each in zip(*({**unset, **lists}).values())]


def _split(text: str) -> list[str]:
    """The parts of a,b. A folder that has a comma in its name is one."""
    if "," not in text or Path(text).exists():
        return [text]
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise ConfigError(f"{text!r} names a dataset without a name: write a,b.")
    return parts


def _name(entry: DatasetEntry) -> str:
    root = redacted(str(entry.root)).rstrip("/")
    return redacted(entry.name or entry.repo_id or "") or Path(root).name or root


def _names(entries: list[DatasetEntry]) -> list[str]:
    names = [_name(entry) for entry in entries]
    counts = Counter(names)
    numbered: Counter[str] = Counter()
    for i, name in enumerate(names):
        if counts[name] > 1:  # the same dataset twice, as with other episodes
            numbered[name] += 1
            names[i] = f"{name} ({numbered[name]})"
    return names


def _check_entry(entry: DatasetEntry, where: str) -> None:
    check_values(entry, where)
    if entry.repo_id is None and entry.root is None:
        raise ConfigError(f"{where} names no dataset: give its repo_id or its root.")
    for name in ("episodes", "exclude_episodes"):
        if isinstance(value := getattr(entry, name), str):
            episode_setting(value, f"{where}.{name}")
    if entry.episode_weights is not None:
        parse_episode_weights(entry.episode_weights, 1 << 20, f"{where}.episode_weights")


def _check_ambiguous(config: DatasetConfig, count: int) -> None:
    for name in PER_DATASET:
        if name != "rename_map" and getattr(config, name):
            raise ConfigError(
                f"dataset.{name}={getattr(config, name)} is ambiguous with {count} datasets in one run. Give it to "
                f"one of them: --dataset.mix='[{{repo_id: ..., {name}: ...}}, ...]', or `mix` in a settings file."
            )
