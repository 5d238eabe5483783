"""Settings of X-VLA: what is refused early, and what is in LeRobot's files."""

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from flexor.cli.main import main
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.policies import make_policy
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import load_pretrained, save_pretrained
from flexor.policies.vlm.florence_size import FLORENCE_2_LARGE
from flexor.policies.weight_names import unique_state
from flexor.policies.xvla.config import XVLAConfig
from support.small_xvla import TINY, features, small_config

WIDE = {"output_features": {"action": PolicyFeature(Kind.ACTION, (20,))}}


def saved(config: XVLAConfig, folder):
    """A checkpoint of a policy with these settings."""
    torch.manual_seed(0)
    policy = make_policy(config)
    save_pretrained(folder, config, unique_state(policy), *config.pipelines({}, "cpu"))
    return folder


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"input_features": features({})}, "camera"),
        ({"input_features": features({"top": (40, 56)}, state=None)}, "observation.state"),
        ({"input_features": features({"top": (40, 56)}, state=7)}, "policy.max_state_dim=6"),
        ({**WIDE}, "action has 20 values, but policy.action_mode=auto predicts 5"),
        ({**WIDE, "action_mode": "franka_joint7"}, "policy.action_mode=franka_joint7 predicts 7"),
        ({"action_mode": "ee6d"}, "--policy.max_state_dim of at least 20, not 6"),
        ({"action_mode": "joint", "max_state_dim": 13}, "at least 14"),
        ({"action_mode": "so101_bimanual", "max_state_dim": 32}, "needs --policy.max_state_dim=20, not 32"),
        ({"action_mode": "ee6d", "use_proprio": False}, "needs the robot's state"),
        (
            {"input_features": features({"a": (40, 56), "b": (48, 56)}), "resize_imgs_with_padding": None},
            "observation.images.a .3, 40, 56., observation.images.b .3, 48, 56.",
        ),
        ({"max_len_seq": 20}, "8 actions, 12 words and 1 images of 2 tokens are 22"),
        ({"max_len_seq": 25, "num_image_views": 3}, "3 images of 2 tokens"),
        ({"resize_imgs_with_padding": (480, 640)}, "480 x 640 pixels have 301 tokens"),
        ({"resize_imgs_with_padding": (32, 3200)}, "places for 50 rows and columns"),
        ({"hidden_size": 17}, "policy.hidden_size=17 must be a multiple of policy.num_heads=2"),
        ({"domain_id": 3}, "policy.domain_id: 3 is no domain"),
        ({"domain_ids": [0, 3]}, "policy.domain_ids: 3 is no domain"),
        ({"florence_config": {"vision_config": {}}}, "policy.florence_config has no text_config"),
        ({"n_action_steps": 9}, "policy.n_action_steps=9"),
        ({"dropout": 1.0}, "policy.dropout=1.0"),
        ({"dim_time": 1}, "policy.dim_time=1"),
    ],
)
def test_what_can_not_work_is_refused_at_once(changes, words):
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        small_config(**changes).validate()


def test_defaults_are_those_of_lerobot_and_have_a_network():
    config = XVLAConfig()
    config.validate()
    assert (config.chunk_size, config.max_state_dim, config.max_action_dim, config.optimizer_betas) == (
        *(32, 32, 20),
        (0.9, 0.99),
    )
    assert config.florence_size().text.width == 1024


def test_what_lerobot_reads(tmp_path):
    config = small_config(empty_cameras=2, domain_id=1, florence_config={}, max_len_seq=512)
    saved_as = config.for_lerobot()
    assert saved_as.florence_config == FLORENCE_2_LARGE and saved_as.num_image_views == 3
    folder = saved(small_config(tmp_path / "files", domain_id=2, dtype="bfloat16"), tmp_path / "policy")
    settings = json.loads((folder / "config.json").read_text())
    assert not {"domain_id", "domain_ids", "dropout", "rtc_config"} & settings.keys()
    assert settings["florence_config"] == TINY["florence_config"] and settings["dtype"] == "bfloat16"
    steps = json.loads((folder / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps] == [
        "rename_observations_processor",
        "to_batch_processor",
        "tokenizer_processor",
        "xvla_image_to_float",
        "xvla_imagenet_normalize",
        "xvla_add_domain_id",
        "device_processor",
        "normalizer_processor",
    ]
    assert [step["config"] for step in steps[3:6]] == [
        {"image_keys": None, "validate_range": True},
        {"image_keys": None},
        {"domain_id": 2},
    ]


def test_views_do_not_grow_over_five_rounds(tmp_path):
    """LeRobot adds the empty cameras to the inputs, and counts them again whenever it loads a policy."""
    config = small_config(tmp_path / "files", empty_cameras=2)
    observed = {
        "observation.images.top": np.zeros((1, 40, 56, 3), np.uint8).transpose(0, 3, 1, 2),
        "observation.state": np.zeros((1, 4), np.float32),
    }
    folder, chunks = saved(config, tmp_path / "0"), []
    for number in range(1, 6):
        loaded = load_pretrained(str(folder))
        config = loaded.policy.config
        assert config.views == 3 and [*config.images] == ["observation.images.top"]
        chunks.append(loaded.chunk(observed, ["pick up"], Noise(0, 0, torch.tensor([0]))))
        folder = tmp_path / str(number)
        pipelines = loaded.preprocessor, loaded.postprocessor
        save_pretrained(folder, config, unique_state(loaded.policy), *pipelines)
        # as LeRobot writes it
        settings = json.loads((folder / "config.json").read_text())
        assert settings["num_image_views"] == 3
        for index in range(2):
            camera = {"type": "VISUAL", "shape": [3, 480, 640]}
            settings["input_features"][f"observation.images.empty_camera_{index}"] = camera
        (folder / "config.json").write_text(json.dumps(settings))
    assert all(np.array_equal(chunk, chunks[0]) for chunk in chunks)


def test_the_domain_of_a_checkpoint_is_kept_unless_another_is_given(tmp_path):
    folder = saved(small_config(tmp_path / "files", domain_id=2), tmp_path / "policy")
    for overrides, expected in (({}, 2), ({"domain_id": 1}, 1)):
        loaded = load_pretrained(str(folder), overrides=overrides)
        assert loaded.policy.config.domain_id == expected
        batch = loaded.preprocessor(
            {"observation.state": torch.zeros(2, 4), "task": ["pick up", "open"]},
        )
        assert batch["domain_id"].tolist() == [expected] * 2


def test_domains_in_a_column_of_the_dataset():
    config = small_config(domain_feature_key="robot")
    config.check_columns({"robot": np.array([0, 2, 1])})
    for columns, words in (
        ({"action": np.zeros(3)}, "no such column. It has action"),
        ({"robot": np.array([0, 3])}, "values from 0 to 3"),
        ({"robot": np.array([0.5, 1])}, "whole numbers from 0 to 2"),
    ):
        with pytest.raises(ConfigError, match=words):
            config.check_columns(columns)
    with pytest.raises(ConfigError, match="of which there are 2"):
        small_config(domain_ids=[1, 0, 2]).check_columns({"/dataset": np.array([0, 1])})


def test_states_of_another_robot(tmp_path):
    config = small_config(tmp_path / "files")
    assert config.accepts_shape("observation.state", (6,))
    assert not config.accepts_shape("observation.state", (7,))
    assert not config.accepts_shape("observation.state", (2, 3))
    by_statistics = replace(config, normalization_mapping={Kind.STATE: "MEAN_STD"})
    assert not by_statistics.accepts_shape("observation.state", (6,))
    loaded = load_pretrained(str(saved(config, tmp_path / "policy")))
    observed = {
        "observation.images.top": np.zeros((1, 3, 40, 56), np.uint8),
        "observation.state": np.ones((1, 6), np.float32),
    }
    assert loaded.chunk(observed, ["pick up"]).shape == (1, 8, 3)


def test_training_pads_all_tasks_alike(caplog):
    config = small_config(pad_language_to="longest")
    with caplog.at_level(logging.WARNING):
        fitted = config.fitted(config.input_features, config.output_features)
    assert fitted.pad_language_to == "max_length" and "the policy sees the padding" in caplog.text


def test_a_dataset_with_other_cameras_fits(tmp_path):
    """Cameras keep their places, and what is missing stays a view."""
    config = small_config(input_features=features({"image": (40, 56), "image2": (40, 56)}), num_image_views=3)
    inputs = features({"top": (48, 64)}, state=5)
    fitted = config.fitted(inputs, config.output_features)
    fitted.validate()
    assert [*fitted.images] == ["observation.images.top"] and fitted.views == 3
    assert fitted.state.shape == (5,)


def test_a_plan_needs_no_files(capsys):
    assert (
        main(["plan", "--policy.type=xvla", "--cameras=2x64x64", "--state=8", "--action=20", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)
