"""The application's server: who may use it, and how it answers."""

import json
import threading
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from flexor.cli import main as cli
from flexor.core.errors import ConfigError
from flexor.ui.replies import byte_range
from flexor.ui.server import UIServer
from support.run_folders import write_run
from support.ui_pages import serving_ui


def ask(
    server: UIServer, path: str, method: str = "GET", body: Any = None, **headers: str
) -> tuple[int, Any, dict]:
    connection = HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    content = None if body is None else json.dumps(body)
    connection.request(method, path, content, sent)
    reply = connection.getresponse()
    data = reply.read()
    connection.close()
    is_json = reply.headers.get_content_type() == "application/json"
    return reply.status, json.loads(data) if is_json else data, dict(reply.headers)


def with_cookie(server: UIServer) -> dict[str, str]:
    return {"Cookie": server.access.set_cookie().partition(";")[0]}


def test_only_the_link_opens_it(tmp_path: Path):
    write_run(tmp_path / "run")
    with serving_ui(tmp_path) as server:
        status, page, headers = ask(server, f"/?token={server.access.token}")
        assert status == 200 and b"<!doctype html>" in page
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert ask(server, "/runs")[0] == 401
        assert ask(server, "/?token=wrong")[0] == 401
        assert ask(server, "/runs", Cookie=f"{server.access.cookie}=wrong")[0] == 401
        status, rows, _ = ask(server, "/runs", Cookie=cookie.partition(";")[0])
        assert status == 200 and [row["name"] for row in rows] == ["run"]


def test_other_sites_get_nothing(tmp_path: Path):
    """Neither by a name that leads to this machine, nor from a page that is open in the same browser."""
    run = write_run(tmp_path / "run")
    with serving_ui(tmp_path) as server:
        cookie = with_cookie(server)
        assert ask(server, "/runs", Host="evil.example", **cookie)[0] == 403
        assert ask(server, "/runs", Origin="http://evil.example", **cookie)[0] == 403
        run_id = ask(server, "/runs", **cookie)[1][0]["id"]
        note = {"text": "mine"}
        assert ask(server, f"/notes/{run_id}", "POST", note, **cookie)[0] == 415
        as_json = {"Content_Type": "application/json"}
        foreign = {"Origin": "http://evil.example", **as_json}
        assert ask(server, f"/notes/{run_id}", "POST", note, **foreign, **cookie)[0] == 403
        assert not (run / "notes.md").exists()
        assert ask(server, f"/notes/{run_id}", "POST", note, **as_json, **cookie)[0] == 200
        assert (run / "notes.md").read_text() == "mine"
        assert ask(server, f"/runs/{run_id}", "POST", note, **as_json, **cookie)[0] == 404  # only reads
        assert ask(server, f"/notes/{run_id}", "POST", ["no object"], **as_json, **cookie)[0] == 400


def test_files_are_sent_in_parts(tmp_path: Path):
    run = write_run(tmp_path / "run")
    video = run / "videos/000100/episode.mp4"
    video.parent.mkdir(parents=True)
    video.write_bytes(bytes(range(200)))
    (tmp_path / "secret.mp4").write_bytes(b"secret")
    (run / "videos/link.mp4").symlink_to(tmp_path / "secret.mp4")
    with serving_ui(tmp_path) as server:
        cookie = with_cookie(server)
        run_id = ask(server, "/runs", **cookie)[1][0]["id"]
        assert [v["name"] for v in ask(server, f"/run/{run_id}", **cookie)[1]["videos"]] == [
            "videos/000100/episode.mp4"
        ]
        address = f"/video/{run_id}/videos/000100/episode.mp4"
        status, data, headers = ask(server, address, **cookie)
        assert (status, len(data), headers["Accept-Ranges"]) == (200, 200, "bytes")
        status, data, headers = ask(server, address, Range="bytes=10-19", **cookie)
        assert (status, data, headers["Content-Range"]) == (206, bytes(range(10, 20)), "bytes 10-19/200")
        assert ask(server, address, Range="bytes=500-", **cookie)[0] == 416
        for name in ("videos/link.mp4", "config.yaml", "..%2F..%2Fsecret.mp4", "videos/no.mp4"):
            assert ask(server, f"/video/{run_id}/{name}", **cookie)[0] == 404, name


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        *((None, None), ("bytes=0-", (0, 100)), ("bytes=5-9", (5, 5)), ("bytes=90-500", (90, 10))),
        *(("bytes=-10", (90, 10)), ("bytes=-500", (0, 100)), ("bytes=1-2,4-5", None), ("lines=1-2", None)),
    ],
)
def test_ranges(header: str | None, expected: tuple[int, int] | None):
    assert byte_range(header, 100) == expected


@pytest.mark.parametrize("header", ["bytes=100-", "bytes=9-5", "bytes=-0"])
def test_ranges_that_are_not_in_the_file(header: str):
    with pytest.raises(ValueError):
        byte_range(header, 100)


def test_errors_are_texts(tmp_path: Path):
    write_run(tmp_path / "run")
    with serving_ui(tmp_path) as server:
        cookie = with_cookie(server)
        assert ask(server, "/nothing", **cookie)[0] == 404
        assert ask(server, "/run/0123", **cookie)[:2] == (404, {"error": "This run no longer exists."})
        assert ask(server, "/run", **cookie)[0] == 404


def test_a_port_that_is_in_use_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with serving_ui(tmp_path) as server, pytest.raises(ConfigError, match="is in use"), serving_ui(tmp_path):
        UIServer(server.server_port, {}, {})
    assert cli.main(["ui", str(tmp_path / "no")]) == 2
    assert "does not exist: name a folder" in capsys.readouterr().err


def test_a_long_list_comes_at_once_and_fills_up(tmp_path: Path):
    for number in range(30):
        write_run(tmp_path / f"run{number:02}", last=5000)
    with serving_ui(tmp_path) as server:
        cookie = with_cookie(server)
        assert len(ask(server, "/runs", **cookie)[1]) == 30
        for _ in range(100):
            rows = ask(server, "/runs", **cookie)[1]
            if all(row["loaded"] for row in rows):
                break
        assert {row["step"] for row in rows} == {5000}


def test_the_link_that_is_printed_opens_the_page(tmp_path: Path, monkeypatch, capsys):
    opened: list[int] = []

    def serve_once(server: UIServer, **_: object) -> None:
        link = capsys.readouterr().out.split()[1]
        address = link.partition(f":{server.server_port}")[2]
        asking = threading.Thread(target=lambda: opened.append(ask(server, address)[0]))
        asking.start()
        server.handle_request()
        asking.join()

    monkeypatch.setattr(UIServer, "serve_forever", serve_once)
    assert cli.main(["ui", str(tmp_path), "--port=0"]) == 0
    assert opened == [200]
