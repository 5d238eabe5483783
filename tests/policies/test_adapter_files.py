"""Adapters in PEFT's files. tests/golden/peft was made with peft 0.21.2; both ways live: `make parity`."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flexor.core.errors import CheckpointError
from flexor.policies.act.config import ACTConfig
from flexor.policies.act.policy import ACT
from flexor.policies.adapter_files import base_of, merge_adapter, save_adapter
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.pretrained import load_pretrained, save_pretrained
from parity.fill import fill, uniform

GOLDEN = Path(__file__).parents[1] / "golden/peft"


class ThreeLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("name", ["plain", "patterns"])
def test_what_peft_saved_computes_what_peft_computed(name):
    """Also with ranks and alphas of their own, and the other scale."""
    net = ThreeLayers()
    merge_adapter(net.state_dict(), GOLDEN / name)
    expected = torch.tensor(json.loads((GOLDEN / name / "out.json").read_text()))
    torch.testing.assert_close(net(torch.from_numpy(uniform("x", (3, 4), -1, 1))), expected)


def test_what_we_save_is_what_peft_saves(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    theirs = load_file(GOLDEN / "plain/adapter_model.safetensors")
    weights = dict(ThreeLayers().state_dict())
    for name, tensor in theirs.items():
        short = name.removeprefix("base_model.model.")
        weights[short.removesuffix(".weight") if "lora_" in short else short] = tensor
    config = LoraConfig(r=2, alpha=6, target_modules=["first"], full_training_modules=["head"])
    save_adapter(tmp_path, weights, config, base="base")
    ours = load_file(tmp_path / "adapter/adapter_model.safetensors")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    settings, expected = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "adapter", GOLDEN / "plain")
    )
    assert settings == {name: expected[name] for name in settings}
    assert json.loads((tmp_path / "adapter/config.json").read_text()) == {
        "use_peft": True,
        "pretrained_path": "base",
    }


def tiny_policy() -> ACT:
    inputs = {
        "observation.state": PolicyFeature(Kind.STATE, (3,)),
        "observation.environment_state": PolicyFeature(Kind.ENV, (2,)),
    }
    settings = {"dim_model": 8, "n_heads": 2, "dim_feedforward": 8, "n_encoder_layers": 1, "use_vae": False}
    outputs = {"action": PolicyFeature(Kind.ACTION, (2,))}
    config = ACTConfig(input_features=inputs, output_features=outputs, normalization_mapping={}, **settings)
    policy = ACT(config)
    fill(policy)
    return policy


def test_a_folder_with_adapters_alone_loads_as_the_merged_policy(tmp_path):
    torch.manual_seed(0)
    policy = tiny_policy()
    around = policy.config.pipelines({}, "cpu")
    save_pretrained(tmp_path / "base", policy.config, policy.state_dict(), *around)
    lora = LoraConfig(r=2, full_training_modules=["action_head"])
    add_adapters(policy, lora, seed=0)
    for layer in policy.modules():
        if isinstance(layer, LoraLinear):
            nn.init.normal_(layer.lora_B)
    nn.init.normal_(policy.model.action_head.weight)
    save_pretrained(tmp_path / "tuned", policy.config, None, *around)
    save_adapter(tmp_path / "tuned", policy.state_dict(), lora, str(tmp_path / "base"))
    loaded = load_pretrained(str(tmp_path / "tuned/adapter")).policy
    batch = {key: torch.randn(2, *feature.shape) for key, feature in policy.config.input_features.items()}
    with torch.no_grad():
        expected = policy.eval().predict(batch, None)
        torch.testing.assert_close(loaded.predict(batch, None), expected, rtol=1e-3, atol=1e-3)
        base = load_pretrained(str(tmp_path / "base")).policy
        assert not torch.allclose(base.predict(batch, None), expected, rtol=1e-2, atol=1e-2)


def test_without_a_base_nothing_is_written(tmp_path):
    save_adapter(tmp_path, {}, LoraConfig(r=2), base=None)
    assert not (tmp_path / "adapter").exists()


def changed(tmp_path: Path, **settings: object) -> Path:
    folder = tmp_path / "adapter"
    shutil.copytree(GOLDEN / "plain", folder)
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))
    return folder


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"use_dora": True}, "LORA, use_dora"),
        ({"peft_type": "MISS"}, "type MISS, but"),
        ({"init_lora_weights": "pissa_niter_4"}, "pissa_niter_4"),
        ({"base_model_name_or_path": None}, "does not say which policy"),
    ],
)
def test_adapters_that_are_not_plain_are_refused(settings, message, tmp_path):
    folder = changed(tmp_path, **settings)
    with pytest.raises(CheckpointError, match=message):
        base_of(folder)


def test_the_base_and_its_revision(tmp_path):
    assert (
        base_of(changed(tmp_path, base_model_name_or_path="user/policy", revision="v1")) == "user/policy@v1"
    )
    (tmp_path / "adapter/model.safetensors").touch()  # a merged policy is there: the adapters are not needed
    assert base_of(tmp_path / "adapter") is None


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("third.lora_B.weight", (6, 2), "does not fit this policy.*third.lora_A.weight, third.lora_B.weight"),
        ("first.lora_embedding_A", (2, 4), "does not fit this policy.*: first.lora_embedding_A"),
        ("first.lora_B.weight", (5, 2), r"first.weight is \[5, 4\], but \[6, 4\] in the policy"),
        ("head.bias", (3,), r"head.bias is \[3\]"),
    ],
)
def test_adapters_of_another_policy_are_refused(name, shape, message, tmp_path):
    folder = changed(tmp_path)
    tensors = load_file(folder / "adapter_model.safetensors")
    tensors[f"base_model.model.{name}"] = torch.zeros(shape)
    save_file(tensors, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        merge_adapter(ThreeLayers().state_dict(), folder)
