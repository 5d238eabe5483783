"""Figures of the GPUs of a run, through NVML and its official bindings (nvidia-ml-py).

Without the package, the driver or a GPU there are no figures and no error. A figure that a GPU does not have (PCIe
traffic of some, most of a MIG slice) is left out. NVML does not wait for work on the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any

# Bits of NVML's reasons why clocks are below their maximum. Being idle and chosen clocks are no throttling.
THROTTLING = {
    0x04: "power_cap",
    0x08: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "temperature",
    0x40: "hardware_temperature",
    0x80: "power_brake",
}


def throttling(mask: int) -> list[str]:
    """The reasons by name."""
    return [name for bit, name in THROTTLING.items() if mask & bit]


def shared_memory(
    entries: Sequence[tuple[int, int | None]], run_pids: Collection[int]
) -> tuple[int, int] | None:
    """Bytes that the run's own processes use on a GPU, and those of others; None if unknown.

    `entries`: process ids and bytes, as NVML has them. In a container these are ids of the host: then the processes
    count as the run's if there are no more of them than it has.
    """
    sizes = [(pid, size) for pid, size in entries if size is not None]
    if not sizes or len(sizes) < len(entries):
        return None
    if not any(pid in run_pids for pid, _ in sizes):
        return (sum(size for _, size in sizes), 0) if len(sizes) <= len(run_pids) else None
    run_bytes = sum(size for pid, size in sizes if pid in run_pids)
    return run_bytes, sum(size for _, size in sizes) - run_bytes


def open_gpus(uuids: dict[str, Collection[int]]) -> list[Gpu]:
    """The GPUs with these ids, each with the run's processes that use it. Call from the thread that samples."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, a driver that is being replaced
        return []
    gpus = []
    for index, (uuid, pids) in enumerate(uuids.items()):
        for prefix in ("GPU-", "MIG-"):
            with suppress(pynvml.NVMLError):
                handle = pynvml.nvmlDeviceGetHandleByUUID(f"{prefix}{uuid}".encode())
                gpus.append(Gpu(pynvml, handle, index, pids))
                break
    return gpus


class Gpu:
    def __init__(self, nvml: Any, handle: Any, index: int, pids: Collection[int]):
        self.nvml, self.handle, self.index, self.pids = nvml, handle, index, pids
        self.unsupported: set[str] = set()
        name = self._ask(nvml.nvmlDeviceGetName)
        self.name = name.decode() if isinstance(name, bytes) else name
        self.energy = self._energy()
        self.read_at = time.monotonic()
        self.sampled_at = 0  # in the driver's microseconds

    def read(self) -> dict[str, Any]:
        """The figures of a line of `system.jsonl`. Energy is that since the last reading."""
        nvml, figures = self.nvml, {"index": self.index, "name": self.name}
        use = self._ask(nvml.nvmlDeviceGetUtilizationRates)
        if use is not None:
            figures |= {"util": use.gpu / 100, "memory_util": use.memory / 100}
        for name, kind in (("sm_mhz", nvml.NVML_CLOCK_SM), ("memory_mhz", nvml.NVML_CLOCK_MEM)):
            figures[name] = self._ask(nvml.nvmlDeviceGetClockInfo, kind)
        figures["sm_max_mhz"] = self._ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM)
        figures["temperature_c"] = self._ask(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
        figures["power_limit_w"] = _scaled(self._ask(nvml.nvmlDeviceGetEnforcedPowerLimit), 1e-3)
        default = getattr(nvml, "nvmlDeviceGetPowerManagementDefaultLimit", None)
        figures["power_default_w"] = _scaled(self._ask(default) if default else None, 1e-3)
        figures["power_w"] = _scaled(self._ask(nvml.nvmlDeviceGetPowerUsage), 1e-3)
        figures |= self._consumed() | self._pcie() | self._memory() | self._other_processes()
        # the older name works with every driver and every version of the bindings
        mask = self._ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons)
        if mask is not None:
            figures["throttled"] = throttling(mask)
        return {name: value for name, value in figures.items() if value is not None}

    def _energy(self) -> float | None:
        return _scaled(self._ask(self.nvml.nvmlDeviceGetTotalEnergyConsumption), 1e-3)

    def _consumed(self) -> dict[str, Any]:
        """Energy since the last reading, and from it the mean power."""
        now, energy = time.monotonic(), self._energy()
        before, since = self.energy, max(now - self.read_at, 1e-6)
        self.energy, self.read_at = energy, now
        if energy is None or before is None or energy < before:  # the driver was reloaded
            return {}
        spent = energy - before
        return {"energy_j": round(spent, 1)} | ({"power_w": round(spent / since, 1)} if since > 0.5 else {})

    def _pcie(self) -> dict[str, Any]:
        """Megabytes per second to and from the GPU; NVML watches the bus for some milliseconds."""
        nvml = self.nvml
        to = self._ask(nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_RX_BYTES)
        back = self._ask(nvml.nvmlDeviceGetPcieThroughput, nvml.NVML_PCIE_UTIL_TX_BYTES)
        return {"pcie_in_mb_s": _scaled(to, 1e-3), "pcie_out_mb_s": _scaled(back, 1e-3)}

    def _memory(self) -> dict[str, Any]:
        memory = self._ask(self.nvml.nvmlDeviceGetMemoryInfo)
        if memory is None:
            return {}
        figures = {"vram_total_gb": _scaled(memory.total, 1e-9), "vram_used_gb": _scaled(memory.used, 1e-9)}
        listed = self._ask(self.nvml.nvmlDeviceGetComputeRunningProcesses) or []
        usage = shared_memory([(entry.pid, entry.usedGpuMemory) for entry in listed], self.pids)
        if usage is not None:
            figures |= {"vram_own_gb": _scaled(usage[0], 1e-9), "vram_others_gb": _scaled(usage[1], 1e-9)}
        return figures

    def _other_processes(self) -> dict[str, Any]:
        """The share of the time in which other processes computed; empty if unknown."""
        listed = self._ask(self._process_use)
        if not listed:
            return {}
        self.sampled_at = max(entry.timeStamp for entry in listed)
        usage = shared_memory([(entry.pid, entry.smUtil) for entry in listed], self.pids)
        return {} if usage is None else {"util_others": min(usage[1] / 100, 1.0)}

    def _process_use(self, handle: Any) -> Any:
        function = getattr(self.nvml, "nvmlDeviceGetProcessUtilization", None)
        return function(handle, self.sampled_at) if function else None

    def _ask(self, function: Callable[..., Any], *more: Any) -> Any:
        """NVML's answer; None if this GPU has none. An unsupported query is made only once."""
        name = f"{getattr(function, '__name__', function)}{more}"
        if name in self.unsupported:
            return None
        try:
            return function(self.handle, *more)
        except self.nvml.NVMLError as error:
            if isinstance(error, getattr(self.nvml, "NVMLError_NotSupported", ())):
                self.unsupported.add(name)
            return None


def _scaled(value: float | None, scale: float) -> float | None:
    return None if value is None else round(value * scale, 3)
