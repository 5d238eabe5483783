"""A ResNet for tests, `--policy.vision_backbone=resnet_small`: like ResNet-18 with 1 of 36 of its weights.

Most of what a small run does would be to make, save, hash and read those of ResNet-18. Known to processes that import
this: the tests' own, and those that are forked for them.
"""

from flexor.policies.nn import resnet

NAME = "resnet_small"
FLAG = f"--policy.vision_backbone={NAME}"

resnet.ARCHITECTURES[NAME] = resnet.Architecture((1, 1, 1, 1), bottleneck=False, width=16)
