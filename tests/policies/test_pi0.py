"""pi0 and pi05 beyond their numbers (test_parity.py): weights, other robots, and what is computed once."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.cli.main import main
from flexor.core.batch import ACTION, ACTION_LENGTH, STATE
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.name_ranges import listed
from flexor.core.rng import Noise
from flexor.policies import policy_class
from flexor.policies.base import without_padding
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.nn.siglip import SiglipVision
from flexor.policies.nn.transformer import Transformer
from flexor.policies.pi0 import network
from flexor.policies.pretrained import load_pretrained, load_weights, read_config, save_pretrained
from flexor.policies.processing.tokenize import TASK_MASK, TASK_TOKENS
from flexor.policies.vlm.paligemma_names import EMBEDDING, EXPERT_HEAD, LANGUAGE_HEAD
from flexor.train.checkpoint import folder as checkpoint
from flexor.train.checkpoint.tensors import OPTIMIZER
from support import runs, small_pi
from support.tokenizers import make_tokenizer

KINDS = ["pi0", "pi05"]
TOP, WRIST = "observation.images.top", "observation.images.wrist"


def image(height=40, width=56):
    return PolicyFeature(Kind.VISUAL, (3, height, width))


def make_config(kind="pi0", cameras=(TOP,), state=4, action=3, **settings):
    inputs = {**dict.fromkeys(cameras, image()), STATE: PolicyFeature(Kind.STATE, (state,))}
    outputs = {ACTION: PolicyFeature(Kind.ACTION, (action,))}
    config_settings = {**small_pi.CONFIG, **settings}
    return policy_class(kind).Config(input_features=inputs, output_features=outputs, **config_settings)


def make_policy(kind="pi0", **settings):
    torch.manual_seed(0)
    policy = policy_class(kind)(make_config(kind, **settings))
    for name, parameter in policy.named_parameters():  # gates of pi05 start at zero
        if "layernorm" in name or name.endswith("norm.dense.weight"):
            torch.nn.init.normal_(parameter, std=0.3)
    return policy


def batch_of(config, size=2):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.rand(size, *shape, generator=generator)

    tokens = torch.randint(small_pi.VOCABULARY, (size, 20), generator=generator)
    return {
        **{camera: draw(*feature.shape) for camera, feature in config.images.items()},
        STATE: draw(config.state.shape[0]),
        ACTION: draw(config.chunk_size, config.action.shape[0]),
        TASK_TOKENS: tokens,
        TASK_MASK: torch.arange(20)[None] < torch.tensor([[7], [20]])[:size],
    }


def noise_of(size=2):
    return Noise(0, 0, torch.arange(size))


# from scratch


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_without_weights_must_be_asked_for_in_so_many_words(kind, dataset, tmp_path, capsys):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    flags = [f"--policy.{each}" for each in small_pi.SETTINGS if "load_vlm_weights" not in each]
    flags += [f"--policy.type={kind}", f"--policy.tokenizer_name={tokenizer}", "--policy.device=cpu"]
    train_flags = runs.flags(dataset, tmp_path / "run", flags, "--steps=1")
    assert main(["train", *train_flags]) != 0
    message = capsys.readouterr().err
    assert "--policy.load_vlm_weights=false" in message and f"--policy.path=lerobot/{kind}_base" in message
    assert (
        main(["train", *train_flags, "--policy.load_vlm_weights=false", "--policy.train_expert_only=true"])
        == 0
    )
    message = capsys.readouterr().err
    assert "starts with random weights, and policy.train_expert_only=true never trains" in message


# several datasets


@pytest.mark.parametrize("kind", KINDS)
def test_image_that_a_sample_does_not_have_is_not_seen(kind):
    policy = make_policy(kind, cameras=(TOP, WRIST))
    policy.eval()
    batch = batch_of(policy.config)
    hidden = {**batch, f"{WRIST}_padding_mask": torch.tensor([True, False])}
    other = {**hidden, WRIST: torch.stack([batch[WRIST][0], torch.zeros_like(batch[WRIST][1])])}
    visible, masked, changed = (policy.loss(each, noise_of()).per_sample for each in (batch, hidden, other))
    assert torch.equal(masked, changed)
    assert torch.allclose(masked[0], visible[0], rtol=1e-5) and not torch.allclose(
        masked[1], visible[1], rtol=1e-5
    )
    alone = policy.loss({key: value for key, value in batch.items() if key != WRIST}, noise_of()).per_sample
    assert torch.allclose(masked[1], alone[1], rtol=1e-4)  # as if there were no such camera


def test_padding_of_shorter_actions_is_not_learned():
    policy = make_policy(action=5)
    policy.eval()
    batch = {**batch_of(policy.config), ACTION_LENGTH: torch.tensor([5, 2])}
    plain = {key: value for key, value in batch.items() if key != ACTION_LENGTH}
    errors = policy.loss(batch, noise_of()).per_sample, policy.loss(plain, noise_of()).per_sample
    assert torch.equal(errors[0][0], errors[1][0])
    error = torch.rand(2, 3, 5)
    expected = without_padding(error, batch).mean((1, 2))
    assert torch.allclose(expected, torch.stack([error[0].mean(), error[1, :, :2].mean()]))
    on_meta = {ACTION_LENGTH: batch[ACTION_LENGTH].to("meta")}
    assert without_padding(error.to("meta"), on_meta).shape == error.shape  # without looking at values


# the file of weights


@pytest.fixture
def saved(tmp_path):
    policy = make_policy()
    before, after = policy.config.pipelines({}, "cpu")
    save_pretrained(tmp_path, policy.config, policy.state_dict(), before, after)
    return policy, tmp_path, tmp_path / "model.safetensors"


def assert_loads(policy, folder):
    other = make_policy()
    for parameter in other.parameters():
        parameter.data.fill_(9)
    load_weights(other, folder)
    mine, theirs = policy.state_dict(), other.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


def test_language_heads_are_in_the_file_and_not_in_the_policy(saved):
    policy, folder, file = saved
    weights = load_file(file)
    assert weights.keys() - policy.state_dict().keys() == {LANGUAGE_HEAD, EXPERT_HEAD}
    assert torch.equal(weights[LANGUAGE_HEAD], weights[EMBEDDING])
    assert weights[EXPERT_HEAD].shape == (small_pi.VOCABULARY, 12)
    assert_loads(policy, folder)


@pytest.mark.parametrize("change", ["no prefix", "tied", "tied, no prefix", "no heads"])
def test_files_of_other_programs(change, saved):
    policy, folder, file = saved
    weights = load_file(file)
    if "tied" in change:
        del weights[EMBEDDING]  # is the head's
    if "no heads" in change:
        del weights[LANGUAGE_HEAD], weights[EXPERT_HEAD]
    if "no prefix" in change:
        weights = {name.removeprefix("model."): weight for name, weight in weights.items()}
    save_file(weights, file)
    assert_loads(policy, folder)


def test_what_does_not_fit_is_named(saved):
    policy, folder, file = saved
    weights = load_file(file)
    del weights["model.state_proj.bias"], weights[EMBEDDING], weights[LANGUAGE_HEAD]
    weights["model.more"] = torch.zeros(1)
    weights["model.action_in_proj.bias"] = torch.zeros(5)
    save_file(weights, file)
    with pytest.raises(CheckpointError) as error:
        load_weights(policy, folder)
    missing, unexpected, shapes = str(error.value).split("Missing: ")[1].split(". ")[:3]
    assert "model.state_proj.bias" in missing and EMBEDDING in missing
    assert unexpected == "Unexpected: model.more"
    assert "model.action_in_proj.bias: (5,) in the file, (12,) in the policy" in shapes


def test_weights_of_pi0_are_not_those_of_pi05(saved):
    _, folder, _ = saved
    other = make_policy("pi05")
    with pytest.raises(CheckpointError) as error:
        load_weights(other, folder)
    message, file_weights = str(error.value), load_file(folder / "model.safetensors")
    missing = [name for name in other.state_dict() if name not in file_weights]
    assert f"Missing: {listed(missing)}.\nUnexpected: " in message and len(missing) > 12  # every one of them
    assert "\n  model.paligemma_with_expert.gemma_expert.model.layers.{0..1}.{input_layernorm," in message


def test_settings_that_lerobot_lacks_are_not_in_its_file(saved):
    policy, folder, _ = saved
    config = json.loads((folder / "config.json").read_text())
    assert not config.keys() & {"load_vlm_weights", "tokenizer_name"}
    assert read_config(str(folder)).chunk_size == policy.config.chunk_size


def test_the_optimizer_is_numbered_as_lerobots(dataset, tmp_path):
    """Which counts the heads. Runs from before that go on, too."""
    flags = ["--policy.type=pi0", *(f"--policy.{setting}" for setting in small_pi.SETTINGS)]
    flags += [f"--policy.tokenizer_name={make_tokenizer(tmp_path / 'tokenizer')}", "--policy.device=cpu"]
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=3", "--save_freq=2")
    cut = runs.cut_back(run, tmp_path / "cut", 2)
    saved = cut / "checkpoints/000002"
    states, groups = (saved / "training_state" / name for name in (OPTIMIZER, "optimizer_param_groups.json"))
    weights, numbered, (group,) = (
        load_file(saved / "pretrained_model/model.safetensors"),
        load_file(states),
        json.loads(groups.read_text()),
    )
    names = list(dict(load_pretrained(str(cut)).policy.named_parameters()))
    expert = next(n for n, name in enumerate(names) if ".gemma_expert." in name)
    counted = [LANGUAGE_HEAD, *names[:expert], EXPERT_HEAD, *names[expert:]]
    assert group["params"] == list(range(len(counted)))
    for key, state in numbered.items():
        _, number, field = key.split("/")
        assert field == "step" or state.shape == weights[counted[int(number)]].shape
    group["params"] = list(range(len(names)))
    groups.write_text(json.dumps([group]))
    before = {}
    for key, state in numbered.items():
        _, number, field = key.split("/")
        before[f"state/{names.index(counted[int(number)])}/{field}"] = state
    save_file(before, states)
    (saved / checkpoint.MANIFEST).unlink()
    checkpoint._write_manifest(saved, 2, {})
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(run, cut, 3)


# other robots than the one of the weights


def fitted(config, cameras, state=4, action=3):
    inputs = {**dict.fromkeys(cameras, image()), STATE: PolicyFeature(Kind.STATE, (state,))}
    return config.fitted(inputs, {ACTION: PolicyFeature(Kind.ACTION, (action,))})


def test_other_cameras_and_sizes_are_told_in_a_line_each(caplog):
    base = make_config(
        cameras=("observation.images.base", WRIST, "observation.images.third"), state=32, action=32
    )
    new = fitted(base, [TOP, WRIST], 6, 7)
    assert list(new.images) == [TOP, WRIST]  # what it knows keeps its place
    assert (new.state.shape, new.action.shape) == ((6,), (7,))
    assert len(base.images) == 3 and base.state.shape == (32,)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "observation.images.top takes the place of the policy's camera observation.images.base",
        "the policy's camera observation.images.third is left out: the dataset has none for its place",
        "observation.state has 6 values in the dataset and 32 in the policy: padded to 32",
        "action has 7 values in the dataset and 32 in the policy: padded to 32",
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_a_base_is_fine_tuned_for_another_robot(kind, dataset, tmp_path, capsys):
    """And its checkpoint acts."""
    base = make_policy(kind, cameras=("observation.images.base", WRIST), state=32, action=32)
    before, after = base.config.pipelines({}, "cpu")
    save_pretrained(tmp_path / "base", base.config, base.state_dict(), before, after)
    flags = [f"--policy.path={tmp_path / 'base'}", "--policy.device=cpu"]
    flags.append(f"--policy.tokenizer_name={make_tokenizer(tmp_path / 'tokenizer')}")
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=1", "--optimizer.lr=0")
    assert "takes the place of the policy's camera observation.images.base" in capsys.readouterr().err
    tuned = load_pretrained(str(run))
    mine, theirs = base.state_dict(), tuned.policy.state_dict()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    config = tuned.policy.config
    observation = {
        name: np.zeros((1, *feature.shape), np.float32) for name, feature in config.observed.items()
    }
    assert tuned.chunk(observation, ["pick up the cube"]).shape == (1, 6, config.action.shape[0])


def test_cameras_that_are_there_are_kept(caplog):
    config = make_config(cameras=(WRIST,))
    assert fitted(config, [TOP, WRIST]) == config  # the dataset's other camera stays unused
    larger = {**config.input_features, WRIST: image(480, 640)}
    assert config.fitted(larger, config.output_features).images == {WRIST: image(480, 640)}
    assert caplog.records == []


def test_empty_cameras_are_never_seen():
    empty = "observation.images.empty_camera_0"
    config = make_config(cameras=(TOP, empty), empty_cameras=1)
    assert list(config.images) == [TOP] and empty not in config.observed


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"state": 33}, "max_state_dim=32"),
        ({"action": 40}, "max_action_dim=32"),
        ({"cameras": ()}, "and a camera"),
        ({"n_obs_steps": 2}, "n_obs_steps=2"),
        ({"n_action_steps": 7}, "n_action_steps=7"),
        ({"image_resolution": (28, 42)}, "must be square"),
        ({"image_resolution": (30, 30)}, "a multiple of 14"),
        ({"paligemma_variant": "gemma_7b"}, "gemma_7b"),
        ({"paligemma_variant": "gemma_2b"}, "differ in depth"),
    ],
)
def test_impossible_settings_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_config(**settings).validate()


# what is computed


@pytest.mark.parametrize("kind", KINDS)
def test_the_prefix_is_computed_once_and_never_written_to(kind, monkeypatch):
    policy = make_policy(kind, num_inference_steps=4, cameras=(TOP, WRIST)).eval()
    shapes, versions = [], []
    encode, decode_suffix = SiglipVision.forward, network.decode_suffix
    monkeypatch.setattr(SiglipVision, "forward", lambda self, x: shapes.append(x.shape) or encode(self, x))

    def record(expert, x, suffix_mask, prefix, *condition):
        versions.append([(layer.keys._version, layer.values._version) for layer in prefix.layers])
        return decode_suffix(expert, x, suffix_mask, prefix, *condition)

    monkeypatch.setattr(network, "decode_suffix", record)
    with torch.no_grad():
        chunk = policy.predict(batch_of(policy.config), noise_of())
    assert chunk.shape == (2, 6, 3)
    assert shapes == [(4, 3, 28, 28)]  # both cameras of both samples together
    assert len(versions) == 4 and all(version == versions[0] for version in versions)


@pytest.mark.parametrize("kind", KINDS)
def test_padding_is_never_seen(kind):
    policy = make_policy(kind).eval()
    batch = batch_of(policy.config)
    other = {**batch, TASK_TOKENS: torch.where(batch[TASK_MASK], batch[TASK_TOKENS], 5)}
    shorter = {**batch, TASK_TOKENS: batch[TASK_TOKENS][:1, :7], TASK_MASK: batch[TASK_MASK][:1, :7]}
    shorter |= {name: batch[name][:1] for name in (TOP, STATE, ACTION)}
    with torch.no_grad():
        chunk = policy.predict(batch, noise_of())
        torch.testing.assert_close(policy.predict(other, noise_of()), chunk)
        torch.testing.assert_close(policy.predict(shorter, noise_of(1)), chunk[:1], rtol=1e-4, atol=1e-5)


def test_padded_values_of_the_state_and_of_actions_do_not_count():
    """The loss is of the robot's own actions; the network sees noise in the others, as in training."""
    policy = make_policy()
    batch = batch_of(policy.config)
    loss = policy.loss(batch, noise_of()).per_sample
    policy.model.action_out_proj.weight.data[3:] += 1
    policy.model.state_proj.weight.data[:, 4:] += 1
    assert torch.equal(policy.loss(batch, noise_of()).per_sample, loss)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "settings", [{}, {"freeze_vision_encoder": True}, {"train_expert_only": True}, {"dtype": "bfloat16"}]
)
def test_every_trained_parameter_gets_a_gradient(kind, settings):
    """And no other: DDP relies on it."""
    policy = make_policy(kind, **settings)
    policy.loss(batch_of(policy.config), noise_of()).per_sample.mean().backward()
    without = [name for name, p in policy.named_parameters() if p.requires_grad != (p.grad is not None)]
    assert without == []
    frozen = {name for name, p in policy.named_parameters() if not p.requires_grad}
    vision = {name for name, _ in policy.named_parameters() if ".vision_tower." in name}
    assert bool(vision & frozen) == ("freeze_vision_encoder" in settings or "train_expert_only" in settings)
    assert any(".paligemma." in name for name in {n for n, _ in policy.named_parameters()} - frozen) == (
        "train_expert_only" not in settings
    )


def test_unused_parts_of_the_last_layer_are_not_computed(monkeypatch):
    """Only its keys and values matter to the expert."""
    policy = make_policy()
    calls = []
    last = policy.model.paligemma_with_expert.vlm.language_model.layers[-1]
    last.mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    last.self_attn.q_proj.register_forward_hook(lambda *_: calls.append("queries"))
    policy.loss(batch_of(policy.config), noise_of())
    assert calls == []


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_keeps_norms_and_vision_exact(kind):
    exact, low = make_policy(kind), make_policy(kind, dtype="bfloat16")
    types = {name: p.dtype for name, p in low.named_parameters()}
    rounded = {name for name, dtype in types.items() if dtype == torch.bfloat16}
    assert rounded and all("paligemma_with_expert" in name for name in rounded)
    assert not [name for name in rounded if "vision" in name or "projector" in name or "norm" in name]
    assert types[EMBEDDING] == torch.bfloat16
    low.load_state_dict(exact.state_dict())
    batch = batch_of(exact.config)
    losses = [policy.loss(batch, noise_of()).per_sample for policy in (exact, low)]
    torch.testing.assert_close(losses[1], losses[0], rtol=0.05, atol=0.05)
    assert losses[1].dtype == torch.float32 and not torch.equal(*losses)


def test_times_are_of_the_beta_distribution():
    """Its mean is 0.6, and a tenth of the times are below 0.1 ** (2 / 3), before they are scaled."""
    flow = make_policy().flow
    times = flow.times(20_000, noise_of(20_000))
    assert times.min() > 0.001 and times.max() <= 1
    assert times.mean() == pytest.approx(0.999 * 0.6 + 0.001, abs=0.01)
    assert (times < 0.999 * 0.1 ** (2 / 3) + 0.001).float().mean() == pytest.approx(0.1, abs=0.01)


def test_blocks_are_all_layers():
    policy = make_policy()
    blocks = policy.shard_units()
    layers = [m for m in policy.modules() if isinstance(m, Transformer)]
    assert len(blocks) == 2 + 1 + sum(len(each.layers) for each in layers)
    assert len({id(block) for block in blocks}) == len(blocks)
