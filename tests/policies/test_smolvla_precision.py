"""SmolVLA acts in the precision of its checkpoint, as in LeRobot: with its roundings, and in files of half the size."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from flexor.cli.main import main
from flexor.core.batch import STATE
from flexor.kernels.language_model import rms_norm
from flexor.policies.nn.kv_cache import KVCache
from flexor.policies.nn.rope import Rope, make_rope
from flexor.policies.nn.transformer import DecoderNorm, TransformerLayer, TransformerSize, round_in_bf16
from flexor.policies.pretrained import Pretrained, find_folder, load_pretrained, load_weights, save_pretrained
from flexor.serve.open import open_predictor, weights_dtype
from flexor.serve.settings import ServeSettings
from flexor.train.checkpoint.export import export
from parity.fill import fill
from parity.flexor_side import act, make_policy
from parity.inputs import observation_sequence
from parity.kinds import cases_of
from parity.records import difference
from parity.smolvla.vlms import make_vlms
from support import runs
from support.small_policies import small_flags

BACKBONE = "model.vlm_with_expert."
CROSS = [f"{BACKBONE}lm_expert.layers.{n}.self_attn.{kv}_proj.weight" for n in (1, 3) for kv in "kv"]


@pytest.fixture(scope="module")
def vlms(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vlms")
    make_vlms(folder)
    return folder


def made(name: str, vlms: Path) -> Pretrained:
    policy = make_policy("smolvla", cases_of("smolvla", vlms)[name])
    fill(policy.policy)
    return policy


def saved(
    pretrained: Pretrained, folder: Path, dtype: torch.dtype = torch.float32, **settings: object
) -> str:
    weights = {
        name: weight.to(dtype if name.startswith(BACKBONE) else torch.float32)
        for name, weight in pretrained.policy.state_dict().items()
    }
    config = replace(pretrained.policy.config, **settings)
    save_pretrained(folder, config, weights, pretrained.preprocessor, pretrained.postprocessor)
    return str(folder)


def dtype_of(policy: Pretrained) -> torch.dtype:
    return policy.policy.model.vlm_with_expert.vlm.decoder.dtype


def shown_to(policy: Pretrained, vlms: Path) -> list:
    return act(policy, observation_sequence(cases_of("smolvla", vlms)["bf16"]["robot"], 4))


# In which precision.


@pytest.mark.parametrize(
    ("settings", "stored", "dtype"),
    [
        ({"load_vlm_weights": True}, torch.float32, torch.bfloat16),
        ({"load_vlm_weights": False}, torch.float32, torch.float32),
        ({"load_vlm_weights": False}, torch.bfloat16, torch.bfloat16),
    ],
)
def test_the_checkpoint_decides(settings, stored, dtype, vlms, tmp_path):
    folder = saved(made("bf16", vlms), tmp_path, stored, **settings)
    assert '"dtype"' not in (tmp_path / "config.json").read_text()  # LeRobot does not know it
    assert dtype_of(load_pretrained(folder)) == dtype
    for other in ("float32", "bfloat16"):
        policy = load_pretrained(folder, overrides={"dtype": other})
        assert dtype_of(policy) == getattr(torch, other)
        assert policy.policy.needs_autocast == (other == "float32")


def test_the_types_of_weights_are_lerobots(vlms, tmp_path):
    """LeRobot adds projections to the layers of transformers, in float32."""
    policy = load_pretrained(saved(made("bf16", vlms), tmp_path))
    wide = {name for name, weight in policy.policy.named_parameters() if weight.dtype == torch.float32}
    assert wide == {
        *CROSS,
        *(name for name in dict(policy.policy.named_parameters()) if BACKBONE not in name),
    }


def test_training_keeps_float32_weights(vlms, tmp_path):
    saved(made("bf16", vlms), tmp_path)
    policy = made("bf16", vlms).policy
    load_weights(policy, tmp_path)
    assert {weight.dtype for weight in policy.parameters()} == {torch.float32}
    assert not policy.model.rounds_in_bf16


def test_float32_differs_by_the_roundings_only(vlms, tmp_path):
    folder = saved(made("bf16", vlms), tmp_path)
    rounded = shown_to(load_pretrained(folder), vlms)
    exact = shown_to(load_pretrained(folder, overrides={"dtype": "float32"}), vlms)
    assert 1e-4 < difference(rounded, exact) < 0.1


def test_flags_of_serve(vlms, tmp_path, log_lines):
    folder = saved(made("bf16", vlms), tmp_path)
    config = load_pretrained(folder).policy.config
    assert "faster with --policy.dtype=float32" in log_lines[-1]
    assert weights_dtype("tf32", config) == {"dtype": "float32"} and weights_dtype(None, config) == {}
    assert weights_dtype("tf32", replace(config, dtype="bfloat16")) == {}
    for flags, dtype, expected in (
        ([], None, torch.bfloat16),
        ([], "float32", torch.float32),
        ([], "bfloat16", torch.bfloat16),
        (["--policy.dtype=float32"], None, torch.float32),
    ):
        predictor = open_predictor(folder, ServeSettings(), device="cpu", dtype=dtype, flags=flags)
        assert dtype_of(predictor.pretrained) == expected and predictor.autocast is None


# The roundings.

SIZE = TransformerSize(width=24, depth=1, mlp_width=40, heads=6, kv_heads=2, head_dim=8)


def lerobots_norm(norm: DecoderNorm, x: Tensor) -> Tensor:
    """LlamaRMSNorm of transformers."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + norm.eps)
    return norm.weight * normed.to(x.dtype)


def lerobots_rope(x: Tensor, rope: Rope) -> Tensor:
    left, right = x.float().chunk(2, -1)
    cos, sin = (angle[..., x.shape[-1] // 2 :] for angle in rope)
    return torch.cat((left * cos - right * sin, right * cos + left * sin), -1).to(x.dtype)


def lerobots_layer(layer: TransformerLayer, x: Tensor, rope: Rope, mask: Tensor, cache: KVCache) -> Tensor:
    """As in LeRobot's smolvlm_with_expert.py."""
    attention = layer.self_attn
    normed = lerobots_norm(layer.input_layernorm, x).to(torch.bfloat16)
    q, k, v = (
        attention.split_heads(projection(normed))
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    q, k = lerobots_rope(q, rope), lerobots_rope(k, rope)
    k, v = (
        torch.cat(pair, 1).repeat_interleave(attention.groups, 2) for pair in ((cache[0], k), (cache[1], v))
    )
    scores = q.float().transpose(1, 2) @ k.float().permute(0, 2, 3, 1) * 8**-0.5
    probs = scores.where(mask, torch.finfo(torch.float32).min).softmax(-1).to(v.dtype)
    out = attention.o_proj((probs @ v.transpose(1, 2)).transpose(1, 2).flatten(2))
    out += x
    mlp, residual = layer.mlp, out.clone()
    normed = lerobots_norm(layer.post_attention_layernorm, out)
    out = mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(normed)) * mlp.up_proj(normed))
    out += residual
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_rounds_where_lerobots_does(dtype):
    torch.manual_seed(0)
    layer = TransformerLayer(SIZE).bfloat16()
    round_in_bf16(layer)
    for weight in layer.parameters():
        torch.nn.init.uniform_(weight, -0.5, 1)
    x = torch.randn(2, 5, 24).to(dtype)
    cache = KVCache(*(torch.randn(2, 3, 2, 8).bfloat16() for _ in range(2)))
    mask = torch.ones(5, 5, dtype=torch.bool).tril().expand(2, 1, 5, 5)
    mask = torch.cat(
        (torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()[:, None, None].expand(2, 1, 5, 3), mask), -1
    )
    rope = make_rope(torch.arange(3, 8)[None], 8)
    with torch.no_grad():
        ours, _ = layer(x, rope, SIZE.grouped(mask), cache)
        theirs = lerobots_layer(layer, x, rope, mask, cache)
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert (ours != theirs).float().mean() < 0.02  # sums may be added up in another order


def test_a_norm_is_rounded_before_its_weights():
    torch.manual_seed(0)
    norm = DecoderNorm(SIZE).bfloat16()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(100, 24).bfloat16()
    theirs = lerobots_norm(norm, x)
    once = rms_norm(x, norm.weight, 0.0, norm.eps, torch.bfloat16)
    round_in_bf16(norm)
    different = (norm(x)[0] != theirs).float().mean(), (once != theirs).float().mean()
    assert different[0] < 1e-3 < 0.05 < different[1]


# Files.


@pytest.fixture(scope="module")
def run(tmp_path_factory, dataset):
    folder = tmp_path_factory.mktemp("smolvla")
    flags = [*small_flags("smolvla", folder), "--policy.device=cpu"]
    return runs.train(dataset, folder / "run", flags, "--steps=2", "--save_freq=1")


def test_checkpoints_keep_float32_and_exports_do_not(run, tmp_path):
    exported = export(run, tmp_path / "exported")
    trained, small = (load_file(folder / "model.safetensors") for folder in (find_folder(str(run)), exported))
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    assert small.keys() == trained.keys()
    wide = {name for name, weight in small.items() if weight.dtype == torch.float32}
    assert wide == {*CROSS[:2], *(name for name in trained if BACKBONE not in name)}
    for name, weight in trained.items():
        assert torch.equal(small[name], weight.to(small[name].dtype))
    observation = {
        name: np.ones((1, *feature.shape), np.float32 if name == STATE else np.uint8)
        for name, feature in load_pretrained(str(run)).policy.config.observed.items()
    }
    chunks = [load_pretrained(str(path)).chunk(observation, ["open the drawer"]) for path in (run, exported)]
    np.testing.assert_array_equal(*chunks)
    assert export(run) == find_folder(str(run))  # in place: what resuming needs stays
    again = load_file(find_folder(str(run)) / "model.safetensors")
    assert {weight.dtype for weight in again.values()} == {torch.float32}


def test_an_exported_policy_is_trained_in_float32(run, dataset, tmp_path):
    exported = export(run, tmp_path / "exported")
    tuned = runs.train(
        dataset, tmp_path / "run", [f"--policy.path={exported}", "--policy.device=cpu"], "--steps=1"
    )
    weights = load_file(find_folder(str(tuned)) / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_a_run_may_export_float32(dataset, tmp_path):
    flags = [*small_flags("smolvla", tmp_path / "files"), "--policy.device=cpu", "--policy.dtype=float32"]
    run = runs.train(dataset, tmp_path / "run", flags, "--steps=1")
    assert main(["export", str(run), f"--output={tmp_path / 'exported'}"]) == 0
    weights = load_file(tmp_path / "exported/model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
