"""An actor's message -> records. Nobody knows who sends it, so all of it is compared with what the policy takes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flexor.core.batch import ACTION
from flexor.policies.sac.config import SACConfig
from flexor.rl.records import first_record, step_record
from flexor.rl.spec import EnvironmentSpec
from flexor.serve.form import ObservationForm
from flexor.serve.limits import BadRequest, RequestLimits
from flexor.serve.request import CheckedRequest, ObservationReader
from flexor_client.jpeg import JpegFile

MOST_RECORDS = 256  # of a message
FLAGS = ("terminated", "truncated", "intervention", "success", "discarded")
FIELDS = {"is_step", "update", "observation"}
OF_STEPS = {"action", "reward", "penalty", *FLAGS}
TOLERANCE = 1e-3  # of an action's range: rounding on its way


@dataclass(frozen=True)
class CheckedRecord:
    """A record whose compressed images are still to be decoded."""

    fields: dict[str, Any]
    observed: CheckedRequest

    @property
    def is_step(self) -> bool:
        return bool(self.fields["is_step"])


class RecordReader:
    """Reads the records of actors."""

    def __init__(self, policy: SACConfig, spec: EnvironmentSpec, layout: np.dtype[Any]):
        self.form, self.layout = ObservationForm.of_policy(policy, {}), layout
        self.observations = ObservationReader(self.form, RequestLimits.of(self.form))
        self.low, self.high = spec.action_limits

    def check(self, messages: Any) -> list[CheckedRecord]:
        """The records of a message; BadRequest if one is none."""
        if not isinstance(messages, list) or not 0 < len(messages) <= MOST_RECORDS:
            raise BadRequest(f"records must be a list of 1 to {MOST_RECORDS} maps.")
        return [self._check(message) for message in messages]

    def _check(self, message: Any) -> CheckedRecord:
        is_step = message.get("is_step") if isinstance(message, dict) else None
        if not isinstance(is_step, bool) or message.keys() != (FIELDS | OF_STEPS if is_step else FIELDS):
            names = ", ".join(sorted(FIELDS | OF_STEPS))
            raise BadRequest(
                f"A record of a step must have {names}; the first of an episode only an observation."
            )
        update = message["update"]
        if type(update) is not int or not 0 <= update < 2**32:
            raise BadRequest("update must be a whole number.")
        observed = self.observations.check(message["observation"])
        missing = [name for name in self.form.inputs if name not in observed.values]
        if missing or observed.stacked:
            raise BadRequest(
                f"An observation must have one value of {', '.join(missing or self.form.inputs)}."
            )
        fields: dict[str, Any] = {"is_step": is_step, "update": update}
        if is_step:
            fields |= {name: _flag(message, name) for name in FLAGS}
            fields |= {name: _number(message, name) for name in ("reward", "penalty")}
            if fields["discarded"] and not (fields["terminated"] or fields["truncated"]):
                raise BadRequest("An episode is discarded with its last step: terminated or truncated.")
            fields[ACTION] = self._action(message["action"])
        return CheckedRecord(fields, observed)

    def _action(self, value: Any) -> np.ndarray:
        is_float = isinstance(value, np.ndarray) and value.dtype.kind == "f"
        if not is_float or value.shape != self.low.shape:
            raise BadRequest(f"action must be a float array of {len(self.low)} numbers.")
        with np.errstate(over="ignore"):
            action = value.astype(np.float32)
        if not np.isfinite(action).all():
            raise BadRequest("action has values that are not finite.")
        allowed = np.clip(action, self.low, self.high)
        if (np.abs(allowed - action) > TOLERANCE * (self.high - self.low) + 1e-6).any():
            raise BadRequest(
                f"The action {action.tolist()} is outside of its limits, {self.low.tolist()} to {self.high.tolist()}."
            )
        return np.asarray(allowed)

    def record(
        self, checked: CheckedRecord, images: Mapping[JpegFile, np.ndarray], actor: int, sequence: int
    ) -> np.ndarray:
        """The record [1], with the images of its files."""
        observation = checked.observed.request(images).observation
        who = {"actor": actor, "sequence": sequence}
        if not checked.is_step:
            record = first_record(self.layout, observation)
            record["actor"], record["sequence"] = actor, sequence
            return record
        outcome = {name: value for name, value in checked.fields.items() if name not in ("is_step", ACTION)}
        return step_record(self.layout, observation, checked.fields[ACTION], **outcome, **who)


def _flag(message: Mapping[str, Any], name: str) -> bool:
    value = message[name]
    if not isinstance(value, bool):
        raise BadRequest(f"{name} must be true or false.")
    return value


def _number(message: Mapping[str, Any], name: str) -> float:
    value = message[name]
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:
        raise BadRequest(f"{name} must be a finite number.")
    assert math.isfinite(value)
    return float(value)
