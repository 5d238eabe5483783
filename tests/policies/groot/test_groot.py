"""GR00T beyond its numbers: padding, what is frozen, kept features, continued chunks, base models and checkpoints."""

import json
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.core.batch import IMAGE_FEATURES
from flexor.core.errors import CheckpointError, ConfigError, FlexorError
from flexor.core.rng import Noise
from flexor.policies.frozen_in_bf16 import store_frozen_in_bf16
from flexor.policies.groot.processing import PROMPT, PROMPT_MASK
from flexor.policies.nn.real_time import GUIDANCE_WEIGHTS, PREVIOUS, RealTimeSettings
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.weight_names import unique_state
from parity.fill import fill
from parity.flexor_side import make_policy, tensors
from parity.groot.cases import training_batch
from parity.inputs import BATCH, TASKS, observation
from parity.kinds import cases_of


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("models") / "groots"


def made_of(name, files, **changed) -> Pretrained:
    case = cases_of("groot", files)[name]
    small = {"image_target_size": (64, 64), "image_crop_size": (60, 60), "image_min_pixels": 4096}
    made = make_policy("groot", {**case, "ours": {**case["ours"], **small, **changed}})
    fill(made.policy)
    with torch.no_grad():  # small enough that rounding does not show
        for name, value in made.policy.named_parameters():
            if "timestep_embedder" in name or "patch_embed" in name:
                value.mul_(0.1)
    return made


def batch_of(made, name, files, tasks=TASKS, **columns) -> dict:
    batch = {**tensors(training_batch(cases_of("groot", files)[name])), **columns}
    return made.preprocessor({**batch, "task": tasks})


def noise(*samples) -> Noise:
    return Noise(3, 7, torch.tensor(samples))


def losses(policy, batch, *samples) -> torch.Tensor:
    return policy.loss({**batch, "action_valid_steps": 5.0}, noise(*samples)).per_sample.detach()


def chunk(policy, batch, *samples) -> torch.Tensor:
    with torch.no_grad():
        return policy.eval().predict(batch, noise(*samples))


@pytest.mark.parametrize("name", ["default", "three_cameras", "plain"])
def test_a_sample_is_the_same_beside_one_with_a_longer_task(name, files):
    """In LeRobot it is not: tokens attend to padding."""
    made = made_of(name, files)
    long = " the ".join(["open"] * 30)
    together = batch_of(made, name, files, [long, "open the drawer"])
    alone = batch_of(made, name, files, ["open the drawer"] * 2)
    assert together[PROMPT].shape[1] > alone[PROMPT].shape[1]
    single = {key: value[1:] for key, value in alone.items()}
    expected = losses(made.policy, single, 12)
    assert torch.allclose(losses(made.policy, together, 11, 12)[1:], expected, rtol=1e-4)
    pair, by_itself = chunk(made.policy, together, 11, 12), chunk(made.policy, single, 12)
    assert torch.allclose(pair[1:], by_itself, atol=1e-4)


def test_what_is_drawn_belongs_to_the_sample(files):
    """Hidden states and random crops, too."""
    made = made_of("default", files, random_crop=True, state_dropout_prob=0.5)
    batch = batch_of(made, "default", files)
    swapped = {key: value.flip(0) for key, value in batch.items() if torch.is_tensor(value)}
    first = losses(made.policy, batch, 11, 12)
    assert torch.allclose(losses(made.policy, swapped, 12, 11).flip(0), first, rtol=1e-4)
    assert not torch.allclose(losses(made.policy, batch, 13, 14), first, rtol=1e-2)


def test_hidden_states_do_not_matter(files):
    made = made_of("default", files, state_dropout_prob=0.5)
    batch = batch_of(made, "default", files)
    changed = {**batch, "observation.state": batch["observation.state"] + 1}
    many = [losses(made.policy, batch, n, n + 1) == losses(made.policy, changed, n, n + 1) for n in range(20)]
    share = torch.cat(many).float().mean()
    assert 0.25 < share < 0.75
    made.policy.eval()
    assert not (losses(made.policy, batch, 0, 1) == losses(made.policy, changed, 0, 1)).any()


def test_a_frozen_backbone_leaves_nothing_for_gradients(files):
    made = made_of("default", files)
    network, batch = made.policy._groot_model, batch_of(made, "default", files)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        features = made.policy._image_features(batch, None)
        hidden = network.vlm.hidden(batch[PROMPT], batch[PROMPT_MASK], features)
    assert not hidden.requires_grad
    assert saved == []
    trained = {name for name, p in made.policy.named_parameters() if p.requires_grad}
    assert trained
    assert all(name.startswith("_groot_model.action_head.") for name in trained)


def test_kept_features_take_the_place_of_images(files):
    made = made_of("three_cameras", files)
    policy, batch = made.policy, batch_of(made, "three_cameras", files)
    assert policy.image_encoder().is_frozen
    assert not policy.image_encoder().is_random
    features = {
        f"{IMAGE_FEATURES}{name}": policy.encode_images(batch[name], name) for name in policy.config.images
    }
    without = {key: value for key, value in batch.items() if key not in policy.config.images}
    assert torch.allclose(
        losses(policy, {**without, **features}, 1, 2), losses(policy, batch, 1, 2), rtol=1e-5
    )
    cropped = made_of("three_cameras", files, random_crop=True).policy.image_encoder()
    assert cropped.is_random


def test_frozen_weights_are_stored_in_bfloat16(files):
    made = made_of("default", files)
    batch = batch_of(made, "default", files)
    with torch.autocast("cpu", torch.bfloat16):
        before = losses(made.policy, batch, 1, 2)
        store_frozen_in_bf16(made.policy, keep_float32=True)
        assert torch.equal(losses(made.policy, batch, 1, 2), before)
    vlm = made.policy._groot_model.vlm
    matrices = [p for p in vlm.parameters() if p.ndim > 1 and p is not vlm.model.visual.pos_embed.weight]
    assert {p.dtype for p in matrices} == {torch.bfloat16}


def test_keys_and_values_of_a_prompt_are_computed_once_per_chunk(files):
    made = made_of("more_steps", files)
    calls = []
    for number, block in enumerate(made.policy._groot_model.action_head.model.transformer_blocks):
        block.attn1.to_k.register_forward_hook(lambda *_, number=number: calls.append(number))
    chunk(made.policy, batch_of(made, "more_steps", files), 1, 2)
    assert [calls.count(number) for number in range(6)] == [1, 7, 1, 7, 1, 7]


@pytest.mark.parametrize(("delay", "remaining"), [(0, 4), (2, 6), (3, 3), (1, 8)])
def test_a_chunk_continues_the_last_one(delay, remaining, files):
    """As GR00T does: executed actions stay, the others get free along 1 - exp(-rate * s)."""
    made = made_of("default", files, rtc_config={"execution_horizon": 5})
    policy, batch = made.policy, batch_of(made, "default", files)
    previous = torch.linspace(-1, 1, BATCH * remaining * 3).view(BATCH, remaining, 3)
    weights = RealTimeSettings.of(policy.config.rtc_config).guidance_weights(8, remaining, delay)
    x = torch.randn(BATCH, 10, 7)
    continued, strength = policy._continued(x, {PREVIOUS: previous, GUIDANCE_WEIGHTS: weights})

    overlap = min(5, remaining)
    frozen = min(delay, overlap)
    s = torch.linspace(0, 1, overlap - frozen + 2)
    ramp = 1 - torch.exp(-6.0 * s)
    expected = torch.cat((torch.zeros(frozen), (ramp / ramp[-1])[1:-1], torch.ones(10 - overlap)))
    assert torch.allclose(strength.flatten(), expected, atol=1e-6)
    assert torch.equal(continued[:, :overlap, :3], previous[:, :overlap])
    assert torch.equal(continued[:, overlap:], x[:, overlap:])
    actions = chunk(policy, {**batch, PREVIOUS: previous, GUIDANCE_WEIGHTS: weights}, 1, 2)
    assert torch.equal(actions[:, :frozen], previous[:, :frozen])
    assert not torch.allclose(actions[:, frozen:], chunk(policy, batch, 1, 2)[:, frozen:])


def test_a_robot_gets_a_chunk_that_continues_its_last_one(files):
    made = made_of("default", files)
    seen = observation(cases_of("groot", files)["default"]["robot"], "now")
    last = made.chunk(seen, TASKS, noise(1, 2))
    following = made.chunk(seen, TASKS, noise(3, 4), previous=last[:, 2:], delay=2)
    low, high = last.min((0, 1)), last.max((0, 1))
    assert np.allclose(following[:, :2], last[:, 2:4], atol=1e-4 * float((high - low).max()) + 1e-5)


# Base models and checkpoints.


def saved(made, folder) -> None:
    save_pretrained(
        folder, made.policy.config, unique_state(made.policy), made.preprocessor, made.postprocessor
    )


def test_a_checkpoint_does_not_need_its_base_model(files, tmp_path):
    base = tmp_path / "base"
    shutil.copytree(cases_of("groot", files)["default"]["folder"] / "tiny-groot", base)
    made = made_of("default", files)
    made.policy.config.base_model_path = str(base)
    saved(made, tmp_path / "saved")
    shutil.rmtree(base)
    again = load_pretrained(str(tmp_path / "saved"))
    seen = observation(cases_of("groot", files)["default"]["robot"], "now")
    assert np.array_equal(again.chunk(seen, TASKS, noise(1, 2)), made.chunk(seen, TASKS, noise(1, 2)))


def test_lerobots_checkpoint_without_its_base_model_says_what_is_missing(files, tmp_path):
    made = made_of("default", files)
    saved(made, tmp_path / "saved")
    (tmp_path / "saved/groot.json").unlink()
    config = json.loads((tmp_path / "saved/config.json").read_text())
    (tmp_path / "saved/config.json").write_text(json.dumps({**config, "base_model_path": "/nowhere/groot"}))
    with pytest.raises(FlexorError, match="base_model_path=/nowhere/groot"):
        load_pretrained(str(tmp_path / "saved"))


@pytest.mark.parametrize("shards", [1, 3])
def test_a_new_policy_starts_from_the_base_models_weights(shards, files, tmp_path):
    source = cases_of("groot", files)["default"]["folder"] / "tiny-groot"
    folder = tmp_path / "base"
    shutil.copytree(source, folder)
    weights = load_file(source / "model.safetensors")
    if shards > 1:
        (folder / "model.safetensors").unlink()
        files_of = {
            name: f"model-{number % shards}.safetensors" for number, name in enumerate(sorted(weights))
        }
        for file in {*files_of.values()}:
            save_file({n: weights[n] for n in weights if files_of[n] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files_of}))
    case = cases_of("groot", files)["default"]
    settings = {**case["settings"], "base_model_path": str(folder)}
    policy = make_policy("groot", {**case, "settings": settings}).policy
    policy.load_backbone()
    state = policy.state_dict()
    assert all(torch.equal(state[f"_groot_model.{name}"], value) for name, value in weights.items())

    (folder / "model.safetensors").unlink(missing_ok=True)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    with pytest.raises(
        ConfigError, match=r"A new GR00T starts from the weights.*--policy.load_base_model=false"
    ):
        policy.load_backbone()


@pytest.mark.parametrize(
    "described",
    [
        {"model_type": "gr00t_n1_5"},
        {"model_type": "GR00TN1d5"},
        {"model_type": "other", "backbone_cfg": {"eagle_path": "x"}},
    ],
)
def test_older_base_models_are_refused_with_what_to_do(described, files, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(described))
    case = cases_of("groot", files)["default"]
    with pytest.raises(ConfigError, match=r"N1\.5.*lerobot==0\.5\.1"):
        make_policy("groot", {**case, "settings": {**case["settings"], "base_model_path": str(tmp_path)}})


def test_older_checkpoints_are_refused_with_what_to_do(files, tmp_path):
    made = made_of("default", files)
    saved(made, tmp_path)
    file = tmp_path / "policy_preprocessor.json"
    steps = json.loads(file.read_text())
    steps["steps"][2] = {"registry_name": "groot_pack_inputs_v3", "config": {}}
    file.write_text(json.dumps(steps))
    with pytest.raises(CheckpointError, match=r"N1\.5.*lerobot==0\.5\.1"):
        load_pretrained(str(tmp_path))

    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "tokenizer_assets_repo": "lerobot/eagle"}))
    with pytest.raises(CheckpointError, match=r"tokenizer_assets_repo.*N1\.5"):
        load_pretrained(str(tmp_path))


def test_missing_cameras_and_other_sizes_are_named(files):
    made = made_of("three_cameras", files)
    batch = batch_of(made, "three_cameras", files)
    with pytest.raises(FlexorError, match=r"observation.images.left is missing in the observation"):
        losses(made.policy, {k: v for k, v in batch.items() if "left" not in k}, 1, 2)
    with pytest.raises(FlexorError, match="has 32 x 70 pixels, but this GR00T takes 33 x 70"):
        losses(made.policy, {**batch, "observation.images.left": torch.zeros(2, 3, 32, 70)}, 1, 2)
