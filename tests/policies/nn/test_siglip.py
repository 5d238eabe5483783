"""SigLIP's vision transformer against the one of `transformers`."""

import pytest
import torch

from flexor.policies.nn.siglip import PatchEmbedding, SiglipSize, SiglipVision

SMALL = SiglipSize(width=32, depth=2, mlp_width=48, heads=4, image=28, patch=14)


def test_names_outputs_and_gradients_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    settings = transformers.SiglipVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        image_size=28,
        patch_size=14,
        vision_use_head=False,
    )
    torch.manual_seed(0)
    theirs, ours = transformers.SiglipVisionModel(settings).eval(), SiglipVision(SMALL)
    weights = {name: 0.3 * torch.randn_like(value) for name, value in theirs.state_dict().items()}
    theirs.load_state_dict(weights)
    ours.load_state_dict({name.removeprefix("vision_model."): value for name, value in weights.items()})
    image = torch.rand(2, 3, 28, 28) * 2 - 1
    expected, out = theirs(image).last_hidden_state, ours(image)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
    for tokens in (expected, out):
        tokens.square().sum().backward()
    gradients = {name.removeprefix("vision_model."): p.grad for name, p in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-3, atol=1e-3, msg=name)


def test_patches_are_those_of_a_convolution():
    torch.manual_seed(0)
    embedding = PatchEmbedding(8, patch=4).double()
    images = torch.randn(2, 3, 12, 17, dtype=torch.float64)  # a column that fills no patch is ignored
    expected = torch.nn.Conv2d.forward(embedding, images).flatten(2).transpose(1, 2)
    torch.testing.assert_close(embedding(images), expected)


def test_tokens_of_an_image():
    assert SiglipSize().tokens == 256
    assert SiglipVision(SMALL)(torch.zeros(1, 3, 28, 28)).shape == (1, SMALL.tokens, SMALL.width)
