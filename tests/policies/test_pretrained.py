"""Reading the folders of other programs' policies."""

import json
import shutil
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from flexor.bench.policy import untrained
from flexor.cli.main import main
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.rng import Noise
from flexor.plan.data.imagined_robot import Robot
from flexor.policies.act.config import ACTConfig
from flexor.policies.pretrained import as_lerobot, load_pretrained, read_config
from flexor.policies.processing.pipeline import Pipeline
from support import runs
from support.damage import edit_json
from support.tokenizers import make_tokenizer


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
    chunks = [
        policy.chunk({camera: images, "observation.state": state}, ["", ""], Noise(0, 0, torch.arange(2)))
        for images in (
            np.ascontiguousarray(np.moveaxis(image, -1, -3)),
            np.moveaxis(image, -1, -3),
            np.moveaxis(image[:, ::-1].copy()[:, ::-1], -1, -3),
        )
    ]
    assert np.array_equal(chunks[0], chunks[1]) and np.array_equal(chunks[0], chunks[2])


# Files of LeRobot that Flexor can't use: each message says what to do.


@pytest.fixture
def act(lowdim, tiny_act, tmp_path):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    return Path(shutil.copytree(run / "checkpoints/last/pretrained_model", tmp_path / "act"))


def test_policies_of_old_versions_say_how_to_convert_them(act, lowdim, capsys):
    weights = load_file(act / "model.safetensors")
    save_file(
        {**weights, "normalize_inputs.buffer_observation_state.mean": torch.zeros(3)},
        act / "model.safetensors",
    )
    flags = [f"--policy.path={act}", f"--dataset.root={lowdim}", f"--output_dir={act}/new"]
    assert main(["train", *flags]) == 1
    assert "migrate_policy_normalization" in capsys.readouterr().err
    for file in ("policy_preprocessor.json", "policy_postprocessor.json"):  # those versions have none either
        with pytest.raises(CheckpointError, match="migrate_policy_normalization"):
            load_pretrained(str(act))
        (act / file).unlink()


def test_weights_in_several_files_load(act):
    expected = load_pretrained(str(act)).policy.state_dict()
    weights = load_file(act / "model.safetensors")
    (act / "model.safetensors").unlink()
    parts = {f"model-{number}-of-2.safetensors": [*weights][number::2] for number in range(2)}
    for file, names in parts.items():
        save_file({name: weights[name] for name in names}, act / file)
    weight_map = {name: file for file, names in parts.items() for name in names}
    index = act / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    loaded = load_pretrained(str(act)).policy.state_dict()
    assert [name for name in expected if not torch.equal(loaded[name], expected[name])] == []
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.more": "model-0-of-2.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"index\.json: .* do not have model\.more"):
        load_pretrained(str(act))
    index.write_text(json.dumps({"weight_map": {**weight_map, "model.more": "../other.safetensors"}}))
    with pytest.raises(CheckpointError, match="which file holds which weights"):
        load_pretrained(str(act))
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="which file holds which weights"):
        load_pretrained(str(act))


def test_weights_in_torchs_distributed_checkpoint_load(act, lowdim, tmp_path):
    """As LeRobot saves them with checkpoint_format=dcp: under `model`, in a folder of this name."""
    expected = load_pretrained(str(act)).policy.state_dict()
    weights = load_file(act / "model.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights}, checkpoint_id=act / "pytorch_model_fsdp_0", no_dist=True)
    (act / "model.safetensors").unlink()
    loaded = load_pretrained(str(act)).policy.state_dict()
    assert [name for name in expected if not torch.equal(loaded[name], expected[name])] == []
    tuned = runs.train(lowdim, tmp_path / "tuned", [f"--policy.path={act}"], "--steps=1", "--optimizer.lr=0")
    trained = load_file(tuned / "checkpoints/last/pretrained_model/model.safetensors")
    assert [name for name in weights if not torch.equal(trained[name], weights[name])] == []
    for file in (act / "pytorch_model_fsdp_0").glob("*.distcp"):
        file.write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="pytorch_model_fsdp_0"):
        load_pretrained(str(act))


def test_a_setting_that_is_not_known_is_named_with_its_file(act):
    edit_json(act / "config.json", lambda config: config.update(flash_mode=3))
    with pytest.raises(CheckpointError, match=r"act/config.json has settings .* not know: flash_mode\."):
        load_pretrained(str(act))


PI05 = {
    "type": "pi05",
    "use_visual_memory": False,
    "use_proprioceptive_memory": False,
    "memory_frames": 6,
    "memory_stride": 30,
    "memory_temporal_attention_every": 4,
    "rtc_training_max_delay": 0,
    "rtc_config": None,
}


def test_a_pi05_with_settings_that_only_lerobot_has(tmp_path, log_lines):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(PI05))
    assert read_config(str(tmp_path)).type == "pi05" and not log_lines
    file.write_text(json.dumps(PI05 | {"rtc_training_max_delay": 10}))
    assert "rtc_training_max_delay" not in as_lerobot(read_config(str(tmp_path)))
    assert "rtc_training_max_delay=10 has no effect" in " ".join(log_lines)
    for name in ("use_visual_memory", "use_proprioceptive_memory"):
        file.write_text(json.dumps(PI05 | {name: True}))
        with pytest.raises(
            CheckpointError, match=f"config.json: {name}=True is not supported: pi05 has no memory"
        ):
            read_config(str(tmp_path))
    file.write_text(json.dumps({"type": "molmoact2", "recipe": {}}))
    with pytest.raises(ConfigError, match=r"policy\.type=molmoact2 is a policy of LeRobot's"):
        read_config(str(tmp_path))


def test_a_tokenizer_beside_the_policy_is_used(tmp_path):
    """LeRobot saves it there, and names it relative to the folder."""
    make_tokenizer(tmp_path / "tokenizer")
    entry = {
        "registry_name": "tokenizer_processor",
        "config": {"tokenizer_name": "tokenizer", "max_length": 8},
        "artifacts": {"tokenizer_name": "tokenizer"},
    }
    file = tmp_path / "policy_preprocessor.json"
    file.write_text(json.dumps({"name": "policy_preprocessor", "steps": [entry]}))
    (step,) = Pipeline.load(tmp_path, "policy_preprocessor").steps
    assert step({"task": ["pick"]})["observation.language.tokens"].shape == (1, 8)
    file.write_text(json.dumps({"steps": [entry | {"artifacts": {"tokenizer_name": "../tokenizer"}}]}))
    with pytest.raises(FlexorError, match="tokenizer"):
        Pipeline.load(tmp_path, "policy_preprocessor")


def test_resuming_a_run_of_lerobots_points_to_its_weights(act, tmp_path, capsys):
    theirs = tmp_path / "theirs"
    shutil.copytree(act, theirs / "checkpoints/000010/pretrained_model")
    assert main(["resume", str(theirs)]) == 1
    assert f"flexor train --policy.path={theirs}" in capsys.readouterr().err
    assert main(["resume", str(tmp_path)]) == 1
    assert "LeRobot" not in capsys.readouterr().err
