"""`flexor launch hf-jobs` with the real client of the Hub, against a Hub on this machine."""

import functools
import hashlib
import importlib.metadata
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flexor import __version__
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError, FlexorError
from flexor.launch.hf import jobs
from flexor.launch.hf.jobs import launch_hf_jobs
from flexor.launch.hf.request import MOUNT, WORK, read_seconds
from flexor.launch.wheel import flexor_wheel
from support import environment
from support.jobs_server import JOB_ID, TOKEN, JobsServer, logged_in
from support.limits import LIMIT_S, wait_for

pytestmark = pytest.mark.installed
PENS = "--dataset.repo_id=ann/pens"
SUBMIT = ("POST", "/api/jobs/ann")
# the program, without what `jobs_server` lacks
NO_UPLOAD = (
    "import sys; from huggingface_hub import HfApi; from flexor.cli.main import program\n"
    "HfApi.batch_bucket_files = lambda *_, **__: None; sys.exit(program())"
)
UNPLANNED = ("--flavor=l4x1", "--timeout=1h")  # so that nothing is planned; `test_hf_plan.py` leaves them out


one_wheel = functools.cache(flexor_wheel)  # half a second each; `test_wheel.py` makes more


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.setattr(jobs, "flexor_wheel", one_wheel)
    with logged_in(monkeypatch, tmp_path) as server:
        yield server


def launch(arguments: list[str]) -> int:
    return launch_hf_jobs([*UNPLANNED, *arguments])


def submitted(hub: JobsServer, *arguments: str) -> dict[str, Any]:
    """What the Hub is asked to run."""
    assert launch(["--detach", *arguments]) == 0
    (body,) = hub.bodies(*SUBMIT)
    return body


def last_command(body: dict[str, Any]) -> list[str]:
    """The words of the last line that the job runs."""
    return shlex.split(body["command"][2].splitlines()[-1])


# What is asked for


def test_the_request(hub, log_lines):
    body = submitted(hub, "--timeout=24h", "--", "train", PENS, "--steps=9", "--output_dir=runs/pens")
    words = last_command(body)
    assert body["command"][:2] == ["bash", "-c"]
    train = words[words.index("--") + 1 :]
    assert train[0] == "train" and {PENS, "--steps=9", "--resume=auto", "--gpus=all"} < set(train)
    assert f"--output_dir={WORK}/runs-pens" in train and f"{MOUNT}/runs-pens" in words
    assert body["flavor"] == "l4x1" and body["dockerImage"] == "python:3.12"
    assert body["timeoutSeconds"] == 24 * 3600
    assert body["secrets"] == {"HF_TOKEN": TOKEN}
    assert "video" in body["environment"]["NVIDIA_DRIVER_CAPABILITIES"]
    assert TOKEN not in json.dumps(body | {"secrets": None})
    assert body["labels"]["name"] == "runs-pens"
    (volume,) = body["volumes"]
    assert volume == {
        "type": "bucket",
        "source": "ann/flexor-runs",
        "mountPath": "/flexor-runs",
        "readOnly": False,
    }
    assert any("24 hours" in line and "14.40 $" in line for line in log_lines)


def test_the_bucket_is_there_before_the_job_and_is_private(hub):
    submitted(hub, "--bucket=ann/mine", "--", PENS)
    paths = [path for _, path, _ in hub.requests]
    assert paths.index("/api/buckets/ann/mine") < paths.index("/api/jobs/ann")
    (body,) = hub.bodies("POST", "/api/buckets/ann/mine")
    assert body in ({"visibility": "private"}, {"private": True})  # as newer and older huggingface_hub say it


def test_a_bucket_that_exists_is_used(hub):
    hub.buckets.add("/api/buckets/ann/flexor-runs")
    assert submitted(hub, "--", PENS)["volumes"][0]["source"] == "ann/flexor-runs"


def test_a_job_installs_the_flexor_that_runs_here(hub, tmp_path):
    """From a wheel that is uploaded before the job starts, by its hash, in the versions of this machine."""
    script = submitted(hub, "--", PENS)["command"][2]
    ((path, content),) = hub.files.items()
    sha256 = hashlib.sha256(content).hexdigest()
    place = f"{MOUNT}/{path.removeprefix('ann/flexor-runs/')}"
    assert f" @ file://{place}#sha256={sha256}" in script and f"flexor=={__version__}" in script
    assert [kind for kind, path, _ in hub.requests if kind == "upload" or path == SUBMIT[1]] == [
        "upload",
        "POST",
    ]
    pip = next(line for line in script.splitlines() if "pip install" in line)
    assert "unset HF_TOKEN" in pip and "--constraint" in pip
    assert f"numpy=={importlib.metadata.version('numpy')}\n" in script and "+cpu" not in script


def test_an_upload_that_fails_starts_no_job(hub, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"no storage for {TOKEN}")

    monkeypatch.setattr("huggingface_hub.HfApi.batch_bucket_files", fail)
    with pytest.raises(FlexorError, match=r"can't be uploaded to the bucket ann/flexor-runs.*for \*\*\*"):
        launch(["--", PENS])
    assert not hub.bodies(*SUBMIT)


def test_a_wheel_of_the_users_goes_along(hub, tmp_path):
    wheel = tmp_path / "mine-1.0-py3-none-any.whl"
    wheel.write_bytes(b"a wheel")
    script = submitted(hub, f"--package={wheel}", "--", PENS)["command"][2]
    sha256 = hashlib.sha256(b"a wheel").hexdigest()
    assert f"'mine @ file://{MOUNT}/.packages/{sha256[:16]}/{wheel.name}#sha256={sha256}'" in script
    assert b"a wheel" in hub.files.values() and len(hub.files) == 2


def test_options(hub):
    body = submitted(
        hub,
        "--flavor=a10g-largex4",
        "--timeout=90m",
        "--image=pytorch/pytorch:latest",
        "--package=git+https://example.com/mine.git@abc",
        "--env=A=1",
        "--env",
        "B=x=y",
        "--",
        PENS,
    )
    assert body["flavor"] == "a10g-largex4" and body["timeoutSeconds"] == 5400
    assert body["dockerImage"] == "pytorch/pytorch:latest"
    (line,) = [line for line in body["command"][2].splitlines() if "git+https" in line]
    assert line.endswith(" git+https://example.com/mine.git@abc)") and "flexor" in line
    assert body["environment"].items() >= {"A": "1", "B": "x=y"}.items()
    assert "--seconds=$((4860 - SECONDS))" in body["command"][2]  # nine minutes to save and copy


def test_all_gpus_unless_said_otherwise(hub):
    assert "--gpus=2" in last_command(submitted(hub, "--", PENS, "--gpus=2"))
    assert "--gpus=all" not in last_command(hub.bodies(*SUBMIT)[0])


def test_a_machine_without_gpus(hub):
    body = submitted(hub, "--flavor=cpu-basic", "--", PENS, "--processes=2")
    assert "--gpus=all" not in last_command(body) and "--processes=2" in last_command(body)
    assert body["environment"] == {}


@pytest.mark.parametrize("more", [[], ["--dry-run"]])
def test_an_unknown_flavor(hub, more):
    with pytest.raises(ConfigError, match=r"'h100'.*cpu-basic.*l4x1"):
        launch([*more, "--flavor=h100", "--", PENS])
    assert not hub.bodies(*SUBMIT)


@pytest.mark.parametrize(
    "text, seconds", [("3600", 3600), ("90m", 5400), ("6h", 21600), ("2d", 172800), ("1.5h", 5400)]
)
def test_times(text, seconds):
    assert read_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "6 h", "1w", "-5m", "0", "30s", "1e3"])
def test_times_that_are_none(text):
    with pytest.raises(ConfigError, match=f"--timeout={text} is not valid: .*6h"):
        read_seconds(text)


# Secrets


def test_secrets_are_sent_as_secrets_only(hub, monkeypatch, capsys):
    monkeypatch.setenv("MY_KEY", "very secret")
    monkeypatch.setenv("WANDB_API_KEY", "w" * 40)
    arguments = ["--secret", "MY_KEY", "--", PENS, "--wandb.enable=true", "--trackers=[trackio]"]
    body = submitted(hub, *arguments)
    secrets = {"HF_TOKEN": TOKEN, "MY_KEY": "very secret", "WANDB_API_KEY": "w" * 40}
    assert body["secrets"] == secrets
    assert "'flexor[wandb,trackio" in body["command"][2]
    assert "(unset HF_TOKEN WANDB_API_KEY MY_KEY; " in body["command"][2]
    sent = len(hub.requests)
    assert launch(["--dry-run", *arguments]) == 0
    assert len(hub.requests) == sent
    out, error = capsys.readouterr()
    printed = json.loads(out[out.index("{") :])
    assert printed["secrets"] == dict.fromkeys(secrets, "***")
    assert not any(value in out + error for value in secrets.values())


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--secret", "NOT_THERE", "--", PENS], "secret NOT_THERE, which is not set"),
        (["--", PENS, "--wandb.enable=true"], "secret WANDB_API_KEY"),
        (["--secret", "A=b", "--", PENS], "takes only a name"),
        (["--env", f"HF_TOKEN={TOKEN}", "--", PENS], "HF_TOKEN is a secret"),
        (["--env", f"TOKEN={TOKEN}", "--", PENS], "value of the secret HF_TOKEN"),
        (["--", PENS, f"--wandb.notes={TOKEN}"], "value of the secret HF_TOKEN"),
        (["--env", "NOTHING", "--", PENS], "NAME=VALUE"),
    ],
)
def test_secrets_that_are_missing_or_would_be_seen(hub, arguments, message):
    with pytest.raises(ConfigError, match=message) as caught:
        launch(arguments)
    assert TOKEN not in str(caught.value)
    assert not hub.bodies(*SUBMIT)


def test_without_a_login(hub, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    with pytest.raises(ConfigError, match=r"HF_TOKEN.*hf auth login"):
        launch(["--", PENS])
    assert not hub.requests


# What only this machine has


def test_local_things_are_refused(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for arguments, message in [
        (["--", f"--dataset.root={tmp_path}"], "flexor data push .* USER/NAME"),
        (["--", f"--dataset.root=file://{tmp_path}"], "on this machine"),
        (["--package=flexor.whl", "--", PENS], "--package=flexor.whl is not a wheel: .*pip wheel"),
        (["--package=.", "--", PENS], "--package=. is not a wheel"),
        (["--", "--dataset.root=https://ann:secret@host/pens"], r"https://\*\*\*@host/pens has a password"),
        (["--env=HTTPS_PROXY=http://ann:secret@proxy", "--", PENS], r"http://\*\*\*@proxy has a password"),
        (["--", "--resume=true", PENS], "leave out --resume"),
        (["--", "resume", "runs/x"], "--output_dir"),
        (["--", PENS, "--no_such=1"], "no_such"),
        (["--bucket=mine", "--", PENS], "--bucket=mine is not valid: give OWNER/NAME"),
    ]:
        with pytest.raises(ConfigError, match=message):
            launch(arguments)
    assert not hub.bodies(*SUBMIT)


def test_a_local_policy_is_refused(hub, lowdim, tiny_act, tmp_path):
    from flexor.cli.main import main

    run = tmp_path / "run"
    flags = [f"--dataset.root={lowdim}", f"--output_dir={run}", *tiny_act, "--steps=1", "--num_workers=0"]
    assert main(["train", *flags]) == 0
    with pytest.raises(ConfigError, match=r"policy.path=.* on this machine"):
        launch(["--", PENS, f"--policy.path={run}"])
    assert not hub.requests


def test_a_remote_root_is_not_refused(hub):
    assert "--dataset.root=s3://bucket/pens" in last_command(
        submitted(hub, "--", "--dataset.root=s3://bucket/pens")
    )


def test_a_dataset_that_is_not_on_the_hub(hub):
    with pytest.raises(ConfigError, match=r"ann/cups is not a dataset.*flexor data push FOLDER ann/cups"):
        launch(["--", "--dataset.repo_id=ann/cups"])
    assert not hub.bodies(*SUBMIT)


def test_files_of_settings_and_episodes_go_along(hub, tmp_path):
    """The command is run up to where training would start, and what it leaves is read by the program."""
    episodes, settings, work = tmp_path / "episodes.json", tmp_path / "mine.yaml", tmp_path / "work"
    episodes.write_text("[1, 2]")
    file = {
        "job_name": 'it\'s "mine" $HOME',
        "steps": 7,
        "dataset": {"repo_id": "ann/pens", "episodes": f"@{episodes}"},
        "optimizer": {"lr": 3.0e-4},
        "policy": {"device": "mps", "kl_weight": 2.5},
    }
    settings.write_text(yaml.safe_dump(file))
    body = submitted(hub, "--", "--config", str(settings), "--steps=8")
    script = body["command"][2]
    write = script[script.index("printf") : script.index("\nexec")]
    work.mkdir()
    subprocess.run(["bash", "-c", write.replace("/tmp/", f"{work}/")], check=True)
    words = last_command(body)
    flags = [w.replace("/tmp/", f"{work}/") for w in words[words.index("train") + 1 :]]
    ours = ("--gpus=", "--resume=", "--output_dir=")
    of_job = load_config([flag for flag in flags if not flag.startswith(ours)])
    here = load_config(["--config", str(settings), "--steps=8"])
    here.policy.device = None
    assert of_job == here and of_job.dataset.episodes == [1, 2] and of_job.steps == 8


# Watching


def test_the_log_to_the_end(hub, capsys, log_lines):
    hub.lines = ["installing", "step 1", "step 2"]
    assert launch(["--", PENS, "--output_dir=x"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[:3] == hub.lines
    assert "COMPLETED" in out[3] and "hf buckets sync hf://buckets/ann/flexor-runs/x x" in out[4]
    assert any(JOB_ID in line and f"{hub.address}/jobs/ann/{JOB_ID}" in line for line in log_lines)


def test_a_log_that_breaks_off(hub, capsys):
    """In mid-line of the stream, and by a status that the client gives up on."""
    hub.lines = [f"step {n}" for n in range(20)]
    hub.log_faults.extend([5, 502, 12])
    assert launch(["--", PENS]) == 0
    assert capsys.readouterr().out.splitlines()[:20] == hub.lines
    assert not hub.log_faults


def test_a_job_that_fails(hub, capsys):
    hub.outcome = {"stage": "ERROR", "message": "Job timeout"}
    assert launch(["--", PENS, "--output_dir=x"]) == 1
    out = capsys.readouterr().out
    assert "ERROR: Job timeout" in out and "--output_dir=x" in out


def test_json(hub, capsys):
    hub.lines = ["step 1"]
    assert launch(["--json", "--", PENS, "--output_dir=x"]) == 0
    out, error = capsys.readouterr()
    assert "step 1" in error
    assert json.loads(out) == {
        "id": JOB_ID,
        "url": f"{hub.address}/jobs/ann/{JOB_ID}",
        "namespace": "ann",
        "flavor": "l4x1",
        "timeout_s": 3600,
        "bucket": "ann/flexor-runs",
        "folder": "x",
        "stage": "COMPLETED",
        "message": None,
    }


def test_detached(hub, capsys):
    hub.may_end.clear()
    assert launch(["--detach", "--", PENS]) == 0
    out = capsys.readouterr().out
    assert (
        f"hf jobs logs --follow --namespace ann {JOB_ID}" in out
        and f"hf jobs cancel --namespace ann {JOB_ID}" in out
    )
    assert not any("logs" in path for _, path, _ in hub.requests)


def test_ctrl_c_leaves_the_job_alone(hub):
    hub.lines = ["step 1"]
    hub.may_end.clear()
    process = subprocess.Popen(
        [sys.executable, "-c", NO_UPLOAD, "launch", "hf-jobs", *UNPLANNED, "--", PENS],
        env=environment.for_cpu(HF_ENDPOINT=hub.address),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "step 1\n"
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 130, error
    assert "The job continues" in out and f"hf jobs logs --follow --namespace ann {JOB_ID}" in out
    assert "Traceback" not in error and TOKEN not in out + error
    assert hub.job is not None and hub.job["status"]["stage"] == "RUNNING"
    assert not any("cancel" in path for _, path, _ in hub.requests)


# The job itself


def _python(folder: Path, warm_python: str) -> Path:
    """A folder for PATH in which `python` is the one that runs the tests, and a warm one for the program."""
    folder.mkdir(parents=True)
    cases = f'flexor*) exec {warm_python} "$@" ;; *) exec {shlex.quote(sys.executable)} "$@" ;;'
    (folder / "python").write_text(f'#!/bin/sh\ncase "$2" in {cases} esac\n')
    (folder / "python").chmod(0o755)
    return folder


class Job:
    """What the Hub is asked to run, run: on a machine of its own, as far as folders go."""

    def __init__(self, body: dict[str, Any], python: str, machine: Path, bucket: Path, datasets: Path):
        self.packages = machine / "packages"
        self.work = machine / "work"
        self.work.mkdir(parents=True)
        script = body["command"][2].replace("/tmp/", f"{self.work}/").replace(f"{MOUNT}/", f"{bucket}/")
        env = environment.for_cpu(
            PATH=f"{_python(machine / 'bin', python)}:{os.environ['PATH']}",
            PYTHONPATH=f"{self.packages}:{os.environ['PYTHONPATH']}",
            PIP_NO_INDEX="1",
            PIP_NO_DEPS="1",
            PIP_TARGET=str(self.packages),
            HF_LEROBOT_HOME=str(datasets),  # instead of the Hub
        )
        self.errors = machine / "stderr"
        with self.errors.open("w") as errors:
            self.process = subprocess.Popen(["bash", "-c", script], env=env, stderr=errors)

    def wait_for_step(self, step: int) -> None:
        metrics = self.work / "arm" / "metrics.jsonl"

        def is_there() -> bool:
            assert self.process.poll() is None, self.errors.read_text()
            return metrics.exists() and metrics.read_text().count("\n") >= step

        wait_for(is_there)

    def end(self) -> int:
        return self.process.wait(LIMIT_S)


@pytest.mark.ranks
def test_a_job_that_is_ended_goes_on_in_the_next_one(hub, lowdim, tiny_act, warm_python, tmp_path):
    """Weights and figures are those of a run that was never ended, though the machine is gone."""
    from flexor.cli.main import main

    shutil.copytree(lowdim, tmp_path / "datasets" / "ann" / "pens")
    flags = [*tiny_act, "--steps=80", "--batch_size=4", "--num_workers=0", "--log_freq=1"]
    arguments = ["--flavor=cpu-basic", "--", "train", PENS, "--output_dir=arm", *flags]
    bucket = tmp_path / "bucket"
    bucket.mkdir()
    body = submitted(hub, *arguments)
    for path, content in hub.files.items():
        file = bucket / path.removeprefix("ann/flexor-runs/")
        file.parent.mkdir(parents=True)
        file.write_bytes(content)
    first = Job(body, warm_python, tmp_path / "first", bucket, tmp_path / "datasets")
    first.wait_for_step(3)
    first.process.send_signal(signal.SIGTERM)
    assert first.end() == 75, first.errors.read_text()
    assert "the same --output_dir to resume" in first.errors.read_text()
    assert (first.packages / "flexor/cli/main.py").is_file()
    shutil.rmtree(first.work)
    second = Job(body, warm_python, tmp_path / "second", bucket, tmp_path / "datasets")
    assert second.end() == 0, second.errors.read_text()
    uninterrupted = tmp_path / "whole"
    assert main(["train", f"--dataset.root={lowdim}", f"--output_dir={uninterrupted}", *flags]) == 0
    assert losses(bucket / "arm") == losses(uninterrupted) and len(losses(uninterrupted)) == 80
    name = "checkpoints/000080/pretrained_model/model.safetensors"
    assert (bucket / "arm" / name).read_bytes() == (uninterrupted / name).read_bytes()


def losses(run: Path) -> list[float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


# What goes wrong with the Hub


@pytest.mark.parametrize(
    "status, message",
    [
        (402, r"no credit for jobs.*settings/billing"),
        (403, r"does not have permission for ann.*settings/tokens"),
        (404, r"ann does not exist on the Hub.*--namespace"),
        (429, "a few minutes"),
        (400, r"rejected.*400 the reason"),
        (500, r"rejected.*500 the reason"),
    ],
)
def test_refusals(hub, status, message):
    hub.refuse["POST /api/jobs/ann"] = (status, "the reason")
    with pytest.raises(FlexorError, match=message) as caught:
        launch(["--namespace=ann", "--", PENS])
    assert "the reason" in str(caught.value) and TOKEN not in str(caught.value)


def test_a_token_that_is_not_accepted(hub, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_old")
    with pytest.raises(FlexorError, match=r"does not accept your token.*hf auth login"):
        launch(["--", PENS])


def test_a_job_that_may_not_be_watched_any_more(hub):
    hub.log_faults.append(403)
    with pytest.raises(
        FlexorError, match=rf"{JOB_ID}; the job continues.*settings/tokens.*/jobs/ann/{JOB_ID}"
    ):
        launch(["--", PENS])


def test_no_network(hub, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", address)
        with pytest.raises(FlexorError, match=f"Can't reach {address}"):
            launch(["--", PENS])
