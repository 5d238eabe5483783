"""`flexor launch ssh`: its script, and runs on an sshd of this machine."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from flexor.cli.main import main
from flexor.core.errors import ConfigError
from flexor.launch.ssh.host import SshHost, Unreachable
from flexor.launch.ssh.launch import make_job, state_of
from support import runs
from support.limits import wait_for

SSHD = shutil.which("sshd") or "/usr/sbin/sshd"
pytestmark = pytest.mark.ranks(waits=True)
LAUNCH = ["launch", "ssh", "127.0.0.1"]
needs_sshd = pytest.mark.skipif(
    not Path(SSHD).is_file() or os.geteuid() != 0, reason="needs sshd, and root to start it"
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Sshd(NamedTuple):
    """A server of its own, with a home folder of its own."""

    process: subprocess.Popen
    flags: list[str]
    home: Path

    @property
    def host(self) -> SshHost:
        return SshHost("127.0.0.1", [flag.removeprefix("--ssh=") for flag in self.flags])


@pytest.fixture
def sshd(tmp_path) -> Iterator[Sshd]:
    folder, home, port = tmp_path / "sshd", tmp_path / "home", free_port()
    folder.mkdir(mode=0o700)
    home.mkdir()
    for name in ("host_key", "key"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True)
    shutil.copy(folder / "key.pub", folder / "authorized_keys")
    Path("/run/sshd").mkdir(exist_ok=True)
    settings = {
        "Port": port,
        "ListenAddress": "127.0.0.1",
        "HostKey": folder / "host_key",
        "AuthorizedKeysFile": folder / "authorized_keys",
        "PidFile": "none",
        "StrictModes": "no",
        "UsePAM": "no",
        "PermitRootLogin": "yes",
        "ForceCommand": f'cd {home} && exec bash -c "$SSH_ORIGINAL_COMMAND"',
    }
    (folder / "config").write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
    process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stderr=subprocess.DEVNULL)
    wait_for(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0)
    known = f"-oUserKnownHostsFile={folder / 'known_hosts'}"
    flags = [
        f"--ssh=-p{port}",
        f"--ssh=-i{folder / 'key'}",
        f"--ssh={known}",
        "--ssh=-oStrictHostKeyChecking=no",
    ]
    yield Sshd(process, flags, home)
    process.kill()
    process.wait()


def words(sshd: Sshd, dataset: Path, policy: list[str], run: Path, *more: str) -> list[str]:
    """A launch on this machine, in the environment of the tests, without the small ResNet that only tests have."""
    policy = [flag for flag in policy if "vision_backbone" not in flag]
    settings = runs.flags(dataset, run, policy, "--env_eval_freq=0", *more)
    return [*LAUNCH, *sshd.flags, f"--environment={sys.prefix}", "--", "train", "--processes=1", *settings]


@needs_sshd
def test_a_run_is_sent_followed_and_fetched(sshd, dataset, tiny_act, tmp_path, capfd):
    run = tmp_path / "here/run"
    assert main(words(sshd, dataset, tiny_act, run, "--steps=4")) == 0
    out = capfd.readouterr()
    assert "step 4" in out.out + out.err and "done: step 4" in out.out
    assert [line["step"] for line in runs.metrics(run)][-1] == 4
    assert (run / "checkpoints/000004/pretrained_model/model.safetensors").is_file()
    assert not [path for path in run.parent.iterdir() if path.name.startswith(".")]
    assert state_of(sshd.host, "run") == "0"
    # the same name again: nothing is left to do, and what was fetched stays
    assert main(words(sshd, dataset, tiny_act, run, "--steps=4")) != 0
    assert "is not empty" in capfd.readouterr().err


@needs_sshd
def test_a_run_outlives_the_connection_stops_when_told_and_resumes(sshd, dataset, tiny_act, tmp_path, capfd):
    run, often = tmp_path / "run", ("--save_freq=100000", "--log_freq=1")
    long = words(sshd, dataset, tiny_act, run, "--steps=100000", *often)
    assert main([*LAUNCH, "--detach", *long[3:]]) == 0
    assert "--follow=run" in capfd.readouterr().out
    log = sshd.home / "flexor-runs/run/log"
    wait_for(lambda: log.is_file() and "step 3 " in log.read_text())
    assert main(long) != 0 and "is running on 127.0.0.1" in capfd.readouterr().err
    stopping = threading.Timer(1.0, lambda: main([*LAUNCH, *sshd.flags, "--stop=run"]))
    stopping.start()
    assert main([*LAUNCH, *sshd.flags, "--follow=run", f"--output={run}"]) == 75  # saved, and stopped
    stopping.join()
    step = runs.metrics(run)[-1]["step"]
    resumed = tmp_path / "more/run"
    assert main(words(sshd, dataset, tiny_act, resumed, f"--steps={step + 2}", *often)) == 0
    steps = [line["step"] for line in runs.metrics(resumed)]
    assert steps == [*range(1, step + 3)]


@needs_sshd
def test_following_reconnects(sshd, tmp_path, capfd):
    host = sshd.host
    host.run(
        "mkdir -p flexor-runs/a && cd flexor-runs/a && (setsid nohup sleep 60 > /dev/null 2>&1 & echo $! > pid)"
    )
    log, pid = sshd.home / "flexor-runs/a/log", int((sshd.home / "flexor-runs/a/pid").read_text())
    log.write_text("one\n")
    following = threading.Thread(target=host.follow, args=("flexor-runs/a/log", "flexor-runs/a/pid"))
    following.start()
    wait_for(
        lambda: (
            subprocess.run(["pgrep", "-f", "flexor-runs/a/log"], capture_output=True).stdout.count(b"\n") > 1
        )
    )
    subprocess.run(["pkill", "-f", f"^ssh .*{sshd.flags[0].removeprefix('--ssh=')}"], check=True)
    with log.open("a") as out:
        out.write("two\n")
    text = []
    wait_for(lambda: text.append(capfd.readouterr().out) or "two" in "".join(text))
    os.kill(pid, signal.SIGKILL)
    following.join(60)
    assert "".join(text).count("one") == 1 and "".join(text).count("two") == 1


@needs_sshd
def test_paths_are_those_of_the_host(sshd, dataset, tiny_act, tmp_path, capsys):
    arguments = words(sshd, tmp_path / "elsewhere", tiny_act, tmp_path / "run")
    assert main(arguments) != 0
    assert f"dataset.root={tmp_path / 'elsewhere'} is not on 127.0.0.1" in capsys.readouterr().err
    assert not (sshd.home / "flexor-runs/run").exists()


@needs_sshd
def test_another_key_is_refused(sshd, tmp_path):
    (tmp_path / "sshd/authorized_keys").write_text("")
    with pytest.raises(Unreachable, match="ssh can't connect to"):
        sshd.host.run("true")


def test_the_script_installs_these_versions_once(capsys, tmp_path):
    command = [
        "launch",
        "ssh",
        "robot@gpu",
        "--dry-run",
        "--json",
        "--setup=module load cuda",
        "--",
        "--steps=5",
    ]
    assert main(command) == 0
    report = json.loads(capsys.readouterr().out)
    script = report["script"]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    assert "module load cuda" in script and "torch==" in script and "flexor==" not in script
    assert "launch local --gpus=all -- train" in script and "--resume=auto" in script


@pytest.mark.parametrize("doing", ["--follow=place", "--stop=place"])
def test_a_dry_run_connects_to_nothing(doing, capsys, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)
    monkeypatch.setattr(subprocess, "Popen", None)
    assert main(["launch", "ssh", "robot@gpu", "--dry-run", doing]) == 0
    assert doing[2:].replace("=", " ") in capsys.readouterr().out


def test_what_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="leave out --resume"):
        make_job(["train", "--resume=true"])
    with pytest.raises(ConfigError, match="is not a host"):
        SshHost("-oProxyCommand=evil")
