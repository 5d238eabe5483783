"""WALL-X's weights: their types, where they come from, and what a checkpoint needs."""

import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.rng import Noise
from flexor.policies.meta_init import parameters_without_memory
from flexor.policies.nn.cast_to_bf16 import cast_to_bf16
from flexor.policies.pretrained import Pretrained, load_pretrained, save_pretrained
from flexor.policies.wall_x.config import WallXConfig
from flexor.policies.wall_x.policy import WallX
from flexor.policies.weight_names import unique_state
from parity.fill import fill
from parity.flexor_side import make_policy, tensors
from parity.inputs import TASKS
from parity.kinds import cases_of
from parity.wall_x.cases import training_batch
from parity.wall_x.models import VOCABULARY, make_wall

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
