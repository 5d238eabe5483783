"""A Hub for tests: repositories that can be created, listed, read, committed to and tagged, and whatever goes wrong.

It speaks the Hub's protocol as far as its real client uses it here: preupload, LFS batch and upload, commit, tags,
tree, resolve.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

from support.file_server import FileServer, Handler

TOKEN = "hf_SentinelTokenThatMustNotAppearAnywhere"
USER = "ann"
LARGE = (".safetensors", ".parquet", ".mp4")
KINDS = {"models": "", "datasets": "datasets/"}
QUOTA = (403, {"X-Error-Message": "Private repository storage limit reached, please upgrade your plan."})


@dataclass(frozen=True)
class Blob:
    data: bytes
    large: bool

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()

    @property
    def git(self) -> str:
        return hashlib.sha1(b"blob %d\0" % len(self.data) + self.data).hexdigest()

    @property
    def oid(self) -> str:
        return self.sha256 if self.large else self.git


@dataclass
class Repo:
    """Commits by hash, each with all its files; branches and tags by name."""

    url: str
    private: bool = False
    commits: dict[str, dict[str, Blob]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)
    refs: dict[str, str] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def commit(self, files: dict[str, Blob], message: str) -> str:
        content = json.dumps([message, len(self.commits), sorted((n, b.oid) for n, b in files.items())])
        sha = hashlib.sha1(content.encode()).hexdigest()
        self.commits[sha] = files
        self.messages.append(message)
        self.refs["main"] = sha
        return sha

    def resolve(self, revision: str) -> str | None:
        named = self.refs.get(revision) or self.tags.get(revision)
        return named or (revision if revision in self.commits else None)

    @property
    def files(self) -> dict[str, Blob]:
        return self.commits[self.refs["main"]]


class HubServer(FileServer):
    """`troubles`: what befalls a request, once each: a pattern for its method and path, and a status with headers or
    "drop" (the connection, in the middle of what is sent). `down`: every connection is closed without an answer.
    """

    def __init__(self) -> None:
        super().__init__(Path("/nonexistent"), HubHandler)
        self.repos: dict[tuple[str, str], Repo] = {}  # kind and name
        self.large: dict[str, bytes] = {}  # what was uploaded, by hash
        self.troubles: deque[tuple[str, Any]] = deque()
        self.unplugged = False
        self.request_lines: list[str] = []  # method and path of each request
        self.uploads: list[str] = []  # hash of every large file that came
        self.tokens: set[str] = {TOKEN}
        self.seen_tokens: set[str] = set()
        self.before_commit: Callable[[], None] | None = None

    def add(self, kind: str, name: str, folder: Path, *tags: str) -> Repo:
        """A repository with the files of a folder."""
        repo = self.repos[kind, name] = Repo(f"{self.address}/{KINDS[kind]}{name}")
        files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        sha = repo.commit({n: Blob(data, n.endswith(LARGE)) for n, data in files.items()}, "added")
        repo.tags = dict.fromkeys(tags, sha)
        return repo

    def model(self, name: str) -> Repo:
        return self.repos["models", name]

    def dataset(self, name: str) -> Repo:
        return self.repos["datasets", name]

    def trouble_for(self, request: str) -> Any:
        with self.lock:
            for entry in self.troubles:
                if re.search(entry[0], request):
                    self.troubles.remove(entry)
                    return entry[1]
        return None


@contextmanager
def hub(monkeypatch: pytest.MonkeyPatch, folder: Path, token: str | None = TOKEN) -> Iterator[HubServer]:
    """A Hub at which ann is logged in; what is downloaded from it goes to a folder."""
    for name, value in {
        "HF_TOKEN": token,
        "HF_LEROBOT_HOME": str(folder),
        "FLEXOR_CACHE": str(folder),
    }.items():
        monkeypatch.setenv(name, value) if value else monkeypatch.delenv(name, raising=False)
    constants = "huggingface_hub.constants"
    with HubServer() as server:
        monkeypatch.setattr(f"{constants}.ENDPOINT", server.address)
        template = server.address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(f"{constants}.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(f"{constants}.HF_HUB_OFFLINE", False)
        monkeypatch.setattr(f"{constants}.HF_HUB_DISABLE_XET", True)  # files come by LFS: the Hub takes both
        monkeypatch.setattr(f"{constants}.HF_HUB_CACHE", str(folder / "cache"))
        # the client waits between its own attempts
        patient = {name: getattr(time, name) for name in dir(time) if not name.startswith("_")}
        hasty = SimpleNamespace(**patient | {"sleep": lambda seconds: None})
        monkeypatch.setattr("huggingface_hub.utils._http.time", hasty)
        yield server


def log_in(address: str, token: str) -> None:
    """In a process of its own: use the Hub at this address from now on."""
    from huggingface_hub import constants

    os.environ["HF_TOKEN"] = token
    constants.ENDPOINT, constants.HF_HUB_DISABLE_XET = address, True
    constants.HUGGINGFACE_CO_URL_TEMPLATE = address + "/{repo_id}/resolve/{revision}/{filename}"


class HubHandler(Handler):
    server_version = "Hub"

    @property
    def hub(self) -> HubServer:
        return self.owner  # type: ignore[return-value]

    def do_GET(self) -> None:
        self._handle()

    def do_HEAD(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_PUT(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def _handle(self) -> None:
        path = unquote(self.path.partition("?")[0])
        request = f"{self.command} {path}"
        self.hub.request_lines.append(request)
        trouble = self.hub.trouble_for(request)
        length = int(self.headers.get("Content-Length") or 0)
        if self.hub.unplugged or trouble == "drop":
            self.rfile.read(length // 2)
            self.close_connection = True
            self.connection.close()
            return
        body = self._body(length)
        if isinstance(trouble, tuple):
            self.answer(trouble[0], b"not now", trouble[1])
        elif self.hub.down:
            self.hub.down -= 1
            self.answer(503, b"not now")
        else:
            self._route(path, body)

    def _body(self, length: int) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(length)
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _route(self, path: str, body: bytes) -> None:
        authorization = self.headers.get("Authorization")
        self.hub.seen_tokens |= {authorization.removeprefix("Bearer ")} if authorization else set()
        logged_in = authorization is not None and authorization.removeprefix("Bearer ") in self.hub.tokens
        if authorization is not None and not logged_in:
            self._refuse(401, "Invalid credentials in Authorization header")
        elif path.startswith("/upload/"):
            self._store(path.removeprefix("/upload/"), body)
        elif path == "/api/validate-yaml":
            bad = "license: nonsense" in json.loads(body)["content"]
            error = [{"message": '"license" must be one of [apache-2.0, mit]'}]
            self._json({"errors": error if bad else [], "warnings": []}, 400 if bad else 200)
        elif path == "/api/repos/create":
            self._create(json.loads(body), logged_in)
        elif match := re.fullmatch(r"/(datasets/)?([\w.-]+/[\w.-]+)\.git/info/lfs/objects/batch", path):
            self._batch(json.loads(body)) if self._may_write(match[2], logged_in) else None
        elif match := re.fullmatch(r"/(datasets/)?([\w.-]+/[\w.-]+)/resolve/([^/]+)/(.+)", path):
            self._resolve("datasets" if match[1] else "models", match[2], match[3], match[4], logged_in)
        elif match := re.fullmatch(r"/api/(models|datasets)/([\w.-]+/[\w.-]+)(?:/(\w+)(?:/(.+))?)?", path):
            self._api(*match.groups(), body=body, logged_in=logged_in)
        else:
            self._refuse(404, "Sorry, we can't find the page you are looking for.")

    def _create(self, request: dict[str, Any], logged_in: bool) -> None:
        owner = request.get("organization") or USER
        if not self._may_write(f"{owner}/{request['name']}", logged_in):
            return
        key = (f"{request.get('type', 'model')}s", f"{owner}/{request['name']}")
        taken, url = key in self.hub.repos, f"{self.hub.address}/{KINDS[key[0]]}{key[1]}"
        if not taken:
            private = request.get("visibility") == "private" or bool(request.get("private"))
            repo = self.hub.repos[key] = Repo(url, private)
            repo.commit({".gitattributes": Blob(b"", False)}, "initial commit")
        self._json({"url": url, "id": key[1]}, 409 if taken else 200)

    def _may_write(self, name: str, logged_in: bool) -> bool:
        if logged_in and name.startswith(f"{USER}/"):
            return True
        self._refuse(
            403 if logged_in else 401, "You don't have the rights to do this" if logged_in else "Log in first"
        )
        return False

    def _api(
        self, kind: str, name: str, resource: str | None, rest: str | None, body: bytes, logged_in: bool
    ) -> None:
        repo = self.hub.repos.get((kind, name))
        if repo is None or (repo.private and not logged_in):
            self._refuse(404 if logged_in else 401, "Repository not found", "RepoNotFound")
            return
        writes = {"preupload": self._preupload, "commit": self._commit, "tag": self._tag}
        if resource in writes:
            if self._may_write(name, logged_in):
                writes[resource](repo, rest or "main", body)
            return
        if resource == "refs":
            tags = [{"name": n, "ref": f"refs/tags/{n}", "targetCommit": c} for n, c in repo.tags.items()]
            self._json({"branches": [], "converts": [], "tags": tags})
            return
        sha = repo.resolve(rest or "main")
        if sha is None:
            self._refuse(404, "Revision not found", "RevisionNotFound")
        elif resource == "tree":
            self._json([_entry(path, blob) for path, blob in repo.commits[sha].items()])
        else:
            about = {"id": name, "sha": sha, "siblings": [], "private": repo.private, "tags": []}
            self._json(about | {"downloads": 0, "likes": 0})

    def _preupload(self, repo: Repo, revision: str, body: bytes) -> None:
        files = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(LARGE) else "regular",
                "shouldIgnore": False,
                "oid": repo.files[file["path"]].oid if file["path"] in repo.files else None,
            }
            for file in json.loads(body)["files"]
        ]
        self._json({"files": files})

    def _batch(self, request: dict[str, Any]) -> None:
        objects = []
        for entry in request["objects"]:
            upload = {"upload": {"href": f"{self.hub.address}/upload/{entry['oid']}", "header": {}}}
            objects.append(entry if entry["oid"] in self.hub.large else entry | {"actions": upload})
        self._json({"transfer": "basic", "objects": objects})

    def _store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            self._refuse(400, "The content does not match its hash")
            return
        self.hub.large[oid] = body
        self.hub.uploads.append(oid)
        self.answer(200, b"")

    def _commit(self, repo: Repo, revision: str, body: bytes) -> None:
        files, message = dict(repo.files), ""
        for line in body.splitlines():
            key, value = json.loads(line).values()
            if key == "header":
                message = value["summary"]
            elif key == "file":
                files[value["path"]] = Blob(base64.b64decode(value["content"]), False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.large:
                    self._refuse(400, f"{value['path']} was not uploaded")
                    return
                files[value["path"]] = Blob(self.hub.large[value["oid"]], True)
            elif key == "deletedFile":
                del files[value["path"]]
        if self.hub.before_commit is not None:
            self.hub.before_commit()
        sha = repo.commit(files, message)
        self._json({"commitUrl": f"{repo.url}/commit/{sha}", "commitOid": sha, "success": True})

    def _tag(self, repo: Repo, revision: str, body: bytes) -> None:
        if self.command == "DELETE":
            repo.tags.pop(revision, None)
            self._json({})
            return
        name = json.loads(body)["tag"]
        if name in repo.tags:
            self._refuse(409, "Tag reference exists already")
            return
        sha = repo.resolve(revision)
        assert sha is not None
        repo.tags[name] = sha
        self._json({})

    def _resolve(self, kind: str, name: str, revision: str, path: str, logged_in: bool) -> None:
        repo = self.hub.repos.get((kind, name))
        sha = repo.resolve(revision) if repo and (logged_in or not repo.private) else None
        if repo is None or sha is None or path not in repo.commits[sha]:
            self._refuse(404, "Entry not found", "EntryNotFound")
            return
        blob = repo.commits[sha][path]
        self.answer_file(blob.data, {"X-Repo-Commit": sha, "ETag": f'"{blob.oid}"'})

    def _json(self, content: object, status: int = 200) -> None:
        self.answer(status, json.dumps(content).encode(), {"Content-Type": "application/json"})

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        headers = {"X-Error-Message": message, **({"X-Error-Code": code} if code else {})}
        self.answer(status, json.dumps({"error": message}).encode(), headers)


def _entry(path: str, blob: Blob) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "file", "path": path, "size": len(blob.data), "oid": blob.git}
    if blob.large:
        entry["lfs"] = {"oid": blob.sha256, "size": len(blob.data), "pointerSize": 130}
    return entry


def everything_written(*folders: Path) -> Iterator[tuple[Path, bytes]]:
    for folder in folders:
        for path in folder.rglob("*"):
            if path.is_file() and not path.is_symlink():
                yield path, path.read_bytes()
