"""The settings `--rl.*` of a run that learns while it acts: those of the algorithm, and of what it learns from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flexor.core.typed import setting
from flexor.policies.sac.settings import SACSettings

CAPACITY = {"hilserl": 200_000, "lerobot": 100_000}


@dataclass(frozen=True)
class RLConfig(SACSettings):
    """Of the run: how much it learns from what."""

    updates: int | Literal["max"] = setting(1, at_least=1)
    """Updates per step in the environment, however fast the machine is. max: as many as the machine manages; then
    neither waits for the other, and the run can't be repeated."""
    batch_size: int = setting(256, at_least=2)
    """Transitions per update."""
    learning_starts: int = setting(100, at_least=1)
    """Steps in the environment before the first update."""
    capacity: int | None = setting(None, at_least=2)
    """Observations that the buffer keeps of what was collected; default: 200,000 (hilserl), 100,000 (lerobot). All
    of them stay in the run's folder."""
    storage: Literal["auto", "cpu", "cuda", "file"] = setting("auto", may_change=True)
    """Where the buffer is: in host memory, on the GPU, or in a file of the run's folder. auto: on the GPU if it takes
    at most half of the free memory there, else in host memory."""
    online_ratio: float = setting(0.5, at_least=0)
    """Share of a batch that is drawn from what was collected; the rest are demonstrations and interventions."""
    reward: Literal["recorded", "last", "success"] = "recorded"
    """Rewards of the demonstrations: the dataset's next.reward and next.done; 1 at the last step of each episode
    (last); or 1 at the first step with next.success, where the episode ends."""
    intervener: Literal["none", "scripted"] = "none"
    """Who takes over while the policy acts: nobody, or the expert of the built-in task."""
    image_shift: int = setting(4, at_least=0)
    """Images of a batch are shifted at random by up to this many pixels; 0: not at all."""

    @property
    def observations(self) -> int:
        """The capacity that was given, or the preset's."""
        return self.capacity or CAPACITY[self.preset]
