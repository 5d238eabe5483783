"""Computes the results from the ranks' measurements: rates, latencies, shares, and what limits the speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexor.bench.limits import Limits

LEVELS = ("pool_bytes", "pool_peak_bytes", "cache_bytes")
"""Counters of an amount, not of events."""
KEEPING_TIERS = ("ram", "disk", "gpu")
BUSY = 0.6  # share of its time from which on a resource is the bottleneck


@dataclass
class EpochMeasurement:
    """One rank's measurements of an epoch. All processes of a machine share the clock."""

    started: float
    ended: float = 0.0
    first_batch_at: float = 0.0
    samples: int = 0
    frames: int = 0
    bytes: int = 0
    cpu_s: float = 0.0  # of the process that trains, and of its decode processes
    latencies: list[tuple[float, int]] = field(default_factory=list)
    """Seconds that the loop waited for each step, and the step's number of samples."""
    counters: dict[str, float] = field(default_factory=dict)


def make_report(
    about: dict[str, Any], first_batch_s: float, ranks: Sequence[Sequence[EpochMeasurement]], limits: Limits
) -> dict[str, Any]:
    """`about` the run, its total results, and those of every epoch. `ranks` has one stretch per epoch."""
    stretches = list(zip(*ranks))
    required = frames_to_decode(about, stretches)
    epochs = [figures([epoch], about, limits, count) for epoch, count in zip(stretches, required)]
    overall = figures(stretches, about, limits, sum(required))
    return {
        **about,
        "first_batch_latency_s": first_batch_s,
        **overall,
        "decode_limit_frames_per_s": limits.decode,
        "memory_limit_frames_per_s": limits.memory,
        "epochs": [{"epoch": number, **epoch} for number, epoch in enumerate(epochs, 1)],
    }


def frames_to_decode(about: dict[str, Any], epochs: Sequence[Sequence[EpochMeasurement]]) -> list[float]:
    """How many frames each epoch had to decode. Frames decoded ahead, twice or unnecessarily do not count.

    Windows overlap: an epoch delivers each frame `reuse` times. Frames cached by an earlier epoch do not count.
    """
    keeps, cached, required = about["tier"] in KEEPING_TIERS, 0.0, []
    for epoch in epochs:
        frames, samples = sum(s.frames for s in epoch), sum(s.samples for s in epoch)
        reuse = max(1.0, frames / samples * about["samples_per_epoch"] / about["dataset_frames"])
        uncached = about["dataset_frames"] - cached if keeps else frames / reuse
        decoded = sum(s.counters.get("decoded", 0) for s in epoch)
        required.append(max(0.0, min(decoded, frames / reuse, uncached)))
        cached += decoded
    return required


def figures(
    epochs: Sequence[Sequence[EpochMeasurement]], about: dict[str, Any], limits: Limits, needed: float
) -> dict[str, Any]:
    """Results of one or several epochs, from the stretches of all ranks in each. `needed`: frames to decode."""
    stretches = [stretch for epoch in epochs for stretch in epoch]
    seconds = max(s.ended for s in stretches) - min(s.started for s in stretches)
    frames = sum(s.frames for s in stretches)
    samples = sum(s.samples for s in stretches)
    counters = {name: sum(s.counters[name] for s in stretches) for name in stretches[0].counters}
    for name in LEVELS:
        counters[name] = max(sum(s.counters.get(name, 0) for s in epoch) for epoch in epochs)
    rate = frames / seconds
    limit = limits.frames_per_s(frames, needed)
    cpu_s = sum(s.cpu_s for s in stretches)
    shares = busy_shares(counters, about, seconds, cpu_s, rate / limits.memory)
    latency = np.array([1e3 * seconds / samples for s in stretches for seconds, samples in s.latencies])
    return {
        "frames_per_s_node": rate,
        "samples_per_s": samples / seconds,
        "limit_frames_per_s": limit,
        "of_limit": rate / limit if frames else None,
        "shares": shares,
        "bound": bound(shares, rate / limit, limit == limits.memory, about["remote"]),
        "wallclock_s": seconds,
        "frames": frames,
        "samples": samples,
        **{f"p{p}_sample_latency_ms": float(np.percentile(latency, p)) for p in (50, 95, 99)},
        "hit_rate": _ratio(counters.get("hits", 0), counters.get("hits", 0) + counters.get("misses", 0)),
        "frames_decoded_per_frame_delivered": _ratio(counters.get("decoded", 0), frames),
        "bytes_delivered": sum(s.bytes for s in stretches),
        "cpu_s_per_frame": _ratio(cpu_s, frames),
        "cpu_s": cpu_s,
        **dict.fromkeys(("evictions", "bytes_read")),  # no value if the loader does not count them
        **counters,
    }


def busy_shares(
    counters: Mapping[str, float], about: Mapping[str, Any], seconds: float, cpu_s: float, of_memory: float
) -> dict[str, float]:
    """How busy each resource is, from 0 to 1: the workers with each kind of work, the interpreter of a rank, memory.

    The interpreter runs what is not decoding or conversion; and threads that decode wait for it."""
    workers, wall = about["threads"] * seconds, about["ranks"] * seconds
    decoding, converting = counters.get("decode_s", 0.0), counters.get("convert_s", 0.0)
    waiting = 0.0 if about["decode_in"] == "processes" else counters.get("decode_wait_s", 0.0) / workers
    return {
        "decoding": decoding / workers,
        "conversion": converting / workers,
        "reading": counters.get("read_s", 0.0) / workers,
        "interpreter": max(0.0, (cpu_s - decoding - converting) / wall, waiting),
        "memory": of_memory,
    }


def bound(shares: Mapping[str, float], of_limit: float, memory_limited: bool, remote: bool) -> str:
    """What limits the speed, in a sentence."""
    names = {"reading": "the network" if remote else "the disk", "interpreter": "Python's interpreter"}
    names |= {"conversion": "gathering and conversion", "memory": "copying memory"}
    by_share = sorted(shares, key=lambda name: -shares[name])
    parts = ", ".join(f"{names.get(name, name)} {shares[name]:.0%}" for name in by_share)
    largest = by_share[0]
    idle = shares[largest] < BUSY
    if remote and idle:
        why = f"the network: videos are read remotely, and the workers wait ({parts} busy)"
    elif idle:
        why = f"nothing that is measured ({parts} busy)"
    else:
        why = f"{names.get(largest, largest)} ({parts} busy)"
    operation = "copying memory" if memory_limited else "decoding"
    return f"{why}; {of_limit:.0%} of what {operation} alone allows" if of_limit else why


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None
