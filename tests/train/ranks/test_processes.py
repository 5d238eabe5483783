"""Which process this is, from what each launcher leaves in the environment."""

import pytest

from flexor.core.errors import ConfigError
from flexor.train.ranks.processes import Processes, find_processes
from flexor.train.ranks.split import hsdp_sizes

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "1",
    "TORCHELASTIC_RUN_ID": "none",
    "TORCHELASTIC_RESTART_COUNT": "2",
}
# of a task on the second of two nodes; a batch script has no SLURM_STEP_*
SRUN = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "node7",
    "SLURM_JOB_ID": "12345",
}


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def places(processes: Processes) -> tuple[int, ...]:
    return processes.rank, processes.world_size, processes.local_rank, processes.local_world_size


def test_torchrun():
    processes = find_processes(TORCHRUN)
    assert places(processes) == (5, 8, 1, 4)
    assert (processes.launcher, processes.restarts, processes.is_main) == ("torchrun", 2, False)
    assert str(processes.host) in processes.launch  # "none" is what all runs are called there


def test_accelerate():
    assert find_processes({**TORCHRUN, "ACCELERATE_MIXED_PRECISION": "no"}).launcher == "accelerate"


def test_flexor():
    ours = {k: v for k, v in TORCHRUN.items() if not k.startswith("TORCHELASTIC")}
    processes = find_processes({**ours, "FLEXOR_RUN_ID": "abc", "FLEXOR_RESTART_COUNT": "1"})
    assert (processes.launcher, processes.launch, processes.restarts) == ("flexor", "abc", 1)


@pytest.mark.parametrize(("tasks", "local"), [("2(x2)", 2), ("3,1", 1), ("1,2(x3)", 2), ("4", 4)])
def test_srun(tasks, local, monkeypatch):
    processes = find_processes({**SRUN, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_RESTART_COUNT": "1"})
    assert places(processes) == (3, 4, 1, local)
    assert (processes.launcher, processes.launch, processes.restarts) == ("srun", "12345", 1)
    import os

    assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node7", "22345")


def test_a_batch_script_is_one_process():
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "1"}
    assert places(find_processes(batch)) == (0, 1, 0, 1)


def test_nothing_is_one_process():
    assert places(find_processes({})) == (0, 1, 0, 1)


def test_half_an_environment_is_refused_by_name():
    with pytest.raises(ConfigError, match="MASTER_PORT is not"):
        find_processes({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"})


@pytest.mark.parametrize(
    ("world", "local", "replicate", "shard", "expected"),
    [
        (8, 4, None, None, (2, 4)),
        (8, 8, None, 2, (4, 2)),
        (8, 8, 2, None, (2, 4)),
        (8, 4, 4, 2, (4, 2)),
        (4, 4, None, None, (1, 4)),
    ],
)
def test_groups_of_hsdp(world, local, replicate, shard, expected):
    assert hsdp_sizes(world, local, replicate, shard) == expected


def test_groups_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match=r"parallel.dp_replicate=3 x parallel.dp_shard=2 .* 8"):
        hsdp_sizes(8, 4, 3, 2)
