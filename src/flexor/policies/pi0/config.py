"""The settings of pi0 and pi0.5, under LeRobot's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from flexor.policies.features import Kind, Normalization
from flexor.policies.lerobot_settings import LerobotSetting
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.prompt import AddNewLinePi0, StateInPrompt
from flexor.policies.processing.rename_and_move import RenameObservations, ToBatch, ToDevice
from flexor.policies.processing.tokenize import Tokenize
from flexor.policies.vlm.paligemma_config import PaliGemmaConfig


@dataclass
class PiConfig(PaliGemmaConfig):
    """What pi0 and pi0.5 have."""

    unknown_to_lerobot: ClassVar[frozenset[str]] = frozenset({"load_vlm_weights", "tokenizer_name"})
    projections: ClassVar[tuple[str, ...]]
    """The layers around the expert."""

    tokenizer_name: str = "google/paligemma-3b-pt-224"
    """The tokenizer: a Hub repository or a folder with PaliGemma's."""
    num_inference_steps: int = 10
    """Integration steps at inference. Fewer steps are faster and less accurate."""
    time_sampling_beta_alpha: float = 1.5
    """Times in training are scale x b + offset, where b has a beta distribution: its alpha."""
    time_sampling_beta_beta: float = 1.0
    """The beta of that distribution."""
    time_sampling_scale: float = 0.999
    """The scale of times."""
    time_sampling_offset: float = 0.001
    """The offset of times: the earliest one."""
    min_period: float = 4e-3
    """Shortest period in the embedding of the time."""
    max_period: float = 4.0
    """Longest period in the embedding of the time."""
    freeze_vision_encoder: bool = False
    """Do not train the image encoder."""
    train_expert_only: bool = False
    """Train only the expert and the projections around it, not the vision-language model."""

    def validate(self) -> None:
        super().validate()
        self.require(1, "num_inference_steps")
        self.require(0, "time_sampling_scale", "time_sampling_offset")
        self.require(1e-6, "min_period", "max_period", "time_sampling_beta_alpha", "time_sampling_beta_beta")

    def tokenizer(self) -> Tokenize:
        return Tokenize(self.tokenizer_name, max_length=self.tokenizer_max_length)

    def lora_targets(self) -> list[str] | str:
        """Queries and values of the expert, and the layers around it."""
        return rf".*\.gemma_expert\..*\.self_attn\.(q|v)_proj|model\.({'|'.join(self.projections)})"


@dataclass
class Pi0Config(PiConfig):
    type: ClassVar[str] = "pi0"
    base: ClassVar[str] = "lerobot/pi0_base"
    projections: ClassVar[tuple[str, ...]] = (
        *("state_proj", "action_in_proj", "action_out_proj"),
        *("action_time_mlp_in", "action_time_mlp_out"),
    )

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        return [
            *(RenameObservations(), ToBatch()),
            *(AddNewLinePi0(), self.tokenizer()),
            *(ToDevice(), self.relative_actions(), self.normalizer(stats)),
        ]


@dataclass
class Pi05Config(PiConfig):
    """The state is a part of the prompt, which must be written after it is normalised."""

    type: ClassVar[str] = "pi05"
    base: ClassVar[str] = "lerobot/pi05_base"
    projections: ClassVar[tuple[str, ...]] = (
        *("action_in_proj", "action_out_proj"),
        *("time_mlp_in", "time_mlp_out"),  # which LeRobot 0.6.1 leaves out
    )

    only_in_lerobot: ClassVar[Mapping[str, LerobotSetting]] = {
        "use_visual_memory": LerobotSetting("pi05 has no memory of earlier images here", (False,)),
        "use_proprioceptive_memory": LerobotSetting("pi05 has no memory of earlier states here", (False,)),
        "memory_frames": LerobotSetting(),
        "memory_stride": LerobotSetting(),
        "memory_temporal_attention_every": LerobotSetting(),
        "rtc_training_max_delay": LerobotSetting(
            "Flexor does not train policies to continue a chunk, it guides them when they act",
            (0,),
            "The policy acts and is fine-tuned like one that was trained without",
        ),
    }
    normalization_mapping: dict[Kind, Normalization] = field(
        default_factory=lambda: {Kind.VISUAL: "IDENTITY", Kind.STATE: "QUANTILES", Kind.ACTION: "QUANTILES"}
    )
    tokenizer_max_length: int = 200
    """Maximum number of tokens of a prompt, which has the state in it. Shorter ones are padded."""

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        return [
            *(RenameObservations(), ToBatch()),
            *(self.relative_actions(), self.normalizer(stats)),
            *(StateInPrompt(max_state_dim=self.max_state_dim), self.tokenizer(), ToDevice()),
        ]
