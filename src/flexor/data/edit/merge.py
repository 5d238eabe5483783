"""Whether datasets can become one: their features must be equal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from flexor.core.errors import DatasetError
from flexor.data.edit.source import EditSource
from flexor.data.format.metadata import declared_feature

TOGETHER = (
    "Datasets are merged only if their features are equal. Flexor can train on several without merging them: name "
    "them in a mixture (docs/mixture.md)."
)
Specs = dict[str, dict[str, Any]]


def shared_features(
    sources: Sequence[EditSource], robot_type: str | None
) -> tuple[Specs, str | None, list[str]]:
    """The features and the robot of the merged dataset, and notes. A difference is an error that names it."""
    assert all(source.plan is not None for source in sources)
    first, *rest = sources
    features, notes = dict(_specs(first)), []
    for source in rest:
        differences = [
            *_rate(first, source),
            *_differences(features, str(first.root), _specs(source), str(source.root)),
        ]
        if differences:
            more = f" (and {len(differences) - 3} more differences)" if len(differences) > 3 else ""
            raise DatasetError(f"{'; '.join(differences[:3])}{more}. {TOGETHER}")
        for name, spec in _specs(source).items():
            if features[name].get("names") is None:
                features[name] = features[name] | {"names": spec.get("names")}
            notes += _encoding(name, features[name], spec, source)
    robots = list(dict.fromkeys(source.layout.info.get("robot_type") for source in sources))
    if robot_type is None and len(robots) > 1:
        raise DatasetError(
            f"robot_type differs: {', '.join(map(str, robots))}. If their values mean the same, merge them with "
            f"--robot_type={robots[0]}. {TOGETHER}"
        )
    return features, robot_type or robots[0], list(dict.fromkeys(notes))


def _specs(source: EditSource) -> Specs:
    assert source.plan is not None
    return source.plan.columns.features


def _rate(first: EditSource, second: EditSource) -> list[str]:
    assert first.plan is not None and second.plan is not None
    if first.plan.fps == second.plan.fps:
        return []
    return [f"{first.root} has {first.plan.fps:g} frames per second, {second.root} has {second.plan.fps:g}"]


def _differences(first: Specs, first_root: str, second: Specs, second_root: str) -> list[str]:
    result = []
    for name in [*first, *(name for name in second if name not in first)]:
        if name not in first or name not in second:
            lacking, having = (first_root, second_root) if name not in first else (second_root, first_root)
            result.append(f"{lacking} has no {name}, which {having} has")
            continue
        left, right = declared_feature(name, first[name]), declared_feature(name, second[name])
        for aspect in ("dtype", "shape", "names", "depth"):
            a, b = (_plain(getattr(feature, aspect)) for feature in (left, right))
            if a != b and not (aspect == "names" and None in (a, b)):
                result.append(f"{name}: {aspect} is {a} in {first_root} and {b} in {second_root}")
    return result


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _encoding(name: str, spec: dict[str, Any], other: dict[str, Any], source: EditSource) -> list[str]:
    """A note if videos are encoded differently: the declaration names one encoding."""
    keys = ("video.codec", "video.pix_fmt")
    ours, theirs = ([(s.get("info") or {}).get(key) for key in keys] for s in (spec, other))
    if spec["dtype"] != "video" or ours == theirs or None in (*ours, *theirs):
        return []
    return [f"camera {name}: videos of {source.root} are {theirs[0]} {theirs[1]}, others {ours[0]} {ours[1]}"]
