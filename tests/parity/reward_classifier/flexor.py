"""What our reward classifier computes."""

import torch

from parity import flexor_side
from parity.fill import Draws
from parity.reward_classifier.cases import fill_policy, images, labels, record


def measure(case: dict) -> dict:
    pretrained = flexor_side.make_policy("reward_classifier", {**case, "ours": {}})
    policy = pretrained.policy.eval()
    parameters = fill_policy(policy)
    batch = pretrained.preprocessor(flexor_side.tensors(images(case)))
    label = {"next.reward": torch.from_numpy(labels(case))[:, None]}
    loss = policy.loss({**batch, **label}, Draws("training")).per_sample.mean()
    with torch.no_grad():
        probabilities = policy.logits(batch)
    return {"parameters": parameters, **record(policy, probabilities, loss, flexor_side.groups(policy))}
