"""SmolVLA's weights: made, loaded, and fine-tuned for other robots than they were trained on."""

import json
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.cli.main import main
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.log import _warn_once
from flexor.core.rng import Noise, seed_everything
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.pretrained import load_pretrained, load_weights, save_pretrained
from flexor.policies.session import Session, act_together
from flexor.policies.smolvla.config import SmolVLAConfig
from flexor.policies.smolvla.policy import SmolVLA
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
    with pytest.raises(FlexorError, match=r"top has the shape \[3, 60, 80\]"):
        Session(made).act({**state, "observation.images.top": np.zeros((3, 60, 80), np.uint8)})
