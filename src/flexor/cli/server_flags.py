"""The flags that name a policy server, for verbs that play with what it serves."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from flexor.cli.serve import KEY
from flexor.core.errors import ConfigError

if TYPE_CHECKING:
    from flexor.evaluate.served import ServerAddress


def server_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a policy on a server")
    add = group.add_argument
    add("--server", metavar="URL", help="use the policy that `flexor serve` serves at ws://HOST:PORT")
    add(
        "--api-key",
        "--api_key",
        metavar="KEY",
        help=f"API key of the server; safer in the environment variable {KEY}",
    )
    add(
        "--certificate",
        type=Path,
        metavar="FILE",
        help="certificate (PEM) to trust, if the server's is self-signed",
    )
    add("--jpeg", type=int, metavar="QUALITY", help="send images as JPEG of this quality, from 1 to 100")


def server_address(parsed: argparse.Namespace) -> ServerAddress | None:
    if parsed.server is None:
        flags = [name for name in ("api_key", "certificate", "jpeg") if getattr(parsed, name) is not None]
        if flags:
            raise ConfigError(
                f"--{flags[0].replace('_', '-')} is for a server: name it with --server=ws://HOST:PORT."
            )
        return None
    from flexor.evaluate.served import ServerAddress

    key = parsed.api_key or os.environ.get(KEY) or None
    return ServerAddress(parsed.server, key, parsed.certificate, parsed.jpeg)
