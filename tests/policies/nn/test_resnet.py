"""ResNets beyond their numbers (test_parity.py): the convolution for small maps, and ImageNet weights."""

import urllib.error

import pytest
import torch
import torch.nn.functional as F

from flexor.core.errors import ConfigError
from flexor.policies.nn import resnet
from flexor.policies.nn.resnet import Conv2d, FrozenBatchNorm2d, ResNet

WEIGHTS = "ResNet18_Weights.IMAGENET1K_V1"


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("kernel", [1, 3, 7])
@pytest.mark.parametrize("height", [1, 2, 3, 4])
@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_matrix_product_is_the_convolution(height, width, kernel, stride):
    generator = torch.Generator().manual_seed(0)
    conv = Conv2d(3, 5, kernel, stride).double()
    x = torch.randn(2, 3, height, width, generator=generator, dtype=torch.float64, requires_grad=True)
    results = []
    for compute in (conv._as_matrix_product, lambda x: F.conv2d(x, conv.weight, None, stride, kernel // 2)):
        out = compute(x)
        results.append((out, *torch.autograd.grad(out.square().sum(), (x, conv.weight))))
    for ours, reference in zip(*results):
        torch.testing.assert_close(ours, reference, rtol=1e-12, atol=1e-12)


def test_small_maps_take_the_matrix_product(monkeypatch):
    """The choice is a matter of speed alone: a whole network computes the same either way."""
    network = ResNet("resnet18")
    picture = torch.rand(1, 3, 64, 96)
    outs = []
    for slow in (True, False):
        monkeypatch.setattr(resnet, "SLOW_SMALL_MAPS", slow)
        outs.append(network(picture))
    torch.testing.assert_close(*outs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dilate", [False, True])
@pytest.mark.parametrize("size", [(1, 1), (32, 33), (40, 56), (95, 64)])
def test_feature_map_size_is_that_of_the_map(size, dilate):
    network = ResNet("resnet50", dilate_last_stage=dilate)
    with torch.no_grad():
        out = network(torch.zeros(1, 3, *size))
    assert tuple(out.shape[2:]) == network.feature_map_size(*size)


def test_dilation_needs_a_bottleneck():
    with pytest.raises(ConfigError, match="vision_backbone=resnet50"):
        ResNet("resnet18", dilate_last_stage=True)


def test_unknown_network_is_refused():
    with pytest.raises(ConfigError, match=r"resnet19.*resnet18"):
        ResNet("resnet19")


def test_frozen_batch_norm_has_nothing_to_train():
    norm = FrozenBatchNorm2d(4)
    assert not list(norm.parameters())
    reference = torch.nn.BatchNorm2d(4).eval()
    state = {name: torch.rand(4) + 0.5 for name in norm.state_dict()}
    norm.load_state_dict(state)
    reference.load_state_dict(state, strict=False)
    x = torch.randn(2, 4, 3, 3)
    torch.testing.assert_close(norm(x), reference(x))
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_loads_published_weights(tmp_path, monkeypatch):
    """torchvision's file has a classifier and counters too, which have no place here."""
    state = {name: torch.rand_like(value) for name, value in ResNet("resnet18").state_dict().items()}
    extra = {"fc.weight": torch.zeros(1000, 512), "bn1.num_batches_tracked": torch.tensor(0)}
    (tmp_path / "hub/checkpoints").mkdir(parents=True)
    torch.save({**state, **extra}, tmp_path / "hub/checkpoints/resnet18-f37072fd.pth")
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    network = ResNet("resnet18")
    network.load_imagenet(WEIGHTS)
    for name, value in network.state_dict().items():
        assert torch.equal(value, state[name]), name


def test_says_what_to_do_without_a_network(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise urllib.error.URLError("no route to host")

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.setattr("torch.hub.urlopen", refuse)
    with pytest.raises(ConfigError, match="pretrained_backbone_weights=null") as caught:
        ResNet("resnet18").load_imagenet(WEIGHTS)
    assert str(tmp_path) in str(caught.value)
    assert "no route to host" in str(caught.value)


def test_unknown_weights_are_refused():
    with pytest.raises(ConfigError, match="IMAGENET1K_V3"):
        ResNet("resnet18").load_imagenet("ResNet18_Weights.IMAGENET1K_V3")
