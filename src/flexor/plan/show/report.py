"""A study of a run as text, for people."""

from __future__ import annotations

from dataclasses import asdict

from flexor.core.console import table
from flexor.core.machine import gigabytes
from flexor.plan.advise import Impact, would_be_captured
from flexor.plan.compare import Comparison
from flexor.plan.memory.memory import MOST
from flexor.plan.plan import HOURS_PER_MONTH, Plan
from flexor.plan.rank import Choice, cheapest, fastest
from flexor.policies.external import short_name

LISTED = 10  # choices in the terminal
IMPACTS = {
    Impact.TIME: "time",
    Impact.HARDWARE: "more GPUs",
    Impact.ROUNDING: "rounding",
    Impact.LEARNING: "different training",
}


def render(study: Comparison) -> str:
    """The result first, then the details behind it."""
    sections = [
        answer(study),
        _changes(study),
        _memory(study.plan),
        _time(study),
        _host(study.plan),
        _robot(study.plan),
        _money(study.plan, study),
        _choices(study),
        _assumptions(study),
    ]
    return "\n\n".join(section for section in sections if section)


# The result.


def answer(study: Comparison) -> str:
    plan = study.plan
    gpu, step = plan.site.gpu, plan.run_time.step
    policy = short_name(plan.config.policy.type)
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    takes, costs = ("takes", "costs") if plan.fits else ("would take", "cost")
    rent = "" if plan.money.rent is None else f" and {costs} {usd(plan.money.rent)} to rent"
    lines = [
        f"{policy} {verdict} on {machines(plan)}: {gb(plan.peak)} of {gb(gpu.memory)} GB at peak.",
        f"A step {takes} {duration(step.seconds)} (+-{step.spread:.0%}). The run {takes} "
        f"{duration(plan.run_time.seconds)} for {plan.config.steps:,} steps ({number(plan.epochs)} epochs){rent}.",
    ]
    if plan.data_bound:
        lines.append(
            f"Data loading is the bottleneck: it delivers {plan.run_time.later.loaded:.0f} samples/s, and the training "
            f"could use {plan.run_time.later.demand:.0f}."
        )
    if not plan.fits and study.remedy:
        lines.append(f"It would fit with {' '.join(change.setting for change in study.remedy)}.")
    elif not plan.fits:
        lines.append("No change that Flexor knows makes it fit.")
    return "\n".join(lines)


def machines(plan: Plan) -> str:
    count, nodes = plan.site.gpus, plan.site.nodes
    name = plan.site.gpu.name
    article = "an" if name.startswith(("RTX", "A", "L", "H")) else "a"
    each = f"{count} {name}" if count > 1 else f"{article} {name}"
    return f"{nodes} nodes with {each} each" if nodes > 1 else each


# The details.


def _memory(plan: Plan) -> str:
    memory, split = plan.memory, plan.split
    rows: list[list[object]] = [["memory per GPU", "GB"]]
    parts = sorted(memory.parts.items(), key=lambda part: -part[1])
    rows += [[f"  {name}", gb(size)] for name, size in parts if size >= 5e6]
    small = sum(size for _, size in parts if size < 5e6)
    rows += [["  other small parts", gb(small)]] if small else []
    rows.append(["  reserved by torch's allocator, unused", gb(memory.allocator)])
    rows.append(["  CUDA context and libraries", gb(memory.context)])
    if plan.frames_on_gpu:
        name = "features of all images" if plan.loading.features else "cached frames of the dataset"
        rows.append([f"  {name}", gb(plan.frames_on_gpu)])
    rows.append(["  total at peak", gb(plan.peak)])
    module = f", in {memory.module}" if memory.module else ""
    lines = [
        table(rows),
        f"The peak is in: {memory.phase}{module} ({memory.operation}). "
        f"Batch size {split.batch_size} in {precision_of(plan)}"
        + (f" in {split.accumulation} passes" if split.accumulation > 1 else "")
        + (f", {memory.parallelism.strategy} on {split.world_size} GPUs" if split.world_size > 1 else "")
        + f"; {plan.trained / 1e6:.1f} of {plan.parameters / 1e6:.1f} million parameters are trained.",
    ]
    if plan.largest_batch is not None:
        more = " or more" if plan.largest_batch == MOST else ""
        largest = f"The largest batch size that fits is {plan.largest_batch}{more}."
        lines.append(largest if plan.largest_batch else "No batch size fits.")
    if (runs := plan.concurrent) and runs.fit > 1:
        gain = "more than one at once would not do more work per hour"
        if runs.useful > 1:
            gain = f"{runs.useful} at once do {runs.faster:.1f} times as much work per hour as one"
        lines.append(f"{runs.fit} such runs fit on this GPU at once (the limit is {runs.limit}); {gain}.")
    return "\n".join(lines)


def precision_of(plan: Plan) -> str:
    return "float32" if plan.config.precision == "no" else plan.config.precision


BOUNDS = {
    "gpu": "The GPU is the bottleneck.",
    "host": "The host is the bottleneck: it launches operations more slowly than the GPU executes them. A larger batch "
    "size takes little extra time.",
    "network": "Communication between GPUs is the bottleneck.",
}


def _time(study: Comparison) -> str:
    plan, step = study.plan, study.plan.run_time.step
    rows: list[list[object]] = [["step time", "ms"]]
    rows += [[f"  {name}", ms(seconds)] for name, seconds in sorted(step.gpu.items(), key=lambda x: -x[1])]
    rows.append(["  GPU work, total", ms(step.gpu_seconds)])
    rows.append(["  host work, in parallel", ms(step.host_seconds)])
    if step.communication:
        rows.append(["  communication between GPUs", ms(step.communication)])
        rows.append(["  communication that is not overlapped", ms(step.exposed)])
    rows.append(["  step, total", ms(step.seconds)])
    basis = (
        "based on the calibration of this machine"
        if step.calibrated
        else "based on data sheets and on measurements of an H200; `flexor plan --calibrate` measures your GPU"
    )
    lines = [
        table(rows),
        f"{BOUNDS[step.bound]} {plan.samples_per_s:.1f} samples/s, {step.mfu:.0%} of the data sheet's FLOP/s. "
        f"Times are {basis}.",
    ]
    if plan.site.world_size > 1:
        lines.append(_links(study))
    if plan.waits:
        lines.append(
            f"The policy makes the host wait for the GPU: {'; '.join(plan.waits)}. Host and GPU then do not "
            f"overlap, and a step takes up to {ms(step.gpu_seconds + step.host_seconds)} ms."
        )
    if plan.config.compile:
        lines.append(
            f"Compiled blocks: memory and time above are those of the uncompiled policy, which is the maximum. If the "
            f"compiler fuses everything it can, a step takes {ms(step.compiled_at_best)} ms at best."
        )
    elif step.graph:
        lines.append("Steps are replayed as a CUDA graph, so the host launches each with one call.")
    elif step.bound == "host":
        how = "With --step=auto, as a CUDA graph" if would_be_captured(plan) else "Without launch overhead"
        lines.append(f"{how}, a step would take {ms(step.at_best)} ms.")
    return "\n".join(lines)


def _links(study: Comparison) -> str:
    """What several GPUs gain, and what that is based on."""
    plan, step = study.plan, study.plan.run_time.step
    hidden = 1 - step.exposed / step.communication
    return (
        f"Each of the {plan.site.world_size} GPUs does {study.alone_s / step.seconds:.0%} of the work of one GPU alone "
        f"({ms(study.alone_s)} ms per step). They communicate over {plan.site.links}; {hidden:.0%} of it overlaps with "
        "computation. The speed of links is from data sheets and published results, and was not measured."
    )


TIERS = {
    "stream": "decoded again in each epoch",
    "ram": "cached in host memory",
    "disk": "cached on disk",
    "gpu": "cached on the GPU",
}


def _host(plan: Plan) -> str:
    host, disk, later = plan.host_memory, plan.disk, plan.run_time.later
    rows: list[list[object]] = [["per node", "GB"]]
    rows += [[f"  memory: {name}", gb(size)] for name, size in asdict(host).items() if size >= 5e6]
    rows.append(["  memory, total", gb(host.total)])
    rows += [[f"  disk: {name}", gb(size)] for name, size in asdict(disk).items() if size]
    rows.append(["  disk, total at most", gb(disk.total)])
    threads = (
        f"Loading would need {later.threads} workers in total (now {plan.loading.workers} per GPU)"
        if later.bound
        else f"Loading needs {later.threads} of {plan.loading.workers * plan.loading.ranks} workers"
    )
    pictures = max(1, plan.data.pictures)
    threads += f" and {later.cores} cores, for {pictures * later.demand:,.0f} frames/s"
    if later.demand > later.most:
        threads += f". Python can hand on at most {pictures * later.most:,.0f} frames/s: use more GPUs, or cache frames"
    first = ""
    if plan.run_time.first.bound and not later.bound:
        first = (
            f" The first epoch waits for decoding: it delivers {plan.run_time.first.loaded:.0f} of the "
            f"{later.demand:.0f} samples/s that the training could use."
        )
    frames = _frames(plan)
    return (
        f"{table(rows)}\n{frames}. {threads}; the host has {plan.site.host.cores} cores and "
        f"{plan.site.host.memory / 1e9:.0f} GB ({plan.site.host.source}).{first}"
    )


def _frames(plan: Plan) -> str:
    """Where frames or their features are, and why the latter are not used."""
    features = plan.features
    if features.tier != "off":
        where = TIERS[features.tier].removeprefix("cached ")
        return (
            f"Images: each is encoded once, in {duration(features.first_pass_s)} before the first step. Their features "
            f"({gb(features.nbytes)} GB) are {where}, and the step above neither decodes nor encodes"
        )
    why = f" Images are encoded in every step: {features.why_off}." if features.why_off else ""
    return f"Frames: {TIERS[plan.loading.tier]}.{why}".removesuffix(".")


def _robot(plan: Plan) -> str:
    robot = plan.robot
    return (
        f"network: an observation takes {gigabytes(robot.raw)} raw or {gigabytes(robot.jpeg)} as JPEG, and is sent "
        f"{robot.per_s:.2g} times per second: {robot.mbit_up(False):.2f} or {robot.mbit_up(True):.2f} Mbit/s from "
        f"robot to server, {robot.mbit_down:.2f} Mbit/s back, at {plan.rate_hz:g} actions per second."
    )


def _money(plan: Plan, study: Comparison) -> str:
    money, energy, site = plan.money, plan.money.energy, plan.site
    lines = []
    if money.rent is not None and site.usd_per_hour is not None:
        lines.append(f"rent: {usd(money.rent)} at {usd(site.usd_per_hour)} per hour ({site.price_source}).")
    lines.append(
        f"energy: {energy.kwh:.2f} kWh at {energy.watts:.0f} W, {usd(energy.usd)} on your own machine "
        f"({study.hardware.prices.kwh:g} USD/kWh)."
    )
    if money.purchase:
        lines.append(_buying(plan, study))
    return "\n".join(lines)


def _buying(plan: Plan, study: Comparison) -> str:
    purchase, break_even = plan.money.purchase, plan.money.break_even
    assert purchase
    text = f"buying: {usd(purchase.usd)} for such a machine"
    if break_even is None:
        return f"{text}; no rental price is known to compare with."
    if break_even.hours is None or break_even.months is None:
        return f"{text}; this never pays off, because its energy per hour costs more than renting."
    runs = break_even.hours / plan.run_time.hours
    within = "within" if break_even.within_lifetime else "beyond"
    return (
        f"{text}; it is cheaper than renting after {break_even.hours:,.0f} hours ({runs:,.0f} such runs, "
        f"{break_even.months:.0f} months of {HOURS_PER_MONTH:g} hours), {within} its assumed lifetime of "
        f"{study.hardware.prices.years:g} years."
    )


def _choices(study: Comparison) -> str:
    fitting = [choice for choice in study.choices if choice.fits]
    if not fitting:
        return "It fits on none of the compared GPUs, even with a batch size of 1."
    listed = fitting[:LISTED]
    fast, cheap = fastest(fitting), cheapest(fitting)
    if fast and fast not in listed:
        listed.append(fast)
    rows: list[list[object]] = [["GPU", "count", "batch", "peak GB", "step", "run", "USD", "bottleneck", ""]]
    for choice in listed:
        marks = [word for word, best in (("cheapest", cheap), ("fastest", fast)) if choice is best]
        rows.append([*_row(choice), " and ".join(marks)])
    too_small = len(study.choices) - len(fitting)
    title = f"the same training (global batch size {study.plan.split.global_batch}) on other hardware, cheapest first:"
    rest = f"; {too_small} have too little memory" if too_small else ""
    return f"{title}\n{table(rows)}\n{len(fitting)} of {len(study.choices)} combinations fit{rest}."


def _row(choice: Choice) -> list[object]:
    assert choice.split
    passes = f" x {choice.split.accumulation}" if choice.split.accumulation > 1 else ""
    return [
        choice.gpu.name,
        choice.gpus,
        f"{choice.split.batch_size}{passes}",
        gb(choice.peak),
        duration(choice.step_s),
        duration(choice.hours * 3600),
        "-" if choice.usd is None else f"{choice.usd:.2f}",
        choice.bound,
    ]


def _changes(study: Comparison) -> str:
    if not study.changes:
        return ""
    rows: list[list[object]] = [
        ["suggested changes, least harmful first", "saves GB", "step time", "harm", ""]
    ]
    for change in study.changes:
        assert change.effect
        saved, time = gb(change.effect.memory), f"x {change.effect.time:.2f}"
        rows.append([change.setting, saved, time, IMPACTS[change.impact], change.why])
    return table(rows)


def _assumptions(study: Comparison) -> str:
    site, lines = study.plan.site, []
    if study.assumed:
        lines.append(
            f"No dataset is given. Assumed: {study.assumed}. The disk total does not include the dataset's files."
        )
    figures = [name for name in ("memory_gib", "bandwidth_gb_s", "tdp_w") if not site.gpu.is_checked(name)]
    figures += [name for name in site.gpu.tflops if not site.gpu.is_checked(name)]
    if figures:
        lines.append(
            f"Data sheet values of the {site.gpu.name} that nobody has verified: {', '.join(figures)}."
        )
    return "\n".join(lines)


# Numbers.


def gb(count: float) -> str:
    return f"{count / 1e9:.2f}"


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def usd(amount: float) -> str:
    return f"{amount:,.2f} USD" if amount < 100 else f"{amount:,.0f} USD"


def number(value: float) -> str:
    """With three digits, without exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def duration(seconds: float) -> str:
    """In a unit that is easy to read."""
    if seconds < 1:
        return f"{number(seconds * 1e3)} ms"
    if seconds < 120:
        return f"{number(seconds)} s"
    if seconds < 2 * 3600:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
