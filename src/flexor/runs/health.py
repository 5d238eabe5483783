"""Learning health: faults of learning, found in the metrics of a run when they begin.

    findings(lines of metrics.jsonl, config, checkpoints) -> [Finding, ...]

Each rule follows one series and compares each value with the usual level: the median of recent values, and their median
distance from it, both of logarithms, because losses and gradient norms differ by factors. A rule reports a fault once,
when it begins, and is armed again when the series is back at its usual level or has settled at a new one.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from flexor.core.findings import Finding, Fix
from flexor.core.text import one_line
from flexor.runs.online_health import OnlineHealth
from flexor.runs.text import figure

Line = Mapping[str, Any]

LEVEL, RECENT = 20, 200  # lines that make up the usual level, and the noise around it
LEAST = 10  # lines before there is a usual level
SIGMAS = 8.0  # how far from the usual level a value stands out, in standard deviations
LEAST_NOISE = 0.02  # of logarithms
SPIKE, BURST = 3.0, 10.0  # times the usual loss; times the usual gradient norm
EARLY = 10.0  # times the lowest loss, before there is a usual level, or of the usual level itself
STAYS = 5  # lines after which a high loss is no spike
EARLY_STAYS = 2  # the same, before there is a usual level
BURST_STAYS = 3  # single large gradients are normal, and clipped
NEW_LEVEL = 20  # lines after which a level that was unusual is the usual one
VANISHED = 1e-3  # times the gradient norm at the beginning
HELD_OUT_LEAST = 5  # evaluations before anything is said about them
HELD_OUT_RISE = 0.1  # of the lowest held-out loss
HELD_OUT_SIGMAS = 5.0


def findings(
    lines: Iterable[Line], config: Mapping[str, Any] | None = None, checkpoints: Sequence[int] = ()
) -> list[Finding]:
    """Apply all rules to the lines of a run's metrics. `config`: its settings; `checkpoints`: the saved steps."""
    health = LearningHealth(config or {}, lambda: checkpoints)
    return [finding for line in lines for finding in health.update(line)]


def to_json(finding: Finding) -> dict[str, Any]:
    """A finding about learning as it is in a line of the metrics; with its step, as in a run's record."""
    texts = {"what": finding.name, "evidence": finding.evidence, "change": finding.fix}
    return texts if finding.step is None else {**texts, "step": finding.step}


def from_record(record: object) -> list[Finding]:
    """The findings in a run's record, which may be a stranger's."""
    findings = []
    for entry in record if isinstance(record, list) else []:
        if isinstance(entry, Mapping) and entry.get("what"):
            name, evidence, fix = (one_line(str(entry.get(k) or "")) for k in ("what", "evidence", "change"))
            findings.append(Finding(name, evidence, [Fix(fix)], step=_number(entry.get("step"))))
    return findings


class LearningHealth:
    """All rules. `update` takes the lines of `metrics.jsonl` in turn and returns the findings that begin with each."""

    def __init__(self, config: Mapping[str, Any], checkpoints: Callable[[], Sequence[int]]):
        self._rules = (_Loss(config), _Gradient(config), _HeldOut(checkpoints))
        self._online = OnlineHealth(config)
        self._kind: frozenset[str] = frozenset()

    def update(self, line: Line) -> list[Finding]:
        if "transitions_per_s" in line:  # critics' losses follow the rewards, which may rise: other rules
            return self._online.update(line)
        if "loss" in line:
            kind = frozenset(name for name in line if name.endswith("_loss") and name != "held_out_loss")
            if kind != self._kind:  # another phase of training, with another loss
                self._kind = kind
                for rule in self._rules:
                    rule.reset()
        return [finding for rule in self._rules if (finding := rule.update(line)) is not None]


class _Level:
    """The usual level of positive values, which may fall all the time, and how far new values were from it."""

    def __init__(self) -> None:
        self.logs: deque[float] = deque(maxlen=LEVEL)
        self.deviations: deque[float] = deque(maxlen=RECENT)

    def add(self, value: float) -> None:
        if len(self.logs) >= 3:
            self.deviations.append(math.log(value) - median(self.logs))
        self.logs.append(math.log(value))

    @property
    def is_ready(self) -> bool:
        return len(self.logs) >= LEAST

    @property
    def usual(self) -> float:
        return math.exp(median(self.logs))

    def stands_out(self, value: float, factor: float) -> bool:
        """Whether a value is far above all recent ones. Noise with rare large values has had some of them before."""
        deviation = math.log(value) - median(self.logs)
        if deviation <= math.log(factor):
            return False
        middle = median(self.deviations)
        noise = max(1.4826 * median(abs(other - middle) for other in self.deviations), LEAST_NOISE)
        return deviation > max(SIGMAS * noise, 2 * max(self.deviations))

    def is_back(self, value: float, factor: float) -> bool:
        return value < self.usual * math.sqrt(factor)


class _Loss:
    """Spikes, and a loss that rises and stays up."""

    def __init__(self, config: Mapping[str, Any]):
        self.config, self.spikes = config, 0
        self.reset()

    def reset(self) -> None:
        self.level, self.lowest, self.high, self.reported = _Level(), math.inf, 0, False
        self.recent: deque[Line] = deque(maxlen=LEVEL)

    def update(self, line: Line) -> Finding | None:
        loss = _positive(line.get("loss"))
        if loss is None:
            return None
        if not self.level.is_ready:
            return self._update_early(line, loss)
        if self.high and self.level.is_back(loss, SPIKE):
            self.high = 0
        if self.high or self.level.stands_out(loss, SPIKE):
            return self._update_high(line, loss)
        self.level.add(loss)
        self.recent.append(line)
        self.lowest = min(self.lowest, self.level.usual)
        if self.level.usual > EARLY * self.lowest and not self.reported:
            self.reported = True
            return self._exploded(line, self.level.usual, f"the lowest it was is {figure(self.lowest)}")
        return None

    def _update_early(self, line: Line, loss: float) -> Finding | None:
        self.high = self.high + 1 if loss > EARLY * self.lowest else 0
        self.lowest = min(self.lowest, loss)
        self.level.add(loss)
        self.recent.append(line)
        if self.level.is_ready:
            self.high, self.lowest = 0, self.level.usual
        if self.high >= EARLY_STAYS and not self.reported:
            self.reported = True
            return self._exploded(line, loss, f"it was {figure(self.lowest)} before")
        return None

    def _update_high(self, line: Line, loss: float) -> Finding | None:
        self.high += 1
        usual = f"usually {figure(self.level.usual)}{self._parts(line)}"
        if self.high == 1:
            self.spikes += 1
            return self._spike(line, loss, usual) if self.spikes in (1, 10, 100) else None
        if self.high == STAYS:
            return self._exploded(line, loss, f"{usual}, and high for {STAYS} log lines")
        if self.high >= NEW_LEVEL:
            self.reset()
            self.level.add(loss)
        return None

    def _spike(self, line: Line, loss: float, usual: str) -> Finding:
        count = f", the {self.spikes}th spike" if self.spikes > 1 else ""
        fix = (
            "a single spike does no harm if the loss comes back; if spikes repeat, lower --optimizer.lr"
            f"{_rate(line)} or {_clipping(self.config)}"
        )
        evidence = f"loss {figure(loss)} at step {line.get('step')}, {usual}{count}"
        return Finding("loss spike", evidence, [Fix(fix)])

    def _exploded(self, line: Line, loss: float, usual: str) -> Finding:
        fix = (
            f"stop, and start again with a lower --optimizer.lr{_rate(line)}, a longer warm-up "
            f"(--scheduler.num_warmup_steps) or {_clipping(self.config)}"
        )
        return Finding(
            "loss exploded", f"loss {figure(loss)} at step {line.get('step')}, {usual}", [Fix(fix)]
        )

    def _parts(self, line: Line) -> str:
        """The part of the loss that has risen most, if there are several."""
        rises = {}
        for name, now in _parts(line).items():
            values = [value for earlier in self.recent if (value := _positive(earlier.get(name))) is not None]
            if values and now > 0:
                rises[name] = (now / median(values), now, median(values))
        if len(rises) < 2:
            return ""
        name = max(rises, key=lambda part: rises[part])
        return f", most of all {name}: {figure(rises[name][1])}, usually {figure(rises[name][2])}"


class _Gradient:
    """Gradients that explode or vanish."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.reset()

    def reset(self) -> None:
        self.level, self.high, self.low, self.reported = _Level(), 0, 0, False
        self.first: list[tuple[float, float]] = []  # norm and loss of the first lines

    def update(self, line: Line) -> Finding | None:
        norm, loss = _number(line.get("grad_norm")), _positive(line.get("loss"))
        if norm is None or loss is None:
            return None
        return self._vanishes(line, norm, loss) or (self._explodes(line, norm) if norm > 0 else None)

    def _explodes(self, line: Line, norm: float) -> Finding | None:
        if not self.level.is_ready:
            self.level.add(norm)
            return None
        if self.high and self.level.is_back(norm, BURST):
            self.high = 0
        if not self.high and not self.level.stands_out(norm, BURST):
            self.level.add(norm)
            return None
        self.high += 1
        if self.high == NEW_LEVEL:
            self.level, self.high = _Level(), 0
        if self.high != BURST_STAYS:
            return None
        return Finding(
            "gradients explode",
            f"gradient norm {figure(norm)} at step {line.get('step')}, usually "
            f"{figure(self.level.usual)}, and high for {BURST_STAYS} log lines",
            [Fix(f"{_clipping(self.config)}, or lower --optimizer.lr{_rate(line)}")],
        )

    def _vanishes(self, line: Line, norm: float, loss: float) -> Finding | None:
        if len(self.first) < LEAST:
            self.first.append((norm, loss))
        norm_then, loss_then = (median(values) for values in zip(*self.first))
        has_baseline = len(self.first) == LEAST
        # a loss that falls to almost nothing takes its gradient along: that is no fault
        small = norm == 0 or (has_baseline and norm < VANISHED * norm_then and loss > 0.3 * loss_then)
        self.low = self.low + 1 if small else 0
        if not small:
            self.reported = False
        if self.low < STAYS or self.reported:
            return None
        self.reported = True
        fix = f"lower --optimizer.lr{_rate(line)}, and check that the parts to be trained are not frozen"
        return Finding(
            "gradients vanish",
            f"gradient norm {figure(norm)} at step {line.get('step')} for {STAYS} log lines, "
            f"{figure(norm_then)} at the beginning; the loss is still {figure(loss)}",
            [Fix(f"nothing is learned any more: {fix}")],
        )


class _HeldOut:
    """A held-out loss that rises while training goes on: the policy learns its episodes by heart."""

    def __init__(self, checkpoints: Callable[[], Sequence[int]]):
        self.checkpoints = checkpoints
        self.points: list[tuple[int, float]] = []
        self.reported: int | None = None
        self.trained: list[tuple[int, float]] = []

    def reset(self) -> None:
        self.points, self.trained = [], []

    def update(self, line: Line) -> Finding | None:
        loss, value, step = (_number(line.get(name)) for name in ("loss", "held_out_loss", "step"))
        if step is None:
            return None
        if loss is not None:
            self.trained.append((int(step), loss))
        if value is None:
            return None
        self.points.append((int(step), value))
        if len(self.points) < HELD_OUT_LEAST:
            return None
        values = [value for _, value in self.points]
        smooth = [median(values[at - 1 : at + 2]) for at in range(1, len(values) - 1)]
        rise = smooth[-1] - min(smooth)
        if rise <= max(HELD_OUT_RISE * abs(min(smooth)), HELD_OUT_SIGMAS * _noise(values)):
            return None
        turned = self.points[smooth.index(min(smooth)) + 1][0]
        if turned == self.reported:
            return None
        self.reported = turned
        best, lowest = min(self.points, key=lambda point: point[1])
        fix = (
            f"{self._use(best)}; longer training needs more episodes, image augmentation "
            "(--dataset.image_transforms.enable=true) or a higher --optimizer.weight_decay"
        )
        return Finding(
            "held-out loss rises",
            f"held-out loss {figure(value)} at step {step:.0f}, the lowest was {figure(lowest)} at step "
            f"{best}{self._trained_since(best)}",
            [Fix(fix)],
        )

    def _trained_since(self, best: int) -> str:
        then = [loss for step, loss in self.trained if step <= best][-STAYS:]
        if not then:
            return ""
        now = [loss for _, loss in self.trained[-STAYS:]]
        return f"; the training loss went from {figure(median(then))} to {figure(median(now))} meanwhile"

    def _use(self, best: int) -> str:
        saved = self.checkpoints()
        if not saved:
            return "stop, and save checkpoints more often (--save_freq) to have the one with the lowest held-out loss"
        nearest = min(saved, key=lambda step: abs(step - best))
        which = "which has" if nearest == best else "the nearest to"
        return f"stop, and use checkpoint {nearest:06d}, {which} the lowest held-out loss"


def _noise(values: Sequence[float]) -> float:
    """Standard deviation of values around a curve, from the differences of neighbours. A steady rise is no noise."""
    steps = [after - before for before, after in pairwise(values)]
    middle = median(steps)
    return 1.4826 * median(abs(step - middle) for step in steps) / math.sqrt(2)


def _parts(line: Line) -> dict[str, float]:
    """The parts of a loss: a run reports them beside it."""
    return {
        name: part
        for name, value in line.items()
        if name.endswith("_loss") and name != "held_out_loss" and (part := _number(value)) is not None
    }


def _number(value: object) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if good else None  # type: ignore[arg-type]


def _positive(value: object) -> float | None:
    number = _number(value)
    return number if number is not None and number > 0 else None


def _rate(line: Line) -> str:
    rate = _number(line.get("lr"))
    return f" (now {rate:.3g})" if rate is not None else ""


def _clipping(config: Mapping[str, Any]) -> str:
    optimizer = config.get("optimizer")
    limit = _number(optimizer.get("grad_clip_norm")) if isinstance(optimizer, Mapping) else None
    if limit == 0:
        return "clip gradients: --optimizer.grad_clip_norm=1"
    return f"lower --optimizer.grad_clip_norm{f' (now {limit:g})' if limit is not None else ''}"
