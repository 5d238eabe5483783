"""The GR00Ts that are compared, what they are shown and told. Imported by both programs."""

from typing import Any

import numpy as np
import torch

from parity.fill import fill
from parity.groot.files import BACKBONE, TAG
from parity.groot.files import make_files as make_bases
from parity.inputs import BATCH, STATE, actions, camera, observation
from parity.kinds import FOLDER
from parity.records import values

STEPS = 8  # of acting: several chunks
PARTS = ()
TINY: dict[str, Any] = {
    "base_model_path": f"{FOLDER}/tiny-groot",
    "chunk_size": 8,
    "n_action_steps": 4,
    "max_state_dim": 8,
    "max_action_dim": 7,
    "use_bf16": False,
}
OURS = {"processor_name": f"{FOLDER}/{BACKBONE}"}
MODES = {"VISUAL": "IDENTITY", "STATE": "IDENTITY", "ACTION": "IDENTITY"}


def case(inputs: dict, **settings: object) -> dict:
    return {
        "inputs": inputs,
        "settings": {**TINY, "normalization_mapping": MODES, **settings},
        "ours": OURS,
    }


def raw(base: str, **settings: object) -> dict:
    """From NVIDIA's files: cameras in another order, one of them left out."""
    robot = STATE | camera("image2", 33, 70) | camera("above", 33, 70) | camera("left", 33, 70)
    files = {"base_model_path": f"{FOLDER}/{base}", "embodiment_tag": TAG}
    ours = {**OURS, "random_crop": False}  # only LeRobot's runs crop at random, which here there are none of
    return {**case(robot, **{**files, **settings}), "ours": ours, "predicts_chunks": True}


ONE_CAMERA = STATE | camera("top")
THREE_CAMERAS = STATE | camera("wrist", 33, 70) | camera("above", 33, 70) | camera("left", 33, 70)
NOTHING_TUNED = dict.fromkeys(("tune_projector", "tune_diffusion_model", "tune_vlln"), False)
CASES = {
    "default": case(ONE_CAMERA),
    "three_cameras": case(THREE_CAMERAS),
    "large_images": case(STATE | camera("top", 480, 640)),
    "square_images": case(STATE | camera("top", 256, 256)),
    "everything": case(ONE_CAMERA, tune_llm=True, tune_visual=True),
    "top_layers": case(THREE_CAMERAS, tune_top_llm_layers=2),
    "vision_only": case(ONE_CAMERA, tune_visual=True, **NOTHING_TUNED),
    "projectors_only": case(ONE_CAMERA, **{**NOTHING_TUNED, "tune_projector": True}),
    "whole_chunk": case(ONE_CAMERA, chunk_size=10, n_action_steps=10),
    "more_steps": case(ONE_CAMERA, num_inference_timesteps=7),
    "another_robot": case(ONE_CAMERA, embodiment_tag="simpler_env_google"),
    "unknown_robot": case(ONE_CAMERA, embodiment_tag="libero_sim"),
    "raw": raw("raw-groot"),
    "raw_without_statistics": raw("raw-groot", embodiment_tag="new_embodiment"),
    "raw_large": raw("raw-groot") | {"inputs": STATE | camera("left", 512, 512)},
    "relative": {**raw("relative-groot"), "acts": False},  # LeRobot predicts only whole chunks
    "plain": case(THREE_CAMERAS, base_model_path=f"{FOLDER}/plain-groot", tune_llm=True),
}
make_files = make_bases


def training_batch(case: dict) -> dict[str, np.ndarray]:
    return {**observation(case["robot"], "training"), **actions(case["settings"]["chunk_size"], (1, 4))}


def fill_policy(policy: torch.nn.Module) -> str:
    """Layers that have "embed" in their names, but are no tables, are as small as others: they would multiply what is
    rounded."""
    digest = fill(policy)
    with torch.no_grad():
        for name, value in policy.named_parameters():
            if name.endswith("weight") and ("timestep_embedder" in name or "patch_embed" in name):
                value.mul_((value[0].numel() / 3) ** -0.5)
    return digest


def prompts(tokens: torch.Tensor, mask: torch.Tensor) -> list[list[int]]:
    """The tokens of each sample, without padding."""
    return [row[valid.bool()].tolist() for row, valid in zip(tokens, mask)]


def pixels(patches: torch.Tensor) -> list:
    """Of patches [B * N, 768], some, and moments of all."""
    patches = patches.reshape(BATCH, -1, 768)
    return [
        patches.double().mean().item(),
        patches.double().square().mean().item(),
        values(patches[:, ::25, ::97]),
    ]


STORED = {"prompts": 0, "pixels": 1e-6, "chunk": 1e-5}
