"""Florence-2's encoders compute what those of `transformers` compute."""

import copy

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Florence2Config, Florence2Model

from flexor.core.errors import ConfigError
from flexor.policies.vlm.florence import Florence
from flexor.policies.vlm.florence_size import FLORENCE_2_LARGE, read_florence

TINY = {
    "vision_config": {
        "embed_dim": [8, 16, 32, 32],
        "depths": [1, 1, 2, 1],
        "num_heads": [1, 2, 4, 4],
        "num_groups": [1, 2, 4, 4],
        "window_size": 4,
        "projection_dim": 24,
        "drop_path_rate": 0.0,
        "max_temporal_embeddings": 5,
        "max_position_embeddings": 12,
    },
    "text_config": {
        "model_type": "bart",
        "d_model": 24,
        "encoder_layers": 2,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 40,
        "decoder_layers": 1,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 40,
        "vocab_size": 60,
        "max_position_embeddings": 80,
        "dropout": 0.0,
    },
}
IMAGES = {"square": (64, 64), "wide": (64, 96), "no multiple of the strides": (70, 45)}


def with_settings(part: str, **changes: object) -> dict:
    config = copy.deepcopy(TINY)
    config[part] |= changes
    return config


def in_old_layout(config: dict) -> dict:
    """As Microsoft's code wrote it, and published policies have it."""
    vision, text = dict(config["vision_config"]), dict(config["text_config"])
    return {
        "vision_config": {
            "model_type": "davit",
            "dim_embed": vision.pop("embed_dim"),
            "image_pos_embed": {
                "type": "learned_abs_2d",
                "max_pos_embeddings": vision.pop("max_position_embeddings"),
            },
            "visual_temporal_embedding": {
                "type": "COSINE",
                "max_temporal_embeddings": vision.pop("max_temporal_embeddings"),
            },
            "image_feature_source": ["spatial_avg_pool", "temporal_avg_pool"],
            "enable_checkpoint": False,
            **vision,
        },
        "text_config": {**text, "model_type": "florence2_language"},
    }


def twins(config: dict) -> tuple[Florence, torch.nn.Module]:
    """Ours, and that of `transformers` with the same weights, without its decoder."""
    torch.manual_seed(0)
    theirs = Florence2Model._from_config(Florence2Config(**copy.deepcopy(config)))
    del theirs.language_model.decoder
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = Florence(read_florence(config, "florence_config"))
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("size", IMAGES.values(), ids=IMAGES)
@pytest.mark.parametrize("scaled", [False, True])
def test_features_and_gradients(size, scaled):
    ours, theirs = twins(with_settings("text_config", scale_embedding=scaled))
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    images, tokens = torch.randn(2, 3, *size), torch.randint(60, (2, 7))
    features = ours.embed_images(images)
    assert features.shape[1] == ours.size.image_tokens(*size)
    encoded = ours.encode(torch.cat((features, ours.embed_tokens(tokens)), 1))
    their_features = theirs.get_image_features(images).pooler_output
    embeds = torch.cat((their_features, theirs.get_input_embeddings()(tokens)), 1)
    mask = torch.ones(embeds.shape[:2], dtype=torch.long)
    expected = theirs.language_model.encoder(inputs_embeds=embeds, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(features, their_features, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(encoded, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(encoded)
    (encoded * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # a key's bias has no effect: its gradient is rounding
        largest = max(float(other.grad.abs().max()), 1e-2)
        assert float((parameter.grad - other.grad).abs().max()) <= 2e-5 * largest, name


def test_drop_path_leaves_branches_out_at_the_rates_of_transformers():
    ours, theirs = twins(with_settings("vision_config", drop_path_rate=0.4))
    layers = [layer for block in ours.vision_tower.layers() for layer in block.children()]
    rates = [
        getattr(m.drop_path1, "drop_prob", 0.0)
        for m in theirs.vision_tower.modules()
        if hasattr(m, "drop_path1")
    ]
    assert [layer.drop_rate for layer in layers] == pytest.approx(rates) and rates[-1] == pytest.approx(0.4)
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours.eval().embed_images(images), ours.embed_images(images))
    ours.train()
    torch.manual_seed(1)
    first = ours.embed_images(images)
    assert not torch.equal(first, ours.embed_images(images))
    torch.manual_seed(1)
    assert torch.equal(first, ours.embed_images(images))


def test_both_layouts_of_the_settings_are_one_size():
    assert read_florence(in_old_layout(TINY), "florence_config") == read_florence(TINY, "florence_config")


def test_the_size_of_florence_2_large():
    with torch.device("meta"):
        large = Florence(read_florence(FLORENCE_2_LARGE, "florence_config"))
    count = {name: sum(p.numel() for p in part.parameters()) for name, part in large.named_children()}
    assert count["vision_tower"] == pytest.approx(360.6e6, rel=1e-3)  # as in lerobot/xvla-base
    assert count["language_model"] == pytest.approx(207.9e6, rel=1e-3)
    assert [large.size.image_tokens(*size) for size in ((224, 224), (256, 256), (480, 640))] == [50, 65, 301]


def test_nothing_is_read_on_the_host():
    with FakeTensorMode():
        ours = Florence(read_florence(TINY, "florence_config"))
        assert ours.embed_images(torch.empty(3, 3, 64, 96)).shape == (3, 7, 24)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({}, "no vision_config and no text_config"),
        ({"vision_config": TINY["vision_config"]}, "no text_config"),
        (with_settings("vision_config", model_type="siglip"), "vision_config.model_type='siglip'"),
        (with_settings("text_config", model_type="llama"), "text_config.model_type='llama'"),
        (with_settings("vision_config", image_pos_embed={"type": "rope"}), "learned_abs_2d"),
        (with_settings("vision_config", visual_temporal_embedding={"type": "RNN"}), "COSINE"),
        (with_settings("vision_config", image_feature_source=["last_frame"]), "image_feature_source"),
        (with_settings("vision_config", depths=[1, 1]), "depths 2"),
        (with_settings("vision_config", depths=3), "depths=3 must be a list"),
        (
            with_settings("vision_config", num_heads=[1, 2, 4, 5]),
            "embed_dim=32 must be a multiple of num_heads=5",
        ),
        (with_settings("vision_config", embed_dim=[8, 16, 32, 0]), "embed_dim: 0 is no size"),
        (with_settings("vision_config", drop_path_rate=1.5), "drop_path_rate=1.5"),
        (with_settings("vision_config", projection_dim=32), "projection_dim=32 and text_config.d_model=24"),
        (with_settings("vision_config", activation_function="relu"), "activation_function='relu'"),
        (with_settings("text_config", encoder_layerdrop=0.1), "encoder_layerdrop=0.1"),
        (with_settings("text_config", encoder_attention_heads=5), "multiple of encoder_attention_heads=5"),
        (with_settings("text_config", vocab_size=1 << 40), "vocab_size"),
        (with_settings("text_config", encoder_layers="many"), "encoder_layers: 'many'"),
    ],
)
def test_settings_that_make_no_florence(config, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")) as error:
        read_florence(config, "policy.florence_config")
    assert "policy.florence_config" in str(error.value)
