"""Describes a dataset: `flexor data info DIR`.

`describe` collects the values, `render` formats them. Values about videos are measured on the files (the
GOP size is read from the packets, not from the encoder's settings). Unreadable files are left out and
noted, so that this also works on a damaged dataset.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flexor.core.errors import DatasetError
from flexor.data.check.layout import Layout, read_layout
from flexor.data.check.pointers import name_pointers
from flexor.data.check.report import CheckReport, group_findings
from flexor.data.check.scan import VideoScan, scan_video
from flexor.data.check.tables import OWN_COLUMNS, stored_columns, take_undeclared
from flexor.data.check.train_command import train_command
from flexor.data.format.metadata import Feature
from flexor.data.format.stats import NEEDED_STATS

if TYPE_CHECKING:
    from flexor.data.dataset import Dataset

FILES_MEASURED = 8
"""Video files per camera that are measured: enough to detect a mixture, fast even with thousands of files."""

TASKS = {True: "meta/tasks.parquet", False: "meta/tasks.jsonl"}  # of v3.0, and of older formats

LONG_GOP = 50
"""GOP size above which reading single frames becomes slow."""


def describe(dataset: Dataset | str | Path) -> dict[str, Any]:
    """The input of `render`, as plain JSON values."""
    root = Path(dataset if isinstance(dataset, str | Path) else dataset.root)
    report = CheckReport(root, deep=False)
    layout = read_layout(root, report)
    name_pointers(layout, layout.episodes, report)
    if not layout.info:
        finding = report.findings[0]
        raise DatasetError(f"{root}: {finding.file}: {finding.evidence}. To fix it: {finding.fix}.")
    tables = dict.fromkeys(episode.data_file for episode in layout.episodes)
    take_undeclared(layout, stored_columns(layout, tables))
    cameras = {f.name: _camera(layout, f) for f in layout.features.values() if f.is_camera}
    frames = sum(episode.length for episode in layout.episodes)
    lengths = [episode.length for episode in layout.episodes]
    result = {
        "root": str(root),
        "version": layout.version,
        "robot_type": layout.info.get("robot_type"),
        "episodes": len(layout.episodes),
        "frames": frames,
        "fps": layout.fps,
        "hours": frames / layout.fps / 3600 if layout.fps else None,
        "episode_length": _spread(np.array(lengths)) if lengths else None,
        "tasks": [text for _, text in sorted(layout.tasks.items())],
        "features": {f.name: _feature(f) for f in layout.features.values() if not f.is_camera},
        "cameras": cameras,
        "action_dim": _width(layout, "action"),
        "state_dim": _width(layout, "observation.state"),
        "bytes": {
            "tables": _size(root / "data"),
            "videos": _size(root / "videos"),
            "meta": _size(root / "meta"),
        },
        "statistics": _statistics(layout, cameras),
    }
    result["train"], reasons = train_command(root, is_sound=not _has_unreadable(cameras))
    result["notes"] = _errors(report) + _notes(layout, result, report) + reasons
    return result


def _feature(feature: Feature) -> dict[str, Any]:
    return {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}


def _width(layout: Layout, name: str) -> int | None:
    return int(np.prod(layout.features[name].shape)) if name in layout.features else None


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _spread(values: np.ndarray) -> dict[str, int]:
    return {"typical": int(np.median(values)), "min": int(values.min()), "max": int(values.max())}


def _statistics(layout: Layout, cameras: dict[str, Any]) -> dict[str, list[str]]:
    """The features that policies normalise, with and without statistics."""
    names = [name for name in layout.features if name.startswith(("action", "observation"))]
    normalized = [name for name in names if name not in cameras or cameras[name]["files"]]
    present = [name for name in normalized if set(NEEDED_STATS) <= set(layout.stats.get(name, {}))]
    quantiles = [name for name in present if {"q01", "q99"} <= set(layout.stats[name])]
    missing = [name for name in normalized if name not in present]
    return {"present": present, "with_quantiles": quantiles, "missing": missing}


def _camera(layout: Layout, feature: Feature) -> dict[str, Any]:
    channels, height, width = feature.chw if len(feature.shape) == 3 else (0, 0, 0)
    camera: dict[str, Any] = {
        "stored_as": feature.dtype,
        "declared": {"height": height, "width": width, "channels": channels},
        "files": 0,
    }
    if feature.is_image:
        return camera | {"files": len({episode.data_file for episode in layout.episodes})}
    files = [layout.path(file) for file in layout.camera_files(feature.name)]
    files = [path for path in files if path.is_file()]
    if not files:
        return camera
    sampled = np.unique(np.linspace(0, len(files) - 1, FILES_MEASURED).round().astype(int))
    scans = [scan_video(files[i]) for i in sampled]
    good = [scan for scan in scans if len(scan.times)]
    camera |= {"files": len(files), "measured": len(scans), "unreadable": len(scans) - len(good)}
    camera["bytes"] = sum(path.stat().st_size for path in files)
    if good:
        camera |= _measured(good)
    return camera


def _has_unreadable(cameras: dict[str, Any]) -> bool:
    return any(camera.get("unreadable") for camera in cameras.values())


def _measured(scans: list[VideoScan]) -> dict[str, Any]:
    steps = np.concatenate([np.diff(np.sort(scan.times)) for scan in scans])
    # The last GOP of a file is a remainder: not typical, unless it is the only one.
    gops = np.concatenate([scan.gops()[:-1] if len(scan.gops()) > 1 else scan.gops() for scan in scans])
    return {
        "codec": sorted({scan.codec for scan in scans}),
        "pix_fmt": sorted({scan.pix_fmt for scan in scans}),
        "resolution": sorted({f"{scan.height}x{scan.width}" for scan in scans}),
        "fps": round(1 / float(np.median(steps)), 3) if len(steps) else None,
        "gop": _spread(gops) if len(gops) else None,
    }


def _errors(report: CheckReport) -> list[str]:
    """The errors in the metadata, one line for those that are alike."""
    notes = []
    for group in group_findings(report.errors):
        files = list(dict.fromkeys(finding.file for finding in group if finding.file))
        place = f"{len(files)} files, such as {files[0]}" if len(files) > 1 else "".join(files)
        notes.append(f"{place}: {group[0].evidence}" if place else group[0].evidence)
    return notes


def _notes(layout: Layout, info: dict[str, Any], report: CheckReport) -> list[str]:
    notes = []
    pointers = {finding.feature for finding in report.errors if finding.name == "lfs-pointer"}
    for name, camera in info["cameras"].items():
        notes += _camera_notes(layout, name, camera) if layout.episodes and name not in pointers else []
    missing = info["statistics"]["missing"]
    if missing:
        notes.append(f"no statistics of {', '.join(missing)}: `flexor data stats DIR --write` computes them")
    if not info["tasks"] and not any(finding.file == TASKS[layout.is_v3] for finding in report.errors):
        notes.append("the dataset has no tasks: policies that read the instruction can't be trained")
    declared = layout.info.get("total_frames")
    if layout.episodes and declared not in (None, info["frames"]):
        notes.append(f"meta/info.json declares {declared} frames, but the episodes have {info['frames']}")
    return notes


def _camera_notes(layout: Layout, name: str, camera: dict[str, Any]) -> list[str]:
    if not camera["files"]:
        return [f"{name} is declared, but has no video files: training leaves it out"]
    notes = []
    if camera.get("unreadable"):
        notes.append(f"{name}: {camera['unreadable']} of {camera['measured']} measured files are unreadable")
    if "codec" not in camera:
        return notes
    for field in ("codec", "resolution", "pix_fmt"):
        if len(camera[field]) > 1:
            notes.append(f"{name}: files differ in {field}: {', '.join(camera[field])}")
    declared = f"{camera['declared']['height']}x{camera['declared']['width']}"
    if camera["resolution"] != [declared]:
        notes.append(
            f"{name}: images are {', '.join(camera['resolution'])}, but meta/info.json declares {declared}"
        )
    if camera["fps"] and layout.fps and abs(camera["fps"] / layout.fps - 1) > 0.01:
        notes.append(f"{name}: the video has {camera['fps']:g} fps, but the table has {layout.fps:g}")
    if camera["gop"] and camera["gop"]["typical"] > LONG_GOP:
        notes.append(
            f"{name}: the GOP size is {camera['gop']['typical']} frames. Random access decodes many frames to "
            "get one; Flexor decodes each GOP once and uses all of its frames"
        )
    return notes


def render(info: dict[str, Any]) -> str:
    """The values of `describe` as text."""
    hours = info["hours"] or 0.0
    span = f"{hours:.2f} hours" if hours >= 0.1 else f"{hours * 60:.1f} minutes"
    length = info["episode_length"] or {"typical": 0, "min": 0, "max": 0}
    spread = f"{length['min']} to {length['max']} frames, median {length['typical']}"
    frames = f"{length['min']} frames" if length["min"] == length["max"] else spread
    sizes = info["bytes"]
    lines = [
        f"{info['root']}",
        f"  format      LeRobot {info['version']}, robot {info['robot_type'] or 'not given'}",
        f"  episodes    {info['episodes']}" + (f" of {frames}" if info["episodes"] else ""),
        f"  frames      {info['frames']} at {info['fps']:g} fps, {span}",
        f"  on disk     tables {_bytes(sizes['tables'])}, video {_bytes(sizes['videos'])}, "
        f"metadata {_bytes(sizes['meta'])}",
        f"  tasks       {len(info['tasks'])}",
        *[f"              {task}" for task in info["tasks"][:5]],
        *([f"              ... and {len(info['tasks']) - 5} more"] if len(info["tasks"]) > 5 else []),
        "  cameras" + ("" if info["cameras"] else "     none"),
        *[line for name, camera in info["cameras"].items() for line in _camera_lines(name, camera)],
        "  features",
        *[
            _feature_line(name, feature)
            for name, feature in info["features"].items()
            if name not in OWN_COLUMNS
        ],
        f"  action      {_numbers(info['action_dim'])}; state {_numbers(info['state_dim'])}",
        f"  statistics  {_statistics_line(info['statistics'])}",
    ]
    lines += ["  notes", *[f"    - {note}" for note in info["notes"]]] if info["notes"] else []
    lines += ["  train on it", f"    {info['train']}"] if info["train"] else []
    return "\n".join(lines)


def _numbers(size: int | None) -> str:
    return f"{size} number{'s' if size > 1 else ''}" if size else "none"


def _camera_lines(name: str, camera: dict[str, Any]) -> list[str]:
    declared = camera["declared"]
    size = f"{declared['height']}x{declared['width']}"
    if camera["stored_as"] == "image":
        return [f"    {name}: {size} images in the tables"]
    if camera["stored_as"] == "uint8":
        return [f"    {name}: {size} arrays of pixels in the tables"]
    if not camera["files"]:
        return [f"    {name}: {size} declared, no files"]
    if "codec" not in camera:
        return [f"    {name}: {size} declared, {_files(camera)}, none readable"]
    gop = camera["gop"]
    spread = f", {gop['min']} to {gop['max']}" if gop and gop["min"] != gop["max"] else ""
    group = f"GOP {gop['typical']}{spread}" if gop else "GOP unknown"
    some = f", {camera['measured']} measured" if camera["measured"] < camera["files"] else ""
    files = f"{_files(camera)}{some}, {_bytes(camera['bytes'])}"
    codec, picture = "/".join(camera["codec"]), "/".join(camera["resolution"])
    return [f"    {name}: {picture} {codec} {'/'.join(camera['pix_fmt'])}, {group}, {files}"]


def _files(camera: dict[str, Any]) -> str:
    return f"{camera['files']} file{'s' if camera['files'] > 1 else ''}"


def _feature_line(name: str, feature: dict[str, Any]) -> str:
    shape = "x".join(str(n) for n in feature["shape"])
    return f"    {name}: {feature['dtype']} [{shape}]"


def _statistics_line(statistics: dict[str, list[str]]) -> str:
    if not statistics["present"]:
        return "none"
    parts = "complete" if not statistics["missing"] else f"missing for {', '.join(statistics['missing'])}"
    lacking = [name for name in statistics["present"] if name not in statistics["with_quantiles"]]
    return parts + (f"; no quantiles for {', '.join(lacking)}" if lacking else ", with quantiles")


def _bytes(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000 or unit == "GB":
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1000
    raise AssertionError
