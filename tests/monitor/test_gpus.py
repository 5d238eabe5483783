"""What NVML says becomes figures; what it does not say is left out, and nothing of it is an error."""

import sys
from types import SimpleNamespace

import pytest
import torch

from flexor.monitor import gpus
from flexor.monitor.gpus import Gpu, open_gpus, shared_memory, throttling


class FakeNvml:
    """An H200 with another program on it, that does not know its PCIe traffic."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PCIE_UTIL_TX_BYTES, NVML_PCIE_UTIL_RX_BYTES = 0, 1

    class NVMLError(Exception):
        pass

    class NVMLError_NotSupported(NVMLError):
        pass

    def __init__(self):
        self.energy, self.asked_pcie, self.broken = 1_000_000, 0, False

    def nvmlDeviceGetName(self, handle):
        return "NVIDIA H200"

    def nvmlDeviceGetUtilizationRates(self, handle):
        if self.broken:
            raise self.NVMLError("GPU is lost")
        return SimpleNamespace(gpu=97, memory=40)

    def nvmlDeviceGetClockInfo(self, handle, kind):
        return {1: 1755, 2: 3201}[kind]

    def nvmlDeviceGetMaxClockInfo(self, handle, kind):
        return 1980

    def nvmlDeviceGetTemperature(self, handle, kind):
        return 63

    def nvmlDeviceGetPowerUsage(self, handle):
        return 600_000

    def nvmlDeviceGetEnforcedPowerLimit(self, handle):
        return 700_000

    def nvmlDeviceGetPowerManagementDefaultLimit(self, handle):
        return 700_000

    def nvmlDeviceGetProcessUtilization(self, handle, since):
        entries = [(11, 60), (99, 30)]
        return [SimpleNamespace(pid=pid, smUtil=share, timeStamp=since + 1) for pid, share in entries]

    def nvmlDeviceGetTotalEnergyConsumption(self, handle):
        self.energy += 3_000_000
        return self.energy

    def nvmlDeviceGetPcieThroughput(self, handle, counter):
        self.asked_pcie += 1
        raise self.NVMLError_NotSupported

    def nvmlDeviceGetMemoryInfo(self, handle):
        return SimpleNamespace(total=150_000_000_000, used=50_000_000_000, free=0)

    def nvmlDeviceGetComputeRunningProcesses(self, handle):
        entries = [(11, 40_000_000_000), (99, 9_000_000_000)]
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in entries]

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle):
        return 0x24 | 0x1


def test_figures_of_a_gpu():
    nvml = FakeNvml()
    gpu = Gpu(nvml, object(), 0, {11, 12})
    assert gpu.read() == {
        "index": 0,
        "name": "NVIDIA H200",
        "util": 0.97,
        "memory_util": 0.4,
        "sm_mhz": 1755,
        "sm_max_mhz": 1980,
        "memory_mhz": 3201,
        "temperature_c": 63,
        "power_w": 600.0,
        "power_limit_w": 700.0,
        "power_default_w": 700.0,
        "util_others": 0.3,
        "energy_j": 3000.0,
        "vram_total_gb": 150.0,
        "vram_used_gb": 50.0,
        "vram_own_gb": 40.0,
        "vram_others_gb": 9.0,
        "throttled": ["power_cap", "temperature"],
    }
    gpu.read_at -= 10  # as if ten seconds had passed: the mean power is of more worth than one look
    assert gpu.read()["power_w"] == pytest.approx(300, abs=1)
    assert nvml.asked_pcie == 2, "what is not supported is asked once in each direction"
    nvml.broken = True
    assert "util" not in gpu.read()


def test_reasons():
    assert throttling(0) == throttling(0x1) == throttling(0x2) == []
    assert throttling(0xFF) == list(gpus.THROTTLING.values())


def test_memory_of_others():
    assert shared_memory([(1, 10), (2, 5), (3, 7)], {1, 2}) == (15, 7)
    assert shared_memory([(1, 10)], {1}) == (10, 0)
    # in a container NVML has other ids: one process is the run's, of two it is not known which
    assert shared_memory([(70001, 10)], {1}) == (10, 0)
    assert shared_memory([(70001, 10), (70002, 10)], {1}) is None
    assert shared_memory([(1, None)], {1}) is None  # not permitted
    assert shared_memory([], {1}) is None


def test_no_package_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert open_gpus({"00000000-0000": [1]}) == []


def test_every_name_is_in_the_real_package():
    real = pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    names = [name for name in dir(FakeNvml) if name.lower().startswith("nvml")]
    assert [name for name in names if not hasattr(real, name)] == []
    assert all(getattr(real, name) == getattr(FakeNvml, name) for name in names if name.startswith("NVML_"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_no_driver_no_error():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    assert open_gpus({"00000000-0000": [1]}) == []


@pytest.mark.gpu
def test_a_real_gpu():
    pytest.importorskip("pynvml", reason="nvidia-ml-py is not installed")
    tensor = torch.ones(1 << 28, device="cuda")
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    (gpu,) = open_gpus({uuid: [1]})
    figures = gpu.read()
    assert 0 <= figures["util"] <= 1 and figures["sm_mhz"] > 0
    assert figures["vram_used_gb"] > tensor.nbytes / 1e9
