"""A client's message -> what a policy is asked. What does not fit is refused, with how to fix it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from flexor.core.errors import ConfigError, FlexorError
from flexor.core.typed import closest
from flexor.serve.settings import Reply
from flexor_client.wire import OPTIONS, Limits, WireError, decode_jpeg, jpeg_size

if TYPE_CHECKING:  # a process that only reads requests does without torch
    from flexor.policies.base import PolicyConfig

TASK_KEYS = ("prompt", "task")
LONGEST_NAME = 64
LONGEST_TASK = 4096
LARGEST_NUMBER = 2**53  # of an episode or step


class BadRequest(FlexorError):
    """A message that can't be answered; its text is for the client."""


@dataclass(frozen=True)
class RequestOptions:
    """The fields under the key `flexor` of an observation: see flexor_client/wire.py."""

    id: int | str | None = None
    session: str = ""
    reset: bool = False
    episode: int | None = None
    step: int | None = None
    reply: Reply | None = None
    previous: np.ndarray | None = None
    delay: int = 0
    deadline_ms: float | None = None
    age_ms: float = 0.0

    @classmethod
    def read(cls, given: Any, action_size: int) -> RequestOptions | None:
        """The options in a message; None if it has none."""
        if given is None:
            return None
        if not isinstance(given, dict):
            raise BadRequest(f"`{OPTIONS}` must be a map of options, not {_kind(given)}.")
        unknown = [name for name in given if name not in cls.__dataclass_fields__]
        if unknown:
            raise BadRequest(
                f"`{OPTIONS}` has an unknown option {unknown[0]!r:.60}. "
                f"{closest(str(unknown[0])[:60], cls.__dataclass_fields__)}"
            )
        options = cls(**given)
        options._check(action_size)
        return options

    def _check(self, action_size: int) -> None:
        def require(name: str, fits: bool, wanted: str) -> None:
            if not fits:
                raise BadRequest(f"`{OPTIONS}.{name}` must be {wanted}.")

        short = isinstance(self.id, str) and len(self.id) <= LONGEST_NAME
        require(
            "id",
            self.id is None or short or _whole(self.id),
            f"a number or at most {LONGEST_NAME} characters",
        )
        fits = isinstance(self.session, str) and len(self.session) <= LONGEST_NAME
        require("session", fits, f"at most {LONGEST_NAME} characters")
        require("reset", isinstance(self.reset, bool), "true or false")
        require("episode", self.episode is None or _whole(self.episode), "a whole number from 0")
        require("step", self.step is None or _whole(self.step), "a whole number from 0")
        require("reply", self.reply in (None, "chunk", "action"), "chunk or action")
        require("delay", _whole(self.delay), "a whole number from 0")
        for name in ("deadline_ms", "age_ms"):
            value = getattr(self, name)
            number = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e12
            require(name, (value is None and name == "deadline_ms") or number, "milliseconds, from 0")
        if self.previous is not None:
            value = self.previous
            fits = (
                isinstance(value, np.ndarray)
                and value.ndim == 2
                and value.dtype.kind == "f"
                and len(value) > 0
            )
            require(
                "previous",
                fits and value.shape[1] == action_size,
                f"a float array [at least 1, {action_size}]",
            )
            require("previous", bool(np.isfinite(value).all()), "finite")


@dataclass(frozen=True)
class PolicyRequest:
    """What a message asks for."""

    observation: dict[str, np.ndarray]
    """Images as uint8 [C, H, W], states as float32; with `stacked`, [T, ...]."""
    stacked: bool
    task: str
    options: RequestOptions | None


@dataclass(frozen=True)
class Input:
    """One value of an observation."""

    shape: tuple[int, ...]
    """Of an image: (channels, height, width)."""
    image: bool
    name: str
    """The clients' name of it."""
    own_too: bool
    """Whether the policy's own name is good too."""


@dataclass(frozen=True)
class ObservationForm:
    """What a policy needs in an observation."""

    inputs: dict[str, Input]
    """By the policy's own name."""
    steps: list[int] | None
    """For policies with a history: those that it sees, relative to now."""
    action_size: int

    @classmethod
    def of_policy(
        cls, config: PolicyConfig, names: Mapping[str, str], usual: Mapping[str, str] | None = None
    ) -> ObservationForm:
        """`names`: {the policy's name of an input: the client's}. Where none is given, the `usual` one and the
        policy's own are both good."""
        for name in names:
            if name not in config.observed:
                raise ConfigError(
                    f"--map {name}=...: the policy has no such input. {closest(name, config.observed)}"
                )
        theirs = {name: names.get(name, (usual or {}).get(name, name)) for name in config.observed}
        inputs = {
            name: Input(
                feature.shape,
                name in config.images,
                theirs[name],
                name not in names and name not in theirs.values(),
            )
            for name, feature in config.observed.items()
        }
        deltas = config.observation_deltas
        steps = None if deltas is None else [step for step in deltas if step <= 0]
        return cls(inputs, steps, config.action.shape[0])


class ObservationReader:
    """Reads observations for a policy, under the names that a client uses."""

    def __init__(self, form: ObservationForm, limits: Limits):
        self.inputs, self.steps, self.action_size = form.inputs, form.steps, form.action_size
        self.limits = limits
        self.sizes = {wanted.shape[1:] for wanted in form.inputs.values() if wanted.image}

    def files(self, message: Any) -> list[bytes]:
        """The compressed images in a message: to decode them takes longer than everything else."""
        if not isinstance(message, dict):
            return []
        found: list[bytes] = []
        for name, wanted in self.inputs.items():
            value = self._find(message, name) if wanted.image else None
            found += [value] if isinstance(value, bytes) else []
            if isinstance(value, list) and len(value) == len(self.steps or []):
                found += [one for one in value if isinstance(one, bytes)]
        return found

    def decode(self, file: bytes) -> np.ndarray | None:
        """An image uint8 [H, W, 3]; None if `read` will say what is wrong with it."""
        try:
            if jpeg_size(file) in self.sizes:
                return decode_jpeg(file, self.limits)
        except WireError:
            pass
        return None

    def read(self, message: Any, decoded: Mapping[int, np.ndarray | None] | None = None) -> PolicyRequest:
        """What a message asks for. `decoded`: images of its files, by the id() of their bytes."""
        images = decoded or {}
        if not isinstance(message, dict):
            raise BadRequest(f"An observation must be a map of names to values, not {_kind(message)}.")
        found: dict[str, np.ndarray] = {}
        for name, wanted in self.inputs.items():
            value = self._find(message, name)
            if value is None:
                raise BadRequest(self._missing(name, message))
            found[name] = self._value(_with_images(value, images), wanted)
        stacked = self._stacked(found)
        task = next((message[key] for key in TASK_KEYS if key in message), "")
        if isinstance(task, np.str_):
            task = str(task)
        if not isinstance(task, str) or len(task) > LONGEST_TASK:
            raise BadRequest(f"`prompt` must be text of at most {LONGEST_TASK} characters.")
        return PolicyRequest(
            found, stacked, task, RequestOptions.read(message.get(OPTIONS), self.action_size)
        )

    def _find(self, message: Mapping[Any, Any], name: str) -> Any:
        value = _find(message, self.inputs[name].name)
        return message.get(name) if value is None and self.inputs[name].own_too else value

    def _missing(self, name: str, message: dict[Any, Any]) -> str:
        wanted = self.inputs[name].name
        there = (
            ", ".join(sorted(str(key)[:LONGEST_NAME] for key in message if key != OPTIONS)[:20]) or "nothing"
        )
        return (
            f"The policy needs {wanted}, but the observation has only {there}. Send it under this name, or start the "
            f"server with --map {name}=NAME."
        )

    def _value(self, value: Any, wanted: Input) -> np.ndarray:
        name, shape = wanted.name, wanted.shape
        if not wanted.image:
            return self._vector(name, value, shape)
        if isinstance(value, list):
            return np.stack([self._image(name, one, shape) for one in _few(name, value, self.steps)])
        return self._image(name, value, shape)

    def _image(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        """An image uint8 [C, H, W], or several [T, C, H, W]."""
        channels, height, width = shape
        if isinstance(value, bytes):
            value = self._file(name, value, height, width)
        if not isinstance(value, np.ndarray) or value.dtype != np.uint8:
            got = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else _kind(value)
            raise BadRequest(f"{name} must be an image, as a uint8 array or a JPEG file in bytes, not {got}.")
        if value.shape[-3:] == (height, width, channels) and value.ndim in (3, 4):
            value = np.moveaxis(value, -1, -3)
        if value.shape[-3:] != shape or value.ndim not in (3, 4):
            raise BadRequest(_other_size(name, list(value.shape), [height, width, channels]))
        return value

    def _file(self, name: str, data: bytes, height: int, width: int) -> np.ndarray:
        try:
            size = jpeg_size(data)
            if size != (height, width):  # said before it is decoded: it may be huge
                raise BadRequest(_other_size(name, [*size, 3], [height, width, 3]))
            return decode_jpeg(data, self.limits)
        except WireError as error:
            raise BadRequest(f"{name}: {error}") from error

    def _vector(self, name: str, value: Any, shape: tuple[int, ...]) -> np.ndarray:
        try:
            array = np.asarray(value)
            fits = array.dtype.kind in "fiub"
        except ValueError:  # a list of lists of different lengths
            fits = False
        if not fits:
            raise BadRequest(f"{name} must be numbers, not {_kind(value)}.")
        if array.shape != shape and array.shape[1:] != shape:
            raise BadRequest(f"{name} is {list(array.shape)}, but the policy was trained on {list(shape)}.")
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if not np.isfinite(array).all():
            raise BadRequest(f"{name} has values that are not finite: nan or infinity.")
        return array

    def _stacked(self, found: dict[str, np.ndarray]) -> bool:
        """Whether the message brings its own history. All values must, or none."""
        more = {name: array.ndim > len(self.inputs[name].shape) for name, array in found.items()}
        if not any(more.values()):
            return False
        steps = self.steps
        for name, has in more.items():
            if steps is None or not has or len(found[name]) != len(steps):
                raise BadRequest(
                    f"{self.inputs[name].name} is {list(found[name].shape)}: "
                    + (
                        "the policy sees one observation, without a history."
                        if steps is None
                        else f"with a history, every input must have {len(steps)} entries, those of the steps {steps}."
                    )
                )
        return True


def _other_size(name: str, found: list[int], wanted: list[int]) -> str:
    return f"{name} is {found}, but the policy was trained on images {wanted}: resize it before you send it."


def _with_images(value: Any, images: Mapping[int, np.ndarray | None]) -> Any:
    """A file, or a list of files, with the images in their place that are known."""
    if isinstance(value, list):
        return [_with_images(one, images) if isinstance(one, bytes) else one for one in value]
    image = images.get(id(value)) if isinstance(value, bytes) else None
    return value if image is None else image


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


def _few(name: str, values: list[Any], steps: Sequence[int] | None) -> list[Any]:
    """Checked before anything is decoded."""
    if len(values) != len(steps or [0]):
        raise BadRequest(
            f"{name} is a list of {len(values)} values, but the policy sees {len(steps or [0])}."
        )
    return values


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= LARGEST_NUMBER


def _kind(value: Any) -> str:
    return {dict: "a map", list: "a list", str: "text", type(None): "nothing"}.get(
        type(value), f"a {type(value).__name__}"
    )
