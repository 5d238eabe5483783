"""The check of licences, which `make lint` runs: what must not come in is named."""

import importlib.util
from email.message import Message
from pathlib import Path
from types import SimpleNamespace

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "check_licenses.py"


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("check_licenses", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def package(**fields: str) -> SimpleNamespace:
    about = Message()
    for name, value in fields.items():
        about[name.replace("_", "-")] = value
    return SimpleNamespace(name=fields.get("Name", "x"), metadata=about)


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"License_Expression": "MIT"}, True),
        ({"License_Expression": "Apache-2.0 OR GPL-3.0-only"}, True),
        ({"License_Expression": "(MIT AND BSD-3-Clause)"}, True),
        ({"License": "BSD 3-Clause, MIT"}, False),  # not a name that anybody agreed on: look at it
        ({"License": "Apache 2.0\nThe whole text"}, True),
        ({"Classifier": "License :: OSI Approved :: MIT License"}, True),
        ({"License_Expression": "MIT AND GPL-3.0-only"}, False),
        ({"License_Expression": "AGPL-3.0"}, False),
        ({"Classifier": "License :: Other/Proprietary License"}, False),
        ({"License": "MITRE"}, False),
        ({}, False),
        ({"Name": "nvidia-cublas-cu12", "License": "NVIDIA Proprietary Software"}, True),
    ],
)
def test_licences(script, monkeypatch, fields, allowed):
    monkeypatch.setattr(script.importlib.metadata, "distributions", lambda: [package(**fields)])
    assert (script.refused() == {}) == allowed
