"""Our ResNets."""

from flexor.policies.blocks.resnet import ResNet
from parity.resnet import cases


def measure(case: dict) -> dict:
    network = ResNet(**case["settings"])
    return cases.measure(network, network)
