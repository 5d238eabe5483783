"""The paths of a dataset's files, from the templates `data_path` and `video_path` of meta/info.json."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable
from math import inf
from string import Formatter
from typing import Any

from flexor.core.paths import safe_name

V3 = {
    "data_path": "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet",
    "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
}
V2 = {
    "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
    "video_path": "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4",
}
"""LeRobot's templates; also the default if a dataset has no template."""

# `chunk_index` and `episode_chunk` are the names of the same field in two versions; a template may use either.
V3_FIELDS = ("chunk_index", "file_index", "episode_index", "episode_chunk")
V2_FIELDS = ("episode_chunk", "episode_index", "chunk_index")

# at most nine digits: {chunk_index:0999999999d} would fill the memory
NUMBER_FORMAT = re.compile(r"0?[1-9]?d?")


def episode_tables(names: Iterable[str]) -> tuple[list[str], list[str]]:
    """The tables of meta/episodes that count, and those that LeRobot ignores: it reads meta/episodes/*/*.parquet.

    If none is there, as other programs write it, all count.
    """
    names = sorted(names)
    tables = [name for name in names if name.count("/") == 3]
    return (tables, [name for name in names if name not in tables]) if tables else (names, [])


def match_misplaced(missing: Iterable[str], present: Iterable[str]) -> dict[str, str]:
    """Missing files that are in another folder: video/x/file-000.mp4 for videos/x/file-000.mp4.

    The file must be in folders of the same names, in any order, and be the only one. Which chunk it is in does not
    matter if its name has the episode.
    """
    by_name: dict[str, list[str]] = {}
    for file in present:
        if not any(part.startswith(".") for part in file.split("/")):
            by_name.setdefault(file.rpartition("/")[2], []).append(file)
    matches: dict[str, str] = {}
    for file in missing:
        *folders, name = file.split("/")[1:]
        needed = {part for part in folders if not (name.startswith("episode_") and part.startswith("chunk-"))}
        candidates = [other for other in by_name.get(name, []) if needed <= {*other.split("/")}]
        if len(candidates) == 1:
            matches[file] = candidates[0]
    claims = Counter(matches.values())
    return {file: other for file, other in matches.items() if claims[other] == 1}


class FileNames:
    """The names of a dataset's files. An invalid template or name raises a ValueError that says what is wrong."""

    def __init__(self, info: dict[str, Any], v3: bool):
        self._v3 = v3
        self._per_chunk = _positive(info.get("chunks_size"), 1000)
        defaults, fields = (V3, V3_FIELDS) if v3 else (V2, V2_FIELDS)
        self._data = _checked("data_path", info.get("data_path"), defaults["data_path"], fields)
        fields = (*fields, "video_key")
        self._video = _checked("video_path", info.get("video_path"), defaults["video_path"], fields)

    def data(self, episode: int, chunk: int | None = None, file: int | None = None) -> str:
        """The table that contains an episode; v3.0 metadata gives its chunk and file."""
        return safe_name(self._data(**self._place(episode, chunk, file)))

    def video(self, camera: str, episode: int, chunk: int | None = None, file: int | None = None) -> str:
        return safe_name(self._video(video_key=camera, **self._place(episode, chunk, file)))

    def _place(self, episode: int, chunk: int | None, file: int | None) -> dict[str, int]:
        if not self._v3:
            chunk = episode // self._per_chunk
            return {"episode_index": episode, "episode_chunk": chunk, "chunk_index": chunk}
        if chunk is None or file is None:
            raise ValueError(f"episode {episode}: the metadata does not give its chunk and file index")
        place = {"chunk_index": int(chunk), "file_index": int(file)}
        return place | {"episode_index": episode, "episode_chunk": int(chunk)}


def _positive(value: object, default: int) -> int:
    return int(value) if isinstance(value, int | float) and 1 <= value < inf else default


def _is_plain(field: str, style: str) -> bool:
    return not style if field == "video_key" else NUMBER_FORMAT.fullmatch(style) is not None


def _checked(name: str, template: object, default: str, fields: tuple[str, ...]) -> Callable[..., str]:
    """The template as a function of its fields."""
    if template is None:
        template = default
    if not isinstance(template, str):
        raise ValueError(f"{name} is {template!r}, not a template such as {default!r}")
    try:
        for _, field, style, conversion in Formatter().parse(template):
            if field is not None and field not in fields:
                raise ValueError(f"the field {{{field}}} is unknown")
            if field is not None and (conversion or not _is_plain(field, style or "")):
                raise ValueError(f"{{{field}:{style}}} is not a valid format")
        safe_name(template.format(**{field: "camera" if field == "video_key" else 0 for field in fields}))
    except (ValueError, LookupError) as error:
        raise ValueError(
            f"{name} is {template!r}: {error}. The valid fields in this version are "
            f"{', '.join(f'{{{field}}}' for field in fields)}"
        ) from error
    return template.format
