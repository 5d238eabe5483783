"""The settings of pi0-FAST, under LeRobot's names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flexor.core.errors import ConfigError
from flexor.policies.pi0.config import PaliGemmaConfig
from flexor.policies.pi0_fast.action_tokens import ActionWords, TokenizeActions
from flexor.policies.processing.pipeline import ProcessingStep, Stats
from flexor.policies.processing.prompt import StateInPromptFast
from flexor.policies.processing.rename_and_move import RenameObservations, ToBatch, ToDevice
from flexor.policies.processing.tokenize import Tokenize


@dataclass
class Pi0FastConfig(PaliGemmaConfig):
    """PaliGemma alone, which writes actions as tokens. Defaults are LeRobot's."""

    type: ClassVar[str] = "pi0_fast"
    base: ClassVar[str] = "lerobot/pi0fast-base"
    same_operations: ClassVar[bool] = False  # logits are computed in pieces of a fixed size

    max_action_tokens: int = 256
    """Maximum number of tokens that a chunk is learnt as, with those around it; the rest is cut off."""
    tokenizer_max_length: int = 200
    """Maximum number of tokens of a prompt, which has the state in it. Shorter ones are padded."""
    text_tokenizer_name: str = "google/paligemma-3b-pt-224"
    """The tokenizer of prompts: a Hub repository or a folder with PaliGemma's."""
    action_tokenizer_name: str = "lerobot/fast-action-tokenizer"
    """The FAST tokenizer of actions: a Hub repository or a folder. Train one with `flexor data tokenizer`."""
    temperature: float = 0.0
    """At inference: 0 takes the most likely token; larger values draw tokens, the larger the more varied."""
    max_decoding_steps: int = 256
    """Maximum number of tokens written at inference."""
    fast_skip_tokens: int = 128
    """Tokens at the end of the vocabulary that do not stand for actions."""
    validate_action_token_prefix: bool = True
    """At inference, warn if the written tokens do not begin as those that were learnt."""
    use_kv_cache: bool = True
    """LeRobot's choice to keep the keys and values of what was read. Flexor always does."""

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

    def action_words(self) -> ActionWords:
        return ActionWords.load(self.text_tokenizer_name, self.fast_skip_tokens)

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
