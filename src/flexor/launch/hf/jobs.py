"""`flexor launch hf-jobs`: trains on Hugging Face Jobs, and follows the job from this machine.

A job's machine is deleted when the job ends. So one of the user's private buckets is mounted into it, and
`keep.py` copies finished files there. Started again with the same --output_dir, the job resumes from there.
All checks happen before the job is submitted, because from then on it costs money. The plan chooses the
machine and the timeout, unless the user gives them (`plan.py`).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub.errors import HTTPError, OfflineModeIsEnabled

from flexor import __version__
from flexor.config.schema import TrainConfig
from flexor.core.console import print_json, print_result
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.hub_errors import without_token
from flexor.core.log import log
from flexor.core.option_parser import OptionParser
from flexor.data.mixture.entries import entries_of
from flexor.launch.hf.follow import explained, follow
from flexor.launch.hf.plan import offers_of, settle_machine
from flexor.launch.hf.request import (
    BUCKET,
    Machine,
    Training,
    build_request,
    read_env,
    read_seconds,
    read_secrets,
    redacted_request,
    settle,
)
from flexor.launch.wheel import flexor_wheel, read_wheel
from flexor.plan.site.hardware import Flavor, load_hardware
from flexor.sim.record import BUILTIN

if TYPE_CHECKING:
    from huggingface_hub import HfApi, JobHardwareInfo, JobInfo


def launch_hf_jobs(arguments: list[str]) -> int:
    """`flexor launch hf-jobs ...`: 0 if the job completed or is not followed, 1 if it failed, 130 after Ctrl-C."""
    options, words = _parse(arguments)
    training = settle(words)
    secrets = read_secrets(options.secret, training.config)
    if options.dry_run:
        options.namespace = options.namespace or "YOUR-NAME"
        machine = _machine(options, training, secrets, _offers(_flavors_of_client()))
        print_json(redacted_request(build_request(training, machine)), indent=2)
        return 0
    api = _client(secrets["HF_TOKEN"])
    with explained(api.endpoint, options.namespace):
        options.namespace = options.namespace or api.whoami()["name"]
        _check_dataset(api, training.config)
        available = {hardware.name: hardware for hardware in api.list_jobs_hardware()}
        machine = _machine(options, training, secrets, _offers(available, available.values()))
        request = build_request(training, machine)
        log.info("%s: %s", machine.flavor, _describe(available[machine.flavor], machine.seconds / 3600))
        bucket = request["volumes"][0].source
        api.create_bucket(bucket, private=True, exist_ok=True)
        _upload(api, bucket, machine)
        job = api.run_job(**request)
    log.info("job %s: %s", job.id, job.url)
    log.info("its checkpoints and other files go to hf://buckets/%s/%s", bucket, training.name)
    return _watch(api, job, _summary(job, training, machine, bucket), options)


def _parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = OptionParser(
        prog="flexor launch hf-jobs",
        usage="flexor launch hf-jobs [options] [--] [train] [settings ...]",
        description="Train on a machine of Hugging Face Jobs, with all of its GPUs. You pay by the minute. "
        "Checkpoints go to a private bucket of yours, and with the same --output_dir a run resumes from there. "
        "Ctrl-C stops following the log, not the job. The exit code is 0 if the job completed, else 1.",
    )
    add = parser.add_argument
    add(
        "--flavor",
        default="",
        help="the machine (`hf jobs hardware` lists them); default: the cheapest on which the run fits, by the plan",
    )
    add("--timeout", help="time limit of the job: seconds, 90m, 6h or 2d; default: from the plan")
    add("--image", default="python:3.12", help="Docker image with bash and Python; default: python:3.12")
    add(
        "--package",
        help="another package to install in the job, such as one with your policy: a wheel or a URL. The Flexor that "
        "runs here is always installed",
    )
    add("--namespace", default="", help="organisation that runs the job and pays; default: you")
    add("--bucket", help=f"OWNER/NAME of the bucket; default: NAMESPACE/{BUCKET}")
    add(
        "--secret",
        action="append",
        default=[],
        metavar="NAME",
        help="environment variable to pass to the job as a secret, besides HF_TOKEN; repeatable",
    )
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="environment variable of the job")
    add("--detach", action="store_true", help="do not follow the job's log")
    add("--dry-run", "--dry_run", action="store_true", help="print the request, but send nothing")
    add("--json", action="store_true", help="print one JSON object; the job's log goes to standard error")
    cut = arguments.index("--") if "--" in arguments else len(arguments)
    options, words = parser.parse_known_args(arguments[:cut])
    words += arguments[cut + 1 :]
    if words[:1] == ["resume"]:
        raise ConfigError(
            "To resume a run on Hugging Face Jobs, start it again: `flexor launch hf-jobs -- train ...` "
            "with its --output_dir."
        )
    return options, words[1:] if words[:1] == ["train"] else words


def _machine(
    options: argparse.Namespace, training: Training, secrets: dict[str, str], offers: dict[str, Flavor | None]
) -> Machine:
    """`offers`: the available flavors, with their data if the plan knows them."""
    if options.flavor and options.flavor not in offers:
        raise ConfigError(f"There is no flavor {options.flavor!r}. Available: {', '.join(offers)}.")
    env = read_env(options.env, secrets)
    seconds = None if options.timeout is None else read_seconds(options.timeout)
    planned = [offer for offer in offers.values() if offer is not None]
    flavor, seconds = settle_machine(training, options.flavor, seconds, planned)
    wheels, package = [flexor_wheel()], options.package
    if package is not None and (package.endswith(".whl") or Path(package).exists()) and "://" not in package:
        wheels, package = [*wheels, read_wheel(Path(package))], None
    return Machine(
        namespace=options.namespace,
        flavor=flavor,
        seconds=seconds,
        image=options.image,
        wheels=wheels,
        package=package,
        bucket=options.bucket,
        env=env,
        secrets=secrets,
    )


def _upload(api: HfApi, bucket: str, machine: Machine) -> None:
    """Upload what the job installs."""
    try:
        api.batch_bucket_files(bucket, add=[(wheel.content, wheel.place) for wheel in machine.wheels])
    except (HTTPError, OfflineModeIsEnabled):
        raise
    except Exception as error:  # whatever the client of its storage raises
        raise FlexorError(
            f"Flexor can't be uploaded to the bucket {bucket}, so the job was not started: {without_token(str(error))}"
        ) from None


def _client(token: str) -> HfApi:
    try:
        from huggingface_hub import HfApi, JobHardwareInfo  # noqa: F401  (which is as new as what is used here)
    except ImportError as error:
        raise FlexorError("Hugging Face Jobs need a newer client: pip install -U huggingface_hub.") from error
    return HfApi(token=token, library_name="flexor", library_version=__version__)


def _flavors_of_client() -> list[str]:
    from huggingface_hub import JobHardware

    return [flavor.value for flavor in JobHardware]


def _offers(names: Iterable[str], prices: Iterable[JobHardwareInfo] = ()) -> dict[str, Flavor | None]:
    """The available flavors by name, with the Hub's prices if it gives them; None for flavors unknown to the plan."""
    flavors = offers_of(load_hardware())
    offers = {name: flavors.get(name) for name in names}
    for hardware in prices:
        offer = offers[hardware.name]
        if offer is not None and hardware.unit_label == "minute":
            offers[hardware.name] = replace(offer, usd_per_hour=60 * hardware.unit_cost_usd)
    return offers


def _check_dataset(api: HfApi, config: TrainConfig) -> None:
    for entry in entries_of(config.dataset):
        repo = entry.repo_id
        on_hub = repo is not None and repo not in BUILTIN and entry.root is None
        if on_hub and not api.repo_exists(str(repo), repo_type="dataset"):
            raise ConfigError(
                f"dataset.repo_id={repo} is not a dataset on the Hub that you can read, so the job can't read it. "
                f"Upload it with `flexor data push FOLDER {repo}`."
            )


def _describe(hardware: JobHardwareInfo, hours: float) -> str:
    gpu = hardware.accelerator
    machine = f"{gpu.quantity}x {gpu.model} ({gpu.vram})" if gpu else hardware.cpu
    price = f"{hardware.unit_cost_usd:g} $ per {hardware.unit_label}"
    most = f", at most {hardware.unit_cost_usd * 60 * hours:.2f} $" if hardware.unit_label == "minute" else ""
    return f"{machine}, {price}; stopped after {hours:g} hours at the latest (--timeout){most}"


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
    """Follow the job, unless --detach is given, and report its result."""
    which = f"--namespace {summary['namespace']} {job.id}"
    text = (
        f"The job continues. Follow it: `hf jobs logs --follow {which}`. Stop it: `hf jobs cancel {which}`."
    )
    code = 0
    if not options.detach:
        log.info("the log starts as soon as the job has a machine; Ctrl-C stops following it, not the job")
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
    text += f"\ndownload its files: hf buckets sync hf://buckets/{summary['bucket']}/{folder} {folder}"
    if job.status.stage != "COMPLETED":
        text += f"\nresume it: the same command with --output_dir={folder}"
    return text
