"""Names of X-VLA's weights in published files: their Florence-2 is that of Microsoft's own code."""

from __future__ import annotations

import re
from collections.abc import Sequence

from flexor.policies.weight_names import WeightNames

VLM = "model.vlm."
OLD_PROJECTION = f"{VLM}image_projection"
# the names of `transformers` -> those of Microsoft's code
RULES = (
    (r"vision_tower\.convs\.(\d+)\.conv\.", r"vision_tower.convs.\1.proj."),
    (r"(vision_tower\.blocks\..*_block)\.conv(\d)\.", r"\1.conv\2.fn.dw."),
    (r"(vision_tower\.blocks\..*)\.spatial_block\.norm1\.", r"\1.spatial_block.window_attn.norm."),
    (r"(vision_tower\.blocks\..*)\.channel_block\.norm1\.", r"\1.channel_block.channel_attn.norm."),
    (r"(vision_tower\.blocks\..*)\.(window_attn|channel_attn)\.(qkv|proj)\.", r"\1.\2.fn.\3."),
    (r"(vision_tower\.blocks\..*_block)\.norm2\.", r"\1.ffn.norm."),
    (r"(vision_tower\.blocks\..*_block)\.ffn\.fc", r"\1.ffn.fn.net.fc"),
    (r"multi_modal_projector\.image_projection\.weight$", "image_projection"),
    (r"multi_modal_projector\.image_position_embed\.", "image_pos_embed."),
    (r"multi_modal_projector\.", ""),
    (r"language_model\.", "language_model.model."),
)


def old_names(name: str) -> Sequence[str]:
    """The names that a weight has in published files."""
    if not name.startswith(VLM):
        return ()
    inner = name.removeprefix(VLM)
    for pattern, replacement in RULES:
        old, count = re.subn(f"^{pattern}", replacement, inner)
        if count:
            return (f"{VLM}{old}",)
    return ()


XVLA_NAMES = WeightNames(
    older=old_names,
    transposed={OLD_PROJECTION},
    ignored={f"{VLM}language_model.final_logits_bias"},
)
