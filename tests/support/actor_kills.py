"""Learners and actors that are killed with -9: no transition is lost but the one in flight, and the learner learns what
it would have learned from the same records without a kill."""

from __future__ import annotations

import random
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch

from flexor_client.spool import Spool
from support import online, runs
from support.actors import LineRobot, collector, transitions
from support.limits import LIMIT_S, wait_for
from support.ports import ReservedPort

NETWORKS = [flag for flag in online.SMALL if not flag.startswith("--env.")]
RECORDS = Path("records/records.bin")


def learner(folder: Path, output: Path, port: int, steps: int) -> runs.Forked:
    """A learner in a process of its own. It goes on with what is in its folder."""
    more = [
        f"--steps={steps}",
        "--save_freq=20",
        "--rl.serve.weights_s=0",
        "--resume=auto",
        "--rl.serve.max_lag=5",
    ]
    return runs.Forked(output, "train", *NETWORKS, f"--output_dir={folder}", f"--rl.serve.port={port}", *more)


def actor(output: Path, spool: Path, port: int) -> runs.Forked:
    """`flexor collect` in a process of its own."""
    address = [f"ws://127.0.0.1:{port}", f"--actor={spool.name}", f"--spool={spool}", "--wait=step"]
    return runs.Forked(output, "collect", *address, *online.STATE_ENV)


@contextmanager
def robots(folder: Path, port: int, count: int) -> Iterator[list[LineRobot]]:
    """Robots without a policy of their own, each in a thread, until the learner has all its steps."""
    stop = threading.Event()
    made = []
    for number in range(count):
        arm = collector(
            f"ws://127.0.0.1:{port}", actor=f"arm {number}", spool=folder / f"arm {number}", lost_after_s=5.0
        )
        made.append(LineRobot(arm, length=5 + number))

    def move(robot: LineRobot) -> None:
        while not (stop.is_set() or robot.collector.finished):
            robot.step()
            time.sleep(0.005 if robot.action is not None else 0.05)

    threads = [threading.Thread(target=move, args=(robot,), daemon=True) for robot in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        stop.set()
        for robot, thread in zip(made, threads):
            thread.join(LIMIT_S)
            robot.collector.close(0)


def kill_learner(folder: Path, kills: int, steps: int, seed: int) -> Path:
    """A learner of two robots, killed at random instants. Raises if it lost something, or learned something else."""
    rng, run = random.Random(seed), folder / "run"
    with ReservedPort() as port, robots(folder, port, 2) as made:
        for number in range(kills):
            process = learner(run, folder / f"output {number}", port, steps)
            recorded = _count(run) + rng.randint(1, max(2, 2 * steps // kills))
            wait_until(lambda: _count(run) >= recorded or process.poll() is not None)  # noqa: B023
            time.sleep(0.05 * rng.random())
            process.send_signal(9)
            process.end()
        process = learner(run, folder / "output", port, steps)
        _, errors = process.end()
        assert process.returncode == 0, errors
        wait_for(lambda: all(robot.collector.finished for robot in made))
    stored = online.records(run)
    assert (stored["is_step"] == 1).sum() == steps
    for number, part in parts(stored).items():
        assert part["sequence"].tolist() == [*range(1, len(part) + 1)]
        done = transitions(part)
        assert any(robot.done[: len(done)] == done for robot in made), f"actor {number} did something else"
    assert_learned_from_records(run, folder / "again", steps)
    return run


def kill_actor(folder: Path, kills: int, steps: int, seed: int) -> Path:
    """An actor with a policy of its own, killed at random instants. Raises if a step that it kept was lost."""
    rng, run, spool = random.Random(seed), folder / "run", folder / "spool"
    with ReservedPort() as port:
        learning = learner(run, folder / "learner", port, steps)
        kept = 0
        for number in range(kills):
            process = actor(folder / f"output {number}", spool, port)
            recorded = _count(run) + rng.randint(1, max(2, steps // (kills + 1)))
            wait_until(lambda: _count(run) >= recorded or process.poll() is not None)  # noqa: B023
            time.sleep(0.05 * rng.random())
            process.send_signal(9)
            process.end()
            kept = max(kept, _last(spool))
        process = actor(folder / "output", spool, port)
        _, errors = process.end()
        assert process.returncode == 0, errors
        _, errors = learning.end()
        assert learning.returncode == 0, errors
    (stored,) = parts(online.records(run)).values()
    assert (stored["is_step"] == 1).sum() == steps
    assert stored["sequence"].tolist() == [*range(1, len(stored) + 1)]
    assert len(stored) >= min(kept, len(stored)) and _last(spool) >= len(stored)
    return run


def assert_learned_from_records(run: Path, copy: Path, steps: int) -> None:
    """Another learner, which has nothing but the records, comes to the same bits."""
    shutil.copytree(run / "records", copy / "records")
    shutil.copy(run / "config.yaml", copy)
    process = learner(copy, copy.with_name("output again"), 0, steps)
    _, errors = process.end()
    assert process.returncode == 0, errors
    first, second = online.tensors(run, steps), online.tensors(copy, steps)
    different = [name for name, tensor in first.items() if not torch.equal(tensor, second[name])]
    assert first.keys() == second.keys() and not different, different


def parts(stored: np.ndarray) -> dict[int, np.ndarray]:
    """The records of each actor."""
    return {int(number): stored[stored["actor"] == number] for number in np.unique(stored["actor"])}


def wait_until(condition) -> None:
    wait_for(condition, every_s=0.002)


def _count(run: Path) -> int:
    """Complete records in a run's file."""
    file = run / RECORDS
    return len(online.records(run)) if file.exists() and (file.parent / "schema.json").exists() else 0


def _last(folder: Path) -> int:
    """The number of the newest record in a spool that nobody uses."""
    if not (folder / "records.spool").exists():
        return 0
    spool = Spool(folder)
    last = spool.last
    spool.close()
    return last
