"""Weights of published WALL-Xs."""

from __future__ import annotations

from flexor.core.model_files import ModelFiles
from flexor.core.weight_files import load_tensors
from flexor.policies.adapters import is_adapter
from flexor.policies.vlm.qwen2_5_files import names_of_weights
from flexor.policies.wall_x.network import WallXNetwork
from flexor.policies.weight_names import unique_state

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_weights(files: ModelFiles, model: WallXNetwork) -> None:
    """Fill the model from a published one's files, whose names are its own; a tied weight has either of two."""
    weights = {name: tensor for name, tensor in unique_state(model).items() if not is_adapter(name)}
    if model.size.tied and HEAD not in names_of_weights(files):
        weights[EMBEDDING] = weights.pop(HEAD)
    load_tensors(files, weights)
