"""SmolVLA beyond its numbers: what is trained and kept, where weights come from, what is refused."""

import json
from dataclasses import replace

import pytest
import torch

from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.processing.tokenize import TASK_TOKENS, Tokenize
from flexor.policies.smolvla.policy import SmolVLA
from flexor.policies.vlm.smolvlm_size import BUILTIN_SIZES, read_size
from flexor.sim.task import describe
from parity.flexor_side import make_config, make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.smolvla.cases import training_batch
from parity.smolvla.vlms import make_vlms

VLM = "model.vlm_with_expert.vlm."


@pytest.fixture(scope="module")
def vlms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlms")
    make_vlms(folder)
    return folder


def case_of(name, vlms):
    return cases_of("smolvla", vlms)[name]


def config_of(name, vlms, **changed):
    return replace(make_config("smolvla", case_of(name, vlms)), **changed)


def batch_of(name, vlms):
    made = make_policy("smolvla", case_of(name, vlms))
    batch = made.preprocessor({**tensors(training_batch(case_of(name, vlms))), "task": TASKS})
    return made, batch


def noise(*samples):
    return Noise(3, 7, torch.tensor(samples))


def chunk(policy, batch, *samples):
    with torch.no_grad():
        return policy.eval().predict(batch, noise(*samples))


# Randomness, padding, words.


@pytest.mark.parametrize("name", ["frozen", "all", "special_tokens"])
def test_a_sample_is_the_same_in_any_batch(name, vlms):
    made, batch = batch_of(name, vlms)
    alone = {key: value[1:] for key, value in batch.items()}
    policy = made.policy.train()
    batch["action_valid_steps"] = alone["action_valid_steps"] = 5.0
    together = policy.loss(batch, noise(11, 12)).per_sample
    assert torch.allclose(together[1:], policy.loss(alone, noise(12)).per_sample, rtol=1e-4)
    assert torch.allclose(chunk(policy, batch, 11, 12)[1:], chunk(policy, alone, 12), atol=1e-4)


@pytest.mark.parametrize("name", ["frozen", "all", "self_attention_all"])
def test_what_is_padding_does_not_matter(name, vlms):
    """Words beyond the end of a task, tokens beyond the prefix, cameras that a sample has not, actions that are not
    there."""
    made, batch = batch_of(name, vlms)
    before = made.policy.loss(batch, noise(1, 2)).per_sample
    words, mask = batch["observation.language.tokens"], batch["observation.language.attention_mask"]
    assert not mask.all()
    other = {**batch, "observation.language.tokens": torch.where(mask, words, 9)}
    actions = torch.where(batch["action_is_pad"][..., None], 7.0, batch["action"])
    assert torch.allclose(made.policy.loss(other, noise(1, 2)).per_sample, before, rtol=1e-5)
    wider = SmolVLA(replace(made.policy.config, prefix_length=40))
    wider.load_state_dict(made.policy.state_dict())
    assert torch.allclose(wider.loss(batch, noise(1, 2)).per_sample, before, rtol=1e-4)
    # a padded action is noise to those after it, which are padding too, but for the first sample's first
    error = made.policy.loss({**batch, "action": actions}, noise(1, 2)).per_sample
    assert torch.allclose(error[1], before[1], rtol=1e-5)


def test_a_camera_that_a_sample_has_not(vlms):
    made, batch = batch_of("two_cameras", vlms)
    hidden = {**batch, "observation.images.wrist_padding_mask": torch.tensor([True, False])}
    masked = chunk(made.policy, hidden, 1, 2)
    changed = dict(hidden)
    changed["observation.images.wrist"] = batch["observation.images.wrist"].roll(1, 0)
    again = chunk(made.policy, changed, 1, 2)
    assert torch.allclose(again[1], masked[1], atol=1e-5) and not torch.allclose(
        again[0], masked[0], atol=1e-3
    )


def test_words_matter(vlms):
    made, batch = batch_of("frozen", vlms)
    other = made.preprocessor({**tensors(training_batch(case_of("frozen", vlms))), "task": TASKS[::-1]})
    assert not torch.allclose(chunk(made.policy, batch, 1, 2), chunk(made.policy, other, 1, 2), atol=1e-3)


def test_times_have_their_distribution():
    """P(time < x) = ((x - 0.001) / 0.999)^1.5."""
    times = FlowToNoise().times(50_000, Noise(0, 0, torch.arange(50_000))).sort().values.double()
    assert times.min() > 0.001 and times.max() < 1
    ranks = torch.arange(1, len(times) + 1) / len(times)
    assert (ranks - ((times - 0.001) / 0.999) ** 1.5).abs().max() < 1.95 / len(times) ** 0.5  # 0.1 %


# What is trained, and what is kept for it.


@pytest.mark.parametrize(
    "name", ["frozen", "all", "frozen_vision", "half_as_many_all", "one_layer_all", "every_third"]
)
def test_all_that_is_trained_gets_a_gradient(name, vlms):
    """Or DDP would wait for it."""
    made, batch = batch_of(name, vlms)
    made.policy.train().loss(batch, noise(1, 2)).per_sample.mean().backward()
    missing = [n for n, p in made.policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing


def test_fine_tuning_modes(vlms):
    def trained(name):
        return {
            n
            for n, p in make_policy("smolvla", case_of(name, vlms)).policy.named_parameters()
            if p.requires_grad
        }

    expert, without_vision, everything = map(trained, ("frozen", "frozen_vision", "all"))
    assert expert < without_vision < everything
    assert not any(name.startswith(VLM) for name in expert)
    assert not any("vision_model" in name for name in without_vision)
    assert any("connector" in name for name in without_vision)
    assert not any("lm_head" in name for name in everything)
    assert trained("frozen_state") == {name for name in expert if "state_proj" not in name}


def test_a_frozen_model_keeps_only_keys_and_values_of_what_it_read(vlms):
    """The state token needs gradients through the whole language model; the many others keep nothing for it."""
    made, batch = batch_of("frozen", vlms)
    prefix = made.policy.model.prefill(made.policy._prepare(batch)).prefix
    assert all(layer.keys.requires_grad for layer in prefix)  # because of the state
    outputs = []
    text = made.policy.model.vlm_with_expert.vlm.model.text_model
    hooks = [
        layer.mlp.register_forward_hook(
            lambda _, inputs, out: outputs.append((out.shape[1], out.requires_grad))
        )
        for layer in text.layers
    ]
    made.policy.loss(batch, noise(1, 2))
    for hook in hooks:
        hook.remove()
    assert {trained for tokens, trained in outputs if tokens > 1} == {False}
    assert {trained for tokens, trained in outputs if tokens == 1} == {True}


def test_the_prefix_is_never_written_to(vlms):
    made, batch = batch_of("frozen", vlms)
    with torch.no_grad():
        context = made.policy.model.prefill(made.policy._prepare(batch))
        before = [layer.keys.clone() for layer in context.prefix]
        x, time = torch.randn(2, 8, 5), torch.tensor([0.5, 0.9])
        once = made.policy.model.velocity(x, time, context)
        assert torch.equal(made.policy.model.velocity(x, time, context), once)
    assert all(torch.equal(old, layer.keys) for old, layer in zip(before, context.prefix))


def test_actions_do_not_see_later_ones(vlms):
    made, batch = batch_of("self_attention", vlms)
    with torch.no_grad():
        context = made.policy.model.prefill(made.policy._prepare(batch))
        x, time = torch.randn(2, 8, 5), torch.tensor([0.5, 0.9])
        before = made.policy.model.velocity(x, time, context)
        x[:, 5:] += 1
        after = made.policy.model.velocity(x, time, context)
    assert torch.allclose(before[:, :5], after[:, :5], atol=1e-6)
    assert not torch.allclose(before[:, 5:], after[:, 5:], atol=1e-3)


def test_bfloat16(vlms):
    made, batch = batch_of("frozen", vlms)
    exact = made.policy.loss(batch, noise(1, 2)).per_sample
    with torch.autocast("cpu", torch.bfloat16):
        rounded = made.policy.loss(batch, noise(1, 2)).per_sample
    rounded.mean().backward()
    assert torch.allclose(exact, rounded.float(), rtol=0.05)


# What is refused.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_action_steps": 9}, "only predicted actions"),
        ({"n_obs_steps": 2}, "one observation only"),
        ({"max_state_dim": 3}, r"the shape \[4\], but smolvla supports at most policy.max_state_dim=3"),
        ({"max_action_dim": 2}, "supports at most policy.max_action_dim=2 values"),
        ({"num_vlm_layers": 6}, "only 5 layers"),
        ({"num_expert_layers": 3}, "does not divide the 4 layers"),
        ({"num_expert_layers": 2}, "policy.self_attn_every_n_layers=2 does not go with"),
        ({"resize_imgs_with_padding": (32, 16)}, "square images"),
        ({"resize_imgs_with_padding": (24, 24)}, "must be a multiple of 2"),
        ({"resize_imgs_with_padding": None}, "square images"),
        ({"adapt_to_pi_aloha": True}, "not supported"),
        ({"num_steps": 0}, "at least 1"),
        ({"expert_width_multiplier": 0.55}, "which must be even"),
    ],
)
def test_refuses_what_cant_be(settings, message, vlms):
    with pytest.raises(ConfigError, match=message):
        SmolVLA(config_of("frozen", vlms, **settings))


def test_refuses_no_camera_and_no_state(vlms):
    config = config_of("frozen", vlms)
    for key in list(config.input_features):
        fewer = {name: feature for name, feature in config.input_features.items() if name != key}
        with pytest.raises(ConfigError, match=r"requires observation.state and a camera"):
            SmolVLA(replace(config, input_features=fewer))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "idefics3"}, "requires a SmolVLM"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings=True"),
        ({"vision_config": {"hidden_act": "relu"}}, "vision_config.hidden_act=relu"),
    ],
)
def test_refuses_other_models(changed, message, vlms, tmp_path):
    config = json.loads((vlms / "tiny-vlm/config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, **changed}))
    with pytest.raises(ConfigError, match=message):
        read_size(str(tmp_path))


def test_an_unknown_model_is_named(tmp_path):
    with pytest.raises(ConfigError, match="no-vlm: there is no such folder"):
        read_size(str(tmp_path / "no-vlm"))
    assert read_size(next(iter(BUILTIN_SIZES))).text.width == 960


def test_the_model_that_comes_along_reads_the_built_in_task():
    config = load_config(["--config=smolvla_place"]).policy
    assert read_size(config.vlm_model_name).text.depth == 4
    step = Tokenize(config.vlm_model_name, max_length=config.tokenizer_max_length)
    tokens = step({"task": [f"{describe(colour)}\n" for colour in range(2)]})[TASK_TOKENS]
    unknown = 1
    assert not (tokens == unknown).any() and (tokens[0] != tokens[1]).sum() == 1
