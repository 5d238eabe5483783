"""`flexor data push`: a dataset on the Hub is complete or absent, and reads as the one that was pushed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml

from flexor.cli.main import main
from flexor.core import hub_errors
from flexor.core.errors import ConfigError, DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.push import push
from flexor.data.push.push import push_dataset
from support.hub_server import QUOTA, TOKEN, HubServer, everything_written, hub
from support.legacy import to_v2
from support.samples import write_sample

NAME = "ann/pens"


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    root = write_sample(folder / "v3.0")
    return {"v3.0": root, "v2.1": to_v2(root, folder / "v2.1", "v2.1")}


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr(hub_errors, "FIRST_WAIT", 0.01)
    with hub(monkeypatch, tmp_path / "downloads") as server:
        yield server


def files(server: HubServer) -> dict[str, bytes]:
    written_by_the_hub = ("README.md", ".gitattributes")
    return {
        name: blob.data for name, blob in server.dataset(NAME).files.items() if name not in written_by_the_hub
    }


def local(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in root.rglob("*") if p.is_file()}


@pytest.mark.parametrize("version", ["v3.0", "v2.1"])
def test_what_is_pushed_is_read_back(server, samples, version, capsys):
    root = samples[version]
    assert (
        main(["data", "push", str(root), NAME, "--private", "--license=mit", "--tags=pens,so101", "--json"])
        == 0
    )
    report = json.loads(capsys.readouterr().out)
    repo = server.dataset(NAME)
    assert repo.private and repo.tags == {version: report["commit"]} and report["tag"] == version
    assert files(server) == local(root) and report["files"] == report["uploaded_files"] == len(local(root))
    front = yaml.safe_load(repo.files["README.md"].data.decode().split("---\n")[1])
    assert front == {
        "license": "mit",
        "task_categories": ["robotics"],
        "tags": ["LeRobot", "pens", "so101"],
        "configs": [{"config_name": "default", "data_files": "data/*/*.parquet"}],
    }
    pushed, here = open_dataset(NAME), open_dataset(root=root)
    assert pushed.version == version and pushed.fingerprint() == here.fingerprint()
    np.testing.assert_array_equal(
        pushed.read(np.array([3]))["observation.images.top"],
        here.read(np.array([3]))["observation.images.top"],
    )


def test_the_card_describes_the_dataset(server, samples, capsys):
    assert main(["data", "push", str(samples["v3.0"]), NAME, "--dry-run"]) == 0
    message = capsys.readouterr().out
    for part in (
        "# ann/pens",
        "| episodes | ",
        "## Tasks",
        f"--dataset.repo_id={NAME}",
        "visualize_dataset?path=ann/pens",
    ):
        assert part in message, part
    assert not server.request_lines


def test_pushed_again_only_what_is_new(server, samples, tmp_path):
    root = shutil.copytree(samples["v3.0"], tmp_path / "mine")
    first = push_dataset(root, NAME)
    uploads = len(server.uploads)
    again = push_dataset(root, NAME)
    assert (
        again["uploaded_files"] == 0 and len(server.uploads) == uploads and again["commit"] == first["commit"]
    )
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | {"robot_type": "another"}))
    changed = push_dataset(root, NAME)
    assert changed["uploaded_files"] == 1 and files(server) == local(root)
    assert server.dataset(NAME).tags == {"v3.0": changed["commit"]}


@pytest.mark.parametrize(
    "trouble", [(500, {}), (429, {"Retry-After": "0"}), "drop"], ids=["500", "429", "drop"]
)
def test_what_passes_is_tried_again(server, samples, trouble):
    for request in (
        "repos/create",
        "/tree/",
        "/preupload/",
        "objects/batch",
        "PUT /upload",
        "/commit/",
        "/tag/",
    ):
        server.troubles.append((request, trouble))
    push_dataset(samples["v3.0"], NAME)
    assert files(server) == local(samples["v3.0"]) and not server.troubles
    assert server.dataset(NAME).tags.keys() == {"v3.0"}


@pytest.mark.parametrize("at", [1, 2, 3])
def test_a_push_that_is_interrupted_is_no_dataset_and_continues(server, samples, monkeypatch, at):
    """The network goes in the middle: what is there is not a dataset yet. The next push uploads only the rest."""
    monkeypatch.setattr(push, "COMMIT_FILES", 2)
    monkeypatch.setattr(hub_errors, "PATIENCE", 0.3)
    server.before_commit = lambda: setattr(
        server, "unplugged", sum("/commit/" in request for request in server.request_lines) >= at
    )
    with pytest.raises(hub_errors.HubError, match="Can't reach"):
        push_dataset(samples["v3.0"], NAME)
    server.unplugged, server.before_commit = False, None
    assert "meta/info.json" not in files(server) and not server.dataset(NAME).tags
    with pytest.raises(DatasetError):
        open_dataset(NAME)
    done = set(server.uploads)
    before = len(server.uploads)
    push_dataset(samples["v3.0"], NAME)
    assert not done & set(server.uploads[before:]) and files(server) == local(samples["v3.0"])


def test_readers_keep_the_version_before_while_a_new_one_is_pushed(server, samples, tmp_path, monkeypatch):
    root = shutil.copytree(samples["v3.0"], tmp_path / "mine")
    push_dataset(root, NAME)
    first_commit = server.dataset(NAME).tags["v3.0"]
    video = next(root.rglob("*.mp4"))
    video.write_bytes(video.read_bytes() + b"\0" * 8)
    reports = []
    server.before_commit = lambda: reports.append(server.dataset(NAME).tags["v3.0"])
    push_dataset(root, NAME)
    assert reports and set(reports) == {first_commit} and server.dataset(NAME).tags["v3.0"] != first_commit


def test_another_dataset_is_not_overwritten_by_mistake(server, samples, capsys):
    push_dataset(samples["v2.1"], NAME)
    before = files(server)
    with pytest.raises(
        ConfigError, match=r"files of a dataset that are not in this one(.|\n)*--delete-extra"
    ):
        push_dataset(samples["v3.0"], NAME)
    assert files(server) == before
    assert main(["data", "push", str(samples["v3.0"]), NAME, "--delete-extra"]) == 0
    assert files(server) == local(samples["v3.0"])


def test_cards_that_people_wrote(server, samples, tmp_path):
    """One in the folder is pushed; one on the Hub stays."""
    root = shutil.copytree(samples["v3.0"], tmp_path / "mine")
    (root / "README.md").write_text("---\nlicense: mit\n---\nMine.")
    push_dataset(root, NAME)
    assert server.dataset(NAME).files["README.md"].data.endswith(b"Mine.")
    (root / "README.md").unlink()
    push_dataset(root, NAME)
    assert server.dataset(NAME).files["README.md"].data.endswith(b"Mine.")


def test_only_the_dataset_is_pushed(server, samples, tmp_path):
    root = shutil.copytree(samples["v3.0"], tmp_path / "mine")
    for extra in ("images/frame.png", "notes.txt", ".cache/x", "meta/.hidden"):
        (root / extra).parent.mkdir(exist_ok=True)
        (root / extra).write_text("private")
    push_dataset(root, NAME)
    assert files(server) == local(samples["v3.0"])


def test_what_is_not_a_dataset(server, samples, tmp_path):
    with pytest.raises(DatasetError, match=r"is not a LeRobot dataset: it has no meta/info\.json"):
        push_dataset(tmp_path, NAME)
    with pytest.raises(ConfigError, match="pens is not the name of a repository on the Hub: give USER/NAME"):
        push_dataset(samples["v3.0"], "pens")
    root = shutil.copytree(samples["v3.0"], tmp_path / "mine")
    next(root.rglob("*.mp4")).unlink()
    with pytest.raises(
        DatasetError, match=r"is not complete: 1 of its files are missing(.|\n)*flexor data check"
    ):
        push_dataset(root, NAME)
    assert not server.request_lines


@pytest.mark.parametrize(
    ("trouble", "message"),
    [((401, {}), "does not accept your token"), ((403, {}), "no permission"), (QUOTA, "is full")],
)
def test_what_the_hub_rejects(server, samples, trouble, message, capsys):
    server.troubles.append(("/preupload/", trouble))
    assert main(["data", "push", str(samples["v3.0"]), NAME]) == 1
    assert message in capsys.readouterr().err


def test_the_token_is_nowhere(server, samples, tmp_path, capfd, log_lines):
    server.troubles.extend([("/commit/", (500, {"X-Error-Message": TOKEN})), ("PUT /upload", "drop")])
    main(["data", "push", str(samples["v3.0"]), NAME, "--json"])
    open_dataset(NAME)
    message = capfd.readouterr()
    assert TOKEN not in message.out + message.err + "\n".join(log_lines) and "pushing" in "\n".join(log_lines)
    assert [path for path, data in everything_written(tmp_path) if TOKEN.encode() in data] == []
