"""The settings of GR00T: what is refused, what LeRobot has and does not have, how cameras are ordered."""

import json
import math
from dataclasses import replace

import pytest
from safetensors.torch import save_file

from flexor.core.errors import CheckpointError, ConfigError
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.groot.config import GrootConfig
from flexor.policies.pretrained import as_lerobot, read_config
from parity.groot.files import make_files

STATE = PolicyFeature(Kind.STATE, (4,))
OUTPUTS = {"action": PolicyFeature(Kind.ACTION, (3,))}
TINY = {
    "base_model_path": "builtin/tiny-groot",
    "max_state_dim": 8,
    "max_action_dim": 8,
    "chunk_size": 8,
    "n_action_steps": 8,
}


def config(*cameras: str, **settings) -> GrootConfig:
    images = {
        f"observation.images.{name}": PolicyFeature(Kind.VISUAL, (3, 48, 64)) for name in cameras or ("top",)
    }
    inputs = {"observation.state": STATE, **images}
    return GrootConfig(input_features=inputs, output_features=dict(OUTPUTS), **{**TINY, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"chunk_size": 9}, "chunk_size=9 is more than the base model's action_horizon=8"),
        ({"max_state_dim": 9}, "max_state_dim=9, but the base model has 8: set it to that"),
        (
            {"embodiment_tag": "oxe_droid_relative_eef_relative_joint"},
            "has the number 24, .*11 embodiments only",
        ),
        (
            {"action_decode_transform": "flip"},
            "action_decode_transform='flip' is not known: use auto, none or",
        ),
        ({"crop_fraction": 1.5}, "crop_fraction=1.5 must be more than 0 and at most 1"),
        ({"image_min_pixels": 100}, "image_min_pixels=100 must be from 1024"),
        ({"image_target_size": (0, 64)}, r"image_target_size=\[0, 64\] must be at least 1 by 1"),
        ({"num_inference_timesteps": 0}, "num_inference_timesteps=0 must be at least 1"),
        ({"state_dropout_prob": 1.0}, "state_dropout_prob=1.0 must be from 0 to 0.99"),
        ({"n_obs_steps": 2}, "groot supports one observation only"),
        ({"base_model_path": "/nowhere"}, "policy.base_model_path=/nowhere: there is no such folder"),
        ({"base_config": {"model_type": "Gr00tN1d7", "backbone_config": {}}}, "does not describe a Qwen3-VL"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings).validate()


def test_cameras_are_required():
    blind = replace(config(), input_features={"observation.state": STATE})
    with pytest.raises(ConfigError, match=r"groot requires observation\.state and a camera"):
        blind.validate()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"backbone_embedding_dim": 64}, "backbone_embedding_dim and hidden_size .* are 64 and 128"),
        ({"input_embedding_dim": 64}, "input_embedding_dim and heads x channels"),
        ({"hidden_size": 64}, "hidden_size and output_dim"),
        ({"state_history_length": 2}, "state_history_length must be 1"),
        ({"max_seq_len": 4}, "max_seq_len=4 is less than action_horizon=8"),
        ({"diffusion_model_cfg": {}}, "num_layers|positional_embeddings"),
        ({"diffusion_model_cfg": None}, "does not describe a GR00T N1.7"),
    ],
)
def test_sizes_that_do_not_go_together(changed, message):
    described = {**config().described_base(), **changed}
    with pytest.raises(ConfigError, match=message):
        config(base_config=described).validate()


def test_defaults_of_the_older_version_become_those_of_this_one():
    old = config(chunk_size=50, n_action_steps=50, max_state_dim=64, max_action_dim=32, base_model_path=None)
    old.validate()
    assert (old.chunk_size, old.n_action_steps, old.max_state_dim, old.max_action_dim) == (40, 40, 132, 132)


def test_the_published_sizes_need_no_files():
    published = config(**dict.fromkeys(("base_model_path",)), max_state_dim=132, max_action_dim=132)
    size = published.size()
    assert (size.backbone.text.depth, size.dit.blocks.depth, size.vl.depth, size.horizon) == (16, 32, 4, 40)
    assert [grid.tokens for grid in published.grids] == [64]


def test_cameras_come_by_name_or_as_the_base_model_has_them():
    cameras = ("wrist", "above", "image2")
    assert [*config(*cameras).images] == [f"observation.images.{name}" for name in sorted(cameras)]
    ordered = config(*cameras, video_modality_keys=["wrist_image", "above"])
    assert [*ordered.images] == ["observation.images.image2", "observation.images.above"]


def test_presets_are_lerobots():
    preset = config().optimizer_preset()
    assert (preset["lr"], preset["betas"], preset["weight_decay"]) == (1e-4, (0.9, 0.999), 1e-5)
    assert preset["grad_clip_norm"] == 1.0
    assert config().scheduler_preset() == {"type": "cosine", "num_warmup_steps": math.ceil(10_000 * 0.05)}
    assert config(chunk_size=6, n_action_steps=6).drop_last_frames == 5


def test_lerobot_gets_its_own_settings_only():
    plain = as_lerobot(config(embodiment_tag="libero_sim"))
    assert plain["action_decode_transform"] == "libero"
    assert not plain.keys() & {"base_config", "image_target_size", "processor_name", "modalities"}
    assert plain["use_relative_actions"] is False


def test_settings_without_an_effect_are_read(tmp_path):
    plain = {**as_lerobot(config()), "lora_rank": 8, "batch_size": 64, "tokenizer_assets_repo": None}
    (tmp_path / "config.json").write_text(json.dumps(plain))
    assert read_config(str(tmp_path)).max_steps == 10_000
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "Gr00tN1d7"}))
    with pytest.raises(CheckpointError, match=r"--policy\.base_model_path"):
        read_config(str(tmp_path))


@pytest.mark.parametrize("name", ["raw-groot", "relative-groot"])
def test_a_base_models_files_complete_the_settings_once(name, tmp_path):
    make_files(tmp_path)
    new = config("left", "image2", base_model_path=str(tmp_path / name), embodiment_tag="simpler_env_google")
    made = replace(new, max_action_dim=7, chunk_size=8).with_base_processing()
    assert made.use_albumentations
    assert made.crops_randomly
    assert made.tag_number == 3
    assert len(made.action_deltas) == 8
    assert made.training_horizon == 10
    assert [*made.images] == ["observation.images.left", "observation.images.image2"]
    assert made.with_base_processing() == made


def test_statistics_of_absolute_actions_do_not_make_relative_ones(tmp_path):
    make_files(tmp_path)
    folder = str(tmp_path / "raw-groot")
    made = config(
        "left", base_model_path=folder, embodiment_tag="simpler_env_google", use_relative_actions=True
    )
    with pytest.raises(ConfigError, match="statistics of absolute actions"):
        made.with_base_processing().steps_before({})


def test_statistics_that_are_missing_are_named(tmp_path):
    make_files(tmp_path)
    folder = tmp_path / "raw-groot"
    statistics = json.loads((folder / "statistics.json").read_text())
    del statistics["simpler_env_google"]["action"]["gripper"]["q99"]
    (folder / "statistics.json").write_text(json.dumps(statistics))
    made = config("left", base_model_path=str(folder), embodiment_tag="simpler_env_google")
    made = made.with_base_processing()
    with pytest.raises(ConfigError, match=r"statistics.json has no q99 of action.gripper"):
        made.steps_before({})
    (folder / "processor_config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"processor_config\.json can't be read"):
        config("left", base_model_path=str(folder)).with_base_processing()


def test_percentiles_of_a_dataset(tmp_path):
    stats = {
        name: {"min": [-9.0] * n, "max": [9.0] * n, "q01": [-1.0] * n, "q99": [1.0] * n}
        for name, n in (("observation.state", 4), ("action", 3))
    }
    scaled = config(use_percentiles=True).scaled_by(stats)
    assert scaled["action"]["min"].tolist() == [-1.0] * 3
    save_file(config(use_percentiles=True).steps_before(stats)[2].state(), tmp_path / "step.safetensors")
    assert config().scaled_by(stats)["action"]["max"].tolist() == [9.0] * 3
    del stats["action"]["q99"]
    with pytest.raises(ConfigError, match="statistics of action lack q99: recompute them"):
        config(use_percentiles=True).scaled_by(stats)
