"""Files as strangers, disks and bugs make them: JSON, text and parquet with odd values, and a watch over what happens.

`flexor` may refuse what it reads, with a FlexorError. It must not fail otherwise, hang, take memory without limit, run
code, or write a file outside of the folders it was given.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.core.errors import FlexorError

HANG_S = 60.0
NUMBERS = [0, 1, -1, 2, 7, 255, 256, 65_536, 1 << 31, 1 << 40, 1 << 62, 1 << 63, -(1 << 63), 10**30, 10**400]
FLOATS = [0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, float("nan"), float("inf"), float("-inf"), 1e6]
TEXTS = [
    *(
        "",
        " ",
        "/",
        ".",
        "..",
        "../..",
        "../../canary/x",
        "{canary}/x",
        "{canary}",
        "a/../../canary/y",
        "~/x",
    ),
    *(
        "a\0b",
        "a\nb",
        "\x1b[31mred\x1b[0m",
        "\u202egnp",
        "\ud800",
        "a\\b",
        "C:\\x",
        "%s%n",
        "{0}",
        "{chunk_index}",
    ),
    *(
        "{chunk_index:0999999d}",
        "{video_key.__class__}",
        "data/{file_index!r}",
        "$(touch {canary}/x)",
        "`x`",
        "x" * 70_000,
    ),
    *(
        "null",
        "true",
        "1e999",
        "NaN",
        "file:///etc/passwd",
        "http://127.0.0.1:1/x",
        "hf://datasets/a/b",
        "memory://x",
    ),
    *(
        "float32",
        "video",
        "image",
        "string",
        "bool",
        "int8",
        "object",
        "v3.0",
        "v2.1",
        "v2.0",
        "act",
        "os:system",
    ),
    *(
        "observation.state",
        "action",
        "observation.images.top",
        "index",
        "timestamp",
        "é",
        "漢字",
        "a.b.c",
        "__class__",
    ),
]


def odd_value(rng: np.random.Generator, canary: Path, depth: int = 0) -> Any:
    """Something that does not belong where it is put."""
    kind = rng.integers(8 if depth < 3 else 5)
    if kind == 0:
        return NUMBERS[rng.integers(len(NUMBERS))]
    if kind == 1:
        return FLOATS[rng.integers(len(FLOATS))]
    if kind in (2, 3):
        return TEXTS[rng.integers(len(TEXTS))].replace("{canary}", str(canary))
    if kind == 4:
        return [None, True, False][rng.integers(3)]
    count = int(rng.integers(4))
    if kind == 5:
        return [odd_value(rng, canary, depth + 1) for _ in range(count)]
    if kind == 6:
        return {str(odd_value(rng, canary, 9)): odd_value(rng, canary, depth + 1) for _ in range(count)}
    deep: Any = 1
    for _ in range(int(rng.integers(1, 60))):
        deep = [deep]
    return deep


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a document: (container, key)."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from nodes(inner)


def mutated(value: Any, rng: np.random.Generator, canary: Path) -> Any:
    """A document with a few changes: values replaced, left out, repeated, or given another name."""
    value = copy.deepcopy(value)
    for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
        places = list(nodes(value))
        if not places or rng.random() < 0.01:
            return odd_value(rng, canary)
        container, key = places[rng.integers(len(places))]
        kind = rng.integers(6)
        if kind == 0:
            del container[key]
        elif kind == 1 and isinstance(container, dict):
            container[str(odd_value(rng, canary, 9))] = container.pop(key)
        elif kind == 2 and isinstance(container, list):
            container.insert(int(rng.integers(len(container) + 1)), copy.deepcopy(container[key]))
        elif kind == 3 and isinstance(container[key], int | float) and not isinstance(container[key], bool):
            container[key] = (
                -container[key] if rng.random() < 0.5 else container[key] * int(rng.integers(2, 10**6))
            )
        else:
            container[key] = odd_value(rng, canary)
    return value


def mutated_text(text: str, rng: np.random.Generator, canary: Path) -> bytes:
    """A JSON text or JSON lines, changed as a document or as bytes."""
    if rng.random() < 0.8:
        lines = text.splitlines() if "\n{" in text.strip() else [text]
        number = int(rng.integers(len(lines)))
        lines[number] = json.dumps(mutated(json.loads(lines[number]), rng, canary))
        return "\n".join(lines).encode("utf-8", "surrogatepass")
    return mutated_bytes(text.encode(), rng)


def mutated_bytes(data: bytes, rng: np.random.Generator) -> bytes:
    """Cut off, overwritten, or with something inserted."""
    changed = bytearray(data)
    kind = rng.integers(4)
    place = int(rng.integers(max(len(changed), 1)))
    if kind == 0:
        del changed[place:]
    elif kind == 1:
        for _ in range(int(rng.integers(1, 20))):
            changed[int(rng.integers(max(len(changed), 1)))] = int(rng.integers(256)) if changed else 0
    elif kind == 2:
        changed[place:place] = rng.bytes(int(rng.integers(1, 100)))
    else:
        del changed[place : place + int(rng.integers(1, 200))]
    return bytes(changed)


def mutated_table(path: Path, rng: np.random.Generator, canary: Path) -> None:
    """Change a parquet file in place: values, types, names and rows of a column, or its bytes."""
    if rng.random() < 0.15:
        path.write_bytes(mutated_bytes(path.read_bytes(), rng))
        return
    table = pq.read_table(path)
    name = table.column_names[rng.integers(len(table.column_names))]
    place, values = table.column_names.index(name), table[name].to_pylist()
    kind = rng.integers(6)
    if kind == 0:
        table = table.drop_columns([name])
    elif kind == 1:
        odd = str(odd_value(rng, canary, 9)).encode("utf-8", "replace").decode()
        table = table.rename_columns([odd if n == name else n for n in table.column_names])
    elif kind == 2:
        table = table.take(rng.integers(0, max(len(table), 1), int(rng.integers(0, 2 * len(table) + 1))))
    else:
        rows = range(len(values)) if kind == 3 else [int(rng.integers(max(len(values), 1)))] if values else []
        value = odd_value(rng, canary)
        for row in rows:
            values[row] = value
        column = _column(values, table.field(name).type if rng.random() < 0.5 else None)
        if column is None:
            return
        table = table.set_column(place, name, column)
    try:
        pq.write_table(table.replace_schema_metadata(None) if rng.random() < 0.1 else table, path)
    except (pa.ArrowException, ValueError):
        path.write_bytes(b"PAR1")  # not every type can be in a file


def _column(values: list[Any], kind: pa.DataType | None) -> pa.Array | None:
    for type_ in (kind, None, pa.string()):
        try:
            plain = [
                str(v).encode("utf-8", "replace").decode() if type_ == pa.string() else v for v in values
            ]
            return pa.array(plain, type=type_)
        except (pa.ArrowException, OverflowError, UnicodeError, ValueError, TypeError):
            continue
    return None


class Watch:
    """Watches this process: files that it opens for writing, programs and modules that it starts, time."""

    def __init__(self, allowed: list[Path], canary: Path):
        self.allowed, self.canary = [str(path) for path in allowed], canary
        self.violations: list[str] = []
        self.watching = False
        self.before = self._canary()
        self.modules: set[str] = set()
        sys.addaudithook(self._hook)  # can't be removed: it does nothing when not watching

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.watching or any("__pycache__" in str(argument) for argument in arguments[:2]):
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path, mode, flags = (*arguments, None, None)[:3]
            writes = any(letter in (mode or "") for letter in "wax+") or bool(
                (flags or 0) & (os.O_WRONLY | os.O_RDWR)
            )
            if writes and not os.path.realpath(os.fsdecode(path)).startswith((*self.allowed, "/dev/null")):
                self.violations.append(f"wrote {path!r}")
        elif event in ("os.system", "subprocess.Popen", "os.exec", "os.posix_spawn", "pty.spawn"):
            self.violations.append(f"started {arguments!r}")
        elif event in (
            "os.rename",
            "os.remove",
            "os.rmdir",
            "shutil.rmtree",
            "os.symlink",
            "os.link",
            "os.mkdir",
        ):
            paths = [os.fsdecode(a) for a in arguments[:2] if isinstance(a, str | bytes | os.PathLike)]
            target = paths[-1:] if event in ("os.symlink", "os.link") else paths
            target = [
                path for path in target if path.startswith("/")
            ]  # others are relative to an open folder
            if any(not os.path.realpath(path).startswith(tuple(self.allowed)) for path in target):
                self.violations.append(f"{event} {paths}")

    def _canary(self) -> list[tuple[str, int, int]]:
        paths = sorted(self.canary.rglob("*"))
        return [(str(p), p.stat().st_mtime_ns, p.stat().st_size) for p in paths]

    def run(self, action: Callable[[], Any]) -> str | None:
        """What went wrong; None if it worked or was refused properly."""
        self.violations.clear()
        problem = None
        self.watching = True
        try:
            with at_most(HANG_S):
                action()
        except FlexorError:
            pass
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            frames = traceback.extract_tb(error.__traceback__)
            place = [f"{Path(f.filename).name}:{f.lineno}" for f in frames if "flexor" in f.filename][-3:]
            problem = f"{type(error).__name__}: {str(error)[:200]} at {' > '.join(place)}"
        finally:
            self.watching = False
        if self._canary() != self.before:
            self.before = self._canary()
            problem = f"the canary has changed; {problem}"
        return problem or (f"{self.violations[:3]}" if self.violations else None)


class Hang(BaseException):
    """It takes too long."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Only in the main thread, and only for what returns to Python now and then."""

    def ring(*_: object) -> None:
        raise Hang(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
