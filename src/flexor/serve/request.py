"""A client's message -> what a policy is asked. What does not fit is refused, with how to fix it.

Nobody knows who sends a message. So an input is compared with what the policy takes before anything is made of it, and
NumPy is never left to guess what a list holds. Compressed images are decoded last, elsewhere: `CheckedRequest.files`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexor.serve.form import Input, ObservationForm
from flexor.serve.limits import BadRequest, Budget, RequestLimits
from flexor.serve.options import LONGEST_NAME, RequestOptions, kind_of
from flexor_client.errors import WireError
from flexor_client.jpeg import JpegFile, open_jpeg
from flexor_client.wire import OPTIONS

TASK_KEYS = ("prompt", "task")
LONGEST_TASK = 4096
NUMBERS = (bool, int, float, np.number, np.bool_)

Image = np.ndarray | JpegFile


@dataclass(frozen=True)
class PolicyRequest:
    """What a message asks for."""

    observation: dict[str, np.ndarray]
    """Images as uint8 [C, H, W], states as float32; with `stacked`, [T, ...]."""
    stacked: bool
    task: str
    options: RequestOptions | None


@dataclass(frozen=True)
class CheckedRequest:
    """A message that fits the policy. Only its compressed images are still to be decoded."""

    values: dict[str, Image | list[Image]]
    """A list: the images of a history."""
    stacked: bool
    task: str
    options: RequestOptions | None

    def files(self) -> list[JpegFile]:
        values = [
            image
            for value in self.values.values()
            for image in (value if isinstance(value, list) else [value])
        ]
        return [value for value in values if isinstance(value, JpegFile)]

    def request(self, images: Mapping[JpegFile, np.ndarray]) -> PolicyRequest:
        """With the images of its files, uint8 [H, W, 3] each."""

        def decoded(value: Image) -> np.ndarray:
            return images[value].transpose(2, 0, 1) if isinstance(value, JpegFile) else value

        observation = {
            name: np.stack([*map(decoded, value)]) if isinstance(value, list) else decoded(value)
            for name, value in self.values.items()
        }
        return PolicyRequest(observation, self.stacked, self.task, self.options)

    def too_late(self) -> PolicyRequest:
        """Without its observation, of which nothing will be predicted any more."""
        return PolicyRequest({}, self.stacked, self.task, self.options)


class ObservationReader:
    """Reads observations for a policy, under the names that a client uses."""

    def __init__(self, form: ObservationForm, limits: RequestLimits):
        self.form, self.inputs, self.limits = form, form.inputs, limits

    def check(self, message: Any) -> CheckedRequest:
        """What a message asks for; BadRequest if it does not fit."""
        if not isinstance(message, dict):
            raise BadRequest(f"An observation must be a map of names to values, not {kind_of(message)}.")
        options = RequestOptions.read(message.get(OPTIONS), self.form.action_size, self.form.horizon)
        task, budget = _task(message), Budget(self.limits)
        values: dict[str, Image | list[Image]] = {}
        for name, form in self.inputs.items():
            value = self._find(message, name)
            if value is not None:
                read = self._images if form.image else self._numbers
                values[name] = read(value, form, budget)
            elif not form.optional:
                raise BadRequest(self._missing(name, message))
        cameras = [name for name, form in self.inputs.items() if form.image]
        if cameras and values.keys().isdisjoint(cameras):
            raise BadRequest(self._missing(cameras[0], message))
        return CheckedRequest(values, self._stacked(values), task, options)

    def _find(self, message: Mapping[Any, Any], name: str) -> Any:
        value = _find(message, self.inputs[name].name)
        return message.get(name) if value is None and self.inputs[name].policy_name_too else value

    def _missing(self, name: str, message: dict[Any, Any]) -> str:
        names = sorted(str(key[:LONGEST_NAME]) for key in message if key != OPTIONS)[:20]
        return (
            f"The policy needs {self.inputs[name].name}, but the observation has only {', '.join(names) or 'nothing'}. "
            f"Send it under this name, or start the server with --map {name}=NAME."
        )

    def _images(self, value: Any, form: Input, budget: Budget) -> Image | list[Image]:
        """Arrays uint8 [C, H, W] and files; an array of several is [T, C, H, W]."""
        if not isinstance(value, list):
            return self._image(value, form, budget)
        if len(value) != self.form.history_length:  # said before anything is looked at
            raise BadRequest(
                f"{form.name} is a list of {len(value)} values, but the policy sees {self.form.history_length}."
            )
        budget.take(form.name, len(value) * form.bytes)  # they are stacked
        images = [self._image(image, form, budget) for image in value]
        if any(isinstance(image, np.ndarray) and image.ndim != 3 for image in images):
            raise BadRequest(f"{form.name} is a list of several images each: send a list of single ones.")
        return images

    def _image(self, value: Any, form: Input, budget: Budget) -> Image:
        channels, height, width = form.shape
        if isinstance(value, bytes):
            return _file(value, form, budget)
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else kind_of(value)
            raise BadRequest(
                f"{form.name} must be an image, as a uint8 array or a JPEG file in bytes, not {got}."
            )
        if value.shape[-3:] == (height, width, channels) and value.ndim in (3, 4):
            value = np.moveaxis(value, -1, -3)
        if value.shape[-3:] != form.shape or value.ndim not in (3, 4):
            raise BadRequest(_other_size(form, list(value.shape)))
        self._check_history(form, value.shape)
        return value

    def _numbers(self, value: Any, form: Input, budget: Budget) -> np.ndarray:
        """A float32 array of the policy's shape, or of as many as there are in its history."""
        if not isinstance(value, (np.ndarray, list)):
            raise BadRequest(f"{form.name} must be numbers, not {kind_of(value)}.")
        shape = _shape(value)
        if shape != form.shape and shape[1:] != form.shape:
            raise BadRequest(
                f"{form.name} is {list(shape)}, but the policy was trained on {list(form.shape)}."
            )
        self._check_history(form, shape)
        budget.take(form.name, (1 if shape == form.shape else len(value)) * form.bytes)
        array = np.empty(shape, np.float32)
        try:
            with np.errstate(over="ignore"):
                _fill(array, value, form.name)
        except OverflowError as error:  # an integer that no float can hold
            raise BadRequest(f"{form.name}: {error}.") from error
        if not np.isfinite(array).all():
            raise BadRequest(f"{form.name} has values that are not finite: nan or infinity.")
        return array

    def _check_history(self, form: Input, shape: tuple[int, ...]) -> None:
        """Refuse an array of several values where the policy sees another number of them."""
        steps = self.form.steps
        if len(shape) > len(form.shape) and (steps is None or shape[0] != len(steps)):
            raise BadRequest(self._wrong_history(form, str(list(shape))))

    def _wrong_history(self, form: Input, size: str) -> str:
        steps = self.form.steps
        if steps is None:
            return f"{form.name} is {size}: the policy sees one observation, without a history."
        return (
            f"{form.name} is {size}: with a history, every input must have {len(steps)} entries, those of the steps "
            f"{steps}."
        )

    def _stacked(self, values: Mapping[str, Image | list[Image]]) -> bool:
        """Whether the message brings its own history. All values must, or none."""
        several = {name: self._is_history(name, value) for name, value in values.items()}
        if any(several.values()) and (self.form.steps is None or not all(several.values())):
            names = [
                name for name, is_history in several.items() if not is_history or self.form.steps is None
            ]
            size = "one value" if self.form.steps else "a list"
            raise BadRequest(self._wrong_history(self.inputs[names[0]], size))
        return any(several.values())

    def _is_history(self, name: str, value: Image | list[Image]) -> bool:
        return isinstance(value, list) or (
            isinstance(value, np.ndarray) and value.ndim > len(self.inputs[name].shape)
        )


def _task(message: Mapping[Any, Any]) -> str:
    task = next((message[key] for key in TASK_KEYS if key in message), "")
    if not isinstance(task, str) or len(task) > LONGEST_TASK:
        raise BadRequest(f"`prompt` must be text of at most {LONGEST_TASK} characters.")
    return task


def _file(data: bytes, form: Input, budget: Budget) -> JpegFile:
    """A compressed image. Its size is compared before it is decoded: it may be huge."""
    try:
        file = open_jpeg(data)
    except WireError as error:
        raise BadRequest(f"{form.name}: {error}") from error
    if (3, file.height, file.width) != form.shape:
        raise BadRequest(_other_size(form, [file.height, file.width, 3]))
    budget.take(form.name, form.bytes)
    return file


def _other_size(form: Input, size: list[int]) -> str:
    channels, height, width = form.shape
    return (
        f"{form.name} is {size}, but the policy was trained on images {[height, width, channels]}: resize it before "
        "you send it."
    )


def _shape(value: Any) -> tuple[int, ...]:
    """Of nested lists and arrays, judged by their first entries."""
    if isinstance(value, np.ndarray):
        return value.shape
    return (len(value), *(_shape(value[0]) if value else ())) if isinstance(value, list) else ()


def _fill(array: np.ndarray, value: Any, name: str) -> None:
    """Copy numbers in lists and arrays into an array. They must have its shape, and be numbers."""
    fits = isinstance(value, list) and len(value) == len(array)
    if isinstance(value, np.ndarray) and value.shape == array.shape and value.dtype.kind in "fiub":
        array[...] = value
    elif fits and array.ndim > 1:
        for row, entry in zip(array, value):
            _fill(row, entry, name)
    elif fits and all(isinstance(entry, NUMBERS) for entry in value):
        array[...] = value
    else:
        raise BadRequest(f"{name} must be numbers, in an array or in lists of equal lengths.")


def _find(message: Mapping[Any, Any], name: str) -> Any:
    """The value under a name: one key, or a path of nested maps."""
    if name in message:
        return message[name]
    value: Any = message
    for part in name.split("/"):
        if not isinstance(value, dict) or part not in value:
            return None
        value = value[part]
    return value
