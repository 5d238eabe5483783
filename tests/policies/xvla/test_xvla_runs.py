"""Runs of X-VLA: domains of several datasets, what is written for LeRobot, fine-tuning on another robot."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.core.batch import DATASET_NUMBER
from flexor.policies import make_policy
from flexor.policies.pretrained import load_pretrained
from flexor.policies.xvla.policy import XVLA
from support import runs
from support.small_policies import small_flags
from support.small_xvla import small_config


@pytest.fixture
def flags(tmp_path) -> list[str]:
    return ["--policy.device=cpu", *small_flags("xvla", tmp_path / "models")]


def test_every_dataset_has_its_domain(dataset, flags, tmp_path, monkeypatch):
    met = []
    real = XVLA._domains

    def noted(self, batch, *more):
        met.append((batch[DATASET_NUMBER], real(self, batch, *more)))
        return met[-1][1]

    monkeypatch.setattr(XVLA, "_domains", noted)
    mix = f"--dataset.mix=[{{root: {dataset}, name: a}}, {{root: {dataset}, name: b}}]"
    common = ["--steps=3", "--dataset.root=null", mix]
    run = runs.train(dataset, tmp_path / "run", flags, *common, "--policy.domain_ids=[2, 1]")
    numbers, domains = (torch.cat(column).tolist() for column in zip(*met))
    assert {*numbers} == {0, 1} and domains == [[2, 1][number] for number in numbers]
    saved = load_pretrained(str(run)).preprocessor.steps
    assert [step.domain_id for step in saved if step.name == "xvla_add_domain_id"] == [2]


def test_what_lerobot_needs_to_resume(dataset, flags, tmp_path):
    scale = "--policy.optimizer_soft_prompt_lr_scale=0.5"
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=2", scale)
    checkpoint = run / "checkpoints" / "last"
    settings = json.loads((checkpoint / "pretrained_model/train_config.json").read_text())["optimizer"]
    assert settings["type"] == "xvla-adamw" and settings["lr"] == 1e-3
    assert settings["soft_prompt_lr_scale"] == 0.5 and settings["soft_prompt_warmup_lr_scale"] is None
    groups = json.loads((checkpoint / "training_state/optimizer_param_groups.json").read_text())
    assert [group["name"] for group in groups] == ["vlm", "soft_prompts", "other"]
    assert [group["initial_lr"] for group in groups] == pytest.approx([1e-4, 5e-4, 1e-3])


def test_fine_tuning_keeps_the_domain_and_the_views(dataset, flags, tmp_path):
    first = runs.train(
        dataset, tmp_path / "first", flags, "--steps=1", "--policy.domain_id=2", "--policy.num_image_views=2"
    )
    tokenizer = [flag for flag in flags if "tokenizer_name" in flag]
    path = [f"--policy.path={first}", "--policy.device=cpu", *tokenizer]
    second = runs.train(dataset, tmp_path / "second", path, "--steps=1")
    config = load_pretrained(str(second)).policy.config
    assert config.domain_id == 2 and config.views == 2
    weights = [
        load_file(run / "checkpoints/last/pretrained_model/model.safetensors") for run in (first, second)
    ]
    assert weights[0].keys() == weights[1].keys()
    prompts = [each["model.transformer.soft_prompt_hub.weight"] for each in weights]
    assert torch.equal(prompts[0][:2], prompts[1][:2]) and not torch.equal(prompts[0][2], prompts[1][2])


def test_steps_of_a_checkpoint_that_a_run_does_not_have_are_named(dataset, flags, tmp_path, log_lines):
    """Such as those that published policies have for a simulator."""
    first = runs.train(dataset, tmp_path / "first", flags, "--steps=1")
    published = shutil.copytree(first / "checkpoints/last/pretrained_model", tmp_path / "published")
    tokenizer = [flag for flag in flags if "tokenizer_name" in flag]
    path = [f"--policy.path={published}", "--policy.device=cpu", *tokenizer]
    runs.train(dataset, tmp_path / "second", path, "--steps=1")
    assert not any("is not part of this run" in line for line in log_lines)
    file = published / "policy_postprocessor.json"
    described = json.loads(file.read_text())
    described["steps"].append({"registry_name": "xvla_rotation_6d_to_axis_angle", "config": {}})
    file.write_text(json.dumps(described))
    runs.train(dataset, tmp_path / "third", path, "--steps=1")
    assert any("xvla_rotation_6d_to_axis_angle is not part of this run" in line for line in log_lines)


def test_an_encoder_that_leaves_branches_out_is_random():
    assert make_policy(small_config(vision_drop_path=0.1)).image_encoder().is_random
    encoder = make_policy(small_config(freeze_vision_encoder=True)).image_encoder()
    assert encoder.is_frozen and not encoder.is_random and encoder.settings == {"size": (32, 32)}


def test_a_column_that_is_missing_stops_the_run(dataset, flags, tmp_path, capsys):
    settings = runs.flags(dataset, tmp_path / "run", flags, "--steps=1", "--policy.domain_feature_key=robot")
    assert main(["train", *settings]) != 0
    assert "policy.domain_feature_key=robot: the dataset has no such column" in capsys.readouterr().err
