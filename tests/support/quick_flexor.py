"""`flexor` as the docs' tests call it: the same commands, with fewer steps and episodes and a tiny network.

    python -m support.quick_flexor serve SOCKET DEMONSTRATIONS
    python -m support.quick_flexor call SOCKET VERB ...

Apart from the numbers that `shrink` changes, what is run is what the docs say. Every call is a process of
its own, but one that the server forks: importing torch for each would take most of the tests' time.
DEMONSTRATIONS is a small dataset for `flexor demo`, which would record a large one.
"""

from __future__ import annotations

import json
import os
import socket
import sys

STEPS = 10_000  # this many steps in the docs are one here
COUNTED_IN_STEPS = ("steps", "save_freq", "log_freq", "eval_steps", "env_eval_freq")
AT_MOST = {"episodes": 4, "eval.n_episodes": 2}
TINY_POLICY = {
    "chunk_size": 8,
    "n_action_steps": 8,
    "dim_model": 16,
    "n_heads": 2,
    "dim_feedforward": 32,
    "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1,
    "latent_dim": 4,
    "pretrained_backbone_weights": "null",
}


def shrink(arguments: list[str], demonstrations: str) -> list[str]:
    """A command of the docs, made quick."""
    verb, *words = arguments
    words = [_smaller(word) for word in words]
    given = {word.lstrip("-").partition("=")[0] for word in words}
    if verb in ("eval", "demo") and "eval.n_episodes" not in given:
        words.append("--eval.n_episodes=2")
    if verb == "record" and "episodes" not in given:
        words.append("--episodes=4")
    if verb == "demo":
        words.append(f"--dataset.root={demonstrations}")
    if verb in ("train", "demo"):
        words += ["--num_workers=0", "--batch_size=4", "--log_freq=1", "--policy.device=cpu"]
        words += [] if "steps" in given else ["--steps=2"]
    if verb in ("train", "demo", "plan"):
        words += [f"--policy.{k}={v}" for k, v in TINY_POLICY.items()] if _is_act(words) else []
    return [verb, *words]


def _is_act(words: list[str]) -> bool:
    """Other policies have other settings, and a checkpoint has its own."""
    given = dict(word.lstrip("-").partition("=")[::2] for word in words)
    return given.get("policy.type", "act") == "act" and "policy.path" not in given


def _smaller(word: str) -> str:
    key, _, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not value.isdigit():
        return word
    if key in COUNTED_IN_STEPS:
        return f"--{key}={max(1, int(value) // STEPS)}"
    return f"--{key}={min(int(value), AT_MOST.get(key, int(value)))}"


def serve(address: str, demonstrations: str) -> None:
    """Run what callers ask for, one after the other, until told to stop."""
    import torch._dynamo  # noqa: F401  (building an optimizer imports it)

    import flexor.train.loop
    import flexor.train.report  # noqa: F401

    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"{address}.new")
        server.listen()
        os.rename(f"{address}.new", address)  # noqa: PTH104  (whoever sees it may call)
        while True:
            caller, _ = server.accept()
            with caller:
                request, streams, _, _ = socket.recv_fds(caller, 1 << 16, 3)
                child = os.fork()
                if child == 0:
                    _run(json.loads(request), streams, demonstrations)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                for stream in streams:
                    os.close(stream)
                caller.sendall(str(code).encode())


def _run(request: dict, streams: list[int], demonstrations: str) -> None:
    """Be the caller: in its folder, with its streams."""
    from flexor.cli import main

    code = 1
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.chdir(request["folder"])
        code = main(shrink(request["arguments"], demonstrations))
    except SystemExit as leaving:  # argparse
        code = int(leaving.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def call(address: str, arguments: list[str]) -> int:
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        request = json.dumps({"folder": str(os.getcwd()), "arguments": arguments})  # noqa: PTH109
        socket.send_fds(server, [request.encode()], [0, 1, 2])
        return int(server.recv(16) or 1)


if __name__ == "__main__":
    what, address, *rest = sys.argv[1:]
    sys.exit(call(address, rest) if what == "call" else serve(address, *rest))
