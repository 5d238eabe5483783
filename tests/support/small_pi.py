"""Sizes of pi0, pi05 and pi0_fast for tests, `--policy.paligemma_variant=gemma_small`.

Known to processes that import this: the tests' own, and those that are forked for them.
"""

import json

from flexor.policies.nn.siglip import SiglipSize
from flexor.policies.vlm import paligemma
from flexor.policies.vlm.paligemma import PaliGemmaSize, gemma

READER, EXPERT = "gemma_small", "gemma_smaller"
VOCABULARY = 100
CONFIG = {
    "load_vlm_weights": False,
    "paligemma_variant": READER,
    "action_expert_variant": EXPERT,
    "image_resolution": (28, 28),
    "chunk_size": 6,
    "n_action_steps": 4,
    "num_inference_steps": 2,
    "tokenizer_max_length": 20,
}
WRITER, WRITTEN = "gemma_small_writer", 500  # a vocabulary with room for actions
FAST_CONFIG = {
    **{name: value for name, value in CONFIG.items() if name != "num_inference_steps"},
    "paligemma_variant": WRITER,
    "tokenizer_max_length": 60,
    "max_action_tokens": 30,
    "max_decoding_steps": 8,
    "fast_skip_tokens": 4,
}


def as_flags(config: dict) -> list[str]:
    return [f"{name}={json.dumps(value)}".replace('"', "") for name, value in config.items()]


SETTINGS, FAST_SETTINGS = as_flags(CONFIG), as_flags(FAST_CONFIG)

paligemma.GEMMA[READER] = gemma(width=16, depth=2, mlp_width=24, heads=2, head_dim=8)
paligemma.GEMMA[EXPERT] = gemma(width=12, depth=2, mlp_width=20, heads=2, head_dim=8)
paligemma.GEMMA[WRITER] = paligemma.GEMMA[READER]
for name, words in ((READER, VOCABULARY), (EXPERT, VOCABULARY), (WRITER, WRITTEN)):
    paligemma.PALIGEMMA[name] = PaliGemmaSize(
        paligemma.GEMMA[name], SiglipSize(width=16, depth=2, mlp_width=24, heads=2), words
    )
