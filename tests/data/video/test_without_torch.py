"""Decoding needs little: a process that only decodes starts fast, and many of them fit in memory."""

import json
import subprocess
import sys

import pytest

MODULES = ("decode", "planes")


@pytest.mark.parametrize("module", MODULES)
def test_decoding_imports_no_large_package(module):
    code = f"import json, sys, flexor.data.video.{module}; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    large = {"torch", "pyarrow", "pandas", "huggingface_hub", "fsspec", "psutil"}
    assert not large & {name.partition(".")[0] for name in json.loads(printed)}
