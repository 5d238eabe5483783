"""Why a run waits for data: its loader's threads read, decode, copy, or wait for room; and what would help."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.cores import cores_of
from flexor.runs.diagnosis.figures import Figures, mapping, number
from flexor.runs.diagnosis.verdict import faster, percent

NOTICED = 0.1  # share of the time: less waiting is not looked at
MAX_THREADS = 64
READING, DECODING, COPYING, PROCESSING = "reading", "decoding", "copying", "processing"
ROOM = "waiting for room"
PYTHON_BUSY = (
    0.6  # share of the time of the thread that plans, in which Python does not keep up with the workers
)
ON_A_CORE = (
    0.7  # share of the time of threads that decode; below, they wait for Python if there are free cores
)


@dataclass(frozen=True)
class LoaderTime:
    """Shares of the time of the loader's threads."""

    reading: float
    decoding: float
    copying: float
    processing: float
    """In the policy's host steps, such as tokenising."""
    room: float
    """Of the time of the one thread that plans: waiting for room for decoded frames."""

    @property
    def busy(self) -> float:
        return self.reading + self.decoding + self.copying + self.processing

    @property
    def largest(self) -> str:
        if self.room > 0.3 and self.busy < 0.5:
            return ROOM
        return max((READING, DECODING, COPYING, PROCESSING), key=lambda part: float(getattr(self, part)))

    @property
    def needs_cores(self) -> float:
        """The part of the work that needs cores."""
        return 1 - self.reading / self.busy if self.busy > 0 else 0.0


def loader_time(f: Figures) -> LoaderTime | None:
    if f.get("loader.read_s") is None or f.get("loader.decode_s") is None:
        return None
    total = max(f.seconds * f.threads, 1e-9)
    reading, copying = f.of("loader.read_s"), f.of("loader.assemble_s")
    decoding = f.of("loader.decode_s")
    if f.last.get("loader.cache") in ("disk", "features disk"):
        # the cache is a mapped file: what assembling takes beyond its time on a core is reading it
        cores = cores_of(f)
        waited = max(0.0, copying - f.of("loader.assemble_cpu_s", copying))
        waited *= 1 - (cores.lost if cores else 0.0)
        reading, copying = reading + waited + f.of("loader.keep_s"), copying - waited
    else:
        copying += f.of("loader.keep_s")
    room = f.of("loader.wait_slots_s") / max(f.seconds * f.processes, 1e-9)
    processing = f.of("loader.host_steps_s")
    return LoaderTime(reading / total, decoding / total, copying / total, processing / total, room)


def data_bound(f: Figures) -> list[Finding]:
    wait = min(f.of("data_wait"), 1.0)
    if wait < NOTICED:
        return []
    loader = loader_time(f)
    if loader is None or loader.busy + loader.room < 0.02:
        kind = _kind_by_system(f)
        evidence = f"it waits for data {percent(wait)} of the time; this run does not report on its loader"
        figures = [("waiting for data", percent(wait))]
        name = f"data-bound ({kind})" if kind else "data-bound"
        return [Finding(name, evidence, cost=wait, figures=figures)]
    source = f.last.get("loader.source")
    work = loader.largest
    reads_from = "network" if source in ("hub", "bucket") and f.of("loader.read_s") > 0 else "disk"
    kinds = {DECODING: "decode", COPYING: "memory copy", PROCESSING: "processing", ROOM: "room for frames"}
    python = python_share(f, loader)
    kind = {READING: reads_from, **kinds}[work] if python is None else "interpreter"
    figures = _figures(f, wait, loader)
    workers = "processes and threads" if f.last.get("loader.decode_in") == "processes" else "threads"
    evidence = (
        f"it waits for data {percent(wait)} of the time; its {f.threads:.0f} loading {workers} spend "
        f"{percent(loader.decoding)} decoding, {percent(loader.reading)} reading, {percent(loader.copying)} copying"
    )
    if work == PROCESSING:
        evidence += f", {percent(loader.processing)} on the policy's host steps, such as tokenising"
    if work == READING:
        evidence += f", and get {f.of('loader.bytes') / f.seconds / 1e6:.3g} MB/s"
    if work == ROOM:
        evidence += f"; {percent(loader.room)} of the time there is no room for more decoded frames"
    fixes = _fixes(f, wait, loader)
    if python is not None:
        evidence += f"; Python's interpreter limits them {percent(python)} of the time"
        fixes = _python_fixes(f, wait, loader)
    fixes = [fix for fix in fixes if fix.speedup is None or fix.speedup > 1]
    return [Finding(f"data-bound ({kind})", evidence, fixes, cost=wait, figures=figures)]


def python_share(f: Figures, loader: LoaderTime) -> float | None:
    """The share of the time in which the loader waits for Python, if that holds it back; else None."""
    if f.last.get("loader.decode_in") == "processes":
        share = f.of("loader.plan_cpu_s") / max(f.seconds * f.processes, 1e-9)
        return min(share, 1.0) if share > PYTHON_BUSY else None
    cores, decoding = cores_of(f), f.of("loader.decode_s")
    if f.last.get("loader.decode_in") is None or loader.largest != DECODING or cores is None or not decoding:
        return None
    on_core = min(f.of("loader.decode_cpu_s") / decoding, 1.0)
    return 1 - on_core if on_core < ON_A_CORE and cores.idle >= 1 and cores.waiting < 1 else None


def _python_fixes(f: Figures, wait: float, loader: LoaderTime) -> list[Fix]:
    fixes = _cached(f, 1 - wait, loader)
    if f.last.get("loader.decode_in") == "threads":
        fixes.append(
            Fix("decodes in processes, which do not wait for each other", "--dataset.decode_in=processes")
        )
    elif not fixes:
        fixes.append(Fix("use more ranks, each of which has an interpreter, or cache the frames", None))
    return fixes


def copy_bound(f: Figures) -> list[Finding]:
    """The GPU waits for batches on their way from the host's memory."""
    share = f.share("copy_s") or 0.0
    if not f.on_gpu or share < NOTICED:
        return []
    fixes = []
    reads_frames = not str(f.last.get("loader.cache")).startswith("features")
    if reads_frames and f.setting("dataset.cache.tier") != "gpu" and _fits_on_gpu(f):
        why = "keeps decoded frames on the GPU"
        fixes.append(Fix(why, "--dataset.cache.tier=gpu", faster(1 - share)))
    evidence = f"copying batches to the GPU takes {percent(share)} of a step"
    figures = [("copying to the GPU", f"{1e3 * f.of('copy_s'):.3g} ms of {1e3 * f.step_s:.3g} ms")]
    return [Finding("data-bound (memory copy)", evidence, fixes, cost=share, figures=figures)]


def _kind_by_system(f: Figures) -> str | None:
    """Without the loader's own figures: what the machine was doing."""
    if f.of("system.pressure_io") > 0.3 or f.of("system.cpu_io_wait") > 0.2:
        return "disk"
    cores = cores_of(f)
    return "decode" if cores and cores.used > 0.8 * cores.usable else None


def _figures(f: Figures, wait: float, time: LoaderTime) -> list[tuple[str, str]]:
    threads = f.of("loader.threads")
    rows = [
        ("waiting for data", percent(wait)),
        ("loading threads", f"{threads:.0f}" if threads else "none of their own"),
        ("their time: reading", percent(time.reading)),
        ("their time: decoding", percent(time.decoding)),
        ("their time: copying", percent(time.copying)),
        ("their time: processing", percent(time.processing)),
        ("frames decoded", f"{f.of('loader.frames_decoded') / f.seconds:.0f}/s"),
        ("frames from the cache", f"{f.of('loader.frames_cached') / f.seconds:.0f}/s"),
        ("read", f"{f.of('loader.bytes') / f.seconds / 1e6:.3g} MB/s"),
        ("source and cache", f"{f.last.get('loader.source')}, {f.last.get('loader.cache')}"),
    ]
    if f.of("loader.decode_s") > 0 and f.get("loader.decode_cpu_s") is not None:
        on_core = min(f.of("loader.decode_cpu_s") / f.of("loader.decode_s"), 1.0)
        rows.append(("decoding, of it on a core", percent(on_core)))
    return rows


def _fixes(f: Figures, wait: float, loader: LoaderTime) -> list[Fix]:
    """The most helpful first. A step takes at least what it computes: 1 - wait."""
    least = 1 - wait
    work = loader.largest
    fixes: list[Fix] = []
    if work == ROOM:
        pool = number(f.setting("dataset.cache.pool_gb"))
        flag = f"--dataset.cache.pool_gb={2 * pool if pool else 4:g}"
        return [Fix("makes room for more decoded frames", flag, faster(least))]
    fixes += _cached(f, least, loader)
    fixes += _downloaded(f, least, loader)
    fixes += _more_threads(f, least, loader)
    if work == DECODING and f.on_gpu and f.setting("dataset.decoder") == "cpu":
        fixes.append(Fix("decodes on the GPU", "--dataset.decoder=nvdec", faster(least)))
    cores = cores_of(f)
    if work == DECODING and cores and cores.used > 0.85 * cores.usable:
        why = f"give the run more cores: it uses all {cores.usable:.4g} that it may"
        fixes.append(Fix(why, None, faster(least)))
    if not fixes:
        fixes = _otherwise(f, least, work)
    return sorted(fixes, key=lambda fix: -(fix.speedup or 0.0))


def _cached(f: Figures, least: float, time: LoaderTime) -> list[Fix]:
    """Frames that are cached are neither read nor decoded again."""
    cache, tier = f.last.get("loader.cache"), f.setting("dataset.cache.tier")
    after = max(least, (time.copying + time.processing) / time.busy)
    speedup = faster(after)
    decoded = number(mapping(f.record.get("dataset")).get("decoded_gb"))
    free = _free_gb(f)
    in_ram = decoded is None or free is None or decoded < 0.6 * free
    need = "" if decoded is None else f" ({decoded:.2g} GB)"
    if speedup is None:
        return []
    if cache == "none" and tier == "stream":
        place, new_tier = ("in memory", "ram") if in_ram else ("on disk", "disk")
        why = f"caches decoded frames {place}{need}, from the second epoch on"
        return [Fix(why, f"--dataset.cache.tier={new_tier}", speedup)]
    if cache == "none" and f.setting("dataset.cache.format") == "raw":
        smaller = f"makes decoded frames{need} a fifth as large"
        why = f"{smaller}: if they fit in memory or on disk, they are cached"
        return [Fix(why, "--dataset.cache.format=jpeg")]
    if cache == "disk" and time.largest == READING and decoded is not None and in_ram:
        why = f"caches decoded frames in memory{need}"
        return [Fix(why, "--dataset.cache.tier=ram", speedup)]
    epoch = number(f.last.get("epoch"))
    if cache in ("ram", "disk", "gpu") and time.largest != COPYING and epoch is not None and epoch < 1:
        why = "is filled in the first epoch: wait for its end, or fill it with `flexor data cache` before the next run"
        return [Fix(f"the cache ({cache}) {why}", None, speedup)]
    return []


def _downloaded(f: Figures, least: float, time: LoaderTime) -> list[Fix]:
    if f.last.get("loader.source") == "hub" and time.largest == READING:
        why = "downloads the videos before training"
        after = max(least, time.needs_cores)
        return [Fix(why, "--dataset.streaming=false", faster(after))]
    return []


def _more_threads(f: Figures, least: float, time: LoaderTime) -> list[Fix]:
    """Threads that wait for files need no cores; those that decode do."""
    ranks, cores = f.processes, cores_of(f)
    now = f.of("loader.threads") / ranks
    if time.largest == READING:
        more = 2 * max(now, 1.0)
    else:
        idle = (cores.idle if cores else 0.0) / ranks
        more = math.floor(max(now, 1.0 if now else 0.0) + idle + 0.2)
    if time.busy < 0.5 and now:
        return []  # more of them would be as idle
    more = min(max(more, 1.0), MAX_THREADS)
    if more <= now:
        return []
    # without threads of their own, the training thread loads and computes one after the other
    after = max(least, now / more if now else (1 - least) / more)
    speedup = faster(after)
    if speedup is None:
        return []
    return [Fix(f"loads with {more:.0f} threads instead of {now:.0f}", f"--num_workers={more:.0f}", speedup)]


def _otherwise(f: Figures, least: float, work: str) -> list[Fix]:
    if work == READING:
        return [Fix("copy the dataset to a faster disk", None, faster(least))]
    if work in (DECODING, PROCESSING):
        return [Fix("give the run more cores", None, faster(least))]
    if f.setting("dataset.cache.size") is None:
        return [Fix("trains on smaller images, which are faster to copy", "--dataset.cache.size=224x224")]
    return []


def _free_gb(f: Figures) -> float | None:
    total, used = f.get("system.ram_total_gb"), f.get("system.ram_used_gb")
    free = None if total is None or used is None else total - used
    limit = f.get("system.ram_limit_gb")
    if limit is not None:
        within = limit - f.of("system.ram_limit_used_gb")
        free = within if free is None else min(free, within)
    return free


def _fits_on_gpu(f: Figures) -> bool:
    decoded = number(mapping(f.record.get("dataset")).get("decoded_gb"))
    total, used = f.get("system.gpu_vram_total_gb"), f.get("system.gpu_vram_used_gb")
    return None not in (decoded, total, used) and decoded < 0.8 * (total - used)  # type: ignore[operator]
