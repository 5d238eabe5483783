"""The settings of pi0-FAST, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexor.core.errors import ConfigError
from flexor.policies.pi0_fast.action_tokens import TokenizeActions
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.prompt import StateInPromptFast
from flexor.policies.processing.rename_and_move import RenameObservations, ToBatch, ToDevice
from flexor.policies.processing.tokenize import Tokenize
from flexor.policies.vlm.paligemma_config import PaliGemmaConfig


@dataclass
class Pi0FastConfig(PaliGemmaConfig):
    """PaliGemma predicts actions as tokens, without an expert. Defaults are LeRobot's."""

    type: ClassVar[str] = "pi0_fast"
    base: ClassVar[str] = "lerobot/pi0fast-base"
    same_operations: ClassVar[bool] = False  # logits are computed in pieces of a fixed size

    max_action_tokens: int = 256
    """Maximum number of tokens of a chunk in training, with those around it; the rest is cut off."""
    tokenizer_max_length: int = 200
    """Maximum number of tokens of a prompt, which has the state in it. Shorter ones are padded."""
    text_tokenizer_name: str = "google/paligemma-3b-pt-224"
    """The tokenizer of prompts: a Hub repository or a folder with PaliGemma's."""
    action_tokenizer_name: str = "lerobot/fast-action-tokenizer"
    """The FAST tokenizer of actions: a Hub repository or a folder. Train one with `flexor data tokenizer`."""
    temperature: float = 0.0
    """At inference: 0 takes the most likely token; with a larger value, sampled tokens are more varied."""
    max_decoding_steps: int = 256
    """Maximum number of tokens decoded at inference."""
    fast_skip_tokens: int = 128
    """Tokens at the end of the vocabulary that do not stand for actions."""
    validate_action_token_prefix: bool = True
    """At inference, warn if the decoded tokens do not begin as in training."""
    use_kv_cache: bool = True
    """No effect: keys and values are always cached."""

    def validate(self) -> None:
        super().validate()
        self.require(1, "max_action_tokens", "max_decoding_steps")
        self.require(0, "fast_skip_tokens", "temperature")
        if self.max_action_tokens < 4:
            raise ConfigError(f"policy.max_action_tokens={self.max_action_tokens} must be at least 4.")

    def lora_targets(self) -> list[str] | str:
        return r".*\.language_model\..*\.self_attn\.(q|v)_proj"

    def tokenizer(self) -> Tokenize:
        return Tokenize(self.text_tokenizer_name, max_length=self.tokenizer_max_length)

    def steps_before(self, stats: Stats) -> list[ProcessingStep]:
        tokenize_actions = TokenizeActions(
            self.action_tokenizer_name,
            max_action_tokens=self.max_action_tokens,
            fast_skip_tokens=self.fast_skip_tokens,
            paligemma_tokenizer_name=self.text_tokenizer_name,
        )
        return [
            *(RenameObservations(), ToBatch()),
            *(self.relative_actions(), self.normalizer(stats)),
            *(StateInPromptFast(max_state_dim=self.max_state_dim), self.tokenizer()),
            *(tokenize_actions, ToDevice()),
        ]
