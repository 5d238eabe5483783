"""The robot's package stays small: no torch, nothing of Flexor, and the grammar and library of Python 3.9."""

import ast
import os
import pwd
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import flexor_client

ROOT = Path(flexor_client.__file__).parent
FILES = sorted(ROOT.glob("*.py"))
ALLOWED = {"flexor_client", "msgpack", "numpy", "PIL", "websockets", *sys.stdlib_module_names}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_file_is_python_39_and_imports_little(file):
    tree = ast.parse(file.read_text(), feature_version=(3, 9))
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [name.name for name in node.names]
        else:
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.partition(".")[0] for name in names} <= ALLOWED
        assert not isinstance(node, ast.Match)


def test_it_imports_neither_torch_nor_flexor():
    code = "import sys, flexor_client; print([n for n in ('torch', 'flexor', 'PIL') if n in sys.modules])"
    path = [str(ROOT.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # what it needs may be there
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"  # and pillow only where images are compressed


def python39() -> str | None:
    """$PYTHON39, one that pyenv built (the tests' own home folder is another), or python3.9 on the path."""
    home = Path(pwd.getpwuid(os.getuid()).pw_dir)
    built = sorted(map(str, home.glob(".pyenv/versions/3.9*/bin/python3.9")))
    return next(filter(None, (os.environ.get("PYTHON39"), *built[-1:], shutil.which("python3.9"))), None)


def test_python_39_runs_it(tmp_path):
    """Compiled, and what needs no other package imported and used. $PYTHON39 names one."""
    python = python39()
    if python is None or subprocess.run([python, "--version"], capture_output=True, check=False).returncode:
        pytest.skip("there is no Python 3.9 here")
    folder = shutil.copytree(ROOT, tmp_path / "flexor_client")
    subprocess.run([python, "-m", "compileall", "-q", folder], check=True)
    # Classes and functions are made at import; the other packages need not be installed for that.
    stand_ins = "import sys\nfrom unittest.mock import MagicMock\n" + "".join(
        f"sys.modules[{name!r}] = MagicMock()\n"
        for name in ("numpy", "msgpack", "websockets", "websockets.exceptions", "websockets.sync.client")
    )
    code = f"{stand_ins}import flexor_client; print(flexor_client.__all__)"
    subprocess.run([python, "-c", code], cwd=tmp_path, check=True)
