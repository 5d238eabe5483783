"""CLIP's two encoders (Radford et al. 2021, https://arxiv.org/abs/2103.00020): an image or a sentence as one vector.

The networks are those of `transformers`, so any published CLIP can be used. That package is imported only when
a CLIP is used. Its versions name the parameters differently, so the networks are registered here under fixed
names, which are LeRobot's. They are built from their config; weights come from a checkpoint or `load_pretrained`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from flexor.kernels.quick_gelu import QuickGELU
from flexor.policies.hf_transformers import fetch, import_transformers
from flexor.policies.sizes import check_model_sizes

# differences from the defaults of `transformers`
PUBLISHED: dict[str, dict[str, Any]] = {
    "openai/clip-vit-base-patch16": {"CLIPVisionConfig": {"patch_size": 16}}
}


class ClipVision(nn.Module):
    """Images [B, 3, H, W] -> the vector [B, D] of the class token, which summarises the image."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name
        clip = import_transformers("CLIP")
        settings = _settings("CLIPVisionConfig", name)
        self.model = nn.ModuleDict({"vision_model": _network(clip.CLIPVisionModel(settings), "vision_model")})
        self.image_size: int = settings.image_size
        self.out_dim: int = settings.hidden_size

    def forward(self, images: Tensor) -> Tensor:
        out = self.model["vision_model"](pixel_values=images)
        # The last normalisation belongs to an output that is not used. DDP expects a gradient for every trained
        # parameter, and LeRobot's optimizer numbers these parameters too, so they get gradients of zero.
        return out.last_hidden_state[:, 0] + 0 * out.pooler_output

    def load_pretrained(self) -> None:
        _load(self.model["vision_model"], "CLIPVisionModel", self.name, "vision_model")

    def layers(self) -> list[nn.Module]:
        return list(self.get_submodule("model.vision_model.encoder.layers").children())


class ClipText(nn.Module):
    """Tokens and their mask [B, L] -> [B, out_dim]: CLIP, which is never trained, and a projection, which is."""

    def __init__(self, name: str, out_dim: int):
        super().__init__()
        self.name = name
        clip = import_transformers("CLIP")
        settings = _settings("CLIPTextConfig", name)
        self.text_encoder = nn.ModuleDict(
            {"text_model": _network(clip.CLIPTextModel(settings), "text_model")}
        )
        self.text_encoder.requires_grad_(False)
        self.projection = nn.Linear(settings.hidden_size, out_dim)
        self.max_length: int = settings.max_position_embeddings

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        length = tokens.shape[1]
        causal = torch.ones(length, length, dtype=torch.bool, device=tokens.device).tril()
        # a 4-D mask: given a 2-D one, `transformers` reads on the host whether anything is masked
        attention_mask = causal & mask[:, None, None].bool()
        with torch.no_grad():
            out = self.text_encoder["text_model"](input_ids=tokens, attention_mask=attention_mask)
        return self.projection(out.pooler_output)

    def load_pretrained(self) -> None:
        _load(self.text_encoder["text_model"], "CLIPTextModel", self.name, "text_model")

    def layers(self) -> list[nn.Module]:
        return list(self.get_submodule("text_encoder.text_model.encoder.layers").children())


def _settings(kind: str, name: str) -> Any:
    """The sizes of a published CLIP, for which the default one needs no Hub: a plan has no network."""
    if name in PUBLISHED:
        return getattr(import_transformers("CLIP"), kind)(**PUBLISHED[name].get(kind, {}))
    settings = fetch(kind, name)
    check_model_sizes(f"{name}: {kind}", settings.to_dict())
    return settings


def _network(model: nn.Module, inner: str) -> nn.Module:
    """The model's network, with Flexor's faster QuickGELU in place of that of `transformers`."""
    network = _inner_network(model, inner)
    for layer in network.encoder.layers:  # type: ignore[union-attr]
        if layer.mlp.config.hidden_act == "quick_gelu":
            layer.mlp.activation_fn = QuickGELU()
    return network


def _inner_network(model: nn.Module, inner: str) -> nn.Module:
    """In `transformers` up to 5.5 the network is a part of the model; in newer ones the model is the network."""
    return getattr(model, inner, model)


def _load(network: nn.Module, kind: str, name: str, inner: str) -> None:
    published = fetch(kind, name, dtype=torch.float32)
    network.load_state_dict(_inner_network(published, inner).state_dict())
