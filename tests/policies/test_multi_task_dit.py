"""The multi-task DiT beyond its numbers: what it refuses, how it is split, what is trained and what is not."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flexor.core.errors import ConfigError, FlexorError
from flexor.core.rng import Noise, seed_everything
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.multi_task_dit.policy import MultiTaskDiT
from flexor.policies.nn.flow import FlowMatching, beta, integrate
from flexor.policies.pretrained import load_pretrained, save_pretrained
from flexor.policies.processing.host_steps import split_processing
from flexor.policies.processing.tokenize import Tokenize
from parity.flexor_side import make_config, make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.multi_task_dit.cases import training_batch
from parity.multi_task_dit.clips import make_clips


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    folder = tmp_path_factory.mktemp("clips")
    make_clips(folder)
    return folder


def case_of(name, clips):
    return cases_of("multi_task_dit", clips)[name]


def config_of(name, clips):
    return make_config("multi_task_dit", case_of(name, clips))


def policy_of(name, clips):
    return make_policy("multi_task_dit", case_of(name, clips))


def processed(made, name, clips):
    return made.preprocessor({**tensors(training_batch(case_of(name, clips))), "task": TASKS})


def batch_of(name, clips):
    made = policy_of(name, clips)
    return made, processed(made, name, clips)


# Randomness.


@pytest.mark.parametrize(("alpha", "b"), [(1.5, 1.0), (1.0, 1.0), (0.5, 2.0), (4.0, 0.3)])
def test_beta_has_its_moments(alpha, b):
    samples = beta(Noise(0, 0, torch.arange(200_000)), "t", 200_000, alpha, b).double()
    mean = alpha / (alpha + b)
    variance = mean * (1 - mean) / (alpha + b + 1)
    assert samples.min() >= 0 and samples.max() <= 1
    assert samples.mean().item() == pytest.approx(mean, abs=4 * (variance / 2e5) ** 0.5)
    assert samples.var().item() == pytest.approx(variance, rel=0.03)


def test_beta_with_one_is_a_power_of_a_uniform_number():
    """The settings all published policies use: P(u < x) = x^1.5."""
    samples = beta(Noise(1, 2, torch.arange(100_000)), "t", 100_000, 1.5, 1.0).sort().values.double()
    expected = samples**1.5
    ranks = torch.arange(1, len(samples) + 1) / len(samples)
    assert (ranks - expected).abs().max() < 1.95 / len(samples) ** 0.5  # Kolmogorov and Smirnov, 0.1 %


@pytest.mark.parametrize("name", ["ddpm", "flow", "two_encoders", "flow_uniform"])
def test_a_sample_is_the_same_in_any_batch(name, clips):
    """Crops, noise and times belong to a sample; the loss does not depend on how a batch is dealt out."""
    made, batch = batch_of(name, clips)
    policy = made.policy.train()
    together = policy.loss(batch, Noise(3, 7, torch.tensor([11, 12]))).per_sample
    alone = policy.loss({k: v[1:] for k, v in batch.items()}, Noise(3, 7, torch.tensor([12]))).per_sample
    assert torch.allclose(together[1:], alone, rtol=1e-5)
    policy.eval()
    with torch.no_grad():
        chunks = policy.predict(batch, Noise(3, 7, torch.tensor([11, 12])))
        chunk = policy.predict({k: v[1:] for k, v in batch.items()}, Noise(3, 7, torch.tensor([12])))
    assert torch.allclose(chunks[1:], chunk, atol=1e-4)


# Flow matching.


@pytest.mark.parametrize("method", ["euler", "rk4"])
def test_a_straight_path_is_followed_exactly(method):
    end, start = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    for steps in (1, 7):
        assert torch.allclose(integrate(lambda x, t: end - start, start, steps, method), end, atol=1e-5)


def test_runge_kutta_follows_curves():
    x = integrate(lambda x, t: x, torch.ones(1, 1), 10, "rk4")
    assert x.item() == pytest.approx(np.e, rel=1e-5)


def test_noise_left_at_the_end_of_a_path():
    """With sigma_min, time 1 is the actions and that much of the noise."""
    inputs = {}

    def network(x, t):
        inputs.update(x=x, t=t)
        return torch.zeros_like(x)

    noise = Noise(0, 0, torch.arange(3))
    actions = torch.randn(3, 4, 2)
    error = FlowMatching(sigma_min=0.25).error(network, actions, noise)
    start, t = noise.normal("noise", (3, 4, 2)), inputs["t"][:, None, None]
    assert torch.allclose(inputs["x"], t * actions + (1 - 0.75 * t) * start)
    assert torch.allclose(error, (actions - 0.75 * start).square())


# What is trained.


def test_text_is_never_trained_and_vision_slowly(clips):
    policy = policy_of("two_encoders", clips).policy
    rest, vision = policy.param_groups()
    assert vision.overrides == {"lr": pytest.approx(2e-6)}
    named = {id(p): name for name, p in policy.named_parameters()}
    assert all("vision_encoders" in named[id(p)] for p in vision.params)
    assert not any("text_model" in named[id(p)] for p in [*rest.params, *vision.params])
    assert any("text_encoder.projection" in named[id(p)] for p in rest.params)


def test_all_that_is_trained_gets_a_gradient(clips):
    """Or DDP would wait for it."""
    made, batch = batch_of("two_cameras", clips)
    made.policy.train().loss(batch, Noise(0, 0, torch.arange(2))).per_sample.mean().backward()
    missing = [n for n, p in made.policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


def test_a_multiplier_of_zero_freezes_the_cameras(clips):
    case = case_of("ddpm", clips)
    case = {**case, "settings": {**case["settings"], "vision_encoder_lr_multiplier": 0}}
    policy = make_policy("multi_task_dit", case).policy
    frozen = list(policy.observation_encoder.vision_encoder.parameters())
    assert not any(p.requires_grad for p in frozen)
    _, vision = policy.param_groups()  # numbered all the same, as by LeRobot's optimizer
    assert vision.overrides == {"lr": 0} and list(map(id, vision.params)) == list(map(id, frozen))


def test_starts_from_published_weights(clips):
    policy = policy_of("two_encoders", clips).policy
    policy.load_backbone()
    published = load_file(clips / "tiny-clip/model.safetensors")
    weights = policy.state_dict()
    for name, value in published.items():
        if name.startswith("text_model"):
            assert torch.equal(weights[f"observation_encoder.text_encoder.text_encoder.{name}"], value)
        else:
            for camera in range(2):
                loaded = weights[f"observation_encoder.vision_encoders.{camera}.model.{name}"]
                assert torch.equal(loaded, value)


def test_a_new_transformer_passes_nothing_on(clips):
    """Gates start at zero: whatever is observed, the first prediction is the same."""
    made = policy_of("ddpm", clips)
    model = made.policy.noise_predictor.eval()
    x, time = torch.randn(2, 8, 3), torch.tensor([1, 5])
    width = made.policy.observation_encoder.out_dim
    assert torch.equal(model(x, time, torch.zeros(2, width)), model(x, time, torch.randn(2, width)))


def test_is_made_without_memory_in_the_same_shape(clips):
    config = config_of("two_cameras", clips)
    with parameters_without_memory():
        empty = MultiTaskDiT(config)
    assert all(p.is_meta for p in empty.parameters())
    assert not any(b.is_meta for b in empty.buffers())
    real = MultiTaskDiT(config)
    assert [(n, p.shape, p.requires_grad) for n, p in empty.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in real.named_parameters()
    ]
    units = {id(module) for module in real.shard_units()}
    assert len(units) == 2 + 2 + 2  # layers of CLIP's two halves and of the transformer


def test_the_same_seed_makes_the_same_policy(clips):
    made = []
    for _ in range(2):
        seed_everything("weights", 5)
        made.append(MultiTaskDiT(config_of("ddpm", clips)).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_bfloat16(clips):
    made, batch = batch_of("flow", clips)
    policy, noise = made.policy.train(), Noise(0, 0, torch.arange(2))
    exact = policy.loss(batch, noise).per_sample
    with torch.autocast("cpu", torch.bfloat16):
        rounded = policy.loss(batch, noise).per_sample
    rounded.mean().backward()
    assert torch.allclose(exact, rounded.float(), rtol=0.05)


# The task.


def test_a_saved_policy_reads_and_acts_the_same(clips, tmp_path):
    made, batch = batch_of("left_longest", clips)
    save_pretrained(
        tmp_path, made.policy.config, made.policy.state_dict(), made.preprocessor, made.postprocessor
    )
    steps = json.loads((tmp_path / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps][2] == "tokenizer_processor"
    assert steps[2]["config"]["padding_side"] == "left"
    again = load_pretrained(str(tmp_path))
    inputs = processed(again, "left_longest", clips)
    noise = Noise(0, 0, torch.arange(2))
    made.policy.eval()
    with torch.no_grad():
        assert torch.equal(again.policy.predict(inputs, noise), made.policy.predict(batch, noise))


def test_tokens_of_a_batch_are_those_of_its_tasks(clips):
    step = Tokenize(str(clips / "tiny-clip"), max_length=20)
    tasks = ["open the drawer", "pick up the red cube", "open the drawer"]
    together = step({"task": tasks})
    for row, task in enumerate(tasks):
        alone = step({"task": [task]})
        for key in ("observation.language.tokens", "observation.language.attention_mask"):
            assert torch.equal(together[key][row], alone[key][0])
    assert together["observation.language.attention_mask"].dtype == torch.bool


def test_words_are_the_hosts_part_of_the_processing(clips):
    made, batch = batch_of("ddpm", clips)
    on_host, on_gpu = split_processing(made.preprocessor)
    assert isinstance(on_host.pipeline.steps[-1], Tokenize)
    assert not on_host.uses_images and not any(step.on_host for step in on_gpu.steps)
    split = on_gpu(on_host.pipeline({**tensors(training_batch(case_of("ddpm", clips))), "task": TASKS}))
    assert split.keys() == batch.keys()
    assert all(torch.equal(split[k], v) for k, v in batch.items() if isinstance(v, torch.Tensor))


def test_no_task_is_said(clips):
    with pytest.raises(FlexorError, match="requires a task description"):
        Tokenize(str(clips / "tiny-clip"))({})


def test_a_missing_package_is_named(clips, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"pip install 'flexor\[vla\]'"):
        policy_of("ddpm", clips)


def test_an_unknown_clip_is_named(clips, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = replace(config_of("ddpm", clips), vision_encoder_name=str(clips / "no-clip-here"))
    with pytest.raises(ConfigError, match="no-clip-here"):
        MultiTaskDiT(config)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_action_steps": 8}, r"\+ 1 = 7"),
        ({"hidden_dim": 18, "num_heads": 4}, "multiple of policy.num_heads=4"),
        ({"timestep_embed_dim": 9}, "must be even"),
        ({"vision_encoder_name": "google/siglip"}, "must be a CLIP"),
        ({"num_integration_steps": 0}, "at least 1"),
        ({"sigma_min": 1.5}, "from 0 to 1"),
        ({"num_train_timesteps": 0}, "num_train_timesteps"),
        ({"tokenizer_max_length": 40}, "supports 24 tokens at most"),
        ({"image_crop_shape": (30, 30)}, "takes 32 x 32"),
        ({"image_crop_shape": None}, r"image_resize_shape='\[32, 32\]'"),
    ],
)
def test_refuses_what_cant_be(settings, message, clips):
    config = config_of("ddpm", clips)
    with pytest.raises(ConfigError, match=message):
        MultiTaskDiT(replace(config, **settings))


def test_refuses_cameras_of_two_sizes_and_no_state(clips):
    config = config_of("ddpm", clips)
    camera = config.input_features["observation.images.top"]
    other = replace(camera, shape=(3, 64, 64))
    with pytest.raises(ConfigError, match="cameras of one size"):
        MultiTaskDiT(
            replace(config, input_features={**config.input_features, "observation.images.wrist": other})
        )
    with pytest.raises(ConfigError, match=r"requires observation.state"):
        MultiTaskDiT(replace(config, input_features={"observation.images.top": camera}))
