"""Checkpoints and settings of absurd sizes are refused before anything is made."""

import json
import shutil
from dataclasses import fields
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.core.errors import ConfigError, FlexorError
from flexor.core.typed import field_types
from flexor.policies import POLICIES, make_policy, policy_class
from flexor.policies.pretrained import load_pretrained
from flexor.policies.sizes import LENGTHS, check_sizes
from flexor.policies.vlm.smolvlm_size import read_size
from support import foreign_checkpoints, runs
from support.damage import edit_json
from support.mutations import at_most

POLICY = "checkpoints/000004/pretrained_model"


@pytest.fixture(scope="module")
def trained(lowdim, tiny_act, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("foreign")
    return runs.train(lowdim, folder / "run", tiny_act, "--steps=4", "--ema.enable")


@pytest.fixture
def theirs(trained, tmp_path) -> Path:
    shutil.copytree(trained, tmp_path / "theirs", symlinks=True)
    return tmp_path / "theirs"


def settle(run: Path) -> None:
    """Whoever makes such a checkpoint makes its manifest fit."""
    foreign_checkpoints.settle(run / "checkpoints/000004/training_state/manifest.json")


def sizes(kind: str) -> list[str]:
    """The settings of a policy that are integers."""
    config = policy_class(kind).Config
    return [
        field.name
        for field in fields(config)
        if not field.name.startswith(LENGTHS) and "int" in str(field_types(config)[field.name])
    ]


@pytest.mark.parametrize("kind", POLICIES)
def test_absurd_settings_are_refused_before_anything_is_made(kind):
    for name in sizes(kind):
        config = policy_class(kind).Config()
        setattr(config, name, 10**9)
        with at_most(60), pytest.raises(ConfigError, match=f"policy.{name}=1000000000 can't be right"):
            check_sizes(config)


ABSURD = {
    "n_encoder_layers": [10**6, -1, 1e6],
    "n_vae_encoder_layers": [10**6],
    "n_decoder_layers": [10**6],
    "chunk_size": [10**7, 0],
    "dim_model": [10**6, 0, 3],
    "dim_feedforward": [10**6, -5],
    "latent_dim": [10**6],
    "n_heads": [10**6, 0],
    "n_obs_steps": [10**6],
    "feedforward_activation": ["exec"],
    "dropout": [1e300, -1],
    "input_features": [{}, {"observation.state": {"type": "STATE", "shape": [10**9]}}],
    "output_features": [
        {},
        {"action": {"type": "ACTION", "shape": [10**9]}},
        {"action": {"type": "X", "shape": []}},
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in ABSURD.items() for value in values]
)
def test_a_checkpoint_with_absurd_sizes_is_refused_at_once(name, value, theirs, lowdim, capsys):
    edit_json(theirs / POLICY / "config.json", lambda config: config.update({name: value}))
    settle(theirs)
    with at_most(60):
        with pytest.raises(FlexorError):
            load_pretrained(str(theirs))
        start = [f"--policy.path={theirs}", f"--dataset.root={lowdim}", "--policy.device=cpu", "--steps=1"]
        started = main(["train", *start, f"--output_dir={theirs.with_name('new')}"])
        assert started in (1, 2) or value == {}  # then the features are those of the dataset
    assert "Traceback" not in capsys.readouterr().err


def test_a_network_of_too_many_tensors_is_not_built(monkeypatch):
    monkeypatch.setattr("flexor.policies.sizes.MAX_PARAMETERS", 500)
    config = policy_class("act").Config(n_encoder_layers=900, dim_model=16, n_heads=2)
    config = read_features(config)
    with at_most(60), pytest.raises(ConfigError, match="more than 500 tensors"):
        make_policy(config)


def test_a_network_of_too_large_tables_is_not_built(monkeypatch):
    monkeypatch.setattr("flexor.policies.sizes.MAX_BUFFER_BYTES", 1 << 10)
    with pytest.raises(ConfigError, match="make tables of more than"):
        make_policy(read_features(policy_class("act").Config(dim_model=16, n_heads=2, chunk_size=100)))


IMAGES = [
    *(("diffusion", name) for name in ("resize_shape", "crop_shape")),
    *(("multi_task_dit", name) for name in ("image_resize_shape", "image_crop_shape")),
    *(("pi0", "image_resolution"), ("smolvla", "resize_imgs_with_padding")),
]


@pytest.mark.parametrize(("kind", "name"), IMAGES)
def test_images_of_an_absurd_size_are_refused(kind, name):
    """Each side alone is a size that a setting may have."""
    config = policy_class(kind).Config()
    setattr(config, name, (10**6, 10**6))
    with pytest.raises(ConfigError, match="no image has that size"):
        check_sizes(config)


@pytest.mark.parametrize(
    ("kind", "name"), [("vqbet", "gpt_block_size"), ("vqbet", "vqvae_n_embed"), ("act", "chunk_size")]
)
def test_what_a_real_table_depends_on_has_a_narrower_limit(kind, name):
    config = policy_class(kind).Config()
    setattr(config, name, 10**5)
    with pytest.raises(ConfigError, match=f"policy.{name}=100000 can't be right"):
        check_sizes(config)


@pytest.mark.parametrize(
    "sizes",
    [
        {"vision_config": {"image_size": 10**6}},
        {"text_config": {"num_hidden_layers": 10**6}},
        {"scale_factor": 10**9},
    ],
)
def test_a_vision_language_model_of_absurd_sizes_is_refused(sizes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "smolvlm", **sizes}))
    with pytest.raises(ConfigError, match=r"config.json: config\..* can't be right"):
        read_size(str(tmp_path))


@pytest.mark.parametrize(
    ("part", "name"), [("vision", "num_attention_heads"), ("text", "hidden_size"), ("text", "head_dim")]
)
@pytest.mark.parametrize("size", [0, -1, "8", 1.5])
def test_a_vision_language_model_of_no_size_is_refused(part, name, size, tmp_path):
    described = {"model_type": "smolvlm", f"{part}_config": {name: size}}
    (tmp_path / "config.json").write_text(json.dumps(described))
    with pytest.raises(ConfigError, match=f"its config.json has {name}=.*, which is no size"):
        read_size(str(tmp_path))


def read_features(config):
    from dataclasses import replace

    from flexor.policies.features import Kind, PolicyFeature

    inputs = {"observation.environment_state": PolicyFeature(Kind.ENV, (3,))}
    return replace(
        config, input_features=inputs, output_features={"action": PolicyFeature(Kind.ACTION, (2,))}
    )
