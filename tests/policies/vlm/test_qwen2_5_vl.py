"""Qwen2.5-VL computes what that of `transformers` computes, for images of two sizes in one sequence."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from flexor.core.errors import ConfigError
from flexor.policies.nn.rope import Rope
from flexor.policies.vlm.qwen2_5_images import ImageGrid
from flexor.policies.vlm.qwen2_5_vl import QwenVL, causal_mask, next_positions, read_size

PAD, START, END, IMAGE, WORDS = 0, 288, 289, 290, 280  # tokens; words are smaller
GRIDS = [ImageGrid(10, 18), ImageGrid(4, 6)]
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
}
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "window_size": 112,
    "fullatt_block_indexes": [1],
}


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def twins(request) -> tuple[QwenVL, Qwen2_5_VLForConditionalGeneration]:
    """Ours, and that of `transformers` with the same weights."""
    torch.manual_seed(0)
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": ROPE},
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=291,
        tie_word_embeddings=request.param,
    )
    theirs = Qwen2_5_VLForConditionalGeneration._from_config(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    size = read_size(config.to_dict(), "config.json")
    assert size.tied == request.param
    ours = QwenVL(size, GRIDS)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def prompts(side: str = "right") -> tuple[torch.Tensor, torch.Tensor]:
    """Two sentences of another length around the same images: tokens and mask [2, S]."""
    images = [[START, *[IMAGE] * grid.tokens, END] for grid in GRIDS]
    generator = torch.Generator().manual_seed(1)
    rows = [
        [
            *torch.randint(1, WORDS, (before,), generator=generator),
            *images[0],
            7,
            *images[1],
            *range(5, after),
        ]
        for before, after in ((2, 9), (4, 13))
    ]
    longest = max(map(len, rows))
    padding = [[PAD] * (longest - len(row)) for row in rows]
    tokens = [pad + row if side == "left" else row + pad for row, pad in zip(rows, padding)]
    masks = [[0] * len(pad) + [1] * len(row) for row, pad in zip(rows, padding)]
    masks = masks if side == "left" else [mask[::-1] for mask in masks]
    return torch.tensor(tokens), torch.tensor(masks).bool()


def seen_by_theirs(patches: torch.Tensor) -> dict[str, torch.Tensor]:
    """Patches [B, N, 588] as `transformers` takes them: each of two equal frames, one sample after the other."""
    frames = patches.unflatten(-1, (3, 1, 196)).expand(-1, -1, -1, 2, -1).flatten(2)
    sizes = [[1, *grid] for _ in patches for grid in GRIDS]
    return {"pixel_values": frames.flatten(0, 1), "image_grid_thw": torch.tensor(sizes)}


@pytest.mark.parametrize("side", ["right", "left"])
def test_positions(side, twins):
    ours, theirs = twins
    tokens, valid = prompts(side)
    grids = torch.tensor([[1, *grid] for _ in tokens for grid in GRIDS])
    expected, _ = theirs.model.get_rope_index(tokens, (tokens == IMAGE).int(), grids, attention_mask=valid)
    positions = ours.positions(tokens, valid)
    assert torch.equal(positions[:, valid], expected[:, valid])
    following = next_positions(positions, valid, 2)
    assert torch.equal(following[:, :, 0], expected.amax((0, 2)).expand(3, -1) + 1)
    assert torch.equal(following[:, :, 1], following[:, :, 0] + 1)


@pytest.mark.parametrize("side", ["right", "left"])
def test_logits_and_gradients(side, twins):
    ours, theirs = twins
    tokens, valid = prompts(side)
    patches = torch.randn(2, sum(grid.patches for grid in GRIDS), 588)
    ours.zero_grad(), theirs.zero_grad()
    logits = ours.lm_head(ours(tokens, valid, patches))[valid]
    expected = theirs(
        input_ids=tokens,
        attention_mask=valid.long(),
        mm_token_type_ids=(tokens == IMAGE).int(),
        **seen_by_theirs(patches),
    ).logits[valid]
    assert close(logits, expected)
    weights = torch.randn_like(logits)
    (logits * weights).sum().backward()
    (expected * weights).sum().backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        assert close(parameter.grad, gradients.pop(name)), name
    assert not gradients


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    ours, theirs = ours.detach(), theirs.detach()
    return float((ours - theirs).abs().max()) <= 1e-5 * float(theirs.abs().max())


def test_a_suffix_sees_the_cached_prefix(twins):
    """As an action chunk is predicted: the same as in one sequence."""
    ours, _ = twins
    tokens, valid = prompts()
    patches, suffix = torch.randn(2, sum(grid.patches for grid in GRIDS), 588), torch.randn(2, 3, 64)
    decoder, positions = ours.language_model, ours.positions(tokens, valid)
    prefix, following = ours.embed(tokens, patches), next_positions(positions, valid, 3)
    everything = torch.cat((valid, torch.ones(2, 3, dtype=torch.bool)), 1)
    mask = causal_mask(everything)
    rope: Rope = decoder.rope(torch.cat((positions, following), 2))
    expected = decoder(torch.cat((prefix, suffix), 1), rope, mask)[:, -3:]
    cache = decoder.prefill(prefix, rope.slice(slice(None, -3)), causal_mask(valid))
    hidden = decoder(suffix, rope.slice(slice(-3, None)), mask[:, :, -3:], cache)
    assert close(hidden, expected)


def test_nothing_is_read_on_the_host(twins):
    tokens, valid = prompts()
    with FakeTensorMode():
        ours = QwenVL(twins[0].size, GRIDS)
        patches = torch.empty(2, sum(grid.patches for grid in GRIDS), 588)
        hidden = ours(torch.empty(tokens.shape, dtype=torch.long), torch.ones(valid.shape).bool(), patches)
    assert hidden.shape == (*tokens.shape, 64)


def test_sizes_of_published_files():
    """Their text settings are not nested."""
    flat = {
        **TEXT,
        "model_type": "qwen2_5_vl",
        "rope_theta": 1e6,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        "vision_config": VISION,
        "image_token_id": IMAGE,
        "tie_word_embeddings": True,
    }
    nested = {**flat, "text_config": {**TEXT, "rope_parameters": ROPE}}
    assert read_size(flat, "config.json") == read_size(nested, "config.json")
    for name in ("vision_config", "image_token_id", "rope_scaling", "hidden_size"):
        with pytest.raises(ConfigError, match=r"config\.json does not describe a Qwen2\.5-VL"):
            read_size({**flat, name: None}, "config.json")
