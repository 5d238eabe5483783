"""`flexor eval`: run episodes with a trained policy."""

from __future__ import annotations

from pathlib import Path

from flexor.cli import open_loop
from flexor.cli.server_flags import server_address, server_flags
from flexor.core.console import print_result, progress
from flexor.core.option_parser import OptionParser


def run(arguments: list[str]) -> int:
    from flexor.evaluate.report import evaluate_policy

    parser = OptionParser(
        prog="flexor eval",
        description="Run episodes with a trained policy and report its success rate; or compare its predictions with "
        "recorded episodes (--open_loop).",
    )
    parser.add_argument(
        "policy", nargs="?", help="run, checkpoint folder or Hub repository; leave it out with --server"
    )
    parser.add_argument(
        "settings",
        nargs="*",
        help="--env.type=..., --eval.n_episodes=..., --policy.device=..., "
        "--rename_map='{observation.image: observation.images.top}' (names of the environment: names of the policy)",
    )
    parser.add_argument(
        "--videos",
        type=Path,
        help="folder for videos (default: videos/eval in the run's folder); --eval.videos sets how many",
    )
    open_loop.add_flags(parser)
    server_flags(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed, more = parser.parse_known_args(_lerobot_eval(arguments))
    server = server_address(parsed)
    if parsed.policy is None and server is None:
        parser.error("name a policy (a run, a checkpoint, a Hub repository), or a --server that has one")
    if parsed.open_loop:
        if parsed.policy is None:
            parser.error("--open_loop needs the policy itself, not a --server")
        return open_loop.run(parsed.policy, [*parsed.settings, *more], parsed)
    result, text = evaluate_policy(
        parsed.policy, [*parsed.settings, *more], parsed.videos, progress("evaluating"), server
    )
    print_result(result, parsed.json, text)
    return 0


def _lerobot_eval(arguments: list[str]) -> list[str]:
    """`lerobot-eval --policy.path=X` names the policy with a flag; here it is a positional argument."""
    return [word.removeprefix("--policy.path=") for word in arguments if word != "--policy.path"]
