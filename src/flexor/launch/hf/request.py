"""Builds the request of a Hugging Face job from the user's settings.

A job can't access this machine. Files with settings and episode lists are sent as text; local datasets and
policies can't be sent, so they are an error. Secrets are sent as secrets: they are neither in the command nor in
the environment, which everyone with access to the job can read.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from flexor.config.parse import config_from_flags, parse_flags, to_words
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.data.mixture.entries import entries_of
from flexor.launch.passwords import refuse_passwords
from flexor.launch.wheel import Wheel, constraints, extras_of
from flexor.policies.external import is_code
from flexor.train.checkpoint.run_folder import default_folder

BUCKET = "flexor-runs"
MOUNT = PurePosixPath("/flexor-runs")  # mount point of the bucket in the job
WORK = PurePosixPath("/tmp")  # noqa: S108  (the disk of the job's machine, which nobody else uses)
SETTINGS = WORK / "settings.yaml"
CONSTRAINTS = WORK / "constraints.txt"
UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "": 1}
SAVING = 600  # seconds before the end of a job in which the run saves and is copied
SHORTEST_SECRET = 8  # shorter ones may occur in other text by chance


@dataclass
class Training:
    """The training, without anything that only this machine has."""

    config: TrainConfig
    name: str  # of the run's folder in the bucket
    flags: dict[str, Any]  # of `flexor train`
    settings: str | None  # the text of a settings file
    gpus: int | None = None  # GPUs of the machine to use; default: all
    on_cpu: bool = False


@dataclass
class Machine:
    """The machine, the timeout, and the rest of the job besides the training."""

    namespace: str
    flavor: str
    seconds: int
    image: str
    wheels: list[Wheel]  # Flexor first
    package: str | None  # another one, from a URL or an index
    bucket: str | None
    env: dict[str, str]
    secrets: dict[str, str]

    @property
    def has_gpu(self) -> bool:
        return not self.flavor.startswith("cpu")


def settle(words: Sequence[str]) -> Training:
    """The settings of `flexor train` in a form that a job can use; an error if that is not possible."""
    flags = parse_flags(words)
    processes = {key: flags.pop(key) for key in ("gpus", "processes") if key in flags}
    if str(flags.pop("resume", "auto")) != "auto":
        raise ConfigError("A job always resumes the run in --output_dir, or starts it: leave out --resume.")
    config = config_from_flags(flags)
    _refuse_local(config)
    name = re.sub(r"[^\w.-]+", "-", config.output_dir or "").strip("-.")
    name = name or default_folder(config.job_name or config.policy.type).name
    settings = None
    if "config" in flags and Path(flags["config"]).is_file():
        settings = Path(flags["config"]).read_text()
        flags["config"] = str(SETTINGS)
    for key in ("episodes", "exclude_episodes"):
        if isinstance(episodes := getattr(config.dataset, key), list):  # they may come from a file
            flags[f"dataset.{key}"] = json.dumps(episodes)
    if config.policy.device is not None:  # the job may have another device
        flags["policy.device"] = "null"
    flags |= {"output_dir": str(WORK / name), "resume": "auto"}
    gpus = str(processes.get("gpus", "all"))
    return Training(
        config,
        name,
        flags | processes,
        settings,
        gpus=int(gpus) if gpus.isdigit() else None,
        on_cpu="processes" in processes,
    )


def _refuse_local(config: TrainConfig) -> None:
    roots = [entry.root for entry in entries_of(config.dataset) if entry.root is not None]
    root = next((each for each in roots if "://" not in each or each.startswith("file:")), None)
    if root is not None:
        raise ConfigError(
            f"dataset.root={root} is on this machine, which the job can't access. Push it with "
            f"`flexor data push {root} USER/NAME` and give --dataset.repo_id=USER/NAME instead."
        )
    weights = config.sample_weighting.progress_path
    if weights is not None and "://" not in weights:
        raise ConfigError(
            f"sample_weighting.progress_path={weights} is on this machine, which the job can't access. Upload it into "
            "the dataset's repository and give hf://datasets/USER/NAME/FILE instead."
        )
    path = config.policy_path
    if path is not None and Path(path).exists():
        raise ConfigError(
            f"policy.path={path} is on this machine, which the job can't access. Push it with "
            "`flexor push RUN --repo_id=USER/NAME` and give --policy.path=USER/NAME instead."
        )
    if is_code(config.policy.type):
        raise ConfigError(
            f"policy.type={config.policy.type} is code on this machine, which the job can't access. Put it into a "
            "package that needs flexor and has an entry point in the group flexor.policies, and give its URL as "
            "--package (docs/your-own-policy.md)."
        )


def read_seconds(text: str) -> int:
    """90m -> 5400."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    seconds = int(float(match[1]) * UNITS[match[2]]) if match else 0
    if seconds < 60:
        raise ConfigError(
            f"--timeout={text} is not valid: give a minute or more, as seconds or as 90m, 6h, 2d."
        )
    return seconds


def read_secrets(names: Sequence[str], config: TrainConfig) -> dict[str, str]:
    """The values, from the user's environment and login."""
    from huggingface_hub import get_token

    instead = {"HF_TOKEN": ", or log in with `hf auth login`"}
    if config.wandb.enable and config.wandb.mode in (None, "online"):
        instead["WANDB_API_KEY"] = ", or give --wandb.enable=false"
    values = {name: os.environ.get(name) for name in (*instead, *names)} | {"HF_TOKEN": get_token()}
    for name, value in values.items():
        if "=" in name:
            raise ConfigError("--secret takes only a name: the value is read from your environment.")
        if not value:
            raise ConfigError(
                f"The job needs the secret {name}, which is not set: export {name}=...{instead.get(name, '')}."
            )
    return {name: str(value) for name, value in values.items()}


def read_env(pairs: Sequence[str], secrets: dict[str, str]) -> dict[str, str]:
    env = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if name in secrets:
            raise ConfigError(f"{name} is a secret: pass it with --secret {name}, not with --env.")
        if not equals or not name:
            raise ConfigError(f"--env {pair} is not valid: give NAME=VALUE.")
        env[name] = value
    return env


def build_request(training: Training, machine: Machine) -> dict[str, Any]:
    """The arguments of `HfApi.run_job`."""
    from huggingface_hub import Volume

    env = machine.env
    if machine.has_gpu:
        # without "video" the container does not get the GPU's video decoder
        env = {"NVIDIA_DRIVER_CAPABILITIES": "compute,utility,video", **env}
    command = ["bash", "-c", _script(training, machine)]
    for name, value in machine.secrets.items():
        if len(value) >= SHORTEST_SECRET and any(value in text for text in (*command, *env.values())):
            raise ConfigError(
                f"The value of the secret {name} is in the settings or in --env, where others can read it. Remove it."
            )
    settings = (training.settings or "").splitlines()
    refuse_passwords((*to_words(training.flags), *settings, *env.values()), "the job")
    bucket = machine.bucket or f"{machine.namespace}/{BUCKET}"
    if bucket.count("/") != 1:
        raise ConfigError(f"--bucket={bucket} is not valid: give OWNER/NAME.")
    return {
        "namespace": machine.namespace,
        "image": machine.image,
        "command": command,
        "env": env,
        "secrets": machine.secrets,
        "flavor": machine.flavor,
        "timeout": machine.seconds,
        "labels": {"name": re.sub(r"[^a-zA-Z0-9_-]", "-", training.name)},
        "volumes": [Volume(type="bucket", source=bucket, mount_path=str(MOUNT), read_only=False)],
    }


def _script(training: Training, machine: Machine) -> str:
    """The job's script, in bash."""
    flags = dict(training.flags)
    if machine.has_gpu and not {"gpus", "processes"} & flags.keys():
        flags["gpus"] = "all"
    lines = ["set -e", *_install(training, machine)]
    if training.settings is not None:
        lines.append(f"printf %s {shlex.quote(training.settings)} > {SETTINGS}")
    stop = machine.seconds - min(SAVING, machine.seconds // 10)
    # bash counts SECONDS since its own start: the time that the installation took
    keep = f"exec python -m flexor.launch.hf.keep --seconds=$(({stop} - SECONDS))"
    folders = shlex.join([str(MOUNT / training.name), str(WORK / training.name)])
    lines.append(f"{keep} {folders} -- train {shlex.join(to_words(flags))}")
    return "\n".join(lines)


def _install(training: Training, machine: Machine) -> list[str]:
    """Lines that install the Flexor that was uploaded with the job. No secret is there for code that pip may run."""
    extras = extras_of(training.config)
    flexor, *more = machine.wheels
    packages = [flexor.requirement(MOUNT, ",".join(extras)), *(wheel.requirement(MOUNT) for wheel in more)]
    packages += [machine.package] if machine.package else []
    pip = f"python -m pip install --quiet --constraint {CONSTRAINTS} {shlex.join(packages)}"
    pinned = shlex.quote("\n".join(constraints(extras)))
    return [f"printf '%s\\n' {pinned} > {CONSTRAINTS}", f"(unset {shlex.join(machine.secrets)}; {pip})"]


def redacted_request(request: dict[str, Any]) -> dict[str, Any]:
    """The request without secrets."""
    return request | {
        "secrets": dict.fromkeys(request["secrets"], "***"),
        "volumes": [volume.to_dict() for volume in request["volumes"]],
    }
