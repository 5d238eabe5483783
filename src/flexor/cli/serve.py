"""`flexor serve`: a trained policy for robots on the network."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ipaddress
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flexor.cli.flags import PRECISIONS
from flexor.core.console import print_json
from flexor.core.errors import ConfigError
from flexor.core.log import log
from flexor.core.option_parser import OptionParser

if TYPE_CHECKING:
    from flexor.serve.server import PolicyServer
    from flexor.serve.settings import ServeSettings

KEY = "FLEXOR_API_KEY"


def parser() -> OptionParser:
    from flexor.serve.settings import ServeSettings

    usual = ServeSettings()
    flags = OptionParser(
        prog="flexor serve",
        description="Serve a trained policy to robots over the network, in the protocol of openpi's client. The port "
        "opens once the policy is loaded and warmed up. `/` shows a status page, `/metrics` is for Prometheus.",
    )
    add = flags.add_argument
    add(
        "checkpoint",
        help="a run, a checkpoint, a pretrained_model folder or a Hub repository, of Flexor or LeRobot",
    )
    add("--host", default=usual.host, help=f"address to listen on; 0.0.0.0 for all (default {usual.host})")
    add("--port", type=int, default=usual.port, help=f"port; 0 takes any free one (default {usual.port})")
    add(
        "--api-key",
        metavar="KEY",
        help=f"API key that clients must send; safer in the environment variable {KEY}",
    )
    add(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name, such as one in DNS, by which clients and browsers may address this server; repeatable. IP "
        "addresses, localhost and this machine's own name always work",
    )
    add("--tls-cert", type=Path, metavar="FILE", help="certificate (PEM), for wss:// and https://")
    add("--tls-key", type=Path, metavar="FILE", help="its private key (PEM)")
    add("--device", help="cpu, cuda, cuda:1 or mps (default: the fastest available)")
    add("--dtype", choices=PRECISIONS, help="precision (default: the checkpoint's)")
    add("--compile", action="store_true", help="compile the policy's blocks before the port opens")
    add(
        "--map",
        action="append",
        default=[],
        metavar="INPUT=NAME",
        help="what clients call an input of the policy, such as observation.images.top=images/cam_high; repeatable",
    )
    add(
        "--reply",
        choices=("chunk", "action"),
        help="default reply: a chunk of actions, or the action for this step (default: a chunk; an action for policies "
        "with temporal ensembling)",
    )
    add("--seed", type=int, default=usual.seed, help="seed of the policy's noise (default 0)")
    _add_limits(flags, usual)
    flags.add_argument(
        "--json", action="store_true", help="print one line of JSON with the address once the server listens"
    )
    return flags


def _add_limits(flags: argparse.ArgumentParser, usual: ServeSettings) -> None:
    add = flags.add_argument_group("limits").add_argument
    add(
        "--max-batch",
        type=int,
        default=usual.max_batch,
        metavar="N",
        help="robots per prediction (default 8)",
    )
    add(
        "--batch-window-ms",
        type=float,
        default=usual.batch_window_ms,
        metavar="MS",
        help="how long a request waits to be batched with those of other robots (default: at most the time of a "
        "prediction, and only for robots that usually send their next request by then)",
    )
    add(
        "--processes",
        type=int,
        default=usual.processes,
        metavar="N",
        help="processes that receive and decode observations, besides the model's; 0: none (default: on Linux with at "
        "least 8 cores one per two cores, at most --max-batch; else none)",
    )
    add(
        "--max-clients",
        type=int,
        default=usual.max_clients,
        metavar="N",
        help="open connections (default 64)",
    )
    add(
        "--requests-per-s",
        type=float,
        default=usual.requests_per_s,
        metavar="N",
        help="requests per second of one client; faster clients are slowed down (default 200)",
    )
    add(
        "--max-frame-mb",
        type=float,
        metavar="MB",
        help="size of an observation (default: twice the size of the policy's inputs as arrays, plus 8)",
    )


def run(arguments: list[str]) -> int:
    parsed, more = parser().parse_known_args(arguments)
    from flexor.serve.open import open_predictor
    from flexor.serve.server import PolicyServer, bind

    settings = _settings(parsed)
    settings.validate()
    names = read_names(parsed.map)
    bind(settings.host, settings.port).close()  # an address that is taken is said before a model is loaded
    predictor = open_predictor(
        parsed.checkpoint,
        settings,
        device=parsed.device,
        dtype=parsed.dtype,
        compiled=parsed.compile,
        flags=more,
    )
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(_serve(PolicyServer(settings, predictor, names), parsed.json))
    return 0


def _settings(parsed: argparse.Namespace) -> ServeSettings:
    from flexor.serve.settings import ServeSettings

    usual = ServeSettings()
    named = {
        name: getattr(parsed, name) for name in ServeSettings.__dataclass_fields__ if hasattr(parsed, name)
    }
    # an empty key is an error, not no key: somebody meant to set one
    named["api_key"] = os.environ.get(KEY) if parsed.api_key is None else parsed.api_key
    named["frame_bytes"] = None if parsed.max_frame_mb is None else int(parsed.max_frame_mb * 2**20)
    named["allow_hosts"] = tuple(parsed.allow_host)
    return replace(usual, **named)


def read_names(pairs: list[str]) -> dict[str, str]:
    """--map INPUT=NAME, several times -> {input: name}."""
    names: dict[str, str] = {}
    for pair in pairs:
        ours, equals, theirs = pair.partition("=")
        if not equals or not ours or not theirs:
            raise ConfigError(
                f"--map {pair}: give the policy's name and the client's, such as "
                "--map observation.images.top=images/cam_high."
            )
        if ours in names:
            raise ConfigError(f"--map {ours}=... is given twice.")
        names[ours] = theirs
    return names


async def _serve(server: PolicyServer, as_json: bool) -> None:
    from flexor.serve.server import serve_until

    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    def ready(url: str) -> None:
        settings = server.settings
        if settings.api_key is None and not _is_local(settings.host):
            log.warning(
                "No API key is set: everybody who reaches this machine can use the policy. Set %s.", KEY
            )
        if server.predictor.action_range is None:
            log.warning(
                "The policy is saved without statistics of its actions: robots can't tell which ones are absurd."
            )
        if as_json:
            print_json({"url": url, "metadata": server.metadata()})
        log.info("serving on %s (a page for browsers: http%s); stop with Ctrl-C", url, url.removeprefix("ws"))

    await serve_until(server, stop, ready)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
