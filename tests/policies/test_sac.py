"""SAC: what differs from LeRobot's, its networks' parts, and its files."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.policies import make_policy, policy_class
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn.resnet10 import ResNet10
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.sac.algorithm import SACAlgorithm, TransitionBatch
from flexor.policies.sac.config import ActorNetwork, CriticNetwork, SACConfig
from flexor.policies.sac.settings import SACSettings
from flexor.policies.weight_names import unique_state

STATE = {"observation.state": PolicyFeature(Kind.STATE, (4,))}
CAMERA = {"observation.images.top": PolicyFeature(Kind.VISUAL, (3, 48, 50))}
ACTION = {"action": PolicyFeature(Kind.ACTION, (3,))}
STATS = {
    "observation.state": {"min": np.full(4, -2.0), "max": np.full(4, 2.0)},
    "observation.images.top": {"mean": np.full((3, 1, 1), 0.5), "std": np.full((3, 1, 1), 0.2)},
    "action": {"min": np.array([0.0, -5, 10]), "max": np.array([2.0, 5, 30])},
}
BATCH = 6


def config(inputs=STATE, **settings) -> SACConfig:
    small = {"latent_dim": 8, "image_encoder_hidden_dim": 3, "actor_network_kwargs": ActorNetwork([12, 12])}
    return SACConfig(input_features=dict(inputs), output_features=dict(ACTION), **{**small, **settings})


def learner(policy_config: SACConfig, **settings) -> SACAlgorithm:
    torch.manual_seed(0)
    algorithm = SACAlgorithm(
        make_policy(policy_config), SACSettings(critic_network_kwargs=CriticNetwork([12, 12]), **settings)
    )
    algorithm.make_optimizers()
    return algorithm


def batch(policy_config: SACConfig, seed: int = 0, penalty: float | None = None) -> TransitionBatch:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def observation() -> dict:
        return {name: normal(BATCH, *feature.shape) for name, feature in policy_config.input_features.items()}

    action = normal(BATCH, 3).tanh()
    if policy_config.num_discrete_actions:
        choice = torch.randint(policy_config.num_discrete_actions, (BATCH, 1), generator=generator)
        action = torch.cat([action, choice.float()], 1)
    penalties = None if penalty is None else torch.full((BATCH,), penalty)
    return TransitionBatch(observation(), action, normal(BATCH), observation(), torch.zeros(BATCH), penalties)


def noise(update: int = 0) -> Noise:
    return Noise(0, update, torch.arange(BATCH))


@pytest.mark.parametrize("utd", [1, 3])
def test_penalties_reach_the_grippers_critic_in_every_update(utd):
    """LeRobot leaves them out of the last batch of an update, which is the only one by default."""
    settings = config(num_discrete_actions=3)
    weights = []
    for penalty in (0.0, -1.0):
        algorithm = learner(settings, utd_ratio=utd)
        algorithm.update([batch(settings, number, penalty) for number in range(utd)], noise(), 0)
        weights.append(algorithm.policy.discrete_critic.output_layer.bias.detach().clone())
        last = algorithm
    assert not torch.equal(*weights)
    assert last.discrete_critic_loss(batch(settings, 0, -1.0), noise()) != last.discrete_critic_loss(
        batch(settings, 0, 0.0), noise()
    )


def test_averages_of_critics_leave_the_encoder_as_it_is():
    """In LeRobot they share the encoder's weights, which each average rounds anew."""
    algorithm = learner(config(STATE | CAMERA))
    before = {name: value.clone() for name, value in algorithm.policy.encoder_critic.state_dict().items()}
    for _ in range(20):
        algorithm.update_targets()
    after = algorithm.policy.encoder_critic.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("inputs", [STATE, STATE | CAMERA])
def test_the_actors_loss_trains_no_shared_encoder(inputs):
    algorithm = learner(config(inputs))
    algorithm.actor_loss(batch(algorithm.policy.config), noise()).backward()
    assert all(p.grad is None for p in algorithm.policy.encoder_critic.parameters())
    assert all(p.grad is not None for p in algorithm.actor_parameters())


def test_an_encoder_is_in_one_optimizer():
    algorithm = learner(config(STATE | CAMERA, num_discrete_actions=3))
    groups = [group["params"] for each in algorithm.optimizers.values() for group in each.param_groups]
    numbers = [id(parameter) for group in groups for parameter in group]
    assert len(numbers) == len({*numbers})
    trained = {*numbers} - {id(algorithm.log_alpha)} - {id(p) for p in algorithm.critic_ensemble.parameters()}
    assert trained == {id(p) for p in algorithm.policy.parameters()}


def test_the_encoder_learns_from_the_gripper_too():
    settings = config(num_discrete_actions=3)
    moved = []
    for reward in (0.0, 50.0):
        algorithm = learner(settings, utd_ratio=1)
        example = batch(settings)._replace(penalty=torch.full((BATCH,), reward))
        algorithm.update([example], noise(), 0)
        moved.append(algorithm.policy.encoder_critic.state_encoder[0].weight.detach().clone())
    assert not torch.equal(*moved)


def test_an_update_is_a_function_of_its_batch_and_number():
    results = []
    for _ in range(2):
        algorithm = learner(config(STATE | CAMERA, num_discrete_actions=2))
        for update in range(3):
            torch.manual_seed(len(results) + update)  # nothing is drawn from torch's own generator
            examples = [batch(algorithm.policy.config, 2 * update + number, -0.1) for number in range(2)]
            algorithm.update(examples, noise(update), update)
        results.append({**algorithm.policy.state_dict(), **algorithm.state_dict()})
    assert all(torch.equal(value, results[1][name]) for name, value in results[0].items())


def test_random_convolutions_are_trained_and_pretrained_ones_are_not(tmp_path):
    free = learner(config(CAMERA))
    assert all(p.requires_grad for p in free.policy.encoder_critic.parameters())
    frozen = learner(config(CAMERA, vision_encoder_name=str(resnet_folder(tmp_path))))
    assert not any(p.requires_grad for p in frozen.policy.encoder_critic.image_encoder.parameters())
    before = frozen.policy.encoder_critic.image_encoder.state_dict()
    before = {name: value.clone() for name, value in before.items()}
    frozen.update([batch(frozen.policy.config)] * 2, noise(), 0)
    after = frozen.policy.encoder_critic.image_encoder.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


def resnet_folder(folder):
    """A ResNet-10 with random weights, as a repository has it."""
    torch.manual_seed(1)
    weights = {name: tensor.contiguous() for name, tensor in ResNet10(3).state_dict().items()}
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "resnet10"}))
    return folder


def test_a_pretrained_encoder_is_loaded_into_actor_and_critics(tmp_path):
    folder = resnet_folder(tmp_path)
    policy = make_policy(config(CAMERA, vision_encoder_name=str(folder), shared_encoder=False))
    policy.load_backbone()
    stored = load_file(folder / "model.safetensors")
    for encoder in (policy.encoder_actor, policy.encoder_critic):
        loaded = encoder.image_encoder.image_enc_layers.state_dict()
        assert loaded.keys() == stored.keys()
        assert all(torch.equal(loaded[name], value) for name, value in stored.items())


def test_another_encoder_is_refused(tmp_path):
    folder = resnet_folder(tmp_path)
    weights = load_file(folder / "model.safetensors")
    save_file({f"resnet.{name}": value for name, value in weights.items()}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="not a ResNet-10"):
        make_policy(config(CAMERA, vision_encoder_name=str(folder))).load_backbone()


def test_resnet10_by_hand():
    """Its layers one after the other, as HIL-SERL's paper has them: a stem, and four blocks of two convolutions."""
    network = ResNet10(3)
    names = [name for name, _ in network.named_parameters()]
    assert names[:3] == ["embedder.0.weight", "embedder.1.weight", "embedder.1.bias"]
    assert "encoder.stages.0.shortcut.0.weight" not in names and "encoder.stages.3.shortcut.1.bias" in names
    out = network(torch.randn(2, 3, 128, 128))
    assert out.shape == (2, 512, 4, 4)
    assert (out >= 0).all() and out.std() > 0.1


def test_acts_without_noise_and_explores_with_it():
    policy = make_policy(config())
    observed = {"observation.state": torch.randn(BATCH, 4)}
    still = [policy.predict(observed, noise(number)) for number in range(2)]
    assert torch.equal(*still) and still[0].shape == (BATCH, 1, 3)
    moving = [policy.explore(observed, noise(number)) for number in range(2)]
    assert not torch.equal(*moving) and max(each.abs().max() for each in moving) <= 1


def test_a_grippers_choice_stays_a_number_of_a_choice(tmp_path):
    settings = config(num_discrete_actions=3)
    before, after = settings.pipelines(STATS, "cpu")
    policy = make_policy(settings).eval()
    saved = Pretrained(policy, before, after)
    save_pretrained(tmp_path, settings, unique_state(policy), before, after)
    loaded = load_pretrained(str(tmp_path))
    observation = {"observation.state": np.random.default_rng(0).normal(size=(20, 4)).astype(np.float32)}
    actions = loaded.chunk(observation, [""] * 20)
    assert actions.shape == (20, 1, 4)
    assert np.array_equal(actions, saved.chunk(observation, [""] * 20))
    assert {*actions[:, 0, 3].tolist()} <= {0.0, 1.0, 2.0}
    assert actions[:, 0, 2].min() >= 10 and actions[:, 0, 2].max() <= 30


def test_files_have_lerobots_names(tmp_path):
    settings = config(STATE | CAMERA)
    policy = make_policy(settings)
    save_pretrained(tmp_path, settings, unique_state(policy), *settings.pipelines(STATS, "cpu"))
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["type"] == "gaussian_actor"
    assert policy_class("gaussian_actor") is policy_class("sac")
    assert isinstance(load_pretrained(str(tmp_path)).policy.config, SACConfig)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"inputs": {"observation.image": PolicyFeature(Kind.VISUAL, (3, 32, 32))}}, "at least 47 pixels"),
        (
            {
                "inputs": CAMERA | {"observation.images.side": PolicyFeature(Kind.VISUAL, (3, 60, 60))},
            },
            "images of one size",
        ),
        ({"num_discrete_actions": 1}, "at least 2"),
        ({"normalization_mapping": {Kind.ACTION: "MEAN_STD"}}, "must be MIN_MAX"),
        ({"inputs": {"observation.force": PolicyFeature(Kind.STATE, (3,))}}, "requires a camera"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        config(**settings).validate()


def test_presets_are_hil_serls_own_values_and_lerobots():
    ours, theirs = SACSettings().with_preset(), SACSettings(preset="lerobot").with_preset()
    assert [ours[name] for name in ("discount", "use_backup_entropy", "temperature_init", "utd_ratio")] == [
        *(0.97, False, 0.01, 2)
    ]
    assert [theirs[name] for name in ("discount", "use_backup_entropy", "temperature_init", "utd_ratio")] == [
        *(0.99, True, 1.0, 1)
    ]
    assert SACSettings(preset="lerobot", discount=0.5).with_preset()["discount"] == 0.5
