"""The settings of SAC's actor and encoders, under the names of LeRobot's `gaussian_actor`."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

from flexor.core.batch import ENV_STATE, STATE
from flexor.core.errors import ConfigError
from flexor.policies.base import PolicyConfig
from flexor.policies.features import Kind, Normalization
from flexor.policies.lerobot_settings import LerobotSetting

OF_THE_RUN = LerobotSetting("it is a setting of the run, not of the policy: see the settings --rl.*")
SMALLEST_IMAGE = 47  # pixels that four convolutions of stride 2 leave one of


@dataclass(frozen=True)
class ActorNetwork:
    hidden_dims: list[int] = field(default_factory=lambda: [256, 256])
    """Widths of the layers."""
    activate_final: bool = True
    """Normalise and activate the output of the last layer, too."""


@dataclass(frozen=True)
class CriticNetwork:
    hidden_dims: list[int] = field(default_factory=lambda: [256, 256])
    """Widths of the layers."""
    activate_final: bool = True
    """Normalise and activate the output of the last layer, too."""
    final_activation: str | None = None
    """Activation of the last layer, as torch.nn names it; default: that of the others, SiLU."""


@dataclass(frozen=True)
class GaussianHead:
    use_tanh_squash: bool = True
    """Actions are the tanh of a Gaussian; there is no other kind."""
    std_min: float = 1e-10
    """Smallest variance: LeRobot's name says deviation, but LeRobot's Gaussian takes it as the variance."""
    std_max: float = 25.0
    """Largest variance."""
    init_final: float = 0.05
    """Initial weights of the last layers are uniform up to this."""


@dataclass
class SACConfig(PolicyConfig):
    """Defaults are those of HIL-SERL's code; LeRobot's are given in docs/rl.md."""

    type: ClassVar[str] = "sac"
    lerobot_type: ClassVar[str] = "gaussian_actor"
    learns_online: ClassVar[bool] = True
    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset({"n_obs_steps"})
    only_in_lerobot = MappingProxyType(
        {
            **dict.fromkeys(
                (
                    *("storage_device", "online_steps", "online_buffer_capacity", "offline_buffer_capacity"),
                    *("async_prefetch", "online_step_before_learning", "actor_learner_config", "concurrency"),
                ),
                OF_THE_RUN,
            ),
            "state_encoder_hidden_dim": LerobotSetting("LeRobot does not use it either"),
            "n_obs_steps": LerobotSetting("the policy sees one observation", harmless=(1,)),
        }
    )

    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {
            Kind.VISUAL: "MEAN_STD",
            Kind.STATE: "MIN_MAX",
            Kind.ENV: "MIN_MAX",
            Kind.ACTION: "MIN_MAX",
        }
    )
    """How each kind of feature is normalised; ACTION must be MIN_MAX, since actions are in [-1, 1]."""
    dataset_stats: dict[str, dict[str, Any]] | None = None
    """Statistics for normalisation: {observation.state: {min: [...], max: [...]}, ...}. Default: those of the
    demonstrations for observations, and the limits of the environment."""
    vision_encoder_name: str | None = None
    """Pretrained ResNet-10 that encodes images: a folder or Hub repository, such as lerobot/resnet10. null: four
    convolutions, which are always trained."""
    freeze_vision_encoder: bool = True
    """Do not train a pretrained image encoder."""
    image_encoder_hidden_dim: int = 32
    """Channels of the four convolutions."""
    shared_encoder: bool = True
    """Actor and critics share one encoder, which the critics train; false: each has its own."""
    num_discrete_actions: int | None = None
    """Number of choices of a gripper, which is then the last action: 3 for close, stay and open. null: all actions are
    continuous."""
    image_embedding_pooling_dim: int = 8
    """Weighted sums over the image that are kept of each channel."""
    latent_dim: int = 256
    """Size of what encodes each camera, the state and the environment's state."""
    actor_network_kwargs: ActorNetwork = field(default_factory=ActorNetwork)
    """The actor's layers."""
    policy_kwargs: GaussianHead = field(default_factory=GaussianHead)
    """The actor's Gaussian."""
    discrete_critic_network_kwargs: CriticNetwork = field(default_factory=CriticNetwork)
    """The layers of the critic that chooses what the gripper does."""

    def validate(self) -> None:
        self.check_one_observation()
        self.require(1, "image_encoder_hidden_dim", "image_embedding_pooling_dim", "latent_dim")
        self.require(2, "num_discrete_actions")
        head = self.policy_kwargs
        if not head.use_tanh_squash:
            raise ConfigError("policy.policy_kwargs.use_tanh_squash=false is not supported: set it to true.")
        if not 0 < head.std_min <= head.std_max:
            raise ConfigError(
                f"policy.policy_kwargs: std_min={head.std_min} must be positive and at most std_max={head.std_max}."
            )
        if self.normalization_mapping.get(Kind.ACTION) != "MIN_MAX":
            raise ConfigError(
                f"policy.normalization_mapping.ACTION={self.normalization_mapping.get(Kind.ACTION)}: SAC acts in "
                "[-1, 1], so it must be MIN_MAX."
            )
        self._check_features()

    def _check_features(self) -> None:
        if self.input_features and not self.observed:
            raise self.missing_input(f"a camera (observation.image...), {STATE} or {ENV_STATE}")
        if len({feature.shape for feature in self.images.values()}) > 1:
            shapes = ", ".join(f"{name} {list(f.shape)}" for name, f in self.images.items())
            raise ConfigError(f"SAC needs cameras with images of one size: {shapes}. Crop or resize them.")
        for name, feature in self.images.items():
            if self.vision_encoder_name is None and min(feature.shape[1:]) < SMALLEST_IMAGE:
                raise ConfigError(
                    f"{name} is {list(feature.shape[1:])}, but the convolutions need at least {SMALLEST_IMAGE} pixels: "
                    "use larger images."
                )

    def optimizer_preset(self) -> dict[str, Any]:
        return {"type": "adam", "lr": 3e-4}

    @property
    def action_deltas(self) -> list[int]:
        return [0]

    @property
    def action_steps(self) -> int:
        return 1

    @property
    def moves_weights(self) -> bool:
        return True  # those of target networks
