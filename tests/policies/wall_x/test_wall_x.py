"""WALL-X beyond its numbers: experts, padding, precision, words, where weights come from, what is refused."""

import numpy as np
import pytest
import torch

from flexor.core.batch import ACTION_LENGTH, IMAGE_FEATURES
from flexor.core.errors import FlexorError
from flexor.core.rng import Noise
from flexor.policies.adapters import LoraConfig, add_adapters
from flexor.policies.nn import recompute
from flexor.policies.pretrained import Pretrained
from flexor.policies.processing.host_steps import split_processing
from flexor.policies.vlm.qwen2_5_vl import causal_mask
from flexor.policies.wall_x.network import action_mask
from flexor.policies.wall_x.prompt import PROMPT, PROMPT_MASK
from parity.fill import fill
from parity.flexor_side import make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.records import gradients
from parity.wall_x.cases import training_batch

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
