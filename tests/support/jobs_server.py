"""A Hub for tests: as much of its API as starting and watching a job takes, and whatever goes wrong with it."""

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

TOKEN = "hf_" + "x" * 34
JOB_ID = "6877a5f2b1e2c3d4e5f60718"
DATASETS = ("ann/pens",)
HARDWARE = {"cpu-basic": None, "l4x1": ("1", "L4", "24 GB"), "a10g-largex4": ("4", "A10G", "96 GB")}


class JobsServer:
    """One user, ann, one job at a time. Requests are kept, to be looked at.

    `refuse` maps a method and path to the status and message that it gets. Each of `log_faults` befalls one
    request for the log: a status, or the number of lines after which the connection breaks.
    """

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, Any]] = []  # method and path and JSON
        self.refuse: dict[str, tuple[int, str]] = {}
        self.log_faults: deque[int | str] = deque()
        self.buckets: set[str] = set()  # their paths
        self.files: dict[str, bytes] = {}  # in the buckets: OWNER/BUCKET/PATH
        self.usd_per_minute = dict.fromkeys(HARDWARE, 0.01)
        self.lines: list[str] = []
        self.outcome: dict[str, Any] = {"stage": "COMPLETED", "message": None}
        self.may_end = threading.Event()  # the job runs until this is set
        self.may_end.set()
        self.job: dict[str, Any] | None = None
        self._http = _QuietServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._http.owner = self  # type: ignore[attr-defined]
        self.address = f"http://127.0.0.1:{self._http.server_port}"

    def __enter__(self) -> "JobsServer":
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.may_end.set()
        self._http.shutdown()
        self._http.server_close()

    def add_files(self, bucket: str, add: list[tuple[bytes, str]]) -> None:
        """What the client does to upload files to a bucket: with a protocol of its own, which this server lacks."""
        assert f"/api/buckets/{bucket}" in self.buckets
        self.requests.append(("upload", bucket, [path for _, path in add]))
        self.files |= {f"{bucket}/{path}": content for content, path in add}

    def bodies(self, method: str, path: str) -> list[Any]:
        return [body for m, p, body in self.requests if (m, p) == (method, path)]


@contextmanager
def logged_in(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[JobsServer]:
    """A Hub, and a user who is logged in there and has the datasets in folder/datasets."""
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_LEROBOT_HOME", str(folder / "datasets"))
    with JobsServer() as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", server.address)
        monkeypatch.setattr(
            "huggingface_hub.HfApi.batch_bucket_files", lambda _, bucket, add: server.add_files(bucket, add)
        )
        yield server


class _QuietServer(ThreadingHTTPServer):
    def handle_error(self, *arguments: object) -> None:
        """Clients that leave are part of the tests."""


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def owner(self) -> JobsServer:
        return self.server.owner  # type: ignore[attr-defined]

    def do_GET(self) -> None:
        self._answer(None)

    def do_POST(self) -> None:
        self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, body: Any) -> None:
        owner = self.owner
        path = self.path.partition("?")[0]
        owner.requests.append((self.command, path, body))
        job = f"/api/jobs/ann/{JOB_ID}"
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            self._refuse(401, "Invalid credentials in Authorization header")
        elif f"{self.command} {path}" in owner.refuse:
            self._refuse(*owner.refuse[f"{self.command} {path}"])
        elif path == "/api/whoami-v2":
            self._send({"type": "user", "name": "ann", "orgs": []})
        elif path == "/api/jobs/hardware":
            self._send([_hardware(name, gpu, owner.usd_per_minute[name]) for name, gpu in HARDWARE.items()])
        elif path.removeprefix("/api/datasets/") in DATASETS:
            self._send({"id": path.removeprefix("/api/datasets/"), "sha": "0" * 40, "siblings": []})
        elif self.command == "POST" and path.startswith("/api/buckets/ann/"):
            status = 409 if path in owner.buckets else 200
            owner.buckets.add(path)
            self._send({"url": f"{owner.address}/buckets/{path.removeprefix('/api/buckets/')}"}, status)
        elif self.command == "POST" and path == "/api/jobs/ann":
            owner.job = _job(body)
            self._send(owner.job)
        elif owner.job is not None and path == job:
            self._send(owner.job)
        elif owner.job is not None and path == f"{job}/logs":
            self._send_log(owner.job)
        else:
            self._refuse(404, "Sorry, we can't find the page you are looking for.", "RepoNotFound")

    def _send(self, content: Any, status: int = 200, **headers: str) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _refuse(self, status: int, message: str, code: str = "") -> None:
        self._send({"error": message}, status, X_Error_Message=message, X_Error_Code=code)

    def _send_log(self, job: dict[str, Any]) -> None:
        """All of the log from its start, as server-sent events; at its end the job ends."""
        fault = self.owner.log_faults.popleft() if self.owner.log_faults else "none"
        if isinstance(fault, int) and fault >= 400:
            self._refuse(fault, "Bad Gateway")
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for number, line in enumerate(["===== Job started at now =====", *self.owner.lines]):
            if number == fault:
                self.close_connection = True
                self.connection.close()
                return
            event = {"timestamp": "2026-01-01T00:00:00.000Z", "data": line}
            self._send_chunk(f"event: log\ndata: {json.dumps(event)}\n\n")
        while not self.owner.may_end.wait(0.05):
            self._send_chunk(": keep-alive\n\n")
        job["status"] = self.owner.outcome
        self._send_chunk("")

    def _send_chunk(self, text: str) -> None:
        self.wfile.write(f"{len(text.encode()):x}\r\n{text}\r\n".encode())
        self.wfile.flush()

    def log_message(self, *_: object) -> None:
        """Nothing: the tests look at `requests`."""


def _hardware(name: str, gpu: tuple[str, str, str] | None, usd: float) -> dict[str, Any]:
    accelerator = None
    if gpu:
        accelerator = dict(zip(("quantity", "model", "vram"), gpu)) | {
            "type": "gpu",
            "manufacturer": "Nvidia",
        }
    described = {
        "name": name,
        "prettyName": name,
        "cpu": "8 vCPU",
        "ram": "30 GB",
        "accelerator": accelerator,
    }
    return described | {"unitCostMicroUSD": round(usd * 1e6), "unitCostUSD": usd, "unitLabel": "minute"}


def _job(spec: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": JOB_ID,
        "createdAt": "2026-01-01T00:00:00.000Z",
        "owner": {"id": "1", "name": "ann", "type": "user"},
        "dockerImage": spec["dockerImage"],
        "command": spec["command"],
        "environment": spec["environment"],
        "flavor": spec["flavor"],
        "status": {"stage": "RUNNING", "message": None},
    }
