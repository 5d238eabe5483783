"""Names of PaliGemma's weights in the files of LeRobot and openpi."""

from __future__ import annotations

from dataclasses import replace

import torch

from flexor.policies.weight_names import UnusedWeight, WeightNames

PALIGEMMA_MODULE = "model.paligemma_with_expert.paligemma"
LANGUAGE_MODEL = f"{PALIGEMMA_MODULE}.model.language_model"
EMBEDDING = f"{LANGUAGE_MODEL}.embed_tokens.weight"
EXPERT = "model.paligemma_with_expert.gemma_expert"
LANGUAGE_HEAD = f"{PALIGEMMA_MODULE}.lm_head.weight"
EXPERT_HEAD = f"{EXPERT}.lm_head.weight"
OPENPI_NAMES = WeightNames(optional_prefix="model.", aliases={EMBEDDING: [LANGUAGE_HEAD]})
"""openpi's files lack the first part of a name. Where embedding and head are tied, they have only the head."""
PI_NAMES = replace(
    OPENPI_NAMES,
    unused=[  # the language heads: PaliGemma's is its embedding, and the expert never predicts tokens
        UnusedWeight(LANGUAGE_HEAD, torch.clone, [EMBEDDING], before=f"{PALIGEMMA_MODULE}."),
        UnusedWeight(
            EXPERT_HEAD,
            lambda embedding, keys: keys.new_zeros(len(embedding), keys.shape[1]),
            [EMBEDDING, f"{EXPERT}.model.layers.0.self_attn.k_proj.weight"],
            before=f"{EXPERT}.",
        ),
    ],
)
