"""WALL-X beyond its numbers: experts, padding, precision, words, where weights come from, what is refused."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.core.batch import ACTION_LENGTH, IMAGE_FEATURES
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.rng import Noise
from flexor.policies.adapters import LoraConfig, add_adapters
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.nn import recompute
from flexor.policies.nn.cast_to_bf16 import cast_to_bf16
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.processing.host_steps import split_processing
from flexor.policies.vlm.qwen2_5_vl import causal_mask
from flexor.policies.wall_x.config import WallXConfig
from flexor.policies.wall_x.network import action_mask
from flexor.policies.wall_x.policy import WallX
from flexor.policies.wall_x.prompt import PROMPT, PROMPT_MASK
from flexor.policies.weight_names import unique_state
from parity.fill import fill
from parity.flexor_side import make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.records import gradients
from parity.wall_x.cases import training_batch
from parity.wall_x.models import VOCABULARY, make_wall

EMBEDDING, HEAD = "model.model.embed_tokens.weight", "model.lm_head.weight"
TOP = "observation.images.top"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("models") / "walls"


def made_of(name, files, **changed) -> Pretrained:
    torch.manual_seed(0)
    case = cases_of("wall_x", files)[name]
    made = make_policy("wall_x", {**case, "ours": {**case["ours"], **changed}})
    fill(made.policy)
    return made


def batch_of(made, name, files, **columns) -> dict:
    batch = {**tensors(training_batch(cases_of("wall_x", files)[name])), **columns}
    return made.preprocessor({**batch, "task": TASKS})


def noise(*samples) -> Noise:
    return Noise(3, 7, torch.tensor(samples))


def losses(policy, batch, *samples) -> torch.Tensor:
    return policy.loss(batch, noise(*samples)).per_sample.detach()


def chunk(policy, batch, *samples) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval().predict(batch, noise(*samples))


# Samples, padding, images.


@pytest.mark.parametrize("name", ["default", "narrow_experts", "fast"])
def test_a_sample_is_the_same_in_any_batch(name, files):
    made = made_of(name, files)
    batch = batch_of(made, name, files)
    single = {key: value[1:] for key, value in batch.items()}
    assert torch.allclose(losses(made.policy, batch, 11, 12)[1:], losses(made.policy, single, 12), rtol=1e-4)
    together, by_itself = chunk(made.policy, batch, 11, 12), chunk(made.policy, single, 12)
    assert torch.allclose(together[1:], by_itself, atol=1e-3)


@pytest.mark.parametrize("name", ["default", "fast"])
def test_padding_does_not_matter(name, files):
    made = made_of(name, files)
    batch = batch_of(made, name, files)
    mask = batch[PROMPT_MASK]
    assert not mask.all()
    other = {**batch, PROMPT: torch.where(mask, batch[PROMPT], 9)}
    assert torch.equal(losses(made.policy, other, 1, 2), losses(made.policy, batch, 1, 2))
    assert torch.equal(chunk(made.policy, other, 1, 2), chunk(made.policy, batch, 1, 2))


def test_actions_beyond_the_end_of_an_episode_are_learned(files):
    """As in LeRobot, which does not read what is padding."""
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    changed = torch.where(batch["action_is_pad"][..., None], batch["action"] + 5, batch["action"])
    same = torch.allclose(
        losses(made.policy, {**batch, "action": changed}, 1, 2), losses(made.policy, batch, 1, 2)
    )
    assert not same


def test_values_that_are_missing_are_not_learned(files):
    """NaN in a state or an action, or beyond a dataset's own actions."""
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    missing = batch["action"].clone()
    missing[1, :, 2] = torch.nan
    shorter = {**batch, ACTION_LENGTH: torch.tensor([3, 2])}
    with_missing = losses(made.policy, {**batch, "action": missing}, 1, 2)
    assert with_missing.isfinite().all() and with_missing[0] == losses(made.policy, batch, 1, 2)[0]
    shorter["action"] = missing.nan_to_num(nan=0.0)
    assert torch.equal(losses(made.policy, shorter, 1, 2), with_missing)
    state = batch["observation.state"].clone()
    state[0, 1] = torch.nan
    assert chunk(made.policy, {**batch, "observation.state": state}, 1, 2).isfinite().all()


def test_an_image_that_a_sample_lacks_is_not_seen(files):
    camera = "observation.images.above"
    made = made_of("three_cameras", files)
    mask = {f"{camera}_padding_mask": torch.tensor([True, False])}
    hidden = batch_of(made, "three_cameras", files, **mask)
    changed = {**hidden, camera: hidden[camera].roll(1, 0)}
    before, after = (chunk(made.policy, each, 1, 2) for each in (hidden, changed))
    assert torch.allclose(after[1], before[1], atol=1e-5)
    assert not torch.allclose(after[0], before[0], atol=1e-3)


def test_other_cameras_are_refused(files):
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    blind = {key: value for key, value in batch.items() if key != TOP}
    with pytest.raises(FlexorError, match=f"{TOP} is missing in the observation"):
        made.policy.predict(blind, noise(1, 2))
    with pytest.raises(FlexorError, match="has 33 x 50 pixels, but this WALL-X takes 33 x 70 of it"):
        made.policy.predict({**batch, TOP: batch[TOP][..., :50]}, noise(1, 2))


@pytest.mark.parametrize("name", ["default", "fast"])
def test_the_loader_writes_prompts_and_leaves_images_to_the_device(name, files):
    made = made_of(name, files)
    host, device = split_processing(made.preprocessor)
    assert host is not None and not host.uses_images
    columns = {**tensors(training_batch(cases_of("wall_x", files)[name])), "task": TASKS}
    image = columns.pop(TOP)
    prompts = host({**columns, "index": torch.arange(2)}, 0)
    batch = device({**prompts, TOP: image})
    expected = batch_of(made, name, files)
    assert torch.equal(losses(made.policy, batch, 1, 2), losses(made.policy, expected, 1, 2))


@pytest.mark.parametrize("name", ["default", "three_cameras"])
def test_features_of_images_instead_of_images(name, files):
    """As a run computes them once where the encoder is frozen: with adapters."""
    made = made_of(name, files)
    assert not made.policy.image_encoder().is_frozen
    add_adapters(made.policy, LoraConfig(r=2), 0, made.policy.config.lora_targets())
    assert made.policy.image_encoder().is_frozen
    batch = batch_of(made, name, files)
    cameras = list(made.policy.config.images)
    with torch.no_grad():
        features = {
            f"{IMAGE_FEATURES}{camera}": made.policy.encode_images(batch[camera], camera)
            for camera in cameras
        }
        expected = losses(made.policy, batch, 1, 2)
    encoded = {**{key: value for key, value in batch.items() if key not in cameras}, **features}
    torch.testing.assert_close(losses(made.policy, encoded, 1, 2), expected, rtol=1e-5, atol=0)


# Experts and attention.


def test_actions_attend_to_each_other_and_nothing_before_attends_to_them():
    valid = torch.tensor([[False, True, True, True, True]])
    mask = action_mask(valid, 2)[0, 0].int().tolist()
    assert mask == [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 1, 1, 1], [0, 1, 1, 1, 1]]
    assert torch.equal(action_mask(valid, 0), causal_mask(valid))


def test_each_kind_of_tokens_has_its_expert(files):
    """Actions are not computed by the words' expert of the last layer, nor words by that of actions."""
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    before = losses(made.policy, batch, 1, 2), chunk(made.policy, batch, 1, 2)
    words, actions = made.policy.model.model.layers[-1].moe.experts
    with torch.no_grad():
        words.down_proj.weight.zero_()
    assert torch.equal(losses(made.policy, batch, 1, 2), before[0])
    assert torch.equal(chunk(made.policy, batch, 1, 2), before[1])
    with torch.no_grad():
        actions.down_proj.weight.zero_()
    assert not torch.allclose(losses(made.policy, batch, 1, 2), before[0], rtol=1e-3)


@pytest.mark.parametrize("name", ["default", "narrow_experts", "dense", "fast", "fast_untied"])
def test_all_that_is_trained_gets_a_gradient(name, files):
    """Or DDP would wait for it."""
    made = made_of(name, files)
    made.policy.loss(batch_of(made, name, files), noise(1, 2)).per_sample.mean().backward()
    missing = [n for n, p in made.policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    frozen = {
        part
        for n, p in made.policy.named_parameters()
        if not p.requires_grad
        for part in (".experts.1.", ".experts.2.", "lm_head", "w1", "w2", "w3", "action_proj_back")
        if part in n
    }
    around = {"w1", "w2", "w3", "action_proj_back"}
    assert (
        frozen
        == {
            "default": set(),
            "narrow_experts": {".experts.2.", "lm_head"},
            "dense": set(),
            "fast": {".experts.1.", *around},
            "fast_untied": {".experts.1.", ".experts.2.", *around},
        }[name]
    )


def test_blocks_are_recomputed_once(files, monkeypatch):
    passes = []

    def checkpoint(forward, *inputs, use_reentrant, **settings):
        passes.append(forward)
        return forward(*inputs, **settings)

    monkeypatch.setattr(recompute, "checkpoint", checkpoint)
    plain, made = made_of("default", files), made_of("default", files, gradient_checkpointing=True)
    for block in made.policy.shard_units():  # as --activation_checkpointing does
        recompute.recompute(block)
    batch = batch_of(made, "default", files)
    computed = []
    for policy in (plain.policy, made.policy):
        policy.train().loss(batch, noise(1, 2)).per_sample.mean().backward()
        computed.append(gradients(policy))
    assert computed[0] == computed[1]
    assert len(passes) == len(made.policy.shard_units()) == 4


def test_adapters_are_where_actions_are_made(files):
    policy = made_of("default", files).policy
    add_adapters(policy, LoraConfig(r=2), 0, policy.config.lora_targets())
    trained = {name.rsplit(".", 1)[0] for name, p in policy.named_parameters() if p.requires_grad}
    inside = {f"model.model.layers.{n}.self_attn.{name}_proj" for n in (0, 1) for name in "qv"}
    around = ("w1", "w2", "w3", "action_proj_back", "propri_proj")
    assert trained == inside | {f"model.action_preprocessor.{name}" for name in around}


# Precision.


def test_the_types_of_weights(files):
    policy = made_of("default", files, dtype="auto").policy
    exact = {name for name, p in policy.named_parameters() if p.dtype == torch.float32}
    layers = [f"model.model.layers.{n}" for n in (0, 1)]
    norms = {f"{layer}.{norm}_layernorm.weight" for layer in layers for norm in ("input", "post_attention")}
    around = {
        f"model.action_preprocessor.{n}.weight" for n in ("w1", "w2", "w3", "action_proj_back", "propri_proj")
    }
    assert exact == norms | around | {"model.model.norm.weight"}
    assert not policy.needs_autocast and made_of("default", files).policy.needs_autocast


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lower_precision(dtype, files):
    exact, made = made_of("default", files), made_of("default", files, dtype=dtype)
    batch = batch_of(made, "default", files)
    expected = losses(exact.policy, batch, 1, 2)
    for mixed in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = made.policy.loss(batch, noise(1, 2)).per_sample
            actions = chunk(made.policy, batch, 1, 2)
        assert loss.dtype == actions.dtype == torch.float32
        assert torch.allclose(loss, expected, rtol=0.05) and actions.isfinite().all()
        loss.mean().backward()


def test_matrices_in_bfloat16(files):
    """As --weights_dtype=bf16 stores them, and `flexor serve --dtype=bfloat16`."""
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    expected = losses(made.policy, batch, 1, 2)
    for parameter in made.policy.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.ndim > 1 else parameter.data
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(losses(made.policy, batch, 1, 2), expected, rtol=0.05)
        cast_to_bf16(made.policy)
        assert chunk(made.policy, batch, 1, 2).isfinite().all()


def test_actions_are_rounded_as_lerobots_unless_told_otherwise(files):
    batch = batch_of(made_of("default", files), "default", files)
    rounded = {**batch, "action": batch["action"].bfloat16().float()}
    rounded["observation.state"] = batch["observation.state"].bfloat16().float()
    for settings, same in (({}, True), ({"round_actions": False}, False)):
        policy = made_of("default", files, dtype="bfloat16", **settings).policy
        assert torch.equal(losses(policy, batch, 1, 2), losses(policy, rounded, 1, 2)) is same
    exact = made_of("default", files).policy  # in float32, nothing is rounded
    assert not torch.equal(losses(exact, batch, 1, 2), losses(exact, rounded, 1, 2))


# Acting.


def test_a_new_chunk_continues_the_last(files):
    made = made_of("default", files)
    columns = tensors(training_batch(cases_of("wall_x", files)["default"]))
    observation = {key: value.numpy() for key, value in columns.items() if key.startswith("observation")}
    free = made.chunk(observation, TASKS, noise(1, 2))
    previous = free[:, :6] + np.float32(0.5)
    guided = made.chunk(observation, TASKS, noise(1, 2), previous=previous, delay=3)
    assert np.abs(guided[:, :3] - previous[:, :3]).mean() < 0.7 * np.abs(free[:, :3] - previous[:, :3]).mean()


def test_words_are_those_of_a_growing_sequence(files):
    """The cache computes what reading everything again computes."""
    made = made_of("fast", files)
    policy = made.policy.eval()
    batch = batch_of(made, "fast", files)
    with torch.no_grad():
        state = policy.generate(batch, noise(1, 2))
        tokens = batch[PROMPT][:, : batch["state_token_mask"].shape[1]]
        mask = batch[PROMPT_MASK][:, : tokens.shape[1]]
        assert len({tuple(row) for row in state.tokens.tolist()}) == 2
        for number in range(12):
            hidden = policy.model.read(policy._embed_prompt(batch, tokens), tokens, mask)
            token = policy.model.lm_head(hidden[:, -1]).argmax(-1)
            assert torch.equal(token, state.tokens[:, number])
            tokens = torch.cat((tokens, token[:, None]), 1)
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), 1)


def test_words_become_actions(files, log_lines):
    made = made_of("fast", files)
    chunks = np.random.default_rng(0).normal(size=(2, 8, 3)).astype(np.float32)
    policy = made.policy.eval()
    batch = batch_of(made, "fast", files)
    state = policy.prefill(batch, noise(1, 2))
    for row, fast_tokens in zip(state.tokens, policy.fast.encode(chunks)):
        row[: len(fast_tokens)] = torch.tensor(fast_tokens) + policy.words.first
        row[len(fast_tokens) :] = policy.words.end
    state.cursor.add_(policy.config.max_decoding_steps)
    assert np.abs(policy.decode_actions(state).numpy() - chunks).max() < 0.2 and not log_lines
    state.tokens[0] = policy.words.end
    assert (policy.decode_actions(state)[0] == 0).all()
    assert "of 2 chunks, the tokens of 1 are not those of a full chunk" in log_lines[0]


def test_a_batch_without_answers_is_refused(files):
    made = made_of("fast", files)
    batch = batch_of(made, "fast", files)
    batch.pop("answer_mask")
    with pytest.raises(FlexorError, match="learns from answer_mask, which its processing makes of actions"):
        made.policy.loss(batch, noise(1, 2))


# Weights.


def test_the_full_size():
    with parameters_without_memory():
        policy = WallX(WallXConfig(input_features=made_features(), output_features=made_features("action")))
    count = sum(parameter.numel() for parameter in policy.parameters())
    assert 4.21e9 < count < 4.24e9
    assert (
        len(policy.state_dict()) == 390 + 36 * (4 + 3 + 2 + 6) + 3 + 5
    )  # vision, layers, embeddings, around


def made_features(kind="input"):
    from flexor.policies.features import Kind, PolicyFeature

    if kind == "action":
        return {"action": PolicyFeature(Kind.ACTION, (7,))}
    return {
        "observation.state": PolicyFeature(Kind.STATE, (7,)),
        TOP: PolicyFeature(Kind.VISUAL, (3, 480, 640)),
    }


@pytest.mark.parametrize("layout", ["tiny-wall", "narrow-wall"])
@pytest.mark.parametrize("name_in_file", ["model.embed_tokens.weight", "lm_head.weight"])
def test_a_new_policy_starts_from_published_weights(layout, name_in_file, files, tmp_path):
    base = make_wall(tmp_path / "wall", layout)
    weights = load_file(base / "model.safetensors")
    if layout == "tiny-wall" and name_in_file != "model.embed_tokens.weight":
        weights[name_in_file] = weights.pop("model.embed_tokens.weight")
        save_file(weights, base / "model.safetensors")
    policy = made_of("default", files, pretrained_name_or_path=str(base)).policy
    policy.load_backbone()
    state = policy.model.state_dict()
    assert all(torch.equal(state[key], value) for key, value in weights.items() if "normalizer" not in key)


def test_weights_that_are_not_there(files, tmp_path):
    base = make_wall(tmp_path / "wall")
    weights = load_file(base / "model.safetensors")
    policy = made_of("default", files, pretrained_name_or_path=str(base)).policy
    weights.pop("action_preprocessor.w1.weight")
    save_file(weights, base / "model.safetensors")
    with pytest.raises(ConfigError, match=r"does not fit its config.json: action_preprocessor\.w1\.weight"):
        policy.load_backbone()
    (base / "model.safetensors").unlink()
    with pytest.raises(
        ConfigError, match=r"there is no model.safetensors in .*--policy.load_vlm_weights=false"
    ):
        policy.load_backbone()
    made_of(
        "default", files, pretrained_name_or_path=str(base), load_vlm_weights=False
    ).policy.load_backbone()


@pytest.mark.parametrize("name", ["default", "fast"])
def test_a_checkpoint_needs_nothing_else(name, files, tmp_path):
    """Not the folder that its policy started from. It says the type of its weights, which LeRobot's settings do not."""
    base = make_wall(tmp_path / "wall")
    made = made_of(name, files, pretrained_name_or_path=str(base))
    batch = batch_of(made, name, files)
    folder = tmp_path / "saved"
    save_pretrained(
        folder, made.policy.config, unique_state(made.policy), made.preprocessor, made.postprocessor
    )
    shutil.rmtree(base)
    loaded = load_pretrained(str(folder))
    assert loaded.policy.config.dtype == "float32"
    assert torch.equal(
        losses(loaded.policy, batch_of(loaded, name, files), 1, 2), losses(made.policy, batch, 1, 2)
    )
    again = tmp_path / "again"
    save_pretrained(again, loaded.policy.config, None, loaded.preprocessor, loaded.postprocessor)
    assert sorted(path.name for path in (again / "vlm").iterdir()) == [
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def test_a_checkpoint_of_lerobots_takes_sizes_from_the_folder_it_names(files, tmp_path):
    made = made_of("default", files)
    folder = tmp_path / "saved"
    save_pretrained(
        folder, made.policy.config, unique_state(made.policy), made.preprocessor, made.postprocessor
    )
    shutil.rmtree(folder / "vlm")
    loaded = load_pretrained(str(folder))
    assert loaded.policy.model.size.vocabulary == len(VOCABULARY)
    gone = replace(made.policy.config, pretrained_name_or_path=str(tmp_path / "gone"))
    (folder / "config.json").write_text(
        (folder / "config.json")
        .read_text()
        .replace(made.policy.config.pretrained_name_or_path, gone.pretrained_name_or_path)
    )
    with pytest.raises((ConfigError, CheckpointError), match=r"pretrained_name_or_path=.*gone"):
        load_pretrained(str(folder))
