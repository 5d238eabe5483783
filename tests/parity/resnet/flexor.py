"""Our ResNets."""

from flexor.policies.nn.resnet import ResNet
from parity.resnet import cases


def measure(case: dict) -> dict:
    network = ResNet(**case["settings"])
    return cases.measure(network, network)
