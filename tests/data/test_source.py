"""Where datasets come from: folders, fsspec addresses and the Hub."""

import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from legacy import to_v2
from samples import write_sample

from flexor.data.dataset import open_dataset
from flexor.errors import DatasetError

TOP = "observation.images.top"
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    root = write_sample(folder / "v3.0")
    return {"v3.0": root, "v2.1": to_v2(root, folder / "v2.1", "v2.1")}


def test_repo_id_is_looked_for_under_lerobots_home(samples, tmp_path, monkeypatch):
    shutil.copytree(samples["v3.0"], tmp_path / "me/sample")
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    dataset = open_dataset("me/sample")
    assert dataset.root == tmp_path / "me/sample" and dataset.repo_id == "me/sample"


def test_file_address(samples):
    assert len(open_dataset(root=f"file://{samples['v3.0']}")) == 38


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_fsspec_address(samples, version, tmp_path, monkeypatch):
    import fsspec

    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path))
    memory = fsspec.filesystem("memory")
    memory.put(str(samples[version]), f"/bucket/{version}", recursive=True)
    dataset = open_dataset(root=f"memory://bucket/{version}", episodes=[1])
    copied = {path.name for path in tmp_path.rglob("*.mp4")}
    assert not copied  # videos are copied when they are first read
    local = open_dataset(root=samples[version], episodes=[1])
    np.testing.assert_array_equal(dataset.read(np.array([3]))[TOP], local.read(np.array([3]))[TOP])
    assert len(list(tmp_path.rglob("*.mp4"))) == 1  # and only those of selected episodes
    assert dataset.fingerprint() == local.fingerprint()
    assert not list(tmp_path.rglob("*.partial"))


def test_fsspec_address_with_nothing_there():
    with pytest.raises(DatasetError, match=r"memory://nowhere/meta/info\.json cannot be read"):
        open_dataset(root="memory://nowhere")


def test_hub_snapshot_in_the_cache_is_used_without_the_hub(samples, tmp_path, monkeypatch):
    """The layout huggingface_hub leaves behind; offline it must do."""
    folder = tmp_path / "hub/datasets--me--sample"
    shutil.copytree(samples["v2.1"], folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs/v2.1").write_text(COMMIT)
    script = (
        "from flexor.data.dataset import open_dataset; print(len(open_dataset('me/sample', episodes=[1])))"
    )
    assert run(script, tmp_path).stdout.strip() == "12"


def test_unreachable_hub(tmp_path):
    script = (
        "from flexor.data.dataset import open_dataset\n"
        "from flexor.errors import DatasetError\n"
        "try: open_dataset('me/sample')\n"
        "except DatasetError as error: print(error)"
    )
    message = run(script, tmp_path).stdout
    assert "me/sample is not (or not whole) in" in message and "--dataset.root" in message


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as downloading takes: one dataset `me/sample` with one tag."""

    root: Path
    tag: str
    served: list[str]

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        api = "/api/datasets/me/sample"
        if self.path.startswith(f"{api}/refs"):
            tag = {"name": self.tag, "ref": f"refs/tags/{self.tag}", "targetCommit": COMMIT}
            self.answer(json.dumps({"branches": [], "converts": [], "tags": [tag]}).encode())
        elif self.path.startswith(f"{api}/revision/{self.tag}"):
            about = {"id": "me/sample", "sha": COMMIT, "siblings": [], "private": False, "tags": []}
            self.answer(json.dumps(about | {"downloads": 0, "likes": 0}).encode())
        elif self.path.startswith(f"{api}/tree/{COMMIT}"):
            files = [path for path in self.root.rglob("*") if path.is_file()]
            sizes = {path.relative_to(self.root).as_posix(): path.stat().st_size for path in files}
            tree = [{"type": "file", "path": n, "size": size, "oid": COMMIT} for n, size in sizes.items()]
            self.answer(json.dumps(tree).encode())
        elif self.path.startswith(f"/datasets/me/sample/resolve/{COMMIT}/"):
            name = self.path.removeprefix(f"/datasets/me/sample/resolve/{COMMIT}/")
            if self.command == "GET":
                self.served.append(name)
            self.answer((self.root / name).read_bytes(), {"ETag": f'"{name}"', "X-Repo-Commit": COMMIT})
        else:
            self.send_error(404)

    def answer(self, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(200)
        for name, value in ({"Content-Length": str(len(body))} | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_hub_download_is_of_the_selected_episodes_only(samples, tmp_path, version):
    hub = type("ThisHub", (Hub,), {"root": samples[version], "tag": version, "served": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    script = (
        "from flexor.data.dataset import open_dataset\n"
        "import numpy as np\n"
        "dataset = open_dataset('me/sample', episodes=[0])\n"
        f"print(dataset.version, len(dataset), dataset.read(np.array([3]))['{TOP}'].sum())"
    )
    try:
        printed = run(script, tmp_path, f"http://127.0.0.1:{server.server_port}").stdout
    finally:
        server.shutdown()
    expected = open_dataset(root=samples[version], episodes=[0]).read(np.array([3]))[TOP].sum()
    assert printed.split() == [version, "7", str(expected)]
    fetched = [name for name in hub.served if not name.startswith("meta/")]
    assert len(fetched) == len(set(fetched)) == 2  # one data file, one video
    assert sum("000" in name.rsplit("/", 1)[1] for name in fetched) == 2


def run(script: str, home: Path, endpoint: str = "http://127.0.0.1:9") -> subprocess.CompletedProcess:
    """In a process of its own: huggingface_hub reads the endpoint once, when imported."""
    settings = {
        "HF_ENDPOINT": endpoint,
        "HF_LEROBOT_HOME": str(home),
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | settings
    return subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
