"""EO-1 beyond its numbers: padding, precision, where weights come from, what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.core.batch import IMAGE_FEATURES
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.rng import Noise
from flexor.policies.adapters import LoraConfig, add_adapters
from flexor.policies.base import Policy
from flexor.policies.eo1.conversation import PROMPT, PROMPT_MASK
from flexor.policies.eo1.policy import EO1
from flexor.policies.image_encoder import image_steps
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.nn import recompute
from flexor.policies.nn.cast_to_bf16 import cast_to_bf16
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.processing.host_steps import split_processing
from parity.eo1.cases import training_batch
from parity.eo1.qwen import make_qwen
from parity.flexor_side import make_config, make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.records import gradients

EMBEDDING = "model.vlm_backbone.model.language_model.embed_tokens.weight"
HEAD = "model.vlm_backbone.lm_head.weight"


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("models") / "qwens"


def made_of(name, files, **changed) -> Pretrained:
    torch.manual_seed(0)
    case = cases_of("eo1", files)[name]
    return make_policy("eo1", {**case, "ours": changed})


def batch_of(made, name, files, **columns) -> dict:
    batch = {**tensors(training_batch(cases_of("eo1", files)[name])), **columns}
    return made.preprocessor({**batch, "task": TASKS})


def noise(*samples) -> Noise:
    return Noise(3, 7, torch.tensor(samples))


def losses(policy, batch, *samples) -> torch.Tensor:
    return policy.loss(batch, noise(*samples)).per_sample.detach()


def chunk(policy, batch, *samples) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval().predict(batch, noise(*samples))


# Samples, padding, images.


@pytest.mark.parametrize("name", ["default", "nothing_padded"])
def test_a_sample_is_the_same_in_any_batch(name, files):
    made = made_of(name, files)
    batch = batch_of(made, name, files)
    single = {key: value[1:] for key, value in batch.items()}
    batch["action_valid_steps"] = single["action_valid_steps"] = 5.0
    assert torch.allclose(losses(made.policy, batch, 11, 12)[1:], losses(made.policy, single, 12), rtol=1e-4)
    together, by_itself = chunk(made.policy, batch, 11, 12), chunk(made.policy, single, 12)
    assert torch.allclose(together[1:], by_itself, atol=1e-4)


def test_padding_does_not_matter(files):
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    mask = batch[PROMPT_MASK]
    assert not mask.all()
    other = {**batch, PROMPT: torch.where(mask, batch[PROMPT], 9)}
    assert torch.equal(losses(made.policy, other, 1, 2), losses(made.policy, batch, 1, 2))
    assert torch.equal(chunk(made.policy, other, 1, 2), chunk(made.policy, batch, 1, 2))


def test_actions_beyond_the_end_of_an_episode(files):
    """Learned by default. If not, the others do not attend to them either."""
    for name, learned in (("default", True), ("real_actions", False)):
        made = made_of(name, files)
        batch = batch_of(made, name, files)
        changed = torch.where(batch["action_is_pad"][..., None], batch["action"] + 5, batch["action"])
        same = torch.allclose(
            losses(made.policy, {**batch, "action": changed}, 1, 2), losses(made.policy, batch, 1, 2)
        )
        assert same is not learned


def test_an_image_that_a_sample_lacks_is_not_seen(files):
    wrist = "observation.images.wrist"
    made = made_of("three_cameras", files)
    mask = {f"{wrist}_padding_mask": torch.tensor([True, False])}
    hidden = batch_of(made, "three_cameras", files, **mask)
    changed = {**hidden, wrist: hidden[wrist].roll(1, 0)}
    before, after = (chunk(made.policy, each, 1, 2) for each in (hidden, changed))
    assert torch.allclose(after[1], before[1], atol=1e-6)
    assert not torch.allclose(after[0], before[0], atol=1e-3)


def test_tasks_matter(files):
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    other = {**batch, PROMPT: batch[PROMPT].roll(1, 0), PROMPT_MASK: batch[PROMPT_MASK].roll(1, 0)}
    other["state_token_mask"] = batch["state_token_mask"].roll(1, 0)
    assert not torch.allclose(chunk(made.policy, batch, 1, 2), chunk(made.policy, other, 1, 2), atol=1e-3)


def test_other_cameras_are_refused(files):
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    camera = "observation.images.top"
    blind = {key: value for key, value in batch.items() if key != camera}
    with pytest.raises(FlexorError, match=f"{camera} is missing in the observation"):
        made.policy.predict(blind, noise(1, 2))
    with pytest.raises(FlexorError, match="has 40 x 50 pixels, but this EO-1 takes 40 x 56 of it"):
        made.policy.predict({**batch, camera: batch[camera][..., :50]}, noise(1, 2))


def test_the_loader_writes_prompts_and_leaves_images_to_the_device(files):
    made = made_of("default", files)
    host, device = split_processing(made.preprocessor)
    assert host is not None and not host.uses_images
    columns = {**tensors(training_batch(cases_of("eo1", files)["default"])), "task": TASKS}
    image = columns.pop("observation.images.top")
    prompts = host({**columns, "index": torch.arange(2)}, 0)
    batch = device({**prompts, "observation.images.top": image})
    expected = batch_of(made, "default", files)
    assert torch.equal(losses(made.policy, batch, 1, 2), losses(made.policy, expected, 1, 2))


@pytest.mark.parametrize("name", ["default", "three_cameras"])
def test_features_of_images_instead_of_images(name, files):
    """As a run computes them once where the encoder is frozen: with adapters."""
    made = made_of(name, files)
    add_adapters(made.policy, LoraConfig(r=2), 0, made.policy.config.lora_targets())
    assert made.policy.image_encoder().is_frozen and not made_of(name, files).policy.image_encoder().is_frozen
    batch = batch_of(made, name, files)
    for dtype in (None, torch.bfloat16):
        with torch.autocast("cpu", dtype or torch.bfloat16, enabled=dtype is not None):
            with torch.no_grad():
                encoded = {
                    f"{IMAGE_FEATURES}{camera}": made.policy.encode_images(batch[camera], camera)
                    for camera in made.policy.config.images
                }
            rest = {key: value for key, value in batch.items() if key not in made.policy.config.images}
            expected, same = losses(made.policy, batch, 1, 2), losses(made.policy, {**rest, **encoded}, 1, 2)
        torch.testing.assert_close(same, expected, rtol=1e-5 if dtype is None else 1e-2, atol=0)
    assert image_steps(made.preprocessor) is not None


# Training.


@pytest.mark.parametrize("name", ["default", "untied", "real_actions"])
def test_all_that_is_trained_gets_a_gradient(name, files):
    """Or DDP would wait for it."""
    made = made_of(name, files)
    made.policy.loss(batch_of(made, name, files), noise(1, 2)).per_sample.mean().backward()
    missing = [n for n, p in made.policy.named_parameters() if p.requires_grad and p.grad is None]
    assert not missing
    frozen = [n for n, p in made.policy.named_parameters() if not p.requires_grad]
    assert frozen == ([HEAD] if name == "untied" else [])  # of words, which nothing asks for


def test_blocks_are_recomputed_once(files, monkeypatch):
    passes = []
    monkeypatch.setattr(
        recompute, "checkpoint", lambda forward, *a, **k: passes.append(forward) or forward(*a)
    )
    plain, made = made_of("default", files), made_of("recomputed", files)
    made.policy.load_state_dict(plain.policy.state_dict())
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
    around = ("state_proj", "action_in_proj", "action_out_proj.0", "action_out_proj.2")
    around += ("action_time_mlp_in", "action_time_mlp_out")
    layers = "model.vlm_backbone.model.language_model.layers"
    inside = {f"{layers}.{n}.self_attn.{name}_proj" for n in (0, 1) for name in "qv"}
    assert trained == inside | {f"model.{name}" for name in around}


@pytest.mark.parametrize(
    "settings", [{"dtype": "bfloat16"}, {"dtype": "float32"}, {"force_fp32_autocast": False}]
)
def test_lower_precision(settings, files):
    exact = made_of("default", files)
    made = made_of("default", files, **settings)
    made.policy.load_state_dict(exact.policy.state_dict())
    backbone = {p.dtype for n, p in made.policy.named_parameters() if "vlm_backbone" in n}
    around = {p.dtype for n, p in made.policy.named_parameters() if "vlm_backbone" not in n}
    assert around == {torch.float32}
    assert backbone == {torch.bfloat16 if settings.get("dtype") == "bfloat16" else torch.float32}
    batch = batch_of(made, "default", files)
    expected, chunks = losses(exact.policy, batch, 1, 2), chunk(exact.policy, batch, 1, 2)
    for mixed in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
            loss = made.policy.loss(batch, noise(1, 2)).per_sample
            actions = chunk(made.policy, batch, 1, 2)
        assert loss.dtype == actions.dtype == torch.float32
        assert torch.allclose(loss, expected, rtol=0.05) and torch.allclose(actions, chunks, atol=0.3)
        loss.mean().backward()


def test_matrices_in_bfloat16(files):
    """As --weights_dtype=bf16 stores them, and `flexor serve --dtype=bfloat16`."""
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    expected = losses(made.policy, batch, 1, 2)
    assert (
        made.policy.needs_autocast and not made_of("default", files, dtype="bfloat16").policy.needs_autocast
    )
    for parameter in made.policy.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.ndim > 1 else parameter.data
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(losses(made.policy, batch, 1, 2), expected, rtol=0.05)
        cast_to_bf16(made.policy)
        assert chunk(made.policy, batch, 1, 2).isfinite().all()


def test_the_dtype_of_published_weights(files):
    config = replace(make_config("eo1", cases_of("eo1", files)["default"]), dtype="auto")
    assert config.vlm_dtype == torch.float32  # as its config.json says
    described = config.described_vlm()
    assert replace(config, vlm_config={**described, "dtype": "bfloat16"}).vlm_dtype == torch.bfloat16
    old = {key: value for key, value in described.items() if key != "dtype"}
    assert replace(config, vlm_config={**old, "torch_dtype": "bfloat16"}).vlm_dtype == torch.bfloat16


def test_a_new_chunk_continues_the_last(files):
    made = made_of("default", files)
    observed = {
        key: value.numpy()
        for key, value in tensors(training_batch(cases_of("eo1", files)["default"])).items()
    }
    observation = {key: value for key, value in observed.items() if key.startswith("observation")}
    previous = np.full((2, 6, 3), 0.4, np.float32)
    free = made.chunk(observation, TASKS, noise(1, 2))
    guided = made.chunk(observation, TASKS, noise(1, 2), previous=previous, delay=3)
    assert np.abs(guided[:, :3] - 0.4).mean() < 0.5 * np.abs(free[:, :3] - 0.4).mean()


# Weights.


def test_the_full_size_has_published_names(files):
    config = replace(
        make_config("eo1", cases_of("eo1", files)["default"]), vlm_base="Qwen/Qwen2.5-VL-3B-Instruct"
    )
    with parameters_without_memory():
        policy = EO1(replace(config, dtype="auto"))
    count = sum(parameter.numel() for parameter in policy.parameters())
    assert 3.75e9 < count < 3.79e9
    assert len(policy.state_dict()) == 390 + 434 + 1 + 12  # vision, text, the head, the layers around
    assert policy.state_dict()[HEAD].dtype == torch.bfloat16


@pytest.mark.parametrize("name", ["default", "untied"])
@pytest.mark.parametrize("layout", ["published", "today's"])
def test_a_new_policy_starts_from_the_weights_of_its_backbone(name, layout, files, tmp_path):
    base = make_qwen(tmp_path / "qwen", tied=name == "default")
    weights = load_file(base / "model.safetensors")
    today = {
        key.replace("model.", "model.language_model.", 1).replace("visual.", "model.visual.", 1): value
        for key, value in weights.items()
    }
    if layout == "today's":
        save_file(today, base / "model.safetensors")
    policy = made_of("default", files, vlm_base=str(base)).policy
    policy.load_backbone()
    state = policy.model.vlm_backbone.state_dict()
    expected = {
        **today,
        "lm_head.weight": weights.get("lm_head.weight", weights["model.embed_tokens.weight"]),
    }
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], value) for key, value in expected.items())


def test_weights_that_are_not_there(files, tmp_path):
    base = make_qwen(tmp_path / "qwen")
    (base / "model.safetensors").unlink()
    policy = made_of("default", files, vlm_base=str(base)).policy
    with pytest.raises(
        ConfigError, match=r"there is no model.safetensors in .*--policy.load_vlm_weights=false"
    ):
        policy.load_backbone()
    made_of("default", files, vlm_base=str(base), load_vlm_weights=False).policy.load_backbone()


@pytest.mark.parametrize("alias", [EMBEDDING, HEAD])
def test_either_name_of_the_tied_weight_is_loaded(alias, files, tmp_path):
    made = made_of("default", files)
    weights = {key: value for key, value in made.policy.state_dict().items() if key not in (EMBEDDING, HEAD)}
    tied = made.policy.state_dict()[HEAD]
    save_pretrained(
        tmp_path, made.policy.config, {**weights, alias: tied}, made.preprocessor, made.postprocessor
    )
    loaded: Policy = load_pretrained(str(tmp_path)).policy
    assert torch.equal(loaded.state_dict()[EMBEDDING], tied) and torch.equal(loaded.state_dict()[HEAD], tied)
    save_pretrained(tmp_path, made.policy.config, weights, made.preprocessor, made.postprocessor)
    with pytest.raises(CheckpointError, match=r"Missing: model\.vlm_backbone\.lm_head\.weight"):
        load_pretrained(str(tmp_path))
