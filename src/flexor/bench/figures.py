"""Computes the results from the ranks' measurements: rates, latencies, shares, and what limits the speed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from flexor.bench.limits import Limits

LEVELS = ("pool_bytes", "pool_peak_bytes", "cache_bytes")
"""Counters of an amount, not of events."""
KEEPING_TIERS = ("ram", "disk", "gpu")
IDLE = 0.4  # idle share of the threads' time from which on the threads are not the bottleneck


@dataclass
class EpochMeasurement:
    """One rank's measurements of an epoch. All processes of a machine share the clock."""

    started: float
    ended: float = 0.0
    first_batch_at: float = 0.0
    samples: int = 0
    frames: int = 0
    bytes: int = 0
    cpu_s: float = 0.0
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
    latency = np.array([1e3 * seconds / samples for s in stretches for seconds, samples in s.latencies])
    return {
        "frames_per_s_node": rate,
        "samples_per_s": samples / seconds,
        "limit_frames_per_s": limit,
        "of_limit": rate / limit if frames else None,
        "bound": bound(counters, limits, limit, rate, about["threads"] * seconds, about["remote"]),
        "wallclock_s": seconds,
        "frames": frames,
        "samples": samples,
        **{f"p{p}_sample_latency_ms": float(np.percentile(latency, p)) for p in (50, 95, 99)},
        "hit_rate": _ratio(counters.get("hits", 0), counters.get("hits", 0) + counters.get("misses", 0)),
        "frames_decoded_per_frame_delivered": _ratio(counters.get("decoded", 0), frames),
        "bytes_delivered": sum(s.bytes for s in stretches),
        "cpu_s_per_frame": _ratio(sum(s.cpu_s for s in stretches), frames),
        "cpu_s": sum(s.cpu_s for s in stretches),
        **dict.fromkeys(("evictions", "bytes_read")),  # no value if the loader does not count them
        **counters,
    }


def bound(
    counters: dict[str, float], limits: Limits, limit: float, rate: float, thread_s: float, remote: bool
) -> str:
    """What limits the speed, in a sentence."""
    decoding, converting = (counters.get(name, 0) / thread_s for name in ("decode_s", "convert_s"))
    idle = 1 - decoding - converting
    if remote and idle > IDLE:
        why = f"the network: videos are read remotely, and the threads waited {idle:.0%} of the time"
    elif idle > IDLE:
        why = f"neither decoding nor conversion: the threads were idle {idle:.0%} of the time"
    elif decoding >= converting:
        why = f"decoding: it takes {decoding:.0%} of the threads' time, gathering and conversion {converting:.0%}"
    else:
        why = f"gathering and conversion: they take {converting:.0%} of the threads' time, decoding {decoding:.0%}"
    operation = "copying memory" if limit == limits.memory else "decoding"
    return f"{why}; {rate / limit:.0%} of what {operation} alone allows" if rate else why


def _ratio(part: float, total: float) -> float | None:
    return part / total if total else None
