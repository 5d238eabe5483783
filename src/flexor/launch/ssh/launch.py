"""`flexor launch ssh HOST`: trains on a machine that is reached by ssh, such as a rented one.

The Flexor that runs here is sent there. What it depends on is installed there once, in the versions of this machine.
The run is a process group of its own there, which goes on when the connection or this machine is gone. On the host:

    flexor-runs/NAME/            job.sh, log, pid, exit_code, run/
    flexor-runs/.packages/       Flexor, by the hash of its files
    flexor-runs/.environments/   virtual environments, by the versions in them
"""

from __future__ import annotations

import hashlib
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from flexor.config.parse import config_from_flags, parse_flags, to_words
from flexor.config.schema import TrainConfig
from flexor.core.console import print_result, print_text
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.log import log
from flexor.core.option_parser import OptionParser
from flexor.core.output_paths import check_output_folder
from flexor.data.mixture.entries import entries_of
from flexor.launch.passwords import refuse_passwords
from flexor.launch.ssh.host import SshHost
from flexor.launch.wheel import Wheel, constraints, extras_of, flexor_wheel
from flexor.train.checkpoint.run_folder import default_folder

FOLDER = "flexor-runs"
STOPPED = 75  # exit code of a run that saved a checkpoint and can be started again


@dataclass
class RemoteJob:
    config: TrainConfig
    run: Path
    """Where the run's folder arrives on this machine."""
    words: list[str]
    """Of `flexor launch local`."""
    settings: str | None
    """The text of a settings file."""

    @property
    def name(self) -> str:
        return re.sub(r"[^\w.-]+", "-", self.run.name).strip("-.")


def launch_ssh(arguments: list[str]) -> int:
    """`flexor launch ssh ...`"""
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser().parse_known_args(arguments[:cut])
    host = SshHost(options.host, options.ssh)
    if options.dry_run and (options.stop or options.follow):
        raise ConfigError(
            "--dry-run shows how a run would be started: leave out --follow and --stop, or --dry-run."
        )
    if options.stop:
        return _stop(host, options.stop)
    if options.follow:
        return _follow(host, options.follow, Path(options.output or Path("runs") / options.follow))
    job = make_job([*words, *arguments[cut + 1 :]])
    wheel = flexor_wheel()
    script = job_script(job, wheel, options.python, options.environment, options.setup)
    if options.dry_run:
        print_result(
            {"host": host.address, "name": job.name, "script": script}, options.json, script.rstrip()
        )
        return 0
    _check_folder(job.run)
    _check_paths(host, job.config)
    _start(host, job, wheel, script)
    if options.detach:
        print_text(_how_to_go_on(host, job.name))
        return 0
    return _follow(host, job.name, job.run)


def parser() -> OptionParser:
    flags = OptionParser(
        prog="flexor launch ssh",
        usage="flexor launch ssh HOST [options] [--] [train] [settings ...]",
        description="Train on a machine that you reach by ssh, with all of its GPUs, and fetch the run at the end. It "
        "continues there if the connection is lost. Paths of datasets and policies are paths on the host.",
    )
    flags.add_argument("host", metavar="HOST", help="USER@HOST, or a name in ~/.ssh/config")
    flags.add_argument("--follow", metavar="NAME", help="follow a run that was started before, and fetch it")
    flags.add_argument("--stop", metavar="NAME", help="let a run save a checkpoint and stop")
    flags.add_argument("--output", metavar="DIR", help="with --follow: where the run is fetched to")
    flags.add_argument("--detach", action="store_true", help="start the run, and do not follow it")
    flags.add_argument(
        "--python", default="python3", metavar="PROGRAM", help="Python 3.11 to 3.13 on the host"
    )
    flags.add_argument(
        "--environment", metavar="DIR", help="a virtual environment on the host, instead of a new one"
    )
    flags.add_argument("--setup", default="", metavar="LINES", help="shell commands to run first on the host")
    flags.add_argument(
        "--ssh", action="append", default=[], metavar="FLAG", help="a flag of ssh, such as --ssh=-p2222"
    )
    flags.add_argument(
        "--dry-run", "--dry_run", action="store_true", help="print the script, and start nothing"
    )
    flags.add_argument("--json", action="store_true", help="with --dry-run: print one JSON object")
    return flags


def make_job(words: list[str]) -> RemoteJob:
    """The settings of `flexor train`, checked here: a mistake should not wait for an installation."""
    if words[:1] == ["train"]:
        words = words[1:]
    flags = parse_flags(words)
    processes = [f"--{name}={flags.pop(name)}" for name in ("gpus", "processes") if name in flags]
    if str(flags.pop("resume", "auto")) != "auto":
        raise ConfigError("A launch resumes the run of that name, or starts it: leave out --resume.")
    config = config_from_flags(flags)
    run = Path(config.output_dir or default_folder(config.job_name or config.policy.type))
    settings = None
    if "config" in flags and Path(flags["config"]).is_file():
        settings = Path(flags["config"]).read_text()
        flags["config"] = "settings.yaml"
    flags |= {"output_dir": "run", "resume": "auto"}
    refuse_passwords([*to_words(flags), *(settings or "").splitlines()], "a script on the host")
    return RemoteJob(config, run, [*(processes or ["--gpus=all"]), "--", "train", *to_words(flags)], settings)


def job_script(job: RemoteJob, wheel: Wheel, python: str, environment: str | None, setup: str) -> str:
    pins = [pin for pin in constraints(extras_of(job.config)) if not pin.startswith("flexor==")]
    digest = hashlib.sha256("\n".join([python, *pins]).encode()).hexdigest()[:16]
    place = shlex.quote(environment) if environment else f"$PWD/../.environments/{digest}"
    install = "" if environment else _install(place, python, pins)
    return f"""#!/bin/bash
# A training with Flexor: {job.name}. `flexor launch ssh` runs it in a process group of its own.
cd "$(dirname "$0")" && rm -f exit_code && echo $$ > pid
trap : TERM INT HUP  # the training is told too: it saves, and its exit code is written below
{setup}
environment={place}
{install}
code=1
if [ -x "$environment/bin/python" ]; then
  export PYTHONPATH="$PWD/../.packages/{wheel.sha256[:16]}"
  "$environment/bin/python" -m flexor launch local {shlex.join(job.words)}
  code=$?
else
  echo "There is no $environment/bin/python on this host."
fi
echo "$code" > exit_code
"""


def _install(place: str, python: str, pins: list[str]) -> str:
    """Lines that make a virtual environment, once; another launch at the same time waits."""
    return f"""
mkdir -p {place}
(
  flock 9
  [ -e {place}/complete ] && exit
  echo "installing Flexor's dependencies on $(hostname), once ..."
  {shlex.quote(python)} -m venv --clear {place} &&
    {place}/bin/python -m pip install --quiet --disable-pip-version-check {shlex.join(pins)} && touch {place}/complete
) 9> {place}.lock
"""


def _check_folder(run: Path) -> None:
    check_output_folder(run, "--output_dir")
    if run.exists() and any(run.iterdir()):
        raise ConfigError(f"output_dir={run} is not empty: choose another folder for the run.")


def _check_paths(host: SshHost, config: TrainConfig) -> None:
    """Datasets and policies are not sent: they must be on the host, or in a place that it can read."""
    roots = [entry.root for entry in entries_of(config.dataset) if entry.root and "://" not in entry.root]
    paths = [("dataset.root", root) for root in roots]
    if config.policy_path is not None and Path(config.policy_path).exists():
        paths.append(("policy.path", config.policy_path))
    for setting, path in paths:
        if not Path(path).is_absolute():
            raise ConfigError(
                f"{setting}={path} is a path on {host.address}: give it from its root, /.../{path}."
            )
        if not host.exists(path):
            raise ConfigError(
                f"{setting}={path} is not on {host.address}. Copy it there with rsync, or push it to the "
                "Hub and give its name."
            )


def _start(host: SshHost, job: RemoteJob, wheel: Wheel, script: str) -> None:
    log.info("sending Flexor to %s", host.address)
    folder = f"{FOLDER}/{job.name}"
    if state_of(host, job.name) == "running":
        raise ConfigError(
            f"{job.name} is running on {host.address}: follow it with `flexor launch ssh {host.address} "
            f"--follow={job.name}`, or choose another --output_dir."
        )
    package = f"{FOLDER}/.packages/{wheel.sha256[:16]}"
    if not host.exists(package):
        host.upload(f"{package}.new", wheel.files())
        host.run(f"mv -T {package}.new {package}")
    files = {"job.sh": script.encode()}
    if job.settings is not None:
        files["settings.yaml"] = job.settings.encode()
    host.upload(folder, files)
    # the first line is written when the script runs: only then can it be followed
    host.run(
        f"cd {shlex.quote(folder)} && rm -f pid exit_code && "
        "(setsid nohup bash job.sh >> log 2>&1 < /dev/null &) && until [ -s pid ]; do sleep 0.05; done"
    )
    log.info("started %s on %s", job.name, host.address)


def state_of(host: SshHost, name: str) -> str:
    """running, lost (its machine was restarted, say), the exit code, or nothing if there is no such run."""
    folder = shlex.quote(f"{FOLDER}/{name}")
    return host.run(
        f"cd {folder} 2>/dev/null || exit 0; if [ -e exit_code ]; then cat exit_code; elif [ -e pid ]; then "
        "kill -0 $(cat pid) 2>/dev/null && echo running || echo lost; fi"
    ).strip()


def _follow(host: SshHost, name: str, run: Path) -> int:
    _check_folder(run)
    folder = f"{FOLDER}/{name}"
    if not state_of(host, name):
        raise ConfigError(f"There is no run {name} on {host.address}.")
    try:
        host.follow(f"{folder}/log", f"{folder}/pid")
    except KeyboardInterrupt:
        print_text(f"\n{_how_to_go_on(host, name)}")
        return 130
    state = state_of(host, name)
    if host.exists(f"{folder}/run"):
        host.download(f"{folder}/run", run)
        print_text(f"fetched {run}; the host's copy is {host.address}:{folder}/run")
    if not state.isdecimal():
        raise FlexorError(
            f"{name} ended on {host.address} without an exit code, as after a restart of the machine. Launch it again "
            "with the same settings and another --output_dir of the same name: it resumes."
        )
    return int(state)


def _stop(host: SshHost, name: str) -> int:
    if state_of(host, name) != "running":
        raise ConfigError(f"No run {name} is running on {host.address}.")
    host.run(f"kill -TERM -- -$(cat {shlex.quote(f'{FOLDER}/{name}/pid')})")
    print_text(f"{name} saves a checkpoint and stops; --follow={name} shows it, and fetches the run")
    return 0


def _how_to_go_on(host: SshHost, name: str) -> str:
    command = f"flexor launch ssh {shlex.quote(host.address)}"
    return (
        f"{name} runs on {host.address}\n"
        f"  follow and fetch:  {command} --follow={name}\n"
        f"  save and stop:     {command} --stop={name}"
    )
