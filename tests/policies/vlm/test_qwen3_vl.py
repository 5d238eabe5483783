"""Qwen3-VL computes what that of `transformers` computes, for images of one size and of two."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from flexor.core.errors import ConfigError
from flexor.policies.vlm.qwen2_5_images import ImageGrid, choose_grid
from flexor.policies.vlm.qwen3_vision import PATCH
from flexor.policies.vlm.qwen3_vl import Qwen3VL, read_qwen3_size

PAD, START, END, IMAGE, WORDS = 0, 288, 289, 290, 280  # tokens; words are smaller
GRIDS = {"two sizes": [ImageGrid(10, 18), ImageGrid(4, 6)], "one size": [ImageGrid(4, 6)] * 3}
TEXT = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 300,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 5e6,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION = {
    "depth": 4,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1, 3],
    "patch_size": 16,
}


def described(**changes) -> dict:
    config = Qwen3VLConfig(
        text_config=TEXT,
        vision_config=VISION,
        image_token_id=IMAGE,
        vision_start_token_id=START,
        vision_end_token_id=END,
        video_token_id=291,
        tie_word_embeddings=True,
    )
    return {**config.to_dict(), **changes}


@pytest.fixture(scope="module", params=GRIDS)
def twins(request) -> tuple[Qwen3VL, Qwen3VLForConditionalGeneration]:
    """Ours, and that of `transformers` with the same weights."""
    torch.manual_seed(0)
    theirs = Qwen3VLForConditionalGeneration._from_config(Qwen3VLConfig(**described())).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = Qwen3VL(read_qwen3_size(described(), "config.json"), GRIDS[request.param])
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


def prompts(grids: list[ImageGrid]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two sentences of another length after the same images: tokens and mask [2, S]."""
    torch.manual_seed(1)
    start = [5, 6]
    for grid in grids:
        start += [START, *[IMAGE] * grid.tokens, END]
    rows = [start + torch.randint(1, WORDS, (count,)).tolist() for count in (4, 9)]
    length = max(map(len, rows))
    tokens = torch.tensor([row + [PAD] * (length - len(row)) for row in rows])
    return tokens, torch.arange(length) < torch.tensor([[len(row)] for row in rows])


def patches(grids: list[ImageGrid]) -> list[torch.Tensor]:
    return [torch.randn(2, grid.patches, 3 * PATCH**2) for grid in grids]


def hidden_of_theirs(theirs, tokens, mask, images, grids) -> torch.Tensor:
    """The output of the last layer, before the last norm."""
    twice = [image.unflatten(2, (3, 1, -1)).expand(-1, -1, -1, 2, -1).flatten(2) for image in images]
    pixels = torch.cat([image[sample] for sample in range(2) for image in twice])
    grid = torch.tensor([[1, grid.rows, grid.columns] for grid in grids] * 2)
    captured = []
    layer = theirs.model.language_model.layers[-1]
    hook = layer.register_forward_hook(lambda *call: captured.append(call[2]))
    theirs(
        input_ids=tokens,
        attention_mask=mask.long(),
        pixel_values=pixels,
        image_grid_thw=grid,
        mm_token_type_ids=(tokens == IMAGE).int(),
    )
    hook.remove()
    return captured[0] if isinstance(captured[0], torch.Tensor) else captured[0][0]


def test_its_hidden_states_and_gradients_are_those_of_transformers(twins):
    ours, theirs = twins
    grids = ours.model.visual.grids
    (tokens, mask), images = prompts(grids), patches(grids)
    features = ours.model.visual(images)
    hidden = ours.hidden(tokens, mask, features)
    expected = hidden_of_theirs(theirs, tokens, mask, images, grids)
    torch.testing.assert_close(hidden[mask], expected[mask], rtol=1e-4, atol=1e-4)

    ours.zero_grad()
    theirs.zero_grad()
    hidden[mask].square().mean().backward()
    expected[mask].square().mean().backward()
    theirs_by_name = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        grad = theirs_by_name[name].grad
        if parameter.grad is None or grad is None:
            assert "norm.weight" in name or "lm_head" in name, name
            continue
        torch.testing.assert_close(parameter.grad, grad, rtol=1e-3, atol=1e-4 * grad.abs().max().item())


def test_features_of_an_image_alone_are_those_of_it_among_others(twins):
    visual = twins[0].model.visual
    images = patches(visual.grids)
    together = visual(images)
    alone = torch.cat([visual.encode(*each) for each in zip(images, visual.grids)], 1)
    torch.testing.assert_close(together, alone)


def test_it_is_traced_without_values():
    with FakeTensorMode():
        grids = GRIDS["two sizes"]
        model = Qwen3VL(read_qwen3_size(described(), "config.json"), grids)
        tokens = torch.zeros(2, 70, dtype=torch.int64)
        features = model.model.visual([torch.zeros(2, grid.patches, 768) for grid in grids])
        hidden = model.hidden(tokens, torch.ones(2, 70, dtype=torch.bool), features)
        assert hidden.shape == (2, 70, 64)


def test_what_it_does_not_use_is_not_trained():
    size = read_qwen3_size(described(), "config.json").with_layers(3)
    model = Qwen3VL(size, GRIDS["one size"])
    model.freeze_unused()
    (tokens, mask), images = prompts(GRIDS["one size"]), patches(GRIDS["one size"])
    model.hidden(tokens, mask, model.model.visual(images)).sum().backward()
    assert len(model.decoder.layers) == 3
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad == (parameter.grad is not None), name


def test_images_have_whole_tokens_of_32_pixels():
    grid = choose_grid(480, 640, 256**2, 4096**2, 2 * PATCH)
    assert (grid.rows * PATCH, grid.columns * PATCH) == (480, 640)
    assert choose_grid(100, 120, 256**2, 4096**2, 2 * PATCH).patches * PATCH**2 >= 256**2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen2_5_vl"}, "not 'qwen3_vl'"),
        ({"image_token_id": 300}, "is none of 300 tokens"),
        (
            {
                "vision_config": {
                    **VISION,
                    "spatial_merge_size": 2,
                    "temporal_patch_size": 2,
                    "patch_size": 14,
                }
            },
            "16, 2, 2",
        ),
        ({"text_config": {**TEXT, "hidden_size": 32}}, "is not hidden_size"),
        ({"vision_config": None}, "does not describe"),
    ],
)
def test_other_models_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        read_qwen3_size(described(**change), "config.json")
