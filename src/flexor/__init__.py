"""Flexor: plan, train, resume, watch and serve robot policies.

What is named here is for a user's own policies and scripts, and stays (`docs/python.md`). Everything else may move.
"""

import importlib
from typing import TYPE_CHECKING, Any

from flexor.core.version import VERSION

__version__ = VERSION

if TYPE_CHECKING:
    from flexor.config.parse import load_config as load_config
    from flexor.config.schema import TrainConfig as TrainConfig
    from flexor.core.batch import ACTION as ACTION
    from flexor.core.batch import STATE as STATE
    from flexor.core.batch import Batch as Batch
    from flexor.core.errors import ConfigError as ConfigError
    from flexor.core.errors import FlexorError as FlexorError
    from flexor.core.rng import Noise as Noise
    from flexor.core.rng import NoiseSource as NoiseSource
    from flexor.data.dataset import Dataset as Dataset
    from flexor.data.dataset import open_dataset as open_dataset
    from flexor.data.format.writer import DatasetWriter as DatasetWriter
    from flexor.policies.base import Loss as Loss
    from flexor.policies.base import ParamGroup as ParamGroup
    from flexor.policies.base import Policy as Policy
    from flexor.policies.base import PolicyConfig as PolicyConfig
    from flexor.policies.base import mean_over_valid as mean_over_valid
    from flexor.policies.features import Kind as Kind
    from flexor.policies.features import Normalization as Normalization
    from flexor.policies.features import PolicyFeature as PolicyFeature
    from flexor.policies.image_encoder import ImageEncoder as ImageEncoder
    from flexor.policies.pretrained import Pretrained as Pretrained
    from flexor.policies.pretrained import load_pretrained as load_pretrained
    from flexor.policies.processing.pipeline import ProcessingStep as ProcessingStep
    from flexor.policies.processing.pipeline import StepContext as StepContext
    from flexor.policies.processing.pipeline import processing_step as processing_step
    from flexor.policies.session import Session as Session
    from flexor.policies.session import act_together as act_together
    from flexor.train.loop import train as train

_MODULES = {
    "flexor.config.parse": ("load_config",),
    "flexor.config.schema": ("TrainConfig",),
    "flexor.core.batch": ("ACTION", "STATE", "Batch"),
    "flexor.core.errors": ("ConfigError", "FlexorError"),
    "flexor.core.rng": ("Noise", "NoiseSource"),
    "flexor.data.dataset": ("Dataset", "open_dataset"),
    "flexor.data.format.writer": ("DatasetWriter",),
    "flexor.policies.base": ("Loss", "ParamGroup", "Policy", "PolicyConfig", "mean_over_valid"),
    "flexor.policies.features": ("Kind", "Normalization", "PolicyFeature"),
    "flexor.policies.image_encoder": ("ImageEncoder",),
    "flexor.policies.pretrained": ("Pretrained", "load_pretrained"),
    "flexor.policies.processing.pipeline": ("ProcessingStep", "StepContext", "processing_step"),
    "flexor.policies.session": ("Session", "act_together"),
    "flexor.train.loop": ("train",),
}
_WHERE = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    """Imported on use: `import flexor` alone must not take the seconds that torch takes."""
    if name not in _WHERE:
        raise AttributeError(f"module 'flexor' has no attribute {name!r}")
    return getattr(importlib.import_module(_WHERE[name]), name)


def __dir__() -> list[str]:
    return [*globals(), *_WHERE]
