"""The signals of a run that matter, in the order in which a person asks for them. All others are folded away."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from flexor.runs.text import title_of


@dataclass(frozen=True)
class Signal:
    """One plot. `names`: of its series in the metrics; the first one that a run has is drawn."""

    title: str
    names: tuple[str, ...]
    group: str
    kind: str = "number"
    """number, share (0 to 100 %) or seconds."""
    band: tuple[str, str] | None = None
    """Series of its interval."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


LEARNING, ACTING, SPEED, MACHINE = "Learning", "Acting", "Speed", "Machine"
EVALUATED = ("eval_success_low", "eval_success_high")
SIGNALS = (
    Signal("Loss", ("loss",), LEARNING),
    Signal("Held-out loss", ("held_out_loss",), LEARNING),
    Signal("Success rate", ("eval_success_rate",), LEARNING, "share", EVALUATED),
    Signal("Success in training", ("success_rate",), LEARNING, "share"),
    Signal("Return", ("return",), LEARNING),
    Signal("Help", ("intervention_rate",), LEARNING, "share"),
    Signal("Expected at the start, discounted", ("first_q",), LEARNING),
    Signal("Received, discounted", ("discounted_return",), LEARNING),
    Signal("Entropy", ("entropy",), LEARNING),
    Signal("Gradient norm", ("grad_norm",), LEARNING),
    Signal("Learning rate", ("lr",), LEARNING),
    # of policies that learn while they act
    Signal("Success, last 20 episodes", ("success_rate",), ACTING, "share"),
    Signal("Return, last 20 episodes", ("return",), ACTING),
    Signal("Steps with help", ("intervention_rate",), ACTING, "share"),
    Signal("Value by the critics", ("q",), ACTING),
    Signal("Entropy", ("entropy",), ACTING),
    Signal("Temperature", ("temperature",), ACTING),
    Signal("Steps per second", ("transitions_per_s",), SPEED),
    Signal("Samples per second", ("samples_per_s",), SPEED),
    Signal("Updates since the weights that act", ("weights_age",), SPEED),
    Signal("Time in the environment", ("environment_share",), SPEED, "share"),
    Signal("Time of a step", ("step_s",), SPEED, "seconds"),
    Signal("Waiting for data", ("data_wait",), SPEED, "share"),
    Signal("GPU busy", ("system.gpu_util", "gpu_busy"), MACHINE, "share"),
    Signal("GPU memory, GB", ("system.gpu_vram_used_gb",), MACHINE),
    Signal("Processor, all cores", ("system.cpu",), MACHINE, "share"),
    Signal("Memory of the run, GB", ("system.ram_own_gb",), MACHINE),
)
_COVERED = {name for signal in SIGNALS for name in (*signal.names, *(signal.band or ()))}


def folded(names: Iterable[str]) -> list[dict[str, Any]]:
    """The other series in groups, by the part of the run that reports them."""
    groups: dict[str, list[str]] = {}
    for name in names:
        if name not in _COVERED:
            group, dot, _ = name.partition(".")
            groups.setdefault(group if dot else "", []).append(name)
    return [
        {
            "title": group.replace("_", " ") or "everything else that is reported",
            "signals": _plots(group_names),
        }
        for group, group_names in sorted(groups.items())
    ]


def _plots(names: Iterable[str]) -> list[dict[str, Any]]:
    return [Signal(title_of(name), (name,), "").to_json() for name in sorted(names)]
