"""SmolVLA beyond its numbers: what is trained and kept, where weights come from, what is refused."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.log import _warn_once
from flexor.core.rng import Noise, seed_everything
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.nn.flow import FlowToNoise
from flexor.policies.pretrained import load_pretrained, load_weights, save_pretrained
from flexor.policies.processing.tokenize import TASK_TOKENS, Tokenize
from flexor.policies.session import Session, act_together
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.policies.smolvla.policy import SmolVLA
from flexor.policies.vlm.smolvlm_size import BUILTIN_SIZES, read_size
from flexor.sim.task import describe
from parity.flexor_side import make_config, make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.smolvla.cases import training_batch
from parity.smolvla.vlms import make_vlms
from support import runs

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


# Made and loaded.


def test_is_made_without_memory_in_the_same_shape(vlms):
    config = config_of("special_tokens", vlms)
    with parameters_without_memory():
        empty = SmolVLA(config)
    assert all(p.is_meta for p in empty.parameters()) and not any(b.is_meta for b in empty.buffers())
    real = SmolVLA(config)
    assert [(n, p.shape, p.requires_grad) for n, p in empty.named_parameters()] == [
        (n, p.shape, p.requires_grad) for n, p in real.named_parameters()
    ]
    assert len({id(unit) for unit in real.shard_units()}) == 2 + 4 + 4


def test_the_published_size():
    """450 million parameters, 100 of them trained, without any file."""
    features = {
        "observation.state": PolicyFeature(Kind.STATE, (6,)),
        "observation.images.top": PolicyFeature(Kind.VISUAL, (3, 480, 640)),
    }
    with parameters_without_memory(), torch.device("meta"):
        policy = SmolVLA(
            SmolVLAConfig(
                input_features=features, output_features={"action": PolicyFeature(Kind.ACTION, (6,))}
            )
        )
    sizes = [(p.numel(), p.requires_grad) for p in policy.parameters()]
    assert sum(size for size, _ in sizes) == 450_046_176
    assert sum(size for size, trained in sizes if trained) == 99_880_992
    assert (
        policy.model.vlm_with_expert.vlm.model.vision_model.embeddings.position_embedding.num_embeddings
        == 1024
    )


def test_the_same_seed_makes_the_same_policy(vlms):
    made = []
    for _ in range(2):
        seed_everything("weights", 5)
        made.append(SmolVLA(config_of("frozen", vlms)).state_dict())
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_a_saved_policy_reads_and_acts_the_same(vlms, tmp_path):
    made, batch = batch_of("frozen", vlms)
    save_pretrained(
        tmp_path, made.policy.config, made.policy.state_dict(), made.preprocessor, made.postprocessor
    )
    steps = json.loads((tmp_path / "policy_preprocessor.json").read_text())["steps"]
    assert [step["registry_name"] for step in steps][2:] == [
        "smolvla_new_line_processor",
        "tokenizer_processor",
        "device_processor",
        "normalizer_processor",
    ]
    again = load_pretrained(str(tmp_path))
    training_inputs = again.preprocessor({**tensors(training_batch(case_of("frozen", vlms))), "task": TASKS})
    assert torch.equal(chunk(again.policy, training_inputs, 1, 2), chunk(made.policy, batch, 1, 2))


@pytest.mark.parametrize("split", [False, True])
def test_a_new_policy_starts_from_the_vlms_weights(split, vlms, tmp_path):
    shutil.copytree(vlms / "tiny-vlm", folder := tmp_path / "vlm")
    published = load_file(folder / "model.safetensors")
    if split:
        (folder / "model.safetensors").unlink()
        parts = {f"model-{n}.safetensors": list(published)[n::2] for n in range(2)}
        for file, names in parts.items():
            save_file({name: published[name] for name in names}, folder / file)
        index = {"weight_map": {name: file for file, names in parts.items() for name in names}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    policy = SmolVLA(config_of("frozen", vlms, vlm_model_name=str(folder), load_vlm_weights=True))
    policy.load_backbone()
    weights = policy.state_dict()
    loaded = [name for name in weights if name.startswith(VLM)]
    assert all(torch.equal(weights[name], published[name.removeprefix(VLM)]) for name in loaded)
    assert {name.removeprefix(VLM) for name in loaded} == {n for n in published if "layers.4" not in n}


def test_no_weights_are_told_and_must_be_asked_for(vlms, tmp_path, log_lines):
    shutil.copytree(vlms / "tiny-vlm", folder := tmp_path / "vlm")
    (folder / "model.safetensors").unlink()
    policy = SmolVLA(config_of("frozen", vlms, vlm_model_name=str(folder), load_vlm_weights=True))
    with pytest.raises(ConfigError) as error:
        policy.load_backbone()
    message = str(error.value)
    assert (
        "--policy.load_vlm_weights=false" in message
        and str(folder) in message
        and "model.safetensors" in message
    )
    assert "--policy.path=lerobot/smolvla_base" in message
    policy.config.load_vlm_weights = False
    policy.load_backbone()
    assert "random and stays so" in log_lines[-1]


def test_adapters_are_no_part_of_the_vlms_weights(vlms):
    policy = SmolVLA(config_of("all", vlms, load_vlm_weights=True))
    add_adapters(policy, LoraConfig(r=2), seed=0)
    policy.load_backbone()
    published = load_file(vlms / "tiny-vlm/model.safetensors")
    assert torch.equal(policy.state_dict()[f"{VLM}lm_head.weight"], published["lm_head.weight"])


def test_the_layers_that_are_adapted_by_default_are_lerobots(vlms):
    policy = SmolVLA(config_of("all", vlms))
    add_adapters(policy, LoraConfig(r=2), 0, policy.config.lora_targets())
    adapted = [name for name, module in policy.named_modules() if isinstance(module, LoraLinear)]
    expert = [name for name in adapted if name.startswith("model.vlm_with_expert.lm_expert.")]
    assert len(expert) == 2 * len(policy.model.vlm_with_expert.lm_expert.layers)
    assert all(name.endswith(("q_proj", "v_proj")) for name in expert)
    assert len(adapted) - len(expert) == 5


def test_weights_are_loaded_unless_told_otherwise():
    assert SmolVLAConfig().load_vlm_weights


def test_weights_that_do_not_fit_are_named(vlms, tmp_path):
    shutil.copytree(vlms / "tiny-vlm", folder := tmp_path / "vlm")
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = torch.zeros(3, 24)
    del weights["model.text_model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    policy = SmolVLA(config_of("frozen", vlms, vlm_model_name=str(folder), load_vlm_weights=True))
    with pytest.raises(ConfigError, match=r"lm_head.weight, model.text_model.layers.1.mlp.up_proj.weight"):
        policy.load_backbone()


def test_a_checkpoint_that_does_not_fit_is_refused_by_name(vlms, tmp_path):
    made, _ = batch_of("frozen", vlms)
    weights = dict(made.policy.state_dict())
    weights["model.state_proj.bias"] = torch.zeros(7)
    weights["model.more"] = weights.pop("model.action_in_proj.bias")
    save_pretrained(tmp_path, made.policy.config, weights, made.preprocessor, made.postprocessor)
    with pytest.raises(CheckpointError) as error:
        load_weights(made.policy, tmp_path)
    message = str(error.value)
    assert "Missing: model.action_in_proj.bias. Unexpected: model.more." in message
    assert "model.state_proj.bias: (7,) in the file, (24,) in the policy" in message


def test_a_batch_that_does_not_say_has_no_padding(vlms):
    made, batch = batch_of("frozen", vlms)
    batch["action_is_pad"] = torch.zeros_like(batch["action_is_pad"])
    uncut = made.policy.loss(batch, noise(1, 2)).per_sample
    del batch["action_is_pad"]
    assert torch.equal(made.policy.loss(batch, noise(1, 2)).per_sample, uncut)


# Other robots than it was trained on.


def test_other_cameras_states_and_actions(vlms, log_lines):
    trained = config_of("two_cameras", vlms)
    inputs = {
        "observation.state": PolicyFeature(Kind.STATE, (6,)),
        "observation.images.front": PolicyFeature(Kind.VISUAL, (3, 48, 64)),
    }
    outputs = {"action": PolicyFeature(Kind.ACTION, (5,))}
    fitted = trained.fitted(inputs, outputs)
    fitted.validate()
    messages = "\n".join(log_lines)
    assert list(fitted.images) == ["observation.images.front"] and fitted.action.shape == (5,)
    assert "observation.state has 6 values in the dataset and 4 in the policy" in messages
    assert "action has 5 values in the dataset and 3 in the policy" in messages
    assert (
        "observation.images.front takes the place of the policy's camera observation.images.wrist" in messages
    )
    assert "the policy's camera observation.images.above is left out" in messages
    SmolVLA(fitted).load_state_dict(SmolVLA(trained).state_dict())  # the same network


def test_fine_tunes_on_another_robot(vlms, dataset, tmp_path, log_lines):
    """Two cameras and a state of four values become one camera under another name and three values."""
    made, _ = batch_of("two_cameras", vlms)
    parts = made.policy.config, made.policy.state_dict(), made.preprocessor, made.postprocessor
    save_pretrained(tmp_path / "base", *parts)
    flags = [f"--policy.path={tmp_path / 'base'}", "--policy.device=cpu"]
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=1")
    assert "observation.image takes the place of the policy's camera observation.images.wrist" in log_lines
    tuned = load_pretrained(str(run))
    assert list(tuned.policy.config.images) == ["observation.image"]
    frozen = f"{VLM}model.text_model.embed_tokens.weight"
    assert torch.equal(tuned.policy.state_dict()[frozen], made.policy.state_dict()[frozen])
    image = {
        "observation.image": np.zeros((1, 3, 32, 32), np.uint8),
        "observation.state": np.zeros((1, 3), np.float32),
    }
    assert tuned.chunk(image, ["open the drawer"]).shape == (1, 8, 3)


def test_a_run_from_scratch_asks_for_it(vlms, dataset, tmp_path, capsys):
    shutil.copytree(vlms / "tiny-vlm", folder := tmp_path / "vlm")
    (folder / "model.safetensors").unlink()
    flags = ["--policy.type=smolvla", f"--policy.vlm_model_name={folder}", "--policy.num_vlm_layers=2"]
    flags += ["--policy.resize_imgs_with_padding=[32,32]", "--policy.device=cpu"]
    assert main(["train", *runs.flags(dataset, tmp_path / "run", flags, "--steps=1")]) == 2
    assert "--policy.load_vlm_weights=false" in capsys.readouterr().err


def test_the_same_robot_is_left_alone(vlms, log_lines):
    trained = config_of("two_cameras", vlms)
    inputs = {**trained.input_features, "observation.images.third": PolicyFeature(Kind.VISUAL, (3, 48, 64))}
    assert trained.fitted(inputs, trained.output_features) == trained
    assert not log_lines


def test_acts_without_a_camera_and_says_so(vlms, log_lines):
    _warn_once.cache_clear()
    made, _ = batch_of("two_cameras", vlms)
    complete, fewer = Session(made), Session(made)
    images = {f"observation.images.{name}": np.zeros((3, 60, 80), np.uint8) for name in ("wrist", "above")}
    observation = {"observation.state": np.zeros(4, np.float32), **images}
    less = {name: value for name, value in observation.items() if "wrist" not in name}
    actions = act_together([complete, fewer, fewer], [observation, less, less], ["open the drawer"] * 3)
    assert not np.array_equal(actions[0], actions[1])
    assert sum("acts without observation.images.wrist" in line for line in log_lines) == 1
    with pytest.raises(FlexorError, match=r"needs observation\.images\.wrist, observation\.images\.above"):
        Session(made).act({"observation.state": observation["observation.state"]})
    with pytest.raises(FlexorError, match=r"needs observation\.state"):
        Session(made).act(images)


def test_without_resizing_images_must_have_their_size(vlms):
    made, _ = batch_of("right_size", vlms)
    made.policy.config.resize_imgs_with_padding = None
    state = {"observation.state": np.zeros(4, np.float32)}
    with pytest.raises(FlexorError, match=r"top is \[3, 60, 80\] in the environment"):
        Session(made).act({**state, "observation.images.top": np.zeros((3, 60, 80), np.uint8)})


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
