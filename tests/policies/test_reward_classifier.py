"""The reward classifier: what learns in it, how it trains, what it is given to, and what it refuses."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from flexor.config.parse import config_from_flags, parse_flags
from flexor.core.batch import ACTION, IMAGE_FEATURES
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn.resnet10 import ResNet10
from flexor.policies.pretrained import load_pretrained
from flexor.policies.reward_classifier.config import RewardClassifierConfig
from flexor.policies.reward_classifier.policy import RewardClassifier
from flexor.sim.record import record_dataset
from flexor.train.loop import train
from support import online

TOP = "observation.images.top"
SMALL = {"latent_dim": 8, "hidden_dim": 16, "image_embedding_pooling_dim": 2}


def classifier(cameras: int = 1, size: int = 32, **settings) -> RewardClassifier:
    inputs = {f"{TOP}{number}": PolicyFeature(Kind.VISUAL, (3, size, size)) for number in range(cameras)}
    outputs = {ACTION: PolicyFeature(Kind.ACTION, (2,))}
    config = RewardClassifierConfig(**{**SMALL, **settings}).fitted(inputs, outputs)
    torch.manual_seed(0)
    return RewardClassifier(config)


def batch(count: int = 4, cameras: int = 1, size: int = 32) -> dict:
    generator = torch.Generator().manual_seed(1)
    images = {
        f"{TOP}{number}": torch.randn(count, 3, size, size, generator=generator) for number in range(cameras)
    }
    return {**images, "next.reward": torch.tensor([0.0, 1.0] * (count // 2))[:, None]}


def noise(count: int = 4) -> Noise:
    return Noise(0, 0, torch.arange(count))


@pytest.mark.parametrize("frozen", [True, False])
def test_all_layers_learn_but_a_frozen_encoder(frozen):
    """In LeRobot only the last two do: it computes the others without gradients."""
    policy = classifier(cameras=2, freeze_vision_encoder=frozen).train()
    policy.loss(batch(cameras=2), noise()).per_sample.mean().backward()
    learned = {name for name, p in policy.named_parameters() if p.grad is not None and p.grad.abs().sum() > 0}
    encoder = {name for name, _ in policy.named_parameters() if name.startswith("encoder.")}
    everything = {name for name, _ in policy.named_parameters()}
    assert learned == (everything - encoder if frozen else everything)


def test_loss_and_accuracy_of_two_and_of_more_classes():
    policy = classifier().eval()
    inputs = batch()
    loss, logits = policy.loss(inputs, noise()), policy.logits(inputs)
    targets = inputs["next.reward"][:, 0]
    expected = -(targets * logits.sigmoid().log() + (1 - targets) * (1 - logits.sigmoid()).log())
    assert torch.allclose(loss.per_sample, expected, atol=1e-6)
    assert torch.equal(loss.parts["accuracy"], ((logits > 0) == (targets > 0.5)).float())
    assert torch.allclose(policy.probability(inputs), logits.sigmoid())
    three = classifier(num_classes=3).eval()
    assert three.logits(inputs).shape == (4, 3) and three.loss(inputs, noise()).per_sample.shape == (4,)
    assert torch.allclose(three.probability(inputs), three.logits(inputs).softmax(-1)[:, 2])


def test_features_of_a_frozen_encoder_replace_images():
    policy = classifier().train()
    inputs = batch()
    encoder = policy.image_encoder()
    assert encoder.is_frozen and not encoder.is_random
    key = f"{TOP}0"
    features = {
        IMAGE_FEATURES + key: policy.encode_images(inputs[key], key),
        "next.reward": inputs["next.reward"],
    }
    first, second = (policy.loss(each, noise()).per_sample for each in (inputs, features))
    assert torch.equal(first, second)


def test_labels_that_are_no_classes_are_refused():
    config = classifier().config
    config.check_columns({"next.reward": np.array([0.0, 0.5, 1.0])})
    for column in ({"next.reward": np.array([0.0, 2.0])}, {"next.done": np.zeros(2)}):
        with pytest.raises(ConfigError, match=r"next\.reward"):
            config.check_columns(column)
    with pytest.raises(ConfigError, match="32 pixels"):
        classifier(size=16)
    with pytest.raises(ConfigError, match="can't act"):
        classifier().predict(batch(), noise())


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run on the built-in task's images, whose encoder begins with random weights."""
    folder = tmp_path_factory.mktemp("classifier")
    data = record_dataset(folder / "data", episodes=4, image_size=32)
    (folder / "resnet10").mkdir()
    torch.manual_seed(0)
    save_file(ResNet10().state_dict(), folder / "resnet10/model.safetensors")
    flags = [
        "--policy.type=reward_classifier",
        "--policy.label=next.success",
        "--policy.freeze_vision_encoder=false",
        f"--policy.model_name={folder / 'resnet10'}",
        *(f"--policy.{name}={value}" for name, value in SMALL.items()),
        "--policy.device=cpu",
        f"--dataset.root={data}",
        "--dataset.eval_split=0.25",
        "--steps=4",
        "--batch_size=8",
        "--num_workers=0",
        "--log_freq=1",
        f"--output_dir={folder / 'run'}",
    ]
    train(config_from_flags(parse_flags(flags)))
    return folder / "run"


def test_a_run_reports_the_accuracy_also_on_held_out_episodes(trained):
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    assert all(0 <= line["accuracy"] <= 1 for line in lines if "loss" in line)
    held_out = [line for line in lines if "held_out_loss" in line]
    assert held_out and 0 <= held_out[-1]["held_out_accuracy"] <= 1
    settings = json.loads(next(trained.glob("checkpoints/*4/pretrained_model/config.json")).read_text())
    assert settings["type"] == "reward_classifier" and settings["num_cameras"] == 1
    assert not {"use_amp", "n_obs_steps", "label"} & settings.keys()


@pytest.mark.parametrize("ends", [True, False])
def test_a_classifier_rewards_a_run(trained, ends, tmp_path):
    """With a threshold between the probabilities that it gives, some steps are done and others are not."""
    path = str(trained)
    pretrained = load_pretrained(path)
    assert isinstance(pretrained.policy, RewardClassifier)
    more = [
        "--env.kwargs={image_size: 32}",
        "--policy.input_features={observation.state: {type: STATE, shape: [3]}}",
        f"--rl.reward_classifier={path}",
        f"--rl.terminate_on_success={ends}",
        f"--rl.success_threshold={0.0001 if ends else 0.9999}",
        "--steps=12",
    ]
    online.train(tmp_path / "run", None, *more)
    records = online.records(tmp_path / "run")
    steps = records[records["is_step"] == 1]
    assert (steps["reward"] == ends).all() and (steps["terminated"] == ends).all()


def test_what_is_no_classifier_of_this_environment_is_refused(trained, tmp_path):
    more = [f"--rl.reward_classifier={trained}", "--steps=30"]
    with pytest.raises(ConfigError, match=r"sees observation\.image"):
        online.train(tmp_path / "run", None, *more)
