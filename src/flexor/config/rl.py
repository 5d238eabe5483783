"""The settings `--rl.*` of a run that learns while it acts: those of the algorithm, and of what it learns from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from flexor.core.errors import ConfigError
from flexor.core.typed import setting
from flexor.policies.sac.settings import SACSettings

CAPACITY = {"hilserl": 200_000, "lerobot": 100_000}


@dataclass(frozen=True)
class RLServeConfig:
    """The learner's port for actors on the network. Its key is in the environment variable FLEXOR_API_KEY."""

    port: int | None = setting(None, at_least=0, less_than=2**16)
    """Learn from actors on the network, which connect to this port; 0 takes any free one. Default: act here, in
    env.type."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for all."""
    tls_cert: str | None = None
    """Certificate (PEM), for wss://."""
    tls_key: str | None = None
    """Its private key (PEM)."""
    allow_hosts: list[str] = field(default_factory=list)
    """Other names, such as one in DNS, by which actors may address this machine."""
    weights_s: float = setting(1.0, at_least=0)
    """Seconds between two sets of weights that actors get, at least."""
    max_lag: int = setting(200, at_least=0)
    """Actors wait at the start of an episode while the learner has more steps than this still to learn from."""


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
    intervener: str = setting("none", may_change=True)
    """Who takes over while the policy acts: nobody (none), an expert in simulation (scripted), a person with the
    terminal's keyboard (keyboard), or with a teleoperator like LeRobot's: package.module:CLASS or FILE.py:CLASS."""
    intervener_settings: dict[str, Any] = setting(dict, may_change=True)
    """Arguments of the teleoperator, or of its config, such as {port: /dev/ttyACM0}."""
    fps: float | None = setting(None, at_least=0, may_change=True)
    """Steps per second in the environment, at most, where a person may take over; 0: as fast as possible. Default:
    those of the environment."""
    reward_classifier: str | None = None
    """Reward classifier that says when the task is done: a run, checkpoint or Hub repository of policy.type=
    reward_classifier, also LeRobot's. Its reward of 1 replaces the environment's rewards."""
    success_threshold: float = setting(0.5, more_than=0, less_than=1)
    """Probability from which on the reward classifier says that the task is done."""
    terminate_on_success: bool = True
    """Whether an episode ends when a person or the reward classifier says that the task is done."""
    image_shift: int = setting(4, at_least=0)
    """Images of a batch are shifted at random by up to this many pixels; 0: not at all."""

    serve: RLServeConfig = setting(RLServeConfig, may_change=True)

    def check_actors(self) -> None:
        """Refuse settings of those who act, where they act on other machines."""
        for name, idle in (("intervener", "none"), ("reward_classifier", None)):
            value = getattr(self, name)
            if self.serve.port is not None and value != idle:
                raise ConfigError(
                    f"rl.{name}={value} has no effect with rl.serve.port, because the actors are elsewhere: give it to "
                    "`flexor collect`."
                )

    @property
    def observations(self) -> int:
        """The capacity that was given, or the preset's."""
        return self.capacity or CAPACITY[self.preset]
