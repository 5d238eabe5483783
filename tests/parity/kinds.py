"""What is compared: a folder each, of a kind of policy or of a part that several of them have.

A folder holds `cases.py` (CASES, by name, and what both programs do alike), `lerobot.py` and, if needed, `flexor.py`
(what is special about one side), and `golden.json` (what LeRobot computed). Imported by both programs.
"""

import functools
import json
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from pathlib import Path
from types import ModuleType

HERE = Path(__file__).parent
FOLDER = "<folder>"  # in the settings of a case: where the files are that `cases.make_files` makes
KINDS = sorted(path.parent.name for path in HERE.glob("*/cases.py"))


def part(kind: str, name: str) -> ModuleType:
    """One file of a folder; an empty module if there is none."""
    if not (HERE / kind / f"{name}.py").is_file():
        return ModuleType(name)
    return import_module(f"parity.{kind}.{name}")


def policies() -> list[str]:
    """The kinds that act, whose checkpoints are exchanged."""
    return [kind for kind in KINDS if hasattr(part(kind, "cases"), "STEPS")]


def lerobot_type(kind: str) -> str:
    """What LeRobot calls the type of a kind of policy."""
    return getattr(part(kind, "cases"), "LEROBOT_TYPE", kind)


def prepared(kind: str, program: str, folder: Path) -> AbstractContextManager:
    """What a program needs around it to make and load policies of a kind, whose files are in `folder`."""
    special = part(kind, program)
    return special.prepared(folder) if hasattr(special, "prepared") else nullcontext()


def cases_of(kind: str, folder: Path) -> dict[str, dict]:
    """The cases of a kind by name; the files that they need are made in `folder` unless they are there."""
    cases = part(kind, "cases")
    if hasattr(cases, "make_files") and not folder.exists():
        cases.make_files(folder)
    return {
        name: {
            **case,
            "robot": case.get("robot", case.get("inputs")),
            "settings": placed(case["settings"], folder),
            "ours": placed(case.get("ours", {}), folder),
            "folder": folder,
        }
        for name, case in cases.CASES.items()
    }


def placed(settings: dict, folder: Path) -> dict:
    return {
        name: value.replace(FOLDER, str(folder)) if isinstance(value, str) else value
        for name, value in settings.items()
    }


@functools.cache
def golden(kind: str) -> dict:
    return json.loads((HERE / kind / "golden.json").read_text())
