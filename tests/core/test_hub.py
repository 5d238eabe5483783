"""Repositories on the Hub through its real client, against a Hub on this machine, with whatever goes wrong there."""

import threading

import pytest

from flexor.core import hub_errors
from flexor.core.hub import HubRepository
from flexor.core.hub_errors import HubError, Interrupted, persist, require_token, without_token
from support.hub_server import QUOTA, TOKEN, HubServer, hub

FILES = {"a.json": b"{}", "large.safetensors": b"x" * 5000, "deep/more.safetensors": b"y" * 100}


@pytest.fixture
def server(monkeypatch, tmp_path):
    monkeypatch.setattr(hub_errors, "FIRST_WAIT", 0.01)
    with hub(monkeypatch, tmp_path) as server:
        yield server


def repository(name: str = "ann/run") -> HubRepository:
    repo = HubRepository(name)
    repo.create()
    return repo


def content(server: HubServer, name: str = "ann/run") -> dict[str, bytes]:
    return {n: blob.data for n, blob in server.model(name).files.items() if n != ".gitattributes"}


def test_files_become_visible_together_and_can_be_read_back(server, tmp_path):
    repo, requests = repository(), []
    commit = repo.commit(FILES, "first", progress=lambda done, total: requests.append((done, total)))
    assert content(server) == FILES and server.model("ann/run").messages == ["initial commit", "first"]
    assert requests == [(5102, 5102)]
    entries = repo.files(commit)
    assert {name: entry.size for name, entry in entries.items()} == {".gitattributes": 0} | {
        name: len(data) for name, data in FILES.items()
    }
    assert entries["a.json"].sha256 is None and entries["large.safetensors"].sha256 is not None
    assert repo.read("a.json") == b"{}" and repo.read("b.json") is None
    sizes = {name: len(data) for name, data in FILES.items()}
    repo.download(sizes, tmp_path / "here", commit, lambda done, total: None)
    assert {name: (tmp_path / "here" / name).read_bytes() for name in FILES} == FILES


def test_what_is_there_is_not_uploaded_again(server):
    repo = repository()
    first = repo.commit(FILES, "first")
    assert repo.commit(FILES, "again") == first and len(server.uploads) == 2
    repo.commit(
        {"a.json": b"[]", "large.safetensors": b"x" * 5000}, "second", deleted=["deep/more.safetensors"]
    )
    assert len(server.uploads) == 2 and set(content(server)) == {"a.json", "large.safetensors"}


def test_a_tag_moves(server):
    repo = repository()
    commits = [repo.commit({"a.json": text}, "c") for text in (b"1", b"2")]
    for commit in commits:
        repo.tag("v3.0", commit)
    assert server.model("ann/run").tags == {"v3.0": commits[1]}


def test_private(server):
    HubRepository("ann/secret", private=True).create()
    HubRepository("ann/open", private=False).create()
    assert server.model("ann/secret").private and not server.model("ann/open").private


# What goes wrong, at each request of a push

REQUESTS = ["repos/create", "preupload", "objects/batch", "PUT /upload", "/commit/", "validate-yaml"]
PASSING = [(500, {}), (503, {}), (429, {"Retry-After": "0"}), "drop"]


@pytest.mark.parametrize("trouble", PASSING, ids=["500", "503", "429", "drop"])
@pytest.mark.parametrize("request_", REQUESTS)
def test_what_passes_is_tried_again(server, request_, trouble):
    server.troubles.extend([(request_, trouble)] * 2)
    repo, files = HubRepository("ann/run"), FILES | {"README.md": b"---\nlicense: mit\n---\n"}
    persist("pushing", repo.create)
    persist("pushing", lambda: repo.commit(files, "first"))
    assert content(server) == files and not server.troubles
    assert server.model("ann/run").messages.count("first") == 1


def test_a_commit_whose_answer_is_lost_is_not_made_twice(server):
    repo = repository()

    def cut() -> None:
        server.before_commit = None
        server.unplugged = True  # from now on; this commit is still made

    server.before_commit = cut
    commit = repo.commit(FILES, "first")
    server.unplugged = False
    assert repo.commit(FILES, "first") == commit
    assert server.model("ann/run").messages == ["initial commit", "first"]


def test_retry_after_is_honoured(server):
    repo, waited = repository(), []
    server.troubles.append(("/commit/", (429, {"Retry-After": "7"})))

    class Clock(threading.Event):
        def wait(self, timeout=None):
            waited.append(timeout)
            return False

    persist("pushing", lambda: repo.commit(FILES, "first"), stop=Clock())
    assert waited == [7.0]


def test_patience_ends(server, monkeypatch):
    server.unplugged = True
    with pytest.raises(HubError, match=r"Can't reach .*/ann/run: .* Check the network\.") as raised:
        persist("pushing", HubRepository("ann/run").create, patience=0.1)
    assert raised.value.may_help


@pytest.mark.parametrize(
    ("trouble", "message"),
    [
        ((401, {}), "does not accept your token.*hf auth login.*401"),
        ((403, {}), "no permission to write to .*/ann/run. It needs write access to ann"),
        (QUOTA, "storage of ann on the Hub is full.*403 Private repository storage limit reached"),
        ((413, {}), "rejects the request.*413"),
    ],
)
@pytest.mark.parametrize("request_", ["preupload", "objects/batch", "PUT /upload", "/commit/"])
def test_what_stays_is_said_at_once(server, request_, trouble, message):
    repo = repository()
    server.troubles.append((request_, trouble))
    with pytest.raises(HubError, match=message) as raised:
        persist("pushing", lambda: repo.commit(FILES, "first"))
    assert not raised.value.may_help and not raised.value.offline
    assert content(server) == {}


def test_somebody_elses_repository(server):
    with pytest.raises(HubError, match=r"no permission to write to .*/bob/run. It needs write access to bob"):
        repository("bob/run")


def test_wrong_token(server, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_" + "wrong" * 5)
    with pytest.raises(HubError, match="does not accept your token") as raised:
        repository()
    assert "wrongwrong" not in str(raised.value)


def test_no_token(server, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(HubError, match=r"not logged in.*hf auth login"):
        require_token()


def test_offline(server, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set") as raised:
        repository()
    assert raised.value.offline and not raised.value.may_help


def test_a_bad_licence(server):
    with pytest.raises(HubError, match=r"rejects the card.*must be one of .* Check the licence"):
        repository().commit({"README.md": b"---\nlicense: nonsense\n---\n"}, "card")


@pytest.mark.parametrize(
    ("status", "may_help"), [("401 Unauthorized", False), ("500 Internal Server Error", True)]
)
def test_errors_of_the_native_uploader_are_told_apart(status, may_help):
    """hf_xet, which uploads to the real Hub, has only a text."""
    error = RuntimeError(
        f"Network error: Request error: HTTP status client error ({status}), domain: http://x/y"
    )
    explained = hub_errors.explain(error, "https://huggingface.co/ann/run")
    assert explained.may_help == may_help and status in str(explained)


def test_stop(server):
    stop = threading.Event()
    stop.set()
    with pytest.raises(Interrupted):
        repository().commit(FILES, "first", stop=stop)
    assert content(server) == {}


def test_a_file_with_the_token_is_not_uploaded(server, tmp_path):
    file = tmp_path / "config.yaml"
    file.write_text(f"root: https://ann:{TOKEN}@example.com")
    with pytest.raises(
        HubError, match=r"config.yaml contains your Hub token, so nothing was uploaded"
    ) as raised:
        repository().commit({"config.yaml": file}, "first")
    assert TOKEN not in str(raised.value) and content(server) == {}


def test_the_token_is_taken_out_of_texts(server):
    server.troubles.append(("/commit/", (400, {"X-Error-Message": f"what is {TOKEN}?"})))
    with pytest.raises(HubError, match=r"what is \*\*\*\?") as raised:
        repository().commit(FILES, "first")
    assert TOKEN not in str(raised.value) and without_token(f"a {TOKEN} b") == "a *** b"
    assert raised.value.__cause__ is None and raised.value.__suppress_context__


def test_a_text_of_any_size_is_not_read(server, monkeypatch):
    repo = repository()
    repo.commit({"run.json": b"x" * 5000}, "first")
    assert repo.read("run.json") == b"x" * 5000
    monkeypatch.setattr("flexor.core.hub.LARGEST_TEXT", 4999)
    with pytest.raises(HubError, match=r"run.json in .* has more than"):
        repo.read("run.json")


def test_a_download_that_breaks_continues(server, tmp_path):
    repo = repository()
    commit = repo.commit(FILES, "first")
    server.troubles.extend([("GET .*large", "drop"), ("HEAD .*large", (500, {})), ("GET .*more", (503, {}))])
    repo.download(dict.fromkeys(FILES, 1), tmp_path / "here", commit, lambda done, total: None)
    assert {name: (tmp_path / "here" / name).read_bytes() for name in FILES} == FILES
