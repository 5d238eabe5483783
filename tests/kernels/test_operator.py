"""Triton is imported when an operator first runs, not before: plans and CPUs do without it."""

import ast
from pathlib import Path

import flexor

ROOT = Path(flexor.__file__).parent


def test_only_the_triton_folder_imports_triton():
    for file in ROOT.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)]
            if any(
                name.startswith("flexor.kernels.triton") or name.split(".")[0] == "triton" for name in names
            ):
                assert file.parent.relative_to(ROOT) == Path("kernels/triton"), f"{file} imports {names}"
