"""`flexor doctor`: the information for a bug report, and problems with this machine and how to fix them."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from flexor import __version__
from flexor.core.console import print_result
from flexor.core.machine import cache_folder, free_memory, total_memory, usable_cores
from flexor.core.option_parser import OptionParser

PACKAGES = (
    "torch",
    "numpy",
    "pyarrow",
    "av",
    "safetensors",
    "huggingface_hub",
    "fsspec",
    "gymnasium",
    "accelerate",
    "transformers",
    "lerobot",
    "nvidia-ml-py",
    "wandb",
    "tensorboard",
    "trackio",
)
CODECS = ("libdav1d", "h264", "hevc", "vp9", "libsvtav1", "libx264")
LITTLE_DISK_GB = 5
LITTLE_MEMORY_GB = 2


def run(arguments: list[str]) -> int:
    parser = OptionParser(
        prog="flexor doctor",
        description="Show the information for a bug report, and problems with this machine. "
        "The exit code is 1 if there is a problem.",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parsed = parser.parse_args(arguments)
    findings = examine()
    print_result(findings, parsed.json, render(findings))
    return 1 if findings["problems"] else 0


def examine() -> dict[str, Any]:
    """Facts about this machine, and a list of problems, each with its fix."""
    problems: list[dict[str, str]] = []
    facts: dict[str, Any] = {
        "flexor": __version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "processor": f"{platform.machine()}, {usable_cores()} of {os.cpu_count()} cores",
        "packages": _packages(),
    }
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        _add(problems, f"Python {facts['python']} is not supported", "use Python 3.11 to 3.13")
    facts["torch"] = _torch(problems)
    facts["decoders"] = _decoders(problems)
    facts["memory_gb"] = _memory(problems)
    facts["disk"] = _disks(problems)
    return {**facts, "problems": problems}


def _add(problems: list[dict[str, str]], problem: str, fix: str) -> None:
    problems.append({"problem": problem, "fix": fix})


def _packages() -> dict[str, str | None]:
    versions: dict[str, str | None] = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def _torch(problems: list[dict[str, str]]) -> dict[str, Any]:
    import torch

    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        try:
            torch.ones(1, device=f"cuda:{index}").item()
            free = torch.cuda.mem_get_info(index)[0]
            if free < 0.5 * properties.total_memory:
                _add(
                    problems,
                    f"GPU {index} has only {free / 1e9:.1f} of {properties.total_memory / 1e9:.1f} GB free",
                    "find the program that uses it with nvidia-smi, or select another GPU with CUDA_VISIBLE_DEVICES",
                )
        except RuntimeError as error:
            _add(
                problems,
                f"GPU {index} can't be used: {error}",
                "install a torch build for this GPU and driver",
            )
        gpus.append({"name": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)})
    has_driver = shutil.which("nvidia-smi") is not None
    if has_driver and not gpus:
        built = torch.version.cuda
        _add(
            problems,
            f"an NVIDIA driver is installed, but torch sees no GPU (built for CUDA {built})",
            "install a CUDA build of torch"
            if built is None
            else "update the driver, check CUDA_VISIBLE_DEVICES",
        )
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if gpus else None,
        "gpus": gpus,
        "mps": torch.backends.mps.is_available(),
        "threads": torch.get_num_threads(),
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }


def _decoders(problems: list[dict[str, str]]) -> dict[str, Any]:
    try:
        import av
    except ImportError as error:
        _add(problems, f"can't read videos: {error}", "pip install --force-reinstall av")
        return {}
    available = {name: name in av.codecs_available for name in CODECS}
    if not available["libdav1d"] and "av1" not in av.codecs_available:
        _add(
            problems,
            "PyAV has no AV1 decoder, and LeRobot's videos use AV1",
            "install av from a wheel with pip",
        )
    return {"ffmpeg": getattr(av, "ffmpeg_version_info", "unknown"), **available}


def _memory(problems: list[dict[str, str]]) -> dict[str, float]:
    total, free = total_memory() / 1e9, free_memory() / 1e9
    if free < LITTLE_MEMORY_GB:
        _add(
            problems,
            f"only {free:.1f} of {total:.1f} GB of host memory is free",
            "lower --batch_size and --dataset.cache.pool_gb",
        )
    return {"total": round(total, 1), "free": round(free, 1)}


def _disks(problems: list[dict[str, str]]) -> dict[str, float]:
    """Free space in the folders for runs, caches and temporary files, and whether they are writable."""
    free = {}
    for label, folder in (
        ("here", Path.cwd()),
        ("cache", cache_folder()),
        ("temporary", Path(tempfile.gettempdir())),
    ):
        existing = next(p for p in (folder, *folder.parents) if p.exists())
        free[label] = round(shutil.disk_usage(existing).free / 1e9, 1)
        if not os.access(existing, os.W_OK):
            _add(
                problems,
                f"{existing} is not writable",
                "choose another folder (--output_dir, FLEXOR_CACHE, TMPDIR)",
            )
        elif free[label] < LITTLE_DISK_GB:
            _add(
                problems,
                f"only {free[label]} GB free in {existing}",
                "free some disk space for checkpoints and caches",
            )
    return free


def render(findings: dict[str, Any]) -> str:
    torch = findings["torch"]
    gpus = ", ".join(f"{g['name']} ({g['memory_gb']} GB)" for g in torch["gpus"]) or "none"
    decoders = findings["decoders"]
    codecs = ", ".join(name for name in CODECS if decoders.get(name)) or "none"
    packages = ", ".join(f"{n} {v}" for n, v in findings["packages"].items() if v)
    memory, disk = findings["memory_gb"], findings["disk"]
    lines = [
        f"flexor      {findings['flexor']} on Python {findings['python']}, {findings['platform']}",
        f"processor   {findings['processor']}, torch uses {torch['threads']} threads",
        f"memory      {memory['total']} GB, {memory['free']} GB free",
        f"disk free   {', '.join(f'{label} {size} GB' for label, size in disk.items())}",
        f"torch       {torch['version']}, CUDA {torch['cuda'] or 'none'}, cuDNN {torch['cudnn'] or 'none'}",
        f"GPUs        {gpus}{', Apple MPS' if torch['mps'] else ''}",
        f"video       FFmpeg {decoders.get('ffmpeg', 'none')}: {codecs}",
        f"packages    {packages}",
    ]
    for problem in findings["problems"]:
        lines.append(f"PROBLEM     {problem['problem']}\n            fix: {problem['fix']}")
    lines.append("" if findings["problems"] else "no problems found")
    return "\n".join(lines).rstrip()
