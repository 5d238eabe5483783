"""Reading the folders of other programs' policies."""

import json

import numpy as np
import torch

from flexor.bench.policy import untrained
from flexor.core.rng import Noise
from flexor.plan.data.imagined_robot import Robot
from flexor.policies.act.config import ACTConfig
from flexor.policies.pretrained import read_config


def test_reads_a_switch_that_lerobot_wrote_as_a_number(tmp_path):
    """It declares this one an int, and so writes 0 once a checkpoint has been loaded and saved again."""
    settings = {"type": "act", "replace_final_stride_with_dilation": 0, "use_peft": False}
    (tmp_path / "config.json").write_text(json.dumps(settings))
    assert read_config(str(tmp_path)).replace_final_stride_with_dilation is False


def test_the_order_in_memory_of_what_a_robot_sees_changes_nothing():
    """Cameras give [H, W, C], which is shown as [C, H, W] without a copy; some arrays run backwards."""
    small = ACTConfig(dim_model=16, n_heads=2, dim_feedforward=16, n_encoder_layers=1, chunk_size=4)
    small.n_action_steps, small.pretrained_backbone_weights, small.device = 4, None, "cpu"
    policy = untrained(Robot(cameras=1, height=32, width=48, state=3, action=2).fill_in(small))
    image = np.random.default_rng(0).integers(0, 256, (2, 32, 48, 3), dtype=np.uint8)
    state = np.ones((2, 3), np.float32)
    camera = next(iter(policy.policy.config.images))
    found = [
        policy.chunk({camera: images, "observation.state": state}, ["", ""], Noise(0, 0, torch.arange(2)))
        for images in (
            np.ascontiguousarray(np.moveaxis(image, -1, -3)),
            np.moveaxis(image, -1, -3),
            np.moveaxis(image[:, ::-1].copy()[:, ::-1], -1, -3),
        )
    ]
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])
