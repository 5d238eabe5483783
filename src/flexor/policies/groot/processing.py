"""Processing of GR00T's inputs and actions, in the steps that LeRobot's checkpoints name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from flexor.core.batch import ACTION, STATE, Batch
from flexor.core.errors import ConfigError, FlexorError
from flexor.policies.groot.modalities import Modalities, Range, dataset_range
from flexor.policies.groot.size import BACKBONE, N1_5
from flexor.policies.hf_transformers import fetch
from flexor.policies.processing.pipeline import ACTING, STEPS, ProcessingStep, StepContext, processing_step
from flexor.policies.processing.tokenize import FILES
from flexor.policies.vlm.qwen2_5_vl import IMAGE_END, IMAGE_PAD, IMAGE_START, image_text

PROMPT = "input_ids"  # [B, S]
PROMPT_MASK = "attention_mask"  # [B, S], False for padding
EMBODIMENT = "embodiment_id"  # [B]
LANGUAGE = "/language"  # from the first step to the second
DEFAULT_TASK = "Perform the task."
EMBODIMENTS = {
    "oxe_droid_relative_eef_relative_joint": 24,
    "xdof_relative_eef_relative_joint": 27,
    "xdof_relative_eef_relative_joint_subtask": 27,
    "real_g1_relative_eef_relative_joints": 25,
    "real_r1_pro_sharpa_relative_eef": 26,
    "real_r1_pro_sharpa_relative_eef_human": 26,
    "real_r1_pro_sharpa_relative_eef_maxinsights": 26,
    "real_r1_pro_sharpa_relative_eef_mecka": 26,
    "unitree_g1_full_body_with_waist_height_nav_cmd": 25,
    "simpler_env_google": 0,
    "simpler_env_widowx": 1,
    "libero_sim": 2,
    "new_embodiment": 10,
}
"""The numbers of embodiments in published base models."""
BEFORE_IMAGES, AFTER_TASK = "<|im_start|>user\n", "<|im_end|>\n"
ALIGNED = 16
"""Prompts are padded to a multiple of this many tokens, so that steps have the same shapes."""
MOST_TASK_TOKENS = 1000


def formalized(task: str) -> str:
    """In small letters, without punctuation."""
    return "".join(c for c in task.lower() if c.isalnum() or c.isspace() or c == "_")


class StatisticsStep(ProcessingStep):
    """A step that saves statistics of states and actions."""

    uses_images = False
    stats: dict[str, dict[str, Tensor]]

    def state(self) -> dict[str, Tensor]:
        return {
            f"{key}.{name}": value.cpu().contiguous()
            for key, values in self.stats.items()
            for name, value in values.items()
        }

    def load_state(self, state: dict[str, Tensor]) -> None:
        self.stats = {}
        for flat, value in state.items():
            key, name = flat.rsplit(".", 1)
            if key in (STATE, ACTION):
                self.stats.setdefault(key, {})[name] = value.float()

    def config(self) -> dict[str, Any]:
        return {name: value for name, value in super().config().items() if name not in ("stats", "connected")}


def as_statistics(stats: Any) -> dict[str, dict[str, Tensor]]:
    """Those of the state and the action, as tensors."""
    return {
        key: {name: torch.as_tensor(value).float() for name, value in stats[key].items() if name != "count"}
        for key in (STATE, ACTION)
        if key in stats
    }


@processing_step("groot_n1_7_pack_inputs_v1")
@dataclass
class PackInputs(StatisticsStep):
    """Scales states and actions to -1..1, and says what the task and the kind of robot is."""

    state_horizon: int = 1
    action_horizon: int = 40
    valid_action_horizon: int = 40
    video_horizon: int | None = None
    max_state_dim: int = 132
    max_action_dim: int = 132
    language_key: str = "task"
    formalize_language: bool = True
    embodiment_tag: str = "new_embodiment"
    embodiment_mapping: dict[str, int] = field(default_factory=lambda: dict(EMBODIMENTS))
    normalize_min_max: bool = True
    state_dropout_prob: float = 0.0
    clip_outliers: bool = True
    use_percentiles: bool = False
    video_modality_keys: list[str] | None = None
    raw_stats: dict[str, Any] | None = None
    modality_config: dict[str, Any] | None = None
    stats: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        out = dict(batch)
        raw_state = batch.get(STATE)
        if isinstance(raw_state, Tensor):
            out[STATE] = self._normalized_state(raw_state, context)
        if isinstance(batch.get(ACTION), Tensor):
            out[ACTION] = self._normalized_action(batch[ACTION], raw_state)
        like = next((v for v in batch.values() if isinstance(v, Tensor) and v.ndim), torch.zeros(1))
        number = self.embodiment_mapping.get(self.embodiment_tag, 0)
        out[EMBODIMENT] = torch.full((len(like),), number, device=like.device)
        out[LANGUAGE] = self._languages(batch.get(self.language_key), len(like))
        return out

    def _languages(self, tasks: Sequence[str] | str | None, count: int) -> list[str]:
        """A task for each sample: some robots are not told any."""
        listed = [tasks] if isinstance(tasks, str) else list(tasks or [DEFAULT_TASK])
        listed = listed * count if len(listed) == 1 else listed
        texts = [task or DEFAULT_TASK for task in listed]
        return [formalized(text) for text in texts] if self.formalize_language else texts

    def _normalized_state(self, state: Tensor, context: StepContext) -> Tensor:
        if self.normalize_min_max and STATE in self.stats:
            state = self._range(STATE, state.shape[-1]).normalize(state, self.clip_outliers)
        if context.training and self.state_dropout_prob and context.noise is not None:
            dropped = context.noise.uniform("state_dropout", (len(state),)) < self.state_dropout_prob
            state = torch.where(dropped.to(state.device)[:, None], 0.0, state)
        return state

    def _normalized_action(self, action: Tensor, state: Tensor | None) -> Tensor:
        chunk = action if action.ndim == 3 else action[:, None]
        if chunk.shape[1] > self.action_horizon:
            raise FlexorError(
                f"A chunk of {chunk.shape[1]} actions is longer than this GR00T's, which has {self.action_horizon}."
            )
        groups = self.modalities
        if groups is not None and groups.action_width == chunk.shape[-1]:
            if groups.has_relative and state is not None:
                chunk = groups.as_relative(chunk, state)
            chunk = groups.normalize(chunk, self.clip_outliers) if self.normalize_min_max else chunk
        elif groups is not None and groups.has_relative:
            raise ConfigError(
                f"{ACTION} has {chunk.shape[-1]} values, but the relative actions of {self.embodiment_tag} have "
                f"{groups.action_width}."
            )
        elif self.normalize_min_max and ACTION in self.stats:
            chunk = self._range(ACTION, chunk.shape[-1]).normalize(chunk, self.clip_outliers)
        return chunk if action.ndim == 3 else chunk[:, 0]

    def _range(self, key: str, width: int) -> Range:
        return dataset_range(self.stats[key], width)

    @cached_property
    def modalities(self) -> Modalities | None:
        if self.raw_stats is None or self.modality_config is None:
            return None
        return Modalities(self.raw_stats, self.modality_config, self.use_percentiles)


@processing_step("groot_n1_7_vlm_encode_v1")
@dataclass
class EncodePrompt(ProcessingStep):
    """Tokens of a prompt: images, then the task. Padding comes last. Images are resized by the policy, on its device,
    as these settings say."""

    model_name: str = BACKBONE
    image_crop_size: list[int] | None = None
    image_target_size: list[int] | None = None
    shortest_image_edge: int | None = None
    crop_fraction: float | None = None
    use_albumentations: bool = False
    letter_box_transform: bool = False
    device: str | None = None
    image_tokens: list[int] | None = None
    """The number of tokens of each image. Not saved: the policy says so, see `GrootConfig.adapted`."""
    vocabulary: int | None = None
    """Rows of the policy's embedding, to compare the tokenizer with. Not saved."""

    on_host = True
    uses_images = False
    _lock = Lock()  # tokenizers are not safe to share between threads

    def config(self) -> dict[str, Any]:
        hidden = ("image_tokens", "vocabulary")
        return {name: value for name, value in super().config().items() if name not in hidden}

    def to(self, device: str) -> None:
        self.device = device.partition(":")[0]

    @cached_property
    def _tokenizer(self) -> Any:
        tokenizer = fetch("AutoTokenizer", self.model_name, FILES)
        required = ("<|im_start|>", "<|im_end|>", IMAGE_START, IMAGE_PAD, IMAGE_END)
        numbers = tokenizer.convert_tokens_to_ids(list(required))
        missing = [t for t, number in zip(required, numbers) if number in (None, tokenizer.unk_token_id)]
        if missing:
            raise ConfigError(
                f"policy.processor_name={self.model_name}: its tokenizer has no {', '.join(missing)}. GR00T needs that "
                "of a Qwen3-VL."
            )
        if self.vocabulary is not None and max(numbers) >= self.vocabulary:
            raise ConfigError(
                f"policy.processor_name={self.model_name}: its tokenizer has at least {max(numbers) + 1} tokens, but "
                f"the model has embeddings of only {self.vocabulary}. Give a tokenizer that belongs to the model."
            )
        return tokenizer

    def prepare(self) -> None:
        _ = self._tokenizer

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        rest, tasks = self._taken_from(batch)
        before, after = self._surroundings
        encoded = {task: self._encode_task(task) for task in dict.fromkeys(tasks)}
        prompts = [before + encoded[task] + after for task in tasks]
        length = _aligned(max(map(len, prompts)))
        tokens = torch.tensor([prompt + [self._padding] * (length - len(prompt)) for prompt in prompts])
        counts = torch.tensor([len(prompt) for prompt in prompts])
        return {**rest, PROMPT: tokens, PROMPT_MASK: torch.arange(length) < counts[:, None]}

    def rehearse(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        rest, tasks = self._taken_from(batch)
        images = sum(count + 2 for count in self._image_tokens())
        shape = len(tasks), _aligned(images + ALIGNED)
        masks = torch.zeros(shape, dtype=torch.bool)
        return {**rest, PROMPT: torch.zeros(shape, dtype=torch.int64), PROMPT_MASK: masks}

    def _taken_from(self, batch: Batch) -> tuple[Batch, list[str]]:
        if LANGUAGE not in batch:
            raise FlexorError(f"{self.name} requires {PackInputs.name} before it.")
        return {key: value for key, value in batch.items() if key != LANGUAGE}, batch[LANGUAGE]

    def _image_tokens(self) -> list[int]:
        if self.image_tokens is None:
            raise FlexorError(f"{self.name} has no policy that says how many tokens its images have.")
        return self.image_tokens

    @cached_property
    def _surroundings(self) -> tuple[list[int], list[int]]:
        """Encoded once: they are the same in all batches."""
        images = "".join(image_text(count) for count in self._image_tokens())
        return self._encode(BEFORE_IMAGES + images), self._encode(AFTER_TASK)

    @cached_property
    def _padding(self) -> int:
        return int(self._tokenizer.pad_token_id or 0)

    def _encode_task(self, task: str) -> list[int]:
        """Between special tokens, a task's tokens do not depend on what is around it."""
        tokens = self._encode(task)
        if len(tokens) > MOST_TASK_TOKENS:
            raise FlexorError(
                f"The task {task[:80]!r} ... has {len(tokens)} tokens, and GR00T reads at most {MOST_TASK_TOKENS}: "
                "shorten it."
            )
        if IMAGE_PAD in task:
            raise FlexorError(
                f"The task {task[:80]!r} has {IMAGE_PAD} in it, which stands for images: leave it out."
            )
        return tokens

    def _encode(self, text: str) -> list[int]:
        with self._lock:
            tokens: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tokens


def _aligned(tokens: int) -> int:
    return -(-tokens // ALIGNED) * ALIGNED


@processing_step("groot_action_unpack_unnormalize_v2")
@dataclass
class UnpackActions(StatisticsStep):
    """Predicted actions in the robot's units, by the range of the dataset."""

    env_action_dim: int = 0
    normalize_min_max: bool = True
    clip_normalized_action: bool = False
    libero_gripper_action: bool = False
    libero_gripper_binarize: bool = True
    stats: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        action = batch[ACTION]
        if self.env_action_dim and action.shape[-1] >= self.env_action_dim:
            action = action[..., : self.env_action_dim]
        if self.normalize_min_max and self.stats:
            bounds = dataset_range(self.stats.get(ACTION, {}), action.shape[-1])
            action = bounds.restore(action, self.clip_normalized_action)
        if self.libero_gripper_action and action.shape[-1] >= 7:
            gripper = 2 * action[..., -1:] - 1
            opened = -gripper.sign() if self.libero_gripper_binarize else -gripper
            action = torch.cat((action[..., :-1], opened), -1)
        return {**batch, ACTION: action}


@processing_step("groot_n1_7_action_decode_v1")
@dataclass
class DecodeActions(ProcessingStep):
    """Predicted actions in the robot's units, group by group, by the statistics of the base model."""

    uses_images = False
    env_action_dim: int = 0
    raw_stats: dict[str, Any] | None = None
    modality_config: dict[str, Any] | None = None
    use_percentiles: bool = False
    use_relative_action: bool = False
    action_decode_transform: str | None = None

    def __call__(self, batch: Batch, context: StepContext = ACTING) -> Batch:
        groups = self.modalities
        if groups is None or not groups.actions:
            return batch
        action = batch[ACTION]
        chunk = action[:, None] if action.ndim == 2 else action[:, : groups.steps]
        decoded = groups.restore(chunk)
        if self.use_relative_action:
            decoded = groups.as_absolute(decoded, _last(context.observation.get(STATE)))
        if self.action_decode_transform == "libero":
            decoded = self._with_libero_gripper(groups, decoded)
        if self.env_action_dim:
            decoded = decoded[..., : self.env_action_dim]
        return {**batch, ACTION: decoded[:, 0] if action.ndim == 2 else decoded}

    def _with_libero_gripper(self, groups: Modalities, action: Tensor) -> Tensor:
        place = next((group.place for group in groups.actions if group.key == "gripper"), None)
        if place is None or place.stop - place.start != 1:
            raise ConfigError(
                "policy.action_decode_transform=libero needs an action group named gripper with one value. Set "
                "--policy.action_decode_transform=none."
            )
        opened = -(2 * action[..., place] - 1).sign()
        return torch.cat((action[..., : place.start], opened, action[..., place.stop :]), -1)

    @cached_property
    def modalities(self) -> Modalities | None:
        if self.raw_stats is None or self.modality_config is None:
            return None
        settings = self.use_percentiles, self.use_relative_action
        return Modalities(self.raw_stats, self.modality_config, *settings)


def _last(state: Tensor | None) -> Tensor | None:
    """Of several time steps the last is now."""
    return state[:, -1] if state is not None and state.ndim == 3 else state


class RemovedStep(ProcessingStep):
    """A step of GR00T N1.5."""

    @classmethod
    def from_config(cls, settings: dict[str, Any]) -> ProcessingStep:
        raise ConfigError(f"it is of a GR00T N1.5. {N1_5}")


for _name in ("groot_pack_inputs_v3", "groot_eagle_encode_v3", "groot_eagle_collate_v3"):
    STEPS[_name] = RemovedStep
STEPS["groot_action_unpack_unnormalize_v1"] = RemovedStep
