"""Data sheets and prices of GPUs: from `gpus.toml`, extended and overridden by a user's own file.

Values are from data sheets: dense, with fp32 accumulation, so that a roofline computed from them is a real limit.
Values that nobody has verified are marked. Prices have a date and are meant to be edited.
"""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import MISSING as NO_DEFAULT
from dataclasses import dataclass, field, fields, replace
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import torch

from flexor.core.errors import ConfigError
from flexor.core.typed import closest, from_plain

GPUS_FILE = "FLEXOR_GPUS"  # environment variable with the path of a user's file
DTYPES = ("fp32", "tf32", "bf16", "fp16", "fp8", "int8")
INSTEAD = {"tf32": "fp32", "bf16": "fp32", "fp16": "fp32"}  # type that is used if the GPU has no unit for it
PCIE_LANE = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}  # bytes/s of one lane in one direction
MAKERS = {"nvidia", "geforce", "tesla", "quadro", "apple"}  # words of a name that are ignored
SAME_MEMORY = 0.03  # relative tolerance: driver and ECC reserve different amounts


@dataclass(frozen=True)
class GPU:
    """One GPU, in the units of its data sheet; the properties are in bytes, bytes/s and FLOP/s."""

    name: str
    memory_gib: float
    bandwidth_gb_s: float
    tflops: dict[str, float] = field(hash=False)
    tdp_w: float
    maker: Literal["nvidia", "apple", "other"] = "nvidia"
    aliases: tuple[str, ...] = ()
    unified: bool = False
    sms: int | None = None
    capability: str | None = None
    l2_mib: float | None = None
    nvlink_gb_s: float | None = None
    pcie: int | None = None
    pcie_lanes: int = 16
    source: str = ""
    checked: str = ""
    unchecked: tuple[str, ...] = ()

    @property
    def memory(self) -> int:
        """Bytes available to a process, including its CUDA context."""
        return round(self.memory_gib * 2**30)

    @property
    def bandwidth(self) -> float:
        """Memory bandwidth in bytes/s."""
        return self.bandwidth_gb_s * 1e9

    def flops(self, dtype: str) -> float:
        """Dense FLOP/s of matrix products; without a unit for this type, those of the type used instead."""
        assert dtype in DTYPES, dtype
        rate = self.tflops.get(dtype, self.tflops.get(INSTEAD.get(dtype, ""), 0.0))
        if not rate:
            raise ConfigError(
                f"The {self.name} does not support {dtype}. It supports: {', '.join(self.tflops)}."
            )
        return rate * 1e12

    @property
    def compute_capability(self) -> tuple[int, int] | None:
        """CUDA compute capability (major, minor); None without CUDA."""
        if self.capability is None:
            return None
        major, _, minor = self.capability.partition(".")
        return int(major), int(minor)

    @property
    def host_link(self) -> float:
        """Bytes/s from host memory, in one direction; unified memory needs no link."""
        if self.unified or self.pcie is None:
            return self.bandwidth
        return PCIE_LANE[self.pcie] * self.pcie_lanes

    @property
    def peer_link(self) -> float:
        """Bytes/s to the other GPUs of a machine in one direction, without the losses of collectives."""
        return self.nvlink_gb_s * 1e9 / 2 if self.nvlink_gb_s else self.host_link

    def is_checked(self, figure: str) -> bool:
        """Whether a field, or a dtype of `tflops`, was verified with its source."""
        return bool(self.checked) and not {"all", figure} & set(self.unchecked)


@dataclass(frozen=True)
class Flavor:
    """A machine type that can be rented from a cloud."""

    cloud: str
    name: str
    gpu: str
    gpus: int
    usd_per_hour: float
    cores: int
    ram_gb: float
    disk_gb: float | None = None
    billed_by_s: int = 1
    as_of: str = ""
    source: str = ""


@dataclass(frozen=True)
class Purchase:
    """Price to buy one GPU, or a whole machine that includes it."""

    usd: float
    whole_machine: bool = False
    as_of: str = ""
    source: str = ""


@dataclass(frozen=True)
class Prices:
    """All other values for computing costs, in US dollars."""

    kwh: float
    workstation: float
    resale: float
    years: float
    as_of: str = ""
    source: str = ""


@dataclass(frozen=True)
class Hardware:
    """All GPUs and prices in the data."""

    gpus: dict[str, GPU]
    flavors: tuple[Flavor, ...]
    purchases: dict[str, Purchase]
    prices: Prices

    def find(self, name: str) -> GPU:
        """The GPU with this name, alias or driver name."""
        matches = _named(name, self.gpus.values())
        if len(matches) == 1:
            return matches[0]
        if matches:
            names = " or ".join(gpu.name for gpu in matches)
            raise ConfigError(f"GPU {name!r} is ambiguous: it may be {names}. Use one of these names.")
        folded = {_folded(each): gpu.name for gpu in self.gpus.values() for each in (gpu.name, *gpu.aliases)}
        close = difflib.get_close_matches(_folded(name), folded, n=4, cutoff=0.5)
        near = dict.fromkeys(folded[each] for each in close)
        hint = f"Did you mean {' or '.join(near)}?" if near else f"Available: {', '.join(self.gpus)}."
        raise ConfigError(
            f"Unknown GPU {name!r}. {hint} Describe your own GPU in a file: --gpus-file or ${GPUS_FILE}."
        )

    def recognise(self, device_name: str, memory: int | None = None) -> GPU | None:
        """The GPU with the name from `torch.cuda.get_device_name()`; `memory` in bytes distinguishes variants.

        If the memory differs from that of the data sheet, the result is that GPU with this memory.
        """
        matches = _named(device_name, self.gpus.values())
        if not matches:
            return None
        if memory is None:
            return matches[0] if len(matches) == 1 else None
        gpu = min(matches, key=lambda gpu: abs(gpu.memory - memory))
        if abs(gpu.memory - memory) <= SAME_MEMORY * memory:
            return gpu
        return replace(gpu, memory_gib=memory / 2**30)

    def offers(self, gpu: GPU, gpus: int = 1) -> list[Flavor]:
        """Machines with this number of GPUs, the cheapest first."""
        fitting = [f for f in self.flavors if f.gpu == gpu.name and f.gpus == gpus]
        return sorted(fitting, key=lambda flavor: flavor.usd_per_hour)


def load_hardware(file: Path | str | None = None) -> Hardware:
    """The built-in data, extended and overridden by $FLEXOR_GPUS and then by `file`."""
    data = tomllib.loads(resources.files("flexor.plan.site").joinpath("gpus.toml").read_text())
    for path in (os.environ.get(GPUS_FILE), file):
        if path:
            _correct(data, _read(Path(path).expanduser()), str(path))
    return _build(data)


def gpu_here(hardware: Hardware) -> GPU | None:
    """The GPU of this machine that torch would train on; None if there is none."""
    if torch.cuda.is_available():
        device = torch.cuda.get_device_properties(torch.cuda.current_device())
        name, memory = device.name, device.total_memory
        lines = f'sms = {device.multi_processor_count}\ncapability = "{device.major}.{device.minor}"\n'
    elif torch.backends.mps.is_available() and sys.platform == "darwin":
        command = ["sysctl", "-n", "machdep.cpu.brand_string"]
        name = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        memory, lines = torch.mps.recommended_max_memory(), 'maker = "apple"\nunified = true\n'
    else:
        return None
    gpu = hardware.recognise(name, memory)
    if gpu is None:
        raise ConfigError(
            f"This machine's GPU {name!r} is unknown. Write its data sheet values to a file, and pass it with "
            f'--gpus-file or ${GPUS_FILE}:\n\n[gpus."{name}"]\nmemory_gib = {memory / 2**30:.2f}\n{lines}'
            "bandwidth_gb_s = ...\ntflops = { fp32 = ..., bf16 = ... }\ntdp_w = ..."
        )
    return gpu


# Names.


def _folded(name: str) -> str:
    """A normalized name: without case, spaces and the maker, which differ between drivers and shops."""
    words = re.split(r"[^a-z0-9]+", name.casefold())
    return "".join(word for word in words if word not in MAKERS)


def _named(name: str, gpus: Iterable[GPU]) -> list[GPU]:
    """The GPU with this name; otherwise all GPUs with this alias."""
    folded, gpus = _folded(name), list(gpus)
    exact = [gpu for gpu in gpus if _folded(gpu.name) == folded]
    return exact or [gpu for gpu in gpus if folded in map(_folded, gpu.aliases)]


# Files.


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"Can't read the GPU file {path}: {error.strerror}.") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error


def _correct(data: dict[str, Any], tables: Mapping[str, Any], file: str) -> None:
    """Merge a user's tables over the built-in ones. A GPU may have any of its names there."""
    unknown = tables.keys() - data.keys()
    if unknown:
        raise ConfigError(f"{file}: unknown table {min(unknown)!r}. {closest(min(unknown), data)}")
    gpus = [GPU(name, 0, 0, {}, 0, aliases=tuple(v.get("aliases", ()))) for name, v in data["gpus"].items()]
    corrected = {}
    for name, figures in _table(tables.get("gpus", {}), f"{file}: gpus").items():
        figures = dict(_table(figures, f"{file}: gpus.{name}"))
        matches = _named(name, gpus)
        if len(matches) == 1:
            name = matches[0].name
            source = f"{data['gpus'][name].get('source', '')}; {', '.join(figures)}: {file}"
            figures.setdefault("source", source)
        corrected[name] = {"source": file, **figures}
    _merge(data, {**tables, "gpus": corrected})


def _merge(below: dict[str, Any], above: Mapping[str, Any]) -> None:
    for key, value in above.items():
        if isinstance(value, Mapping) and isinstance(below.get(key), dict):
            _merge(below[key], value)
        else:
            below[key] = value


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where}={value!r} must be a table.")
    return value


def _build(data: Mapping[str, Any]) -> Hardware:
    gpus = {name: _gpu(name, figures) for name, figures in data["gpus"].items()}
    prices = dict(data["prices"])
    purchases = {
        name: _parse(Purchase, price, f"prices.buy.{name}") for name, price in prices.pop("buy", {}).items()
    }
    flavors = []
    for cloud, table in data["clouds"].items():
        common = dict(_table(table, f"clouds.{cloud}"))
        for name, machine in common.pop("flavors", {}).items():
            where = f"clouds.{cloud}.flavors.{name}"
            flavors.append(_parse(Flavor, {**common, **machine, "cloud": cloud, "name": name}, where))
    hardware = Hardware(gpus, tuple(flavors), purchases, _parse(Prices, prices, "prices"))
    for name in (*purchases, *(flavor.gpu for flavor in flavors)):
        if name not in gpus:
            raise ConfigError(f"There is a price for the unknown GPU {name!r}. {closest(name, gpus)}")
    return hardware


def _gpu(name: str, figures: Mapping[str, Any]) -> GPU:
    gpu = _parse(GPU, {**figures, "name": name}, f"gpus.{name}")
    strange = [dtype for dtype in gpu.tflops if dtype not in DTYPES]
    if strange:
        raise ConfigError(f"gpus.{name}.tflops.{strange[0]} is unknown. The types are: {', '.join(DTYPES)}.")
    if not gpu.tflops.get("fp32"):
        raise ConfigError(f"gpus.{name}.tflops requires a value for fp32.")
    numbers = {"memory_gib": gpu.memory_gib, "bandwidth_gb_s": gpu.bandwidth_gb_s, "tdp_w": gpu.tdp_w}
    for key, value in {**numbers, **{f"tflops.{k}": v for k, v in gpu.tflops.items()}}.items():
        if value <= 0:
            raise ConfigError(f"gpus.{name}.{key}={value:g} must be greater than 0.")
    if gpu.pcie is not None and gpu.pcie not in PCIE_LANE:
        raise ConfigError(
            f"gpus.{name}.pcie={gpu.pcie} must be a PCIe generation: {', '.join(map(str, PCIE_LANE))}."
        )
    if gpu.capability is not None and not re.fullmatch(r"\d+\.\d", gpu.capability):
        raise ConfigError(f'gpus.{name}.capability={gpu.capability!r} must be like "8.9".')
    return gpu


def _parse(cls: type, data: Mapping[str, Any], where: str) -> Any:
    needed = [f.name for f in fields(cls) if f.default is NO_DEFAULT and f.default_factory is NO_DEFAULT]
    missing = [name for name in needed if name not in data]
    if missing:
        raise ConfigError(f"{where} requires {', '.join(missing)}.")
    return from_plain(cls, dict(data), where)
