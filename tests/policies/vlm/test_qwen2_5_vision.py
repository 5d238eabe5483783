"""The vision transformer computes what that of `transformers` computes."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel

from flexor.policies.vlm.qwen2_5_images import ImageGrid
from flexor.policies.vlm.qwen2_5_vision import QwenVision, QwenVisionSize, Segment, layout_images

SIZE = QwenVisionSize(
    width=32, depth=3, mlp_width=48, heads=2, output_width=40, window=112, full_attention=(1,)
)
GRIDS = {
    "one window": [ImageGrid(8, 8)],
    "cut windows": [ImageGrid(10, 18)],
    "two sizes": [ImageGrid(16, 16), ImageGrid(4, 10)],
    "two alike": [ImageGrid(10, 18), ImageGrid(10, 18)],
    "three cameras": [ImageGrid(8, 12), ImageGrid(8, 12), ImageGrid(2, 2)],
}


def twins(grids: list[ImageGrid]) -> tuple[QwenVision, torch.nn.Module]:
    """Ours, and that of `transformers` with the same weights."""
    torch.manual_seed(0)
    config = Qwen2_5_VLVisionConfig(
        depth=SIZE.depth,
        hidden_size=SIZE.width,
        intermediate_size=SIZE.mlp_width,
        num_heads=SIZE.heads,
        out_hidden_size=SIZE.output_width,
        window_size=SIZE.window,
        fullatt_block_indexes=list(SIZE.full_attention),
    )
    theirs = Qwen2_5_VisionTransformerPretrainedModel._from_config(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    ours = QwenVision(SIZE, grids)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("grids", GRIDS.values(), ids=GRIDS)
def test_features_and_gradients(grids):
    ours, theirs = twins(grids)
    patches = torch.randn(2, sum(grid.patches for grid in grids), 3 * 196)
    frames = patches.unflatten(-1, (3, 1, 196)).expand(-1, -1, -1, 2, -1).flatten(2)
    sizes = torch.tensor([[1, *grid] for grid in grids])
    tokens = ours(patches)
    expected = torch.stack([theirs(sample, sizes).pooler_output for sample in frames])
    torch.testing.assert_close(tokens, expected, rtol=1e-5, atol=1e-5)
    weights = torch.randn_like(tokens)
    (tokens * weights).sum().backward()
    (expected * weights).sum().backward()
    for (name, parameter), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        largest = float(other.grad.abs().max())
        assert float((parameter.grad - other.grad).abs().max()) <= 1e-5 * largest, name


def test_windows_of_one_size_are_a_batch():
    layout = layout_images([ImageGrid(10, 18), ImageGrid(8, 8), ImageGrid(8, 8)], window=4)
    # tokens 5 x 9: two windows of 4 x 4, two of 1 x 4 and 4 x 1, and a corner; then a window for each image
    assert layout.windows == [Segment(2, 64), Segment(3, 16), Segment(1, 4), Segment(2, 64)]
    assert layout.images == [Segment(1, 180), Segment(2, 64)]


def test_nothing_is_read_on_the_host():
    tokens = sum(grid.tokens for grid in GRIDS["two sizes"])
    with FakeTensorMode():
        ours = QwenVision(SIZE, GRIDS["two sizes"])
        assert ours(torch.empty(3, 4 * tokens, 588)).shape == (3, tokens, SIZE.output_width)
