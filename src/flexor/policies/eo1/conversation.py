"""The prompt of EO-1: a conversation in which images, the state and actions have tokens of their own.

    <|im_start|>system ... <|im_end|>
    <|im_start|>user IMAGE ... <|state_start|><|state_pad|><|state_end|>TASK<|vla|><|im_end|>
    <|im_start|>assistant <|action_start|><|action_pad|>...

What follows the actions is left out: it comes later, so nothing that is computed attends to it. Only the task differs
between samples. Padding comes first, so that actions have the same places in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from threading import Lock
from typing import Any, NamedTuple

import torch

from flexor.core.batch import Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.hf_transformers import fetch
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step
from flexor.policies.processing.tokenize import FILES, tasks_of
from flexor.policies.vlm.qwen2_5_images import FACTOR, MAX_PIXELS, MIN_PIXELS, choose_grid
from flexor.policies.vlm.qwen2_5_vl import IMAGE_END, IMAGE_PAD, IMAGE_START, image_text

PROMPT = "input_ids"  # [B, S]
PROMPT_MASK = "attention_mask"  # [B, S], False for padding and for images that a sample lacks
STATE_MASK = "state_token_mask"  # [B, S], True for the token that stands for the state
CONVERSATION = "/conversation"  # from the first step to the second

SYSTEM = "You are a helpful physical assistant."
ACTION_START, ACTION_PAD, ACTION_END = "<|action_start|>", "<|action_pad|>", "<|action_end|>"
STATE_START, STATE_PAD, STATE_END = "<|state_start|>", "<|state_pad|>", "<|state_end|>"
VLA = "<|vla|>"
ADDED = (ACTION_START, ACTION_PAD, ACTION_END, STATE_START, STATE_PAD, STATE_END, VLA)
"""Tokens that EO-1 adds to the tokenizer, in this order: their numbers are rows of the embedding."""
BEFORE_IMAGES = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\n"
AFTER_TASK = f"{VLA}<|im_end|>\n<|im_start|>assistant\n{ACTION_START}"
WORDS = 25
"""Tokens of Qwen's tokenizer besides images, the task and actions."""
TASK_TOKENS = 32
"""Tasks are padded to a multiple of this, so that steps have the same shapes."""
ALIGNED = 16
"""So is a prompt as a whole: masks of attention and matrix products of other lengths are slower."""
MOST_TASK_TOKENS = 1000


ImageSizes = tuple[tuple[str, tuple[int, int]], ...]
"""Height and width by camera."""


class Conversation(NamedTuple):
    tasks: Sequence[str]
    image_sizes: Mapping[str, tuple[int, int]]  # height and width by camera
    chunk: int


@processing_step("eo1_conversation_template_processor")
@dataclass
class ConversationTemplate(ProcessingStep):
    """What a conversation is about. LeRobot writes it as messages; here the next step writes it as tokens at once."""

    input_features: dict[str, PolicyFeature]
    chunk_size: int

    on_host = True
    uses_images = False

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        sizes = {
            name: (feature.shape[1], feature.shape[2])
            for name, feature in self.input_features.items()
            if feature.type is Kind.VISUAL
        }
        return {**batch, CONVERSATION: Conversation(tasks_of(batch, "task"), sizes, self.chunk_size)}

    def config(self) -> dict[str, Any]:
        features = {
            name: {"type": feature.type.value, "shape": list(feature.shape)}
            for name, feature in self.input_features.items()
        }
        return {"input_features": features, "chunk_size": self.chunk_size}


class Surroundings(NamedTuple):
    """The tokens around a task, and where each camera's are."""

    before: list[int]
    images: dict[str, slice]
    state: int
    after: list[int]


@processing_step("eo1_qwen_processor")
@dataclass
class TokenizeConversation(ProcessingStep):
    """Conversations as tokens, which masks tell apart. Images are resized by the policy, on its device."""

    processor_name: str = "Qwen/Qwen2.5-VL-3B-Instruct"
    image_min_pixels: int | None = 64 * FACTOR**2
    image_max_pixels: int | None = 128 * FACTOR**2
    use_fast_processor: bool = False
    vocabulary: int | None = None
    """Rows of the policy's embedding, to compare the tokenizer with. Not saved."""

    on_host = True
    uses_images = False
    _lock = Lock()  # tokenizers are not safe to share between threads

    @classmethod
    def from_config(cls, settings: dict[str, Any]) -> ProcessingStep:
        """Without settings of releases after 0.6.1: prompts are not cut off here."""
        later = ("tokenizer_max_length", "truncation")
        return super().from_config({name: value for name, value in settings.items() if name not in later})

    def config(self) -> dict[str, Any]:
        names = ("processor_name", "image_min_pixels", "image_max_pixels", "use_fast_processor")
        return {name: getattr(self, name) for name in names}

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = fetch("AutoTokenizer", self.processor_name, FILES)
        tokenizer.add_tokens(list(ADDED), special_tokens=True)
        required = (*ADDED, "<|im_start|>", "<|im_end|>", IMAGE_START, IMAGE_PAD, IMAGE_END)
        numbers = tokenizer.convert_tokens_to_ids(list(required))
        missing = [
            token for token, number in zip(required, numbers) if number in (None, tokenizer.unk_token_id)
        ]
        if missing:
            raise ConfigError(
                f"policy.vlm_base={self.processor_name}: its tokenizer has no {', '.join(missing)}. EO-1 requires that "
                "of a Qwen2.5-VL."
            )
        if self.vocabulary is not None and max(numbers) >= self.vocabulary:
            raise ConfigError(
                f"policy.vlm_base={self.processor_name}: with EO-1's own tokens, its tokenizer has {max(numbers) + 1} "
                f"tokens, but the model has embeddings of only {self.vocabulary}. Give a tokenizer and a model that "
                "belong together."
            )
        return tokenizer

    def prepare(self) -> None:
        _ = self._tokenizer

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        rest, conversation = self._taken_from(batch)
        tasks = {task: self._encode_task(task) for task in dict.fromkeys(conversation.tasks)}
        surroundings = self._surroundings(tuple(conversation.image_sizes.items()))
        after = surroundings.after + [self._number(ACTION_PAD)] * conversation.chunk
        length = _padded_length(len(surroundings.before) + len(after), max(map(len, tasks.values())))
        prompts = [surroundings.before + tasks[task] + after for task in conversation.tasks]
        tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts])
        starts = length - torch.tensor([len(prompt) for prompt in prompts])[:, None]
        place = torch.arange(length) - starts  # in the prompt; negative for padding
        mask = place >= 0
        for camera, places in surroundings.images.items():
            if f"{camera}_padding_mask" in rest:
                missing = ~rest[f"{camera}_padding_mask"].bool()[:, None]
                mask &= ~(missing & (place >= places.start) & (place < places.stop))
        return {**rest, PROMPT: tokens, PROMPT_MASK: mask, STATE_MASK: place == surroundings.state}

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        rest, conversation = self._taken_from(batch)
        images = sum(self._image_tokens(size) for size in conversation.image_sizes.values())
        shape = len(conversation.tasks), _padded_length(WORDS + images + conversation.chunk, 1)
        masks = {name: torch.zeros(shape, dtype=torch.bool) for name in (PROMPT_MASK, STATE_MASK)}
        return {**rest, PROMPT: torch.zeros(shape, dtype=torch.int64), **masks}

    def _taken_from(self, batch: Batch) -> tuple[Batch, Conversation]:
        if CONVERSATION not in batch:
            raise FlexorError(f"{self.name} requires {ConversationTemplate.name} before it.")
        return {key: value for key, value in batch.items() if key != CONVERSATION}, batch[CONVERSATION]

    def _image_tokens(self, size: tuple[int, int]) -> int:
        """With the tokens around the image."""
        low, high = self.image_min_pixels, self.image_max_pixels
        grid = choose_grid(*size, MIN_PIXELS if low is None else low, MAX_PIXELS if high is None else high)
        return grid.tokens + 2

    @cached_property
    def _surroundings(self) -> Callable[[ImageSizes], Surroundings]:
        return lru_cache(maxsize=8)(self._encode_surroundings)

    def _encode_surroundings(self, image_sizes: ImageSizes) -> Surroundings:
        before = self._encode(BEFORE_IMAGES)
        images = {}
        for camera, size in image_sizes:
            tokens = self._encode(image_text(self._image_tokens(size) - 2))
            images[camera] = slice(len(before), len(before) + len(tokens))
            before = before + tokens
        before = before + self._encode(f"{STATE_START}{STATE_PAD}{STATE_END}")
        return Surroundings(before, images, len(before) - 2, self._encode(AFTER_TASK))

    def _encode_task(self, task: str) -> list[int]:
        """Between special tokens, a task's tokens do not depend on what is around it."""
        tokens = self._encode(task)
        if len(tokens) > MOST_TASK_TOKENS:
            raise FlexorError(
                f"The task {task[:80]!r} ... has {len(tokens)} tokens, and EO-1 reads at most {MOST_TASK_TOKENS}: "
                "shorten it."
            )
        for placeholder in (IMAGE_PAD, STATE_PAD, ACTION_PAD):
            if self._number(placeholder) in tokens:
                raise FlexorError(
                    f"The task {task[:80]!r} has {placeholder} in it, where EO-1 expects an image, the state or an "
                    "action: leave it out."
                )
        return tokens

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def _number(self, token: str) -> int:
        number: int = self._tokenizer.convert_tokens_to_ids(token)
        return number


def _padded_length(constant: int, task: int) -> int:
    """Tokens of a padded prompt: those that all prompts have, and those of the longest task."""
    tokens = constant + math.ceil(max(1, task) / TASK_TOKENS) * TASK_TOKENS
    return math.ceil(tokens / ALIGNED) * ALIGNED
