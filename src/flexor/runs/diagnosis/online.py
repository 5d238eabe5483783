"""What a run that learns while it acts spends its time with: the environment, or updates."""

from __future__ import annotations

from flexor.core.findings import Finding, Fix
from flexor.runs.diagnosis.figures import Figures
from flexor.runs.diagnosis.verdict import percent
from flexor.runs.state import ENVIRONMENT_BOUND, UPDATE_BOUND

MOST_UPDATES = 20  # per step that are suggested


def online_verdict(f: Figures) -> Finding | None:
    """None if the run does not act. It is no alarm: a robot takes its time, and so does learning."""
    acting, learning = f.get("environment_share"), f.get("learning_share")
    if acting is None or learning is None:
        return None
    figures = [
        ("time in the environment", percent(min(acting, 1.0))),
        ("time of updates", percent(min(learning, 1.0))),
        ("steps", f"{f.of('transitions_per_s'):.3g}/s"),
        ("updates", f"{f.of('updates_per_s'):.3g}/s"),
    ]
    shares = f"the environment takes {percent(min(acting, 1.0))} of the time, updates {percent(min(learning, 1.0))}"
    if acting > learning:
        return Finding(ENVIRONMENT_BOUND, shares, _more_updates(f, acting, learning), figures=figures)
    fixes = [] if f.on_gpu else [Fix("learn on a GPU")]
    return Finding(UPDATE_BOUND, shares, fixes, figures=figures)


def _more_updates(f: Figures, acting: float, learning: float) -> list[Fix]:
    """As many updates per step as take about the time of the environment."""
    updates = f.setting("rl.updates")
    if not isinstance(updates, int) or isinstance(updates, bool):
        return []
    more = min(int(updates * acting / max(learning, 1e-3)), MOST_UPDATES)
    why = "learns more from each step, in at most twice the time"
    return [Fix(why, f"--rl.updates={more}")] if more > updates else []
