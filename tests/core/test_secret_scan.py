"""Secrets are found in every file of an upload, wherever they are in it, and nothing is taken for one that is none."""

import json
import random
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from flexor.core import secret_scan
from flexor.core.hub import HubRepository
from flexor.core.hub_errors import HubError
from flexor.core.secret_scan import BLOCK, find_secret
from support.hub_server import hub

TOKENS = {
    "a Hugging Face token": f"hf_{'aB3' * 11}",
    "a GitHub token": f"ghp_{'a1' * 18}",
    "a GitLab token": f"glpat-{'a_1-' * 5}",
    "a W&B key": f"wandb_v1_{'a1' * 15}",
    "an API key (sk-...)": f"sk-proj-{'a1' * 20}",
    "an AWS access key": "AKIAIOSFODNN7EXAMPLE",
    "a Google API key": f"AIza{'a1-_b' * 7}",
    "a Slack token": f"xoxb-{'12-' * 8}",
    "a password in a URL": "https://ann:secret@example.com",
    "a private key": f"-----BEGIN OPENSSH PRIVATE KEY-----\n{'aB3/+' * 14}\n",
}
OWN_SECRETS = {
    "correct horse battery": "password",
    "0123456789abcdef0123456789abcdef01234567": "$WANDB_API_KEY",
}


def noise(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


@pytest.mark.parametrize(("label", "token"), TOKENS.items())
@pytest.mark.parametrize("around", [b"", b'{"a": "%s"}\n' * 50, noise(5000)], ids=["alone", "text", "bytes"])
def test_every_form_is_found(label, token, around):
    content = around.replace(b"%s", b"words and words") + b'"' + token.encode() + b'"' + around
    assert find_secret(content, {}) == label


@pytest.mark.parametrize("secret", OWN_SECRETS)
def test_the_users_own_are_found_whatever_they_look_like(secret):
    assert (
        find_secret(noise(3000) + secret.encode() + noise(3000), OWN_SECRETS) == f"your {OWN_SECRETS[secret]}"
    )


@given(st.integers(0, 3 * 4096), st.integers(0, 9))
def test_at_any_place_of_a_large_file(tmp_path_factory, at, seed):
    """Blocks are small here: the place is often across two of them."""
    file = tmp_path_factory.getbasetemp() / "large.csv"
    data = bytearray(noise(3 * 4096 + 100, seed))
    token = f" {TOKENS['a Hugging Face token']} ".encode()
    data[at : at + len(token)] = token
    file.write_bytes(data)
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(secret_scan, "BLOCK", 4096)
        monkeypatch.setattr(secret_scan, "OVERLAP", 256)
        assert find_secret(file, OWN_SECRETS) == "a Hugging Face token"


def test_nothing_is_taken_for_a_secret_that_is_none():
    words = (
        b"task-pick the block, sk-learn, AKIAB, https://host:8000/a@b https://***:***@host hf_hub ghp_ xox-\n"
    )
    lines = b"".join(b'{"sha256": "%064x", "commit": "%040x"}\n' % (n, n) for n in range(300))
    for content in (words * 100, lines, noise(4 << 20), bytes(1 << 20), b"A" * (1 << 20)):
        assert find_secret(content, OWN_SECRETS) is None


def test_memory_does_not_grow_with_the_file(tmp_path):
    file = tmp_path / "video.mp4"
    with file.open("wb") as opened:
        for seed in range(24):
            opened.write(noise(BLOCK, seed))
        opened.write(TOKENS["an AWS access key"].encode())
    tracemalloc.start()
    assert find_secret(file, OWN_SECRETS) == "an AWS access key"
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * BLOCK


def test_of_weights_the_header_is_enough(tmp_path):
    """All bytes after it are tensors. A file that only looks like it is searched like any other."""
    weights = {"a": np.frombuffer(TOKENS["a GitHub token"].encode(), np.uint8)}
    file = tmp_path / "model.safetensors"
    save_file(weights, file)
    assert find_secret(file, {}) is None  # numbers that somebody chose: no text that got there by mistake
    save_file(weights, file, metadata={"notes": TOKENS["a GitHub token"]})
    assert find_secret(file, {}) == "a GitHub token"
    for content in (b"", b"\xff" * 8, b"\0" * 8, (2).to_bytes(8, "little") + b"{}"):
        file.write_bytes(content + b" " + TOKENS["a GitHub token"].encode())
        assert find_secret(file, {}) == "a GitHub token"
    header = json.dumps({"a": {"data_offsets": [0, 10]}, "b": {"data_offsets": [5, -5]}}).encode()
    file.write_bytes(len(header).to_bytes(8, "little") + header + TOKENS["a GitHub token"].encode())
    assert find_secret(file, {}) == "a GitHub token"


@pytest.mark.parametrize("name", ["a.csv", "a.log", "a.parquet", "a.py", "a", "a.safetensors", "meta/a.bin"])
def test_whatever_a_file_is_called(name, monkeypatch, tmp_path):
    file = Path(tmp_path / "file")
    file.write_text(f"id,key\n1,{TOKENS['a GitHub token']}\n")
    with hub(monkeypatch, tmp_path / "downloads") as server:
        repository = HubRepository("ann/x")
        repository.create()
        for content in (file, file.read_bytes()):
            with pytest.raises(HubError, match=f"{name} contains a GitHub token, so nothing was uploaded"):
                repository.commit({name: content}, "first")
        assert name not in server.model("ann/x").files
