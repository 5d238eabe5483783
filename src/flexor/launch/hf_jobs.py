"""`flexor launch hf-jobs`: a training on Hugging Face's machines, watched from here.

A job's machine is thrown away when the job ends, so a private bucket of the user's is mounted into it and
`keep.py` copies there what training finishes. Started again with the same --output_dir, it goes on from
there. Whatever can be found wrong is found before the job is sent, because from then on it costs money.
What training will need is not predicted yet: the GPU is chosen by the policy's size, the time is a day.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from flexor import __version__
from flexor.batch import ACTION, STATE
from flexor.config import TrainConfig
from flexor.console import print_result
from flexor.errors import ConfigError, FlexorError
from flexor.launch.hf_follow import explained, follow
from flexor.launch.hf_request import (
    BUCKET,
    Machine,
    Training,
    build_request,
    read_env,
    read_seconds,
    read_secrets,
    settle,
    shown,
)
from flexor.log import log
from flexor.policies import policy_class
from flexor.policies.base import Kind, PolicyConfig, PolicyFeature
from flexor.sim.record import BUILTIN

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobHardwareInfo, JobInfo

# Training takes 16 bytes per parameter (weight, gradient, two moments of the optimizer), and its activations.
BYTES_PER_PARAMETER, ACTIVATIONS_GB = 16, 8
GPU_GB = {"l4x1": 24, "l40sx1": 48, "a100-large": 80, "h200": 141, "h200x4": 564, "h200x8": 1128}


def launch_hf_jobs(arguments: list[str]) -> int:
    """`flexor launch hf-jobs ...`: 0 if the job completed or is left alone, 1 if it failed, 130 after Ctrl-C."""
    options, words = _parse(arguments)
    training = settle(words)
    machine = _machine(options, training.config)
    if options.dry_run:
        _check_flavor(machine.flavor, _flavors_of_client())
        machine.namespace = machine.namespace or "YOUR-NAME"
        print(json.dumps(shown(build_request(training, machine)), indent=2))
        return 0
    api = _client(machine.secrets["HF_TOKEN"])
    with explained(api.endpoint, machine.namespace):
        machine.namespace = machine.namespace or api.whoami()["name"]
        request = build_request(training, machine)
        _check_on_hub(api, training.config, machine)
        bucket = request["volumes"][0].source
        api.create_bucket(bucket, private=True, exist_ok=True)
        job = api.run_job(**request)
    log.info("job %s: %s", job.id, job.url)
    log.info("what it saves goes to hf://buckets/%s/%s", bucket, training.name)
    return _watch(api, job, _summary(job, training, machine, bucket), options)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="flexor launch hf-jobs",
        usage="flexor launch hf-jobs [options] [--] [train] [settings ...]",
        description="Train on a machine of Hugging Face's, with all of its GPUs; it costs money by the minute. "
        "Checkpoints go to a private bucket of yours, and with the same --output_dir a run goes on from there. "
        "Ctrl-C stops watching, not the job. Ends with 0 if the job completed, with 1 if it did not.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--flavor", default="", help="the machine (`hf jobs hardware`); unless given, by the policy's size")
    add("--timeout", default="24h", help="when the job is ended: seconds, 90m, 6h or 2d; unless given, 24h")
    add("--image", default="python:3.12", help="Docker image with bash and Python; unless given, python:3.12")
    add("--package", help="what pip installs there; unless given, this version of flexor")
    add("--namespace", default="", help="organisation that runs it and pays; unless given, you")
    add("--bucket", help=f"OWNER/NAME of the bucket; unless given, NAMESPACE/{BUCKET}")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="a variable of your environment that the job gets as a secret, besides HF_TOKEN",
    )
    add(
        "--env", action="append", default=[], metavar="NAME=VALUE", help="a variable of the job's environment"
    )
    add("--detach", action="store_true", help="do not watch the job")
    add("--dry-run", "--dry_run", action="store_true", help="print the request, send nothing")
    add("--json", action="store_true", help="print one JSON object; the job's log goes to standard error")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser.parse_known_args(arguments[:cut])
    words += arguments[cut + 1 :]
    if words[:1] == ["resume"]:
        raise ConfigError(
            "A run on Hugging Face Jobs goes on when it is started again: `flexor launch hf-jobs -- train ...` "
            "with its --output_dir."
        )
    return options, words[1:] if words[:1] == ["train"] else words


def _machine(options: argparse.Namespace, config: TrainConfig) -> Machine:
    secrets = read_secrets(options.secret, config)
    return Machine(
        namespace=options.namespace,
        flavor=options.flavor or choose_flavor(config),
        seconds=read_seconds(options.timeout),
        image=options.image,
        package=options.package,
        bucket=options.bucket,
        env=read_env(options.env, secrets),
        secrets=secrets,
    )


def choose_flavor(config: TrainConfig) -> str:
    """The cheapest machine whose GPUs hold the training of a policy of this size."""
    parameters = _count_parameters(config.policy)
    needed = parameters * BYTES_PER_PARAMETER / 1e9 + ACTIVATIONS_GB
    flavor = next((name for name, gb in GPU_GB.items() if gb >= needed), list(GPU_GB)[-1])
    log.info(
        "flavor %s: a policy of %.0f million parameters takes about %.0f GB to train (%d bytes for each, and "
        "%d GB); --flavor overrides it",
        flavor,
        parameters / 1e6,
        needed,
        BYTES_PER_PARAMETER,
        ACTIVATIONS_GB,
    )
    return flavor


def _count_parameters(policy: PolicyConfig) -> int:
    """A policy whose dataset is not at hand gets usual features: they hardly change its size."""
    camera, vector = PolicyFeature(Kind.VISUAL, (3, 224, 224)), (14,)
    inputs = {"observation.images.camera": camera, STATE: PolicyFeature(Kind.STATE, vector)}
    outputs = {ACTION: PolicyFeature(Kind.ACTION, vector)}
    filled = dataclasses.replace(
        policy,
        input_features=policy.input_features or inputs,
        output_features=policy.output_features or outputs,
    )
    with torch.device("meta"):
        return sum(p.numel() for p in policy_class(policy.type)(filled).parameters())


def _client(token: str) -> HfApi:
    try:
        from huggingface_hub import HfApi, JobHardwareInfo  # noqa: F401  (which is as new as what is used here)
    except ImportError as error:
        raise FlexorError("Hugging Face Jobs need a newer client: pip install -U huggingface_hub.") from error
    return HfApi(token=token, library_name="flexor", library_version=__version__)


def _flavors_of_client() -> list[str]:
    from huggingface_hub import JobHardware

    return [flavor.value for flavor in JobHardware]


def _check_flavor(flavor: str, known: Sequence[str]) -> None:
    if flavor not in known:
        raise ConfigError(f"There is no flavor {flavor!r}. There are: {', '.join(known)}.")


def _check_on_hub(api: HfApi, config: TrainConfig, machine: Machine) -> None:
    """What can be refused before it costs something, and what it may cost."""
    known = {hardware.name: hardware for hardware in api.list_jobs_hardware()}
    _check_flavor(machine.flavor, list(known))
    repo = config.dataset.repo_id
    on_hub = repo is not None and repo != BUILTIN and config.dataset.root is None
    if on_hub and not api.repo_exists(str(repo), repo_type="dataset"):
        raise ConfigError(
            f"dataset.repo_id={repo} is no dataset on the Hub that you can read, so the job can't read it. "
            f"Upload it with `hf upload {repo} FOLDER --repo-type=dataset`."
        )
    log.info("%s: %s", machine.flavor, _describe(known[machine.flavor], machine.seconds / 3600))


def _describe(hardware: JobHardwareInfo, hours: float) -> str:
    gpu = hardware.accelerator
    what = f"{gpu.quantity}x {gpu.model} ({gpu.vram})" if gpu else hardware.cpu
    price = f"{hardware.unit_cost_usd:g} $ a {hardware.unit_label}"
    most = (
        f", which is {hardware.unit_cost_usd * 60 * hours:.2f} $" if hardware.unit_label == "minute" else ""
    )
    return f"{what}, {price}; ended after {hours:g} hours at the latest (--timeout){most}"


def _summary(job: JobInfo, training: Training, machine: Machine, bucket: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "url": job.url,
        "namespace": machine.namespace,
        "flavor": machine.flavor,
        "timeout_s": machine.seconds,
        "bucket": bucket,
        "folder": training.name,
    }


def _watch(api: HfApi, job: JobInfo, summary: dict[str, Any], options: argparse.Namespace) -> int:
    """Follow the job unless it is to be left alone, and say what came of it."""
    which = f"--namespace {summary['namespace']} {job.id}"
    text = f"The job goes on. Watch it: `hf jobs logs --follow {which}`. End it: `hf jobs cancel {which}`."
    code = 0
    if not options.detach:
        log.info("its log follows as soon as it has a machine; Ctrl-C stops watching, not the job")
        try:
            job = follow(api, job, sys.stderr if options.json else sys.stdout)
            code = 0 if job.status.stage == "COMPLETED" else 1
            text = _outcome(job, summary)
        except KeyboardInterrupt:
            code = 130
    print_result({**summary, "stage": job.status.stage, "message": job.status.message}, options.json, text)
    return code


def _outcome(job: JobInfo, summary: dict[str, Any]) -> str:
    folder = summary["folder"]
    why = f": {job.status.message}" if job.status.message else ""
    text = f"job {job.id} ended with {job.status.stage}{why}"
    text += f"\nget what it saved: hf buckets sync hf://buckets/{summary['bucket']}/{folder} {folder}"
    if job.status.stage != "COMPLETED":
        text += f"\nlet it go on from there: the same command with --output_dir={folder}"
    return text
