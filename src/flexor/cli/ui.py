"""`flexor ui`: runs, plans, datasets and servers in a browser."""

from __future__ import annotations

import os
import webbrowser
from pathlib import Path

from flexor.core.console import print_text
from flexor.core.errors import ConfigError
from flexor.core.option_parser import OptionParser

KEY = "FLEXOR_API_KEY"


def run(arguments: list[str]) -> int:
    from flexor.ui.application import make_server
    from flexor.ui.policy_server import WatchedServer

    parsed = parser().parse_args(arguments)
    for path in parsed.paths:
        if not path.is_dir():
            raise ConfigError(f"{path} {'is a file' if path.exists() else 'does not exist'}: name a folder.")
    policies = WatchedServer(parsed.server, os.environ.get(KEY))
    with make_server(parsed.port, parsed.paths or [Path("runs")], policy_server=policies) as server:
        print(f"Open  {server.link}", flush=True)  # not print_text, which would hide the token
        print_text(
            "This link works on this machine. On another one, first:\n"
            f"  ssh -L {server.server_port}:127.0.0.1:{server.server_port} USER@THIS_MACHINE\n"
            "Ctrl-C ends it. Runs go on."
        )
        if parsed.open:
            webbrowser.open(server.link)
        try:
            server.serve_forever(poll_interval=0.2)
        except KeyboardInterrupt:
            return 0
    return 0


def parser() -> OptionParser:
    from flexor.ui.policy_server import DEFAULT
    from flexor.ui.server import PORT

    text = (
        "Show runs, plans, datasets and policy servers in a browser. The page is served on this machine only, to "
        "whoever has the link. It needs no network and changes nothing, except for notes that you type and lists of "
        "episodes to leave out."
    )
    parser = OptionParser(prog="flexor ui", description=text)
    parser.add_argument(
        "paths", nargs="*", type=Path, help="runs, folders of runs, and datasets (default: runs)"
    )
    parser.add_argument(
        "--port", type=int, default=PORT, metavar="N", help=f"port (default {PORT}; 0: any free one)"
    )
    parser.add_argument(
        "--server",
        default=DEFAULT,
        metavar="URL",
        help=f"the `flexor serve` to show (default {DEFAULT}); its key is read from ${KEY}",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    return parser
