"""The tests themselves: what somebody has set, and has at home, changes nothing about them."""

import os
import subprocess
import sys
from pathlib import Path

from support.environment import TESTS
from support.limits import LIMIT_S

NOWHERE = "/nonexistent"
HOSTILE = {
    **dict.fromkeys(("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"), "1"),
    **dict.fromkeys(("HF_HOME", "HF_LEROBOT_HOME", "FLEXOR_CACHE", "FLEXOR_GPUS", "SLURM_CONF"), NOWHERE),
    "HF_TOKEN": "x",
    "HF_ENDPOINT": "http://127.0.0.1:9",
    "WANDB_MODE": "disabled",
    "WANDB_API_KEY": "x",
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "3",
    "MASTER_ADDR": "nowhere",
    "MASTER_PORT": "1",
    "SLURM_JOB_ID": "5",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "2",
    "SLURM_STEP_NUM_TASKS": "4",
    "ACCELERATE_MIXED_PRECISION": "fp16",
    "ACCELERATE_USE_FSDP": "true",
    "OMP_NUM_THREADS": "7",
    "http_proxy": "http://127.0.0.1:9",
    "ALL_PROXY": "socks5://127.0.0.1:9",
    "COLUMNS": "20",
    "CUDA_VISIBLE_DEVICES": "",
    "FLEXOR_DEBUG": "1",
}
# A request to the Hub, a dataset from it, processes that find out who they are, a run.
SENSITIVE = (
    "launch/hf/test_jobs.py::test_the_request",
    "data/storage/test_source.py::test_hub_snapshot_in_the_cache_is_used_without_the_hub",
    "train/ranks/test_processes.py",
    "train/test_loop.py::test_last_step_is_always_saved",
)


def test_the_environment_of_whoever_runs_them_changes_nothing(tmp_path):
    home = tmp_path / "home"
    for file in (".netrc", ".cache/huggingface/token", ".cache/huggingface/accelerate/default_config.yaml"):
        (home / file).parent.mkdir(parents=True, exist_ok=True)
        (home / file).write_text("not what anybody expects")
    before = sorted(home.rglob("*"))
    tests = [str(TESTS / name) for name in SENSITIVE]
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            f"--basetemp={tmp_path / 'temp'}",
            *tests,
        ],
        cwd=Path(TESTS).parent,
        env={**os.environ, **HOSTILE, "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert sorted(home.rglob("*")) == before
