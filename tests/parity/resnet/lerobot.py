"""torchvision's backbones alone, as LeRobot's ACT uses them."""

from parity.resnet import cases


def measure(case: dict) -> dict:
    import torchvision
    from torchvision.models._utils import IntermediateLayerGetter
    from torchvision.ops.misc import FrozenBatchNorm2d

    network = torchvision.models.get_model(**case["settings"], norm_layer=FrozenBatchNorm2d)
    network = IntermediateLayerGetter(network, {"layer4": "out"})
    return cases.measure(network, lambda picture: network(picture)["out"])
