"""All ranks must run the same program with the same settings on the same data. Nodes that do not are named.

Otherwise they would hang, or train on what nobody asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from flexor.core.digest import hash_json
from flexor.core.errors import ConfigError, DatasetError
from flexor.core.version import VERSION
from flexor.data.dataset import Dataset
from flexor.data.identity import DataIdentity, differences
from flexor.train.ranks.processes import Processes

# each host may have its files in another place, and its own number of cores
LOCAL = {"dataset.root", "policy_path", "num_workers"}
NAMED = 3  # differences in a message


def check_same_program(processes: Processes) -> None:
    """Refuse another version of Flexor or torch, as soon as the ranks are connected."""
    programs = processes.gather({"Flexor": VERSION, "torch": torch.__version__.partition("+")[0]})
    other = find_other(programs)
    if other is not None:
        names = [name for name, version in programs[0].items() if programs[other].get(name) != version]
        versions = [" and ".join(f"{name} {program.get(name)}" for name in names) for program in programs]
        raise ConfigError(
            f"{_name(processes, other)} has {versions[other]}, {_name(processes, 0)} has {versions[0]}: install the "
            "same version on all nodes."
        )


def check_same_settings(processes: Processes, settings: Mapping[str, Any]) -> None:
    """`settings`: as the command gave them, flat and without passwords."""
    ranks = processes.gather(shared_settings(settings))
    other = find_other(ranks)
    if other is not None:
        keys = sorted(key for key in {*ranks[0], *ranks[other]} if ranks[0].get(key) != ranks[other].get(key))
        listed = _list([f"{key} is {ranks[other].get(key)!r}, not {ranks[0].get(key)!r}" for key in keys])
        raise ConfigError(
            f"{_name(processes, other)} has other settings than {_name(processes, 0)}: {listed}. Give all nodes the "
            "same command."
        )


def shared_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Those that all ranks must share."""
    shared = {key: value for key, value in settings.items() if key not in LOCAL}
    if isinstance(mix := shared.get("dataset.mix"), list):
        shared["dataset.mix"] = [{**entry, "root": None} for entry in mix]
    return shared


@dataclass
class Contents:
    """What a rank has opened."""

    episodes: int
    frames: int
    skipped: list[int]
    fingerprint: str
    statistics: str


def check_same_dataset(processes: Processes, dataset: Dataset) -> None:
    """Each rank opens the dataset itself, perhaps from its own disk. Quick: file contents are compared later."""
    contents = Contents(
        len(dataset.episodes),
        len(dataset),
        sorted(dataset.skipped),
        dataset.fingerprint(),
        _hash_statistics(dataset.stats),
    )
    ranks = processes.gather(contents)
    other = find_other(ranks)
    if other is None:
        return
    first, second = ranks[0], ranks[other]
    if first.skipped != second.skipped:
        episodes = sorted({*first.skipped} ^ {*second.skipped})
        raise DatasetError(
            f"{dataset.repo_id}: only one of {_name(processes, 0)} and {_name(processes, other)} can read the episodes "
            f"{episodes}. Copy the same dataset files to all nodes, or exclude these episodes with "
            "--dataset.exclude_episodes."
        )
    sizes = [f"{rank.episodes} episodes, {rank.frames} frames" for rank in (second, first)]
    if sizes[0] != sizes[1]:
        differing = f"{sizes[0]}, not {sizes[1]}"
    elif first.fingerprint != second.fingerprint:
        differing = "its features, tasks or file sizes differ"
    else:
        differing = "meta/stats.json differs"
    raise _other_dataset(processes, other, differing)


def check_same_files(processes: Processes, identity: DataIdentity) -> None:
    """The contents of the files, where no rank reads them over a network."""
    summaries = processes.gather(identity.summary())
    digests = [{kind: digest for kind, digest in summary.items() if digest} for summary in summaries]
    other = next((rank for rank, each in enumerate(digests) if _contradict(each, digests[0])), None)
    if other is None:
        return
    ranks = processes.gather(identity.to_json() if processes.rank in (0, other) else None)
    first, second = ranks[0], ranks[other]
    assert first is not None and second is not None
    named = [
        name
        for kind in first
        if first[kind] and second[kind]
        for name in differences(first[kind], second[kind])
    ]
    raise _other_dataset(processes, other, f"{_list(named)} differ{'s' if len(named) == 1 else ''}")


def _hash_statistics(statistics: Mapping[str, Mapping[str, np.ndarray]]) -> str:
    """Ranks with other statistics would normalise the same sample to other numbers."""
    return hash_json(
        {name: {key: np.asarray(v).tolist() for key, v in of.items()} for name, of in statistics.items()}
    )


def _contradict(first: Mapping[str, str], second: Mapping[str, str]) -> bool:
    return any(second.get(kind, digest) != digest for kind, digest in first.items())


def _other_dataset(processes: Processes, other: int, differing: str) -> DatasetError:
    return DatasetError(
        f"{_name(processes, other)} has another dataset than {_name(processes, 0)}: {differing}. Copy the same dataset "
        "files to all nodes."
    )


def find_other(ranks: Sequence[object]) -> int | None:
    """The first rank that differs from rank 0."""
    return next((rank for rank, value in enumerate(ranks) if value != ranks[0]), None)


def _list(differing: Sequence[str]) -> str:
    more = f", and {len(differing) - NAMED} more" if len(differing) > NAMED else ""
    return ", ".join(differing[:NAMED]) + more


def _name(processes: Processes, rank: int) -> str:
    return f"rank {rank} on {processes.hosts[rank]}"
