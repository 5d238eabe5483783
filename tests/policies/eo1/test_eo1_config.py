"""The settings of EO-1: what is refused, what other releases have, how LeRobot gets them."""

import json
from dataclasses import replace

import pytest

from flexor.core.errors import CheckpointError, ConfigError
from flexor.policies.eo1.config import EO1Config
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import as_lerobot, read_config
from flexor.policies.vlm.qwen2_5_vl import read_size
from parity.eo1.qwen import described, make_qwen

TOP = "observation.images.top"
INPUTS = {
    "observation.state": PolicyFeature(Kind.STATE, (4,)),
    TOP: PolicyFeature(Kind.VISUAL, (3, 480, 640)),
}
OUTPUTS = {"action": PolicyFeature(Kind.ACTION, (3,))}


def config(**settings) -> EO1Config:
    return EO1Config(input_features=dict(INPUTS), output_features=dict(OUTPUTS), **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"image_min_pixels": 9000, "image_max_pixels": 8000}, "image_min_pixels=9000 is more than"),
        ({"image_max_pixels": 700}, "image_max_pixels=700 must be at least 784"),
        ({"action_act": "snake"}, "action_act='snake' is not known: use one of linear, relu"),
        ({"n_action_steps": 9}, "n_action_steps=9 is more than policy.chunk_size=8"),
        ({"n_obs_steps": 2}, "eo1 supports one observation only"),
        ({"num_action_layers": 0}, "num_action_layers=0 must be at least 1"),
        ({"max_state_dim": 3}, r"observation.state has the shape \[4\]"),
        ({"vlm_config": {"model_type": "llama"}}, "policy.vlm_config does not describe a Qwen2.5-VL"),
    ],
)
def test_impossible_settings(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings).validate()


def test_cameras_are_required():
    blind = replace(config(), input_features={"observation.state": INPUTS["observation.state"]})
    with pytest.raises(ConfigError, match=r"eo1 requires observation\.state and a camera"):
        blind.validate()


@pytest.mark.parametrize(
    ("part", "changed", "message"),
    [
        ("vision_config", {"out_hidden_size": 40}, "out_hidden_size=40 is not hidden_size=32"),
        ("vision_config", {"num_heads": 3}, "no multiple of 4 x num_heads=3"),
        ("text_config", {"num_key_value_heads": 3}, "num_attention_heads=4 is no multiple of 3"),
        ("text_config", {"num_attention_heads": 8}, "has not half of a head's 4 channels"),
        ("text_config", {"vocab_size": 5}, "image_token_id=6 is none of 5 tokens"),
    ],
)
def test_a_backbone_whose_sizes_do_not_go_together(part, changed, message):
    wrong = described(tied=True)
    wrong[part] = {**wrong[part], **changed}
    with pytest.raises(ConfigError, match=message):
        read_size(wrong, "config.json")


def test_published_sizes_need_no_files():
    size = config().vlm_size()
    assert (size.text.width, size.text.depth, size.vision.depth) == (2048, 36, 32) and size.tied
    assert config().vlm_dtype.itemsize == 2  # bfloat16
    larger = config(vlm_base="Qwen/Qwen2.5-VL-7B-Instruct").vlm_size()
    assert (larger.text.width, larger.text.depth, larger.vocabulary) == (
        3584,
        28,
        152_064,
    ) and not larger.tied
    assert [tuple(grid) for grid in config().grids] == [(18, 26)]  # 252 x 364: 117 tokens


def test_qwens_own_limits():
    unlimited = config(image_min_pixels=None, image_max_pixels=None)
    unlimited.validate()
    assert unlimited.grids[0].size == (476, 644)


def test_absurd_sizes_in_a_checkpoint(tmp_path):
    file, base = tmp_path / "config.json", as_lerobot(config())
    file.write_text(json.dumps({**base, "image_max_pixels": 12_845_056}))  # Qwen's own
    assert read_config(str(tmp_path)).image_max_pixels == 12_845_056
    layers = {
        **base["vlm_config"],
        "text_config": {**base["vlm_config"]["text_config"], "num_hidden_layers": 2000},
    }
    for name, value in {"image_max_pixels": 1 << 30, "vlm_config": layers}.items():
        file.write_text(json.dumps({**base, name: value}))
        with pytest.raises((CheckpointError, ConfigError), match="can't be right"):
            read_config(str(tmp_path))


def test_lerobot_gets_the_sizes_of_the_backbone(tmp_path):
    """It would ask the Hub for them. They are those of its release, and only settings that it has."""
    base = make_qwen(tmp_path / "qwen")
    settings = as_lerobot(config(vlm_base=str(base)))
    assert settings["vlm_config"] == described(tied=True)
    assert not {"load_vlm_weights", "rtc_config", "empty_cameras"} & settings.keys()
    (tmp_path / "config.json").write_text(json.dumps(settings))
    again = read_config(str(tmp_path))
    assert as_lerobot(again) == settings


def test_settings_of_later_releases(tmp_path, log_lines):
    later = {
        "use_language_recipe": False,
        "recipe_path": None,
        "recipe": {"messages": []},
        "tokenizer_max_length": 1000,
        "text_temperature": 0.0,
        "text_top_p": 1.0,
        "flow_loss_weight": 1.0,
        "text_loss_weight": 0.01,
    }
    file, base = tmp_path / "config.json", as_lerobot(config())
    file.write_text(json.dumps({**base, "chunk_size": 16, "n_action_steps": 16, **later}))
    assert read_config(str(tmp_path)).chunk_size == 16 and not log_lines
    file.write_text(json.dumps({**base, **later, "flow_loss_weight": 2.0, "brand_new": 3}))
    assert as_lerobot(read_config(str(tmp_path))) == base
    said = "\n".join(log_lines)
    assert "flow_loss_weight=2.0 has no effect: the loss of actions is the only one" in said
    assert "has settings that Flexor does not know, which have no effect: brand_new" in said
    file.write_text(json.dumps({**base, **later, "use_language_recipe": True}))
    with pytest.raises(
        CheckpointError, match="use_language_recipe=True is not supported: EO-1 predicts actions"
    ):
        read_config(str(tmp_path))


def test_a_setting_of_the_wrong_kind_is_still_an_error(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**as_lerobot(config()), "chunk_size": "long"}))
    with pytest.raises((CheckpointError, ConfigError), match="chunk_size"):
        read_config(str(tmp_path))
