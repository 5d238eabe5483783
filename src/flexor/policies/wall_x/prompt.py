"""The prompt of WALL-X: images by the names of their cameras, the task, and a token for the state.

    <|im_start|>system ... <|im_end|>
    <|im_start|>user Observation: front view: IMAGE ... Instruction: TASK ... Proprioception: <|propri|> <|im_end|>
    <|im_start|>assistant <|action|><|action|>...

Only the task differs between samples. Padding comes first, so that actions have the same places in all of them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple

import torch

from flexor.core.batch import STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.policies.hf_transformers import fetch
from flexor.policies.processing.pipeline import ACTING, ProcessingStep, StepContext, processing_step
from flexor.policies.processing.tokenize import FILES, tasks_of
from flexor.policies.vlm.qwen2_5_vl import IMAGE_END, IMAGE_PAD, IMAGE_START, image_text
from flexor.policies.wall_x.images import grid_of

PROMPT = "input_ids"  # [B, S]
PROMPT_MASK = "attention_mask"  # [B, S], False for padding and for images that a sample lacks
STATE_MASK = "state_token_mask"  # [B, P], True for the token that stands for the state

ACTION, PROPRI = "<|action|>", "<|propri|>"
BEFORE_IMAGES = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nObservation:"
AFTER_STATE = "\n<|im_end|>\n<|im_start|>assistant\n"
NO_TASK = "Execute the robot action."
CAMERA_NAMES = {
    "face_view": "front view",
    "move1_view": "move view",
    "move2_view": "move view",
}
"""Names in prompts of cameras that are called otherwise in datasets."""
WORDS, WORDS_OF_CAMERA = 41, 4
"""Tokens of Qwen's tokenizer besides images, the task and actions, and of a camera's name."""
TASK_TOKENS = 32
"""Tasks are padded to a multiple of this, so that steps have the same shapes."""
ALIGNED = 16
"""So is a prompt as a whole: masks of attention and matrix products of other lengths are slower."""
MOST_TOKENS = 768
"""LeRobot cuts off what is longer, actions included."""
POINT = re.compile(r"<point>(.*?)</point>")

ImageSizes = tuple[tuple[str, tuple[int, int]], ...]
"""Height and width by camera."""


@processing_step("wall_x_task_processor")
@dataclass
class WallXTask(ProcessingStep):
    """Tasks as sentences: each ends with a full stop."""

    on_host = True
    uses_images = False

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        tasks = batch.get("task")
        if tasks is None:
            return {**batch, "task": [NO_TASK] * len(batch[STATE])}
        return {**batch, "task": [task if task.endswith(".") else f"{task}." for task in tasks]}


def camera_name(camera: str) -> str:
    """How a prompt calls a camera."""
    name = camera.removeprefix("observation.images.")
    if name in CAMERA_NAMES:
        return CAMERA_NAMES[name]
    return name.replace("_", " ") if "view" in name else f"{name} view"


def scale_points(task: str, height: int, width: int) -> str:
    """Points and boxes of an image's pixels, <point>[x, y]</point>, in the pixels of the prepared image."""
    new_height, new_width = grid_of(height, width).size

    def scaled(match: re.Match[str]) -> str:
        numbers = [int(number) for number in re.findall(r"\d+", match.group(1))]
        if len(numbers) in (2, 4):
            sizes = ((width, new_width), (height, new_height)) * (len(numbers) // 2)
            numbers = [
                max(0, min(round(number * (new / old)), new - 1))
                for number, (old, new) in zip(numbers, sizes)
            ]
        return f"<point>[{', '.join(map(str, numbers))}]</point>"

    return POINT.sub(scaled, task)


class ImageTokens(NamedTuple):
    """The tokens of a prompt up to the last image, and where each camera's are."""

    tokens: list[int]
    places: dict[str, slice]


class Prompts(NamedTuple):
    """Prompts of a batch, padded at their beginning."""

    tokens: torch.Tensor  # [B, S]
    place: torch.Tensor  # [B, S], of each token in the prompt, negative for padding


@dataclass
class TokenizePrompt(ProcessingStep):
    """Prompts as tokens. LeRobot writes them in its training step, so a checkpoint does not name this one."""

    tokenizer_name: str
    image_sizes: Mapping[str, tuple[int, int]]  # height and width by camera
    actions: int
    """How many tokens stand for actions."""
    vocabulary: int | None = None
    """Rows of the policy's embedding, to compare the tokenizer with."""
    _encoded: dict[ImageSizes, ImageTokens] = field(default_factory=dict, repr=False)

    name = "wall_x_prompt"
    saved = False
    on_host = True
    uses_images = False
    _lock = Lock()  # tokenizers are not safe to share between threads

    @cached_property
    def tokenizer(self) -> Any:
        tokenizer = fetch("AutoTokenizer", self.tokenizer_name, FILES)
        required = (ACTION, PROPRI, "<|im_start|>", "<|im_end|>", IMAGE_START, IMAGE_PAD, IMAGE_END)
        numbers = tokenizer.convert_tokens_to_ids(list(required))
        missing = [
            token for token, number in zip(required, numbers) if number in (None, tokenizer.unk_token_id)
        ]
        if missing:
            raise ConfigError(
                f"The tokenizer of {self.tokenizer_name} has no {', '.join(missing)}, which WALL-X requires. Use that "
                "of a WALL-X: a Qwen2.5-VL's has no tokens for states and actions."
            )
        if self.vocabulary is not None and len(tokenizer) > self.vocabulary:
            raise ConfigError(
                f"The tokenizer of {self.tokenizer_name} has {len(tokenizer)} tokens, but the model has embeddings of "
                f"only {self.vocabulary}. Give a tokenizer and a model that belong together."
            )
        return tokenizer

    def prepare(self) -> None:
        _ = self.tokenizer

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        images = self._images()
        prompts = [images.tokens + task for task in self.encode_tasks(tasks_of(batch, "task"))]
        tokens, place = self.padded(prompts)
        mask = self.visible(batch, place, images)
        state = tokens[:, : tokens.shape[1] - self.actions] == self.number(PROPRI)
        return {**batch, PROMPT: tokens, PROMPT_MASK: mask, STATE_MASK: state}

    def encode_tasks(self, tasks: Sequence[str]) -> list[list[int]]:
        """What follows the images in each prompt, but for the actions."""
        encoded = {task: self._encode_task(task) for task in dict.fromkeys(tasks)}
        return [encoded[task] for task in tasks]

    def padded(self, prompts: Sequence[list[int]]) -> Prompts:
        """Prompts with tokens for actions at their end."""
        constant = len(self._images().tokens) + self._words_around_task + self.actions
        length = padded_length(constant, max(map(len, prompts)) + self.actions - constant)
        actions = [self.number(ACTION)] * self.actions
        rows = [[0] * (length - len(prompt) - len(actions)) + prompt + actions for prompt in prompts]
        starts = length - len(actions) - torch.tensor([len(prompt) for prompt in prompts])
        return Prompts(torch.tensor(rows), torch.arange(length) - starts[:, None])

    def visible(self, batch: Batch, place: torch.Tensor, images: ImageTokens) -> torch.Tensor:
        """Which tokens are not padding, nor of an image that a sample lacks."""
        mask = place >= 0
        for camera, places in images.places.items():
            if f"{camera}_padding_mask" in batch:
                missing = ~batch[f"{camera}_padding_mask"].bool()[:, None]
                mask &= ~(missing & (place >= places.start) & (place < places.stop))
        return mask

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        images = sum(grid_of(*size).tokens + 2 for size in self.image_sizes.values())
        names = WORDS_OF_CAMERA * len(self.image_sizes)
        count = len(tasks_of(batch, "task"))
        length = padded_length(WORDS + names + images + self.actions, 1)
        prompt = torch.zeros(count, length, dtype=torch.int64)
        mask = torch.zeros(count, length, dtype=torch.bool)
        return {**batch, PROMPT: prompt, PROMPT_MASK: mask, STATE_MASK: mask[:, : length - self.actions]}

    @cached_property
    def _words_around_task(self) -> int:
        return len(self._encode_task(""))

    def _images(self) -> ImageTokens:
        """Encoded once: they are the same in all batches."""
        sizes = tuple(self.image_sizes.items())
        if sizes not in self._encoded:
            self._encoded[sizes] = self._encode_images(sizes)
        return self._encoded[sizes]

    def _encode_images(self, sizes: ImageSizes) -> ImageTokens:
        counts = {camera: grid_of(*size).tokens for camera, size in sizes}
        images = "".join(f" {camera_name(camera)}: {image_text(count)}" for camera, count in counts.items())
        tokens = self.encode(BEFORE_IMAGES + images)
        start = self.number(IMAGE_START)
        starts = [place for place, token in enumerate(tokens) if token == start]
        return ImageTokens(
            tokens,
            {
                camera: slice(place, place + count + 2)
                for place, (camera, count) in zip(starts, counts.items(), strict=True)
            },
        )

    def _encode_task(self, task: str) -> list[int]:
        """Its tokens depend on the words around it, which are encoded with it."""
        text = scale_points(task, *list(self.image_sizes.values())[-1])
        tokens = self.encode(
            f"\nInstruction: {text}\nPredict the next action in robot action.\nProprioception: {PROPRI}{AFTER_STATE}"
        )
        for placeholder, expected in ((IMAGE_PAD, 0), (ACTION, 0), (PROPRI, 1)):
            if tokens.count(self.number(placeholder)) != expected:
                raise FlexorError(
                    f"The task {task[:80]!r} has {placeholder} in it, where WALL-X expects an image, the state or an "
                    "action: leave it out."
                )
        total = len(self._images().tokens) + len(tokens) + self.actions
        if total > MOST_TOKENS:
            raise FlexorError(
                f"The prompt with the task {task[:80]!r} ... has {total} tokens, of which "
                f"{len(self._images().tokens)} are for images and {self.actions} for actions, and WALL-X reads at "
                f"most {MOST_TOKENS}. Use a shorter task, fewer cameras, or a smaller policy.chunk_size."
            )
        return tokens

    def encode(self, text: str) -> list[int]:
        with self._lock:
            tokens: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens

    def number(self, token: str) -> int:
        number: int = self.tokenizer.convert_tokens_to_ids(token)
        return number


def padded_length(constant: int, task: int) -> int:
    """Tokens of a padded prompt: those that all prompts have, and those of the longest task."""
    tokens = constant + math.ceil(max(1, task) / TASK_TOKENS) * TASK_TOKENS
    return math.ceil(tokens / ALIGNED) * ALIGNED
