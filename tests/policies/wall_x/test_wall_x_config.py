"""The settings of WALL-X: what is refused, its sizes, and what a checkpoint has of them."""

import json
from dataclasses import replace

import pytest

from flexor.core.errors import ConfigError
from flexor.core.model_files import ModelFiles
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import as_lerobot, read_config
from flexor.policies.wall_x.config import WallXConfig
from flexor.policies.wall_x.size import describe_wall_x, read_wall_x_size
from parity.wall_x.models import VOCABULARY, described, make_wall

TOP = "observation.images.top"
INPUTS = {
    "observation.state": PolicyFeature(Kind.STATE, (4,)),
    TOP: PolicyFeature(Kind.VISUAL, (3, 480, 640)),
}
OUTPUTS = {"action": PolicyFeature(Kind.ACTION, (3,))}


def config(**settings) -> WallXConfig:
    return WallXConfig(input_features=dict(INPUTS), output_features=dict(OUTPUTS), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_action_steps": 33}, "n_action_steps=33 is more than policy.chunk_size=32"),
        ({"n_obs_steps": 2}, "wall_x supports one observation only"),
        ({"max_state_dim": 3}, r"observation.state has the shape \[4\]"),
        ({"vlm_config": {"model_type": "llama"}}, "policy.vlm_config does not describe a Qwen2.5-VL"),
        ({"prediction_mode": "fast", "chunk_size": 40}, "chunk_size=40 of at most 32"),
        ({"prediction_mode": "fast", "action_tokenizer_path": None}, "requires policy.action_tokenizer_path"),
        ({"num_denoise_steps": 0}, "num_denoise_steps=0 must be at least 1"),
        ({"rtc_config": {"mode": "trained"}}, "rtc_config.mode=trained is not supported"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings).validate()


def test_states_and_actions_have_the_models_size():
    config().validate()
    with pytest.raises(ConfigError, match=r"max_action_dim=10, but the dof_config .* has 20 values"):
        config(max_action_dim=10).model_size()
    with pytest.raises(
        ConfigError, match=r"max_state_dim=25, but the agent_pos_config .* --policy.max_state_dim=20"
    ):
        config(max_state_dim=25).model_size()


def test_cameras_are_required_and_not_too_long():
    blind = replace(config(), input_features={"observation.state": INPUTS["observation.state"]})
    with pytest.raises(ConfigError, match=r"wall_x requires observation\.state and a camera"):
        blind.validate()
    line = replace(config(), input_features={**INPUTS, TOP: PolicyFeature(Kind.VISUAL, (3, 20, 400))})
    with pytest.raises(ConfigError, match="20 x 400 pixels are too long for WALL-X"):
        line.validate()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dim_inputs": [32, 16]}, "but dim_inputs says 16"),
        ({"num_experts": 1, "dim_inputs": [32]}, "an expert for words and one for actions"),
        ({"attention_moe": True}, "attention_moe=true"),
        ({"dof_config": None}, "does not describe a WALL-X"),
        ({"agent_pos_config": {}}, "must name values"),
    ],
)
def test_a_model_whose_sizes_do_not_go_together(changed, message):
    with pytest.raises(ConfigError, match=message):
        read_wall_x_size({**described("tiny-wall"), **changed}, "config.json")


def test_published_sizes_need_no_files():
    size = config().model_size()
    assert (size.vlm.text.width, size.vlm.text.depth, size.vlm.tied) == (2048, 36, True)
    assert [(expert.width, expert.mlp_width) for expert in size.experts] == [(2048, 11008), (2048, 2048)]
    assert (size.action_values, size.state_values) == (20, 20)
    assert config().model_dtype.itemsize == 2  # bfloat16
    assert [tuple(grid) for grid in config().grids] == [(14, 18)]  # 196 x 252: 63 tokens


@pytest.mark.parametrize("layout", ["tiny-wall", "dense-wall"])
def test_the_tokenizer_says_how_many_embeddings_there_are(layout, tmp_path):
    sizes = describe_wall_x(ModelFiles(str(make_wall(tmp_path, layout)), "files"))
    assert read_wall_x_size(sizes, "files").vlm.vocabulary == len(VOCABULARY) != 100
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="does not describe a tokenizer"):
        describe_wall_x(ModelFiles(str(tmp_path), "files"))


def test_lerobot_gets_only_settings_that_it_has(tmp_path):
    settings = as_lerobot(config(dtype="float32", round_actions=False))
    ours = {"vlm_config", "tokenizer_path", "load_vlm_weights", "dtype", "round_actions", "num_denoise_steps"}
    assert not ours & settings.keys()
    assert settings["action_tokenizer_path"] is None
    assert (
        as_lerobot(config(prediction_mode="fast"))["action_tokenizer_path"] == "lerobot/fast-action-tokenizer"
    )
    (tmp_path / "config.json").write_text(json.dumps(settings))
    again = read_config(str(tmp_path))
    assert as_lerobot(again) == settings
    assert read_config(str(tmp_path), {"prediction_mode": "diffusion"}).writes_tokens is False
