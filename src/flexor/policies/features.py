"""The inputs and outputs of a policy: what kind each is, its shape, and how it can be normalised."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal


class Kind(StrEnum):
    """The role of a feature in a policy. It determines how the feature is normalised."""

    STATE = "STATE"
    VISUAL = "VISUAL"
    ENV = "ENV"
    ACTION = "ACTION"
    REWARD = "REWARD"
    LANGUAGE = "LANGUAGE"


Normalization = Literal["IDENTITY", "MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10"]


@dataclass(frozen=True)
class PolicyFeature:
    """One input or output of a policy; images are (channels, height, width)."""

    type: Kind
    shape: tuple[int, ...]
