"""Runs on two hosts with a real network between them: as usual, and when a host, the link or the DNS is in trouble.

Every run is made beside the others, in a thread of its own: what they do is mostly wait. `support/hosts.py` makes the
hosts.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from flexor.core.version import VERSION
from flexor.train.ranks import agreement
from support import host_keeper, hosts, ranks, runs, trouble
from support.hosts import Host
from support.limits import wait_for
from support.samples import write_lowdim

pytest.importorskip("accelerate")
pytestmark = pytest.mark.ranks(waits=True)

STEPS, SAVED, PAUSE = 8, 4, 6
PATIENCE = "--parallel.timeout_s=30"  # for runs that are to end: the others have the usual one
LATE_S, CUT_S = 15, 5
BAD_LINKS = {"slow": {"delay_s": 0.1}, "lossy": {"loss": 0.05}}
PAUSE_IN, OTHER_VERSION = "FLEXOR_TESTS_PAUSE", "FLEXOR_TESTS_VERSION"
ASK_DNS: dict[str, str | None] = {"RES_OPTIONS": None}  # by which tests are kept from asking a DNS server


def prepare(arguments: list[str]) -> list[str]:
    """In a process on a host, before its module starts: what is to befall a rank."""
    if "RANK" in os.environ:
        agreement.VERSION = os.environ.get(OTHER_VERSION, agreement.VERSION)
        if folder := os.environ.get(PAUSE_IN):
            trouble.before_step(PAUSE, lambda: pause(Path(folder)))()
    return arguments


def pause(folder: Path) -> None:
    """Until the test has made the trouble that is to come."""
    (folder / f"paused-{os.environ['RANK']}").touch()
    wait_for((folder / "go").exists)


def torchrun(rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    options = [
        "--nnodes=2",
        "--nproc-per-node=1",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=node1:{port}",
        "--rdzv-id=place",
    ]
    return ["torch.distributed.run", *options, "-m", "flexor"], {}


def accelerate(rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    options = ["--multi_gpu", "--num_machines=2", "--num_processes=2", f"--machine_rank={rank}"]
    options += ["--main_process_ip=node1", f"--main_process_port={port}"]
    return ["accelerate.commands.launch", *options, "-m", "flexor"], {}


def by_hand(rank: int, port: int) -> tuple[list[str], dict[str, str]]:
    """No launcher: its variables, as a script would set them."""
    env = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    return ["flexor"], {
        **{k: str(v) for k, v in env.items()},
        "MASTER_ADDR": "node1",
        "MASTER_PORT": str(port),
    }


Launcher = Callable[[int, int], tuple[list[str], dict[str, str]]]


@dataclass
class Run:
    """One on two hosts, in a folder of its own."""

    folder: Path
    python: str
    flags: list[str]
    launcher: Launcher = torchrun
    port: int = 29500  # no other run on the same hosts may have it
    env: dict[str, str | None] = field(default_factory=dict)
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.folder / "run"

    def start(self, *on: Host) -> Run:
        for host in on:
            self.start_next(host)
        return self

    def start_next(self, host: Host, *more: str, **env: str | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = len(self.processes)
        module, variables = self.launcher(rank, self.port)
        flags = {flag.partition("=")[0]: flag for flag in (*self.flags, *more)}  # later ones count
        command = [self.python, "-m", *module, "train", *flags.values()]
        log = self.folder / f"log-{rank}"
        self.processes.append(host.start(log, command, **{**variables, **self.env, **env}))

    def end(self) -> Run:
        wait_for(lambda: all(process.poll() is not None for process in self.processes), self.folder)
        return self

    @property
    def codes(self) -> list[int]:
        """The exit codes of its launchers."""
        return [process.returncode for process in self.processes]

    def logs(self) -> list[str]:
        return [(self.folder / f"log-{rank}").read_text() for rank in range(len(self.processes))]

    def wait_for_pause(self) -> None:
        def paused() -> bool:
            assert all(process.poll() is None for process in self.processes), self.logs()
            return all((self.folder / f"paused-{rank}").exists() for rank in range(2))

        wait_for(paused, self.folder)

    def go_on(self) -> None:
        (self.folder / "go").touch()


@dataclass
class Plan:
    """What all runs have in common."""

    folder: Path
    python: str
    dataset: Path
    tiny: list[str]

    def run(self, name: str, *more: str, **settings: object) -> Run:
        folder = self.folder / name
        return Run(folder, self.python, flags(self.dataset, folder / "run", self.tiny, *more), **settings)  # type: ignore[arg-type]

    def paused_run(self, name: str, launcher: Launcher, a: Host, b: Host) -> Run:
        """Both ranks wait in the middle of a run for what is to befall them."""
        env = {PAUSE_IN: str(self.folder / name)}
        run = self.run(name, PATIENCE, launcher=launcher, env=env).start(a, b)
        run.wait_for_pause()
        return run


def flags(dataset: Path, run: Path, tiny: list[str], *more: str) -> list[str]:
    more = (f"--steps={STEPS}", f"--save_freq={SAVED}", "--deterministic=true", *more)
    return runs.flags(dataset, run, tiny, *more)


# What is done in the threads


def run_with(launcher: Launcher, plan: Plan) -> Run:
    """Nothing special, on hosts as Debian sets them up."""
    with hosts.linked_hosts(plan.folder / f"{launcher.__name__}-etc", hosts.own_name_local) as (a, b, _):
        return plan.run(launcher.__name__, launcher=launcher).start(a, b).end()


def run_late(plan: Plan) -> Run:
    with hosts.linked_hosts(plan.folder / "late-etc") as (a, b, _):
        run = plan.run("late").start(a)
        time.sleep(LATE_S)
        return run.start(b).end()


def run_over_bad_link(name: str, plan: Plan) -> Run:
    """A link that is slow, or that loses frames, from the first word between the hosts."""
    with hosts.linked_hosts(plan.folder / f"{name}-etc") as (a, b, link):
        link.set(**BAD_LINKS[name])
        run = plan.run(name).start(a, b).end()
        count = link.set()
    assert count["carried"] > 100 and (count["lost"] > 0) == (name == "lossy"), count
    return run


def run_without_dns(plan: Plan) -> Run:
    """All names are in /etc/hosts; torch also asks for the names of addresses."""
    with hosts.linked_hosts(plan.folder / "dns-etc") as (a, b, _):
        return plan.run("dns", env=ASK_DNS).start(a, b).end()


def run_without_names(plan: Plan) -> Run:
    with hosts.linked_hosts(plan.folder / "names-etc", hosts.no_names_known) as (a, b, _):
        return plan.run("names", "--parallel.timeout_s=5", launcher=by_hand, env=ASK_DNS).start(a, b).end()


def cut_for_a_while(plan: Plan) -> Run:
    with hosts.linked_hosts(plan.folder / "cut-etc") as (a, b, link):
        run = plan.paused_run("cut", torchrun, a, b)
        link.cut()
        run.go_on()
        time.sleep(CUT_S)
        assert trouble.steps_done(run.path) == PAUSE
        assert link.set()["lost"] > 0
        return run.end()


def cut_for_good(plan: Plan) -> tuple[Run, Run]:
    with hosts.linked_hosts(plan.folder / "severed-etc") as (a, b, link):
        run = plan.paused_run("severed", accelerate, a, b)
        link.cut()
        run.go_on()
        run.end()
        link.set()
        flags = [f"--output_dir={run.path}", "--resume=auto"]
        return run, plan.run("severed-again", *flags, launcher=accelerate, port=29501).start(a, b).end()


def freeze(number: int, plan: Plan) -> Run:
    """All processes on a host, and later it goes on."""
    with hosts.linked_hosts(plan.folder / f"frozen-{number}-etc") as (a, b, _):
        run = plan.paused_run(f"frozen-{number}", accelerate, a, b)
        frozen, other = (a, b)[number], run.processes[1 - number]
        frozen.signal(signal.SIGSTOP)
        run.go_on()
        wait_for(lambda: other.poll() is not None, run.folder)
        assert run.processes[number].poll() is None
        frozen.signal(signal.SIGCONT)
        return run.end()


DIFFERENT = {  # what the second node has
    "version": ([], {OTHER_VERSION: "0.0.9"}),
    "settings": (["--seed=7", "--num_workers=1"], {}),
    "files": (["--dataset.root={files}"], {}),
    "episodes": (["--dataset.root={episodes}"], {}),
    "statistics": (["--dataset.root={statistics}"], {}),
    "copy": (["--dataset.root={copy}"], {}),  # of the same files: nothing against it
}


def run_differently(plan: Plan) -> dict[str, Run]:
    """The second node is not as the first; all on the same two hosts."""
    data = {name: plan.folder / name for name in ("files", "statistics", "copy", "episodes")}
    for name in ("files", "statistics", "copy"):
        shutil.copytree(plan.dataset, data[name])
    (table,) = data["files"].glob("data/*/*.parquet")
    change_action(table)
    file = data["statistics"] / "meta/stats.json"
    statistics = json.loads(file.read_text())
    statistics["action"]["mean"][0] += 1
    file.write_text(json.dumps(statistics))
    write_lowdim(data["episodes"], lengths=(10, 12))
    with hosts.linked_hosts(plan.folder / "different-etc") as (a, b, _):
        started = {}
        for port, (name, (flags, env)) in enumerate(DIFFERENT.items(), 29500):
            started[name] = plan.run(f"different-{name}", launcher=by_hand, port=port).start(a)
            started[name].start_next(b, *(flag.format(**data) for flag in flags), **env)
        return {name: run.end() for name, run in started.items()}


def change_action(table: Path) -> None:
    """One number of a dataset; the size of the file stays."""
    action = np.asarray(pq.read_table(table)["action"][3].as_py(), np.float32)
    content = table.read_bytes()
    assert content.count(action.tobytes()) == 1
    table.write_bytes(content.replace(action.tobytes(), (action + 1).tobytes()))


SCENARIOS: dict[str, Callable[[Plan], Any]] = {  # those that wait for long come first
    "cut for good": cut_for_good,
    "node1 frozen": functools.partial(freeze, 0),
    "node2 frozen": functools.partial(freeze, 1),
    "slow": functools.partial(run_over_bad_link, "slow"),
    "late": run_late,
    "no DNS": run_without_dns,
    "no names": run_without_names,
    "lossy": functools.partial(run_over_bad_link, "lossy"),
    "cut": cut_for_a_while,
    "different": run_differently,
    "torchrun": functools.partial(run_with, torchrun),
    "accelerate": functools.partial(run_with, accelerate),
}


@pytest.fixture(scope="module")
def started(lowdim, tiny_act, tmp_path_factory) -> Iterator[dict[str, Future[Any]]]:
    warm = hosts.HostPython(prepare)
    plan = Plan(tmp_path_factory.mktemp("hosts"), str(warm.python), lowdim, tiny_act)
    with ThreadPoolExecutor(len(SCENARIOS)) as pool:
        yield {name: pool.submit(scenario, plan) for name, scenario in SCENARIOS.items()}
    warm.close()


@pytest.fixture(scope="module")
def undisturbed(started, lowdim, tiny_act, tmp_path_factory) -> Path:
    """The same run on one host."""
    folder = tmp_path_factory.mktemp("undisturbed")
    ranks.run(folder / "out", 2, ["train", *flags(lowdim, folder / "run", tiny_act)])
    return folder / "run"


GOOD = ("torchrun", "accelerate", "late", "slow", "lossy", "cut", "no DNS")


@pytest.mark.slow
@pytest.mark.parametrize("name", GOOD)
def test_the_run_is_the_same_as_on_one_host(name, started, undisturbed):
    run = started[name].result()
    assert run.codes == [0, 0], run.logs()
    assert re.search(r"rank 0: cpu on node1\n.*rank 1: cpu on node2\n", run.logs()[0])
    assert "no heartbeat" not in "".join(run.logs())
    trouble.assert_same(undisturbed, run.path, STEPS)


@pytest.mark.slow
def test_a_link_that_is_cut_for_good_ends_both_nodes(started, undisturbed):
    run, again = started["cut for good"].result()
    assert run.codes == [1, 1], run.logs()
    for rank in range(2):
        assert_lost(run, by=rank)
    assert again.codes == [0, 0], again.logs()
    assert f"resuming from {SAVED:06d}" in again.logs()[0]
    trouble.assert_same(undisturbed, run.path, STEPS)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
def test_a_node_that_is_frozen_is_named_and_ends_when_it_wakes_up(number, started, undisturbed):
    run = started[f"node{number + 1} frozen"].result()
    assert run.codes == [1, 1], run.logs()
    assert_lost(run, by=1 - number)
    assert re.search(
        rf"rank {1 - number} on node{2 - number} has |hosted by rank 0 on node1", run.logs()[number]
    )
    assert trouble.saved_steps(run.path) == [SAVED]
    ranks.run(run.folder / "resumed", 2, ["resume", str(run.path)])
    trouble.assert_same(undisturbed, run.path, STEPS)


def assert_lost(run: Run, by: int) -> None:
    """What a rank says that waited for another one in vain."""
    log = run.logs()[by]
    if by == 0:
        lost = (
            r"rank 1 on node2 has sent no heartbeat for \d+ s: dead, frozen or cut off, last seen at step \d"
        )
    else:
        lost = r"hosted by rank 0 on node1 or its launcher, has not answered for \d+ s: that process is dead or frozen"
    assert re.search(lost, log), log
    assert f"This is rank {by} on node{by + 1}, at step {PAUSE}, computing" in log
    assert re.search(r"exitcode +: 70", log), log


def test_a_first_host_without_an_address_is_named(started):
    run = started["no names"].result()
    assert run.codes == [1, 1], run.logs()
    for rank, log in enumerate(run.logs()):
        assert f"Rank {rank} on node{rank + 1} can't connect to the other 1 processes at node1:29500" in log
        assert "The name node1 can't be resolved here" in log
        assert "Traceback" not in log


OTHER_DATASET = "another dataset than rank 0 on node1: "
REFUSED = {
    "version": (2, f"Flexor 0.0.9, rank 0 on node1 has Flexor {VERSION}: install the same version"),
    "settings": (
        2,
        "other settings than rank 0 on node1: seed is 7, not 1000. Give all nodes the same command",
    ),
    "files": (1, OTHER_DATASET + "data/chunk-000/file-000.parquet differs. Copy the same dataset files"),
    "episodes": (1, OTHER_DATASET + "2 episodes, 22 frames, not 4 episodes, 43 frames. Copy"),
    "statistics": (1, OTHER_DATASET + "meta/stats.json differs. Copy"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", REFUSED)
def test_a_node_that_is_not_like_the_first_is_refused_by_name(name, started):
    run, (code, message) = started["different"].result()[name], REFUSED[name]
    assert run.codes == [code, code], run.logs()
    assert f"rank 1 on node2 has {message}" in run.logs()[0], run.logs()
    assert [trouble.words(run.logs(), text) for text in ("rank 1 on node2 has", "Traceback")] == [1, 0]
    assert not run.path.exists()


@pytest.mark.slow
def test_a_node_may_have_its_own_copy_of_the_dataset(started, undisturbed):
    run = started["different"].result()["copy"]
    assert run.codes == [0, 0], run.logs()
    trouble.assert_same(undisturbed, run.path, STEPS)


def test_hosts_are_gone_with_the_process_that_made_them(tmp_path):
    with hosts.linked_hosts(tmp_path / "etc") as (a, b, link):
        asleep = subprocess.Popen(["sleep", "6000"], preexec_fn=lambda: host_keeper.enter(a.keeper))
        assert host_keeper.processes_on(a.keeper) == [asleep.pid] and host_keeper.processes_on(b.keeper) == []
        a.signal(signal.SIGSTOP)
        link.process.kill()  # as the end of a test does, whatever ends it
        assert asleep.wait() == -signal.SIGKILL
        wait_for(lambda: not any(Path(f"/proc/{host.keeper}").exists() for host in (a, b)))
