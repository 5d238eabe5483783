"""Imports go one way: a folder imports those before it in these lists, and no file imports itself in a circle."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import flexor

ROOT = Path(flexor.__file__).parent
LAYERS = {
    "": [
        *(
            "core",
            "pages",
            "runs",
            "data",
            "kernels",
            "policies",
            "config",
            "sim",
            "evaluate",
            "monitor",
            "train",
            "plan",
            "serve",
            "rl",
            "bench",
            "launch",
            "ui",
        ),
        *("cli", "__main__"),
    ],
    "data": [
        *(
            "settings",
            "storage",
            "format",
            "video",
            "frames",
            "dataset",
            "statistics",
            "mixture",
            "identity",
            "order",
            "loader",
            "check",
        ),
        *("show", "repair", "edit", "push"),
    ],
    "runs": [
        *(
            "jsonl",
            "series",
            "find",
            "process",
            "text",
            "signals",
            "online_health",
            "health",
            "state",
            "reader",
        ),
        *("diagnosis", "watch", "report"),
    ],
    "plan": [
        "site",
        "trace",
        "memory",
        "data",
        "speed",
        "image_features",
        "plan",
        "rank",
        "advise",
        "compare",
        "preflight",
        "gains",
        "show",
    ],
    "train": [
        *(
            "ranks",
            "optim",
            "compile",
            "engine",
            "checkpoint",
            "announce",
            "datasets",
            "encode_images",
            "image_features",
            "build",
            "sample_view",
            "stopping",
            "hub",
            "validate",
            "step",
            "graph",
            "disk_space",
            "health",
            "diagnose",
            "run_log",
            "resolve",
        ),
        "loop",
    ],
}


def module_of(file: Path) -> str:
    parts = ("flexor", *file.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(file): file for file in ROOT.rglob("*.py")}


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports_of(file: Path) -> Iterator[str]:
    """Modules of Flexor's that a file imports, at the top or anywhere else in it."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.partition(".")[0] == "flexor":
            for name in node.names:
                full = f"{node.module}.{name.name}"
                yield full if full in MODULES else node.module
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names if name.name in MODULES)


@functools.cache
def imports() -> dict[str, set[str]]:
    return {name: {*imports_of(file)} for name, file in MODULES.items()}


def test_folders_import_one_way():
    for folder, layers in LAYERS.items():
        prefix = ".".join(("flexor", *folder.split("."))) + "." if folder else "flexor."
        inside = {
            name: name.removeprefix(prefix).split(".")[0] for name in MODULES if name.startswith(prefix)
        }
        assert {*inside.values()} == {*layers}, f"{folder or 'flexor'}: LAYERS must name what is there"
        for name, layer in inside.items():
            wrong = [
                t for t in imports()[name] if t in inside and layers.index(inside[t]) > layers.index(layer)
            ]
            assert not wrong, f"{name} imports {wrong}, which comes after it"


SHARED_BY_POLICIES = ("nn", "vlm", "processing", "augment", "models")


def test_no_policy_imports_another_policy():
    """They share `nn/` and `vlm/`, which import no policy."""
    folders = {file.parent.name for file in (ROOT / "policies").glob("*/*.py")}
    policies = {f"flexor.policies.{folder}" for folder in folders if folder not in SHARED_BY_POLICIES}
    for name in MODULES:
        if name.startswith("flexor.policies.") and name.count(".") > 2:
            folder = ".".join(name.split(".")[:3])
            wrong = [t for t in imports()[name] if t.startswith(tuple(f"{p}." for p in policies - {folder}))]
            assert not wrong, f"{name} imports {wrong}"
    nn = [name for name in MODULES if name.startswith("flexor.policies.nn.")]
    assert not [t for name in nn for t in imports()[name] if t.startswith("flexor.policies.vlm.")]


def test_no_file_imports_itself_in_a_circle():
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> None:
        assert name not in path, " -> ".join([*path[path.index(name) :], name])
        if name not in done:
            for other in imports()[name]:
                visit(other, [*path, name])
            done.add(name)

    for name in MODULES:
        visit(name, [])


def test_two_classes_never_share_a_name():
    places: dict[str, list[str]] = {}
    for name, file in MODULES.items():
        for node in parsed(file).body:
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(name)
    assert {name: where for name, where in places.items() if len(where) > 1 and name[0] != "_"} == {}


def test_two_test_files_never_share_a_name():
    """pytest imports them by their names alone."""
    names = [file.name for file in Path(__file__).parent.rglob("test_*.py")]
    assert len(names) == len({*names}), sorted(name for name in {*names} if names.count(name) > 1)
