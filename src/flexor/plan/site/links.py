"""How the GPUs of a run are connected, and how long they take to exchange tensors.

Bandwidths are from data sheets. The share of them that an all-reduce of tens of megabytes reaches, and its latency, are
from results of NVIDIA's nccl-tests that others published, which the
constants name. None was measured for Flexor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from flexor.core.errors import ConfigError
from flexor.plan.site.hardware import GPU

GBIT = 1e9 / 8  # bytes

# Share of the data sheet's bandwidth, and seconds of an all-reduce in addition to its bytes.
#   NVLink      365 to 370 of 450 GB/s among 2 to 8 H100 (NVIDIA/nccl#1455, NVIDIA/nccl-tests#212)
#   PCIe        24.7 of 31.5 GB/s among RTX 4090 with a driver that copies between them directly
#               (tinygrad/open-gpu-kernel-modules#17). NVIDIA's own driver for these cards copies through the host's
#               memory: assumed is half of that
#   InfiniBand  24 of 25 GB/s of a card with 200 Gbit/s (NVIDIA/nccl-tests#119); small all-reduces of 16 GPUs on two
#               nodes take 46 us (NVIDIA/nccl#1244)
#   Ethernet    over TCP at most 60 % of 32 Gbit/s (NVIDIA/nccl#209), 5.2 of 12.5 GB/s (NVIDIA/nccl#450)
# The latencies of all but InfiniBand are assumed.
NVLINK, PCIE = ("NVLink", 0.81, 30e-6), ("PCIe", 0.4, 40e-6)
INFINIBAND, ETHERNET = ("InfiniBand", 0.9, 50e-6), ("Ethernet", 0.5, 100e-6)

INFINIBAND_GBIT = 400  # per GPU
ETHERNET_GBIT = 100  # per node

# gloo copies gradients through the host's memory and sums them there: bytes/s of a process, and seconds. Assumed.
GLOO_BYTES, GLOO_LATENCY = 2e9, 500e-6


@dataclass(frozen=True)
class Interconnect:
    """A connection between GPUs or nodes."""

    name: str
    share: float
    """Of its bandwidth, which an all-reduce reaches."""
    latency: float
    """Seconds."""
    bandwidth: float
    """Bytes/s in one direction, from the data sheet."""

    @property
    def reached(self) -> float:
        """Bytes/s."""
        return self.share * self.bandwidth

    def __str__(self) -> str:
        return f"{self.name} ({self.bandwidth / 1e9:g} GB/s)"


@dataclass(frozen=True)
class Links:
    """The connections between all GPUs of a run."""

    gpus: int
    """Per node."""
    nodes: int
    inside: Interconnect
    """Of each GPU to the others of its node."""
    between: Interconnect
    """Of each node to the others. All of its GPUs share it."""

    @property
    def world_size(self) -> int:
        return self.gpus * self.nodes

    def all_reduce(self, nbytes: float) -> float:
        """Seconds until every GPU has the sum of `nbytes` of each.

        With several nodes, GPUs first sum within their node, each its part; parts are summed between nodes; then GPUs
        collect all parts from their node. NCCL does these in small pieces at the same time, so the slowest counts.
        """
        return self._slowest(2 * nbytes)

    def gather(self, nbytes: float) -> float:
        """Seconds until every GPU has `nbytes`, of which each had a part; or the same backwards, with sums."""
        return self._slowest(nbytes)

    def _slowest(self, moved: float) -> float:
        parts = ((self.gpus, self.inside), (self.nodes, self.between))
        used = [(count, link) for count, link in parts if count > 1]
        latency = sum(link.latency for _, link in used)
        return latency + max(((n - 1) / n * moved / link.reached for n, link in used), default=0.0)

    def within_nodes(self) -> Links:
        return replace(self, nodes=1)

    def between_nodes(self) -> Links:
        return replace(self, gpus=1)

    def over_gloo(self) -> Links:
        """The same GPUs, if they exchange through the host's memory."""
        return replace(self, inside=_over_gloo(self.inside), between=_over_gloo(self.between))

    def __str__(self) -> str:
        parts = ((self.gpus, f"{self.inside} in a node"), (self.nodes, f"{self.between} between nodes"))
        return ", ".join(text for count, text in parts if count > 1)


def _over_gloo(link: Interconnect) -> Interconnect:
    return Interconnect(f"gloo over {link.name}", 1.0, GLOO_LATENCY, min(GLOO_BYTES, link.reached))


def links_of(
    gpu: GPU, gpus: int, nodes: int = 1, interconnect: str | None = None, network: str | None = None
) -> Links:
    """`interconnect`: nvlink, pcie, or GB/s in one direction, for the GPUs of a node; by default the fastest it has.
    `network`: ethernet, infiniband, or either with :Gbit/s per node; a number alone is of Ethernet."""
    return Links(gpus, nodes, _inside(gpu, interconnect), _between(gpus, network))


def _inside(gpu: GPU, name: str | None) -> Interconnect:
    nvlink = Interconnect(*NVLINK, gpu.nvlink_gb_s * 1e9 / 2) if gpu.nvlink_gb_s else None
    pcie = Interconnect(*PCIE, gpu.host_link)
    if name is None:
        return nvlink or pcie
    if name.lower() == "pcie":
        return pcie
    if name.lower() == "nvlink":
        if nvlink is None:
            raise ConfigError(f"--interconnect=nvlink: the {gpu.name} has no NVLink: use pcie, or GB/s.")
        return nvlink
    return replace(nvlink or pcie, bandwidth=_positive("interconnect", name, name, "nvlink, pcie") * 1e9)


def _between(gpus: int, name: str | None) -> Interconnect:
    kind, _, number = (name or "ethernet").lower().partition(":")
    choices = "ethernet, infiniband"
    if kind == "infiniband":
        gbit = _positive("network", name, number, choices) if number else INFINIBAND_GBIT * gpus
        return Interconnect(*INFINIBAND, gbit * GBIT)
    if kind != "ethernet":
        kind, number = "ethernet", kind
    gbit = _positive("network", name, number, choices) if number else ETHERNET_GBIT
    return Interconnect(*ETHERNET, gbit * GBIT)


def _positive(flag: str, value: str | None, number: str, choices: str) -> float:
    try:
        parsed = float(number)
    except ValueError:
        parsed = 0.0
    if not 0 < parsed < float("inf"):
        units = "GB/s" if flag == "interconnect" else "Gbit/s"
        raise ConfigError(f"--{flag}={value} must be one of {choices}, or {units} greater than 0.")
    return parsed
