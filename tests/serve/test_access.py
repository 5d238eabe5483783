"""Who gets in: with a key, over TLS, and not from other web pages; `/healthz`, `/metrics`, `/status`."""

import asyncio
import base64
import json
import socket
import ssl
import subprocess
from typing import Any
from urllib.parse import urlsplit

import pytest
from websockets.asyncio.client import connect
from websockets.datastructures import Headers
from websockets.exceptions import InvalidStatus

from flexor.core.errors import ConfigError
from flexor.serve.access import foreign_name, has_key, is_foreign_page, names_of_server
from flexor.serve.settings import ServeSettings
from flexor_client.wire import pack, unpack
from support.limits import LIMIT_S
from support.serving import RawClient, get, needs_linux, numbers, observation, serving

KEY = "a key:with a colon"
BASIC = "Basic " + base64.b64encode(f"anybody:{KEY}".encode()).decode()


@pytest.mark.parametrize(
    ("authorizations", "fits"),
    [
        ([f"Api-Key {KEY}"], True),
        ([f"api-key {KEY}"], True),
        ([f"Bearer {KEY}"], True),
        ([BASIC], True),
        ([], False),
        ([KEY], False),
        (["Api-Key "], False),
        ([f"Api-Key {KEY} "], False),
        ([f"Api-Key {KEY[:-1]}"], False),
        (["Basic !!!"], False),
        (["Basic //79"], False),
        (["Api-Key \xff"], False),
        ([f"Api-Key {KEY}", f"Api-Key {KEY}"], False),
    ],
)
def test_the_key(authorizations, fits):
    assert has_key(Headers([("Authorization", value) for value in authorizations]), KEY) is fits
    assert has_key(Headers(), None)


def test_pages_of_other_sites():
    def foreign(**headers: str) -> bool:
        return is_foreign_page(Headers(**headers))

    assert not foreign(Host="robot:8000")
    assert not foreign(Host="robot:8000", Origin="http://robot:8000")
    assert foreign(Host="robot:8000", Origin="http://robot:9000")
    assert foreign(Host="robot:8000", Origin="https://evil.example")
    assert foreign(Host="robot:8000", Origin="null")
    assert foreign(Host="robot:8000", Origin="http://[") and foreign(Origin="http://robot:8000")


NAMES = names_of_server("gpu.lab.example", ["Robots.Example.org."])


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LocalHost.:8000", True),
        ("127.0.0.1:8000", True),
        ("192.168.1.7", True),
        ("[::1]:8000", True),
        ("[fe80::1]", True),
        ("gpu.lab.example:9000", True),
        ("robots.example.org:443", True),
        (f"{socket.gethostname()}:8000", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example:8000", False),
        ("192.168.1.7.nip.io", False),
        ("evil.example:127.0.0.1", False),
        ("localhost@evil.example", False),
        ("localhost, evil.example", False),
        ("::1:evil", False),
    ],
)
def test_names_of_the_server(host, allowed):
    """A page that makes its own name point here (DNS rebinding) asks for that name."""
    assert (foreign_name(Headers(Host=host), NAMES) is None) is allowed
    assert foreign_name(Headers(), NAMES) is None
    assert foreign_name(Headers([("Host", "localhost"), ("Host", "evil.example")]), NAMES) is not None


def ask_for(url: str, name: str, **settings: Any) -> RawClient:
    """Connect to a server as if its address were behind another name."""
    port = urlsplit(url).port
    return RawClient(
        f"ws://{name}:{port}", sock=socket.create_connection(("127.0.0.1", port), LIMIT_S), **settings
    )


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=needs_linux)])
def test_no_page_gets_in_under_a_name_of_its_own(processes):
    settings = {"host": "0.0.0.0", "allow_hosts": ("robots.example.org",), "processes": processes}
    with serving(numbers(), **settings) as (url, _):
        here = url.replace("0.0.0.0", "127.0.0.1")
        for path in ("/", "/healthz", "/metrics", "/status", "/nothing"):
            status, text = get(here, path, Host="evil.example:8000")
            assert status == 421 and "--allow-host evil.example" in text
            assert get(here, path, Host="robots.example.org")[0] == (404 if path == "/nothing" else 200)
        for name in ("evil.example", "x.localhost"):
            for origin in (None, f"http://{name}:{urlsplit(url).port}"):
                with pytest.raises(InvalidStatus, match="421"):
                    ask_for(url, name, origin=origin)
        for name in ("127.0.0.1", "localhost", "robots.example.org", "10.1.2.3"):
            with ask_for(url, name) as robot:
                assert "actions" in robot.ask(observation(1))
        counted = get(here, "/metrics")[1].splitlines()
        assert "flexor_refused_connections_total 9" in counted
        assert get(here, "/status", Origin="http://evil.example")[0] == 403
        assert "--allow-host ??reboot?" in get(here, "/", Host="$(reboot)")[1]  # people copy what it says


def test_a_name_alone_is_allowed():
    with pytest.raises(ConfigError, match="--allow-host=http://x: give a name alone"):
        ServeSettings(allow_hosts=("http://x",)).validate()


def test_with_a_key_only_its_owners_see_anything():
    with serving(numbers(), api_key=KEY) as (url, server):
        assert get(url, "/healthz") == (200, "OK\n")
        for path in ("/", "/metrics", "/status", "/nothing"):
            assert get(url, path)[0] == 401
        for key in (f"Api-Key {KEY}", BASIC):
            assert [get(url, path, Authorization=key)[0] for path in ("/", "/metrics", "/status")] == [
                200
            ] * 3
        assert get(url, "/nothing", Authorization=BASIC)[0] == 404
        for headers in ({}, {"Authorization": "Api-Key wrong"}):
            with pytest.raises(InvalidStatus, match="401"):
                RawClient(url, additional_headers=headers)
        with RawClient(url, additional_headers={"Authorization": f"Api-Key {KEY}"}) as robot:
            assert "actions" in robot.ask(observation(1))
        with pytest.raises(InvalidStatus, match="403"):
            RawClient(url, additional_headers={"Authorization": BASIC}, origin="http://evil.example")
        assert server.connections.metrics.refused_connections == 4 + 2 + 1


def test_metrics_and_status():
    with serving(numbers()) as (url, _), RawClient(url) as robot:
        for value in (1, 2, 3):
            robot.ask(observation(value, prompt="put it <there>"))
        robot.ask(observation(1, flexor={"deadline_ms": 1, "age_ms": 2}))
        text = get(url, "/metrics")[1]
        page = json.loads(get(url, "/status")[1])
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines['flexor_requests_total{result="ok"}'] == "3"
    assert lines['flexor_requests_total{result="expired"}'] == "1"
    assert lines['flexor_request_seconds_count{part="model"}'] == "3"
    assert lines['flexor_request_seconds_bucket{part="total",le="+Inf"}'] == "3"
    assert lines['flexor_batch_size_bucket{le="1"}'] == "3" and lines["flexor_clients"] == "1"
    assert float(lines["flexor_resident_memory_bytes"]) > 1e6
    buckets = [
        int(n) for name, n in lines.items() if name.startswith('flexor_request_seconds_bucket{part="total"')
    ]
    assert buckets == sorted(buckets)
    kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len({*kinds}) and all(name.startswith("flexor_") for name in kinds)
    (client,) = page["clients"]
    assert client["requests"] == 4 and client["expired"] == 1 and client["task"] == ""
    assert next(iter(client["images"].values())).startswith("data:image/jpeg;base64,")
    assert page["latency_ms"]["total"]["p50"] > page["latency_ms"]["model"]["p50"] > 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    try:
        subprocess.run([*command.split(), *names], cwd=folder, check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("there is no openssl to make a certificate with")
    return folder


async def _ask_twice(url: str, trusting: ssl.SSLContext) -> None:
    """Two robots. In threads of one process, the reading and the writing end of TLS may wait for each other."""
    patience = {"open_timeout": LIMIT_S, "ping_interval": None}
    connections = [connect(url, ssl=trusting, compression=None, **patience) for _ in range(2)]
    async with connections[0] as first, connections[1] as second:
        for robot in (first, second):
            await robot.recv()
            await robot.send(pack(observation(1)))
            assert "actions" in unpack(await robot.recv())


@pytest.mark.parametrize("processes", [0, pytest.param(1, marks=needs_linux)])
def test_tls(certificate, processes):
    files = {"tls_cert": certificate / "cert.pem", "tls_key": certificate / "key.pem"}
    with serving(numbers(), processes=processes, **files) as (url, _):
        assert url.startswith("wss://")
        trusting = ssl.create_default_context(cafile=str(files["tls_cert"]))
        asyncio.run(_ask_twice(url, trusting))
        with pytest.raises(ssl.SSLError):
            RawClient(url)
    with pytest.raises(ConfigError, match="PEM files that belong together"):
        ServeSettings(tls_cert=files["tls_key"], tls_key=files["tls_key"]).tls()
