"""Files of pretrained models: from a folder or the Hub, and weights in one file or several."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from flexor.core import model_files
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.model_files import ModelFiles
from flexor.core.weight_files import WeightFiles, load_tensors

ADVICE = " Use another."


@pytest.fixture
def hub(tmp_path, monkeypatch) -> tuple[Path, list[tuple]]:
    """A repository's files, of which the cache gets what is asked for, and the requests."""
    published, cache, requests = tmp_path / "published", tmp_path / "cache", []
    published.mkdir()
    cache.mkdir()

    def download(repo_id, patterns, revision, ignored=()):
        requests.append((repo_id, *sorted(patterns), revision))
        if repo_id == "ann/none":
            raise RuntimeError("404: no such repository\nmore")
        for pattern in patterns:
            for file in published.glob(pattern):
                (cache / file.name).write_bytes(file.read_bytes())
        return cache

    monkeypatch.setattr(model_files, "download", download)
    return published, requests


def test_a_folder_and_a_repository_are_read_alike(hub, tmp_path):
    published, requests = hub
    (published / "config.json").write_text("{}")
    assert ModelFiles(str(published), "it").path("config.json") == published / "config.json"
    assert not requests
    assert ModelFiles("ann/model@v1", "it").path("config.json").read_text() == "{}"
    assert requests == [("ann/model", "config.json", "v1")]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", r"^setting=nowhere: there is no such folder.*user/name.*Use another\.$"),
        (
            "ann/none",
            r"^setting=ann/none: there is no such folder, and it .*: 404: no such repository Use another\.$",
        ),
        ("ann/model", r"^setting=ann/model: there is no config\.json in .*Use another\.$"),
    ],
)
def test_errors_say_what_where_and_what_to_do(name, message, hub):
    with pytest.raises(ConfigError, match=message):
        ModelFiles(name, f"setting={name}", ADVICE).path("config.json")
    with pytest.raises(CheckpointError, match=message):
        ModelFiles(name, f"setting={name}", ADVICE, CheckpointError).path("config.json")


def test_only_the_files_with_requested_weights_are_downloaded(hub):
    published, requests = hub
    parts = {"first.safetensors": ["a", "b"], "second.safetensors": ["c"]}
    for file, names in parts.items():
        save_file({name: torch.full((2,), float(ord(name))) for name in names}, published / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    (published / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files, tensor = ModelFiles("ann/model", "it"), torch.zeros(2)
    load_tensors(files, {"b": tensor})
    assert torch.equal(tensor, torch.full((2,), float(ord("b"))))
    assert [request[1:-1] for request in requests][1:] == [("first.safetensors",)]
    with pytest.raises(ConfigError, match="does not name d"):
        load_tensors(files, {"d": tensor})
    with pytest.raises(ConfigError, match=r"does not fit its config\.json: c"):
        load_tensors(files, {"c": torch.zeros(3)})
    assert sorted(WeightFiles(published).described()) == ["a", "b", "c"]
    assert torch.equal(WeightFiles(published).read("c"), torch.full((2,), float(ord("c"))))


def test_a_repository_without_weights_is_refused(hub):
    with pytest.raises(ConfigError, match=r"^it: there is no model\.safetensors in .*Use another"):
        load_tensors(ModelFiles("ann/model", "it", ADVICE), {})
