"""The decoder computes what the models of `transformers` compute whose parameter names it has."""

from dataclasses import replace

import pytest
import torch

from flexor.policies.nn.kv_cache import StaticKVCache
from flexor.policies.nn.rope import make_rope
from flexor.policies.nn.transformer import Transformer, TransformerSize, language_head

transformers = pytest.importorskip("transformers")

B, S, P, VOCABULARY = 2, 9, 5, 30
SIZE = TransformerSize(width=64, depth=2, mlp_width=48, heads=4, kv_heads=2, head_dim=16, rope_theta=1e6)
FAMILIES = {
    "Llama": replace(SIZE, rope_theta=10_000.0),
    "Gemma": replace(SIZE, norm_offset=1.0, activation="gelu", embed_scale=64**0.5, rope_theta=10_000.0),
    "Qwen2": replace(SIZE, qkv_bias=True),
    "Qwen3": replace(SIZE, qk_norm=True),
    "Qwen2_5_VL": replace(SIZE, qkv_bias=True, mrope_sections=(2, 3, 3)),
    "Qwen3VL": replace(SIZE, qk_norm=True, mrope_sections=(4, 2, 2), mrope_interleaved=True),
}


def theirs_and_ours(family: str) -> tuple[torch.nn.Module, Transformer]:
    """The same weights in both."""
    torch.manual_seed(0)
    size = FAMILIES[family]
    names = {"Qwen2_5_VL": "Qwen2_5_VLTextModel", "Qwen3VL": "Qwen3VLTextModel"}
    rope = {"rope_type": "default", "rope_theta": size.rope_theta}
    if size.mrope_sections:
        rope |= {"mrope_section": list(size.mrope_sections), "mrope_interleaved": size.mrope_interleaved}
    config = getattr(transformers, names.get(family, f"{family}Model")).config_class(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.mlp_width,
        num_hidden_layers=size.depth,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        hidden_act="gelu_pytorch_tanh" if size.activation == "gelu" else "silu",
        rms_norm_eps=size.norm_eps,
        rope_parameters=rope,
        pad_token_id=0,
    )
    theirs = getattr(transformers, names.get(family, f"{family}Model"))(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = Transformer(size, VOCABULARY)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def causal(length: int) -> torch.Tensor:
    return torch.ones(length, length, dtype=torch.bool).tril().expand(B, 1, -1, -1)


def positions_of(size: TransformerSize) -> torch.Tensor:
    if size.mrope_sections is None:
        return torch.arange(S).expand(B, -1)
    return torch.randint(0, 40, (3, B, S), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_hidden_states_are_those_of_transformers(family):
    theirs, ours = theirs_and_ours(family)
    tokens, positions = torch.randint(1, VOCABULARY, (B, S)), positions_of(ours.size)
    expected = theirs(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
    hidden = ours(ours.embed_tokens(tokens), ours.rope(positions), causal(S))
    torch.testing.assert_close(hidden, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_a_suffix_after_a_cached_prefix_is_the_end_of_the_full_sequence(family):
    _, ours = theirs_and_ours(family)
    x = ours.embed_tokens(torch.randint(1, VOCABULARY, (B, S)))
    rope = ours.rope(positions_of(ours.size))
    hidden = ours(x, rope, causal(S))[:, P:]
    before, after = rope.slice(slice(None, P)), rope.slice(slice(P, None))
    cache = ours.prefill(x[:, :P], before, causal(P))
    torch.testing.assert_close(ours(x[:, P:], after, causal(S)[:, :, P:], cache), hidden)
    index = torch.tensor([P])
    static = [StaticKVCache.allocate(layer, S - P, index) for layer in cache]
    for place in range(P, S):
        written = torch.arange(S)[None, None, None] <= index
        new = rope.slice(slice(place, place + 1))
        torch.testing.assert_close(
            ours(x[:, place : place + 1], new, written, static)[:, 0], hidden[:, place - P]
        )
        index.add_(1)


def test_sections_of_equal_positions_are_the_plain_embedding():
    positions = torch.arange(S).expand(B, -1)
    plain = make_rope(positions, 16)
    for interleaved in (False, True):
        sections = make_rope(positions.expand(3, -1, -1), 16, 10_000.0, (2, 3, 3), interleaved)
        assert all(torch.equal(a, b) for a, b in zip(plain, sections))


def test_a_tied_head_is_the_embedding():
    decoder = Transformer(SIZE, VOCABULARY)
    tied, untied = language_head(decoder, tied=True), language_head(decoder)
    assert tied.weight is decoder.embed_tokens.weight and untied.weight is not tied.weight
    assert (
        untied(torch.zeros(1, SIZE.width)).shape == tied(torch.zeros(1, SIZE.width)).shape == (1, VOCABULARY)
    )
