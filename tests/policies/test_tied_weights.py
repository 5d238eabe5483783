"""A weight that two layers share stays one, wherever a policy is built, trained, saved, loaded or planned."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flexor.cli.main import main
from flexor.config.schema import EMAConfig
from flexor.core.errors import CheckpointError, ConfigError
from flexor.core.run_files import PRETRAINED, WEIGHTS
from flexor.plan.trace.trace import trace_step
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters
from flexor.policies.meta_init import parameters_without_memory, with_memory
from flexor.policies.pretrained import load_pretrained
from flexor.policies.weight_names import tied_names, unique_parameters, unique_state
from flexor.train.optim.bf16_copies import Bf16Copies
from flexor.train.optim.ema import EMA
from support import ranks, runs
from support.own_policy import own_policy
from support.plans import H200, settings

STEPS = 4
BODY = """\
        self.embed = torch.nn.Embedding(16, 8)
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.out = torch.nn.Linear(16, config.action.shape[0])
    def act(self, state):
        tokens = (state[:, 0] * 4).long().clamp(-8, 7) + 8
        return self.out(self.head(self.body(self.embed(tokens)).relu()))[:, None]
    def loss(self, batch, noise):
        error = self.act(batch["observation.state"]) - batch["action"]
        return Loss(error.square().mean((1, 2)), {})
    def predict(self, batch, noise):
        return self.act(batch["observation.state"])
    def shard_units(self):
        return [self.body]
"""


class Net(nn.Module):
    """The same layers, without a policy around them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embed(tokens)))


@pytest.fixture(scope="module")
def code(tmp_path_factory) -> Path:
    """Two policies in files: the tied layers beside the block that is sharded, and in two such blocks."""
    folder = tmp_path_factory.mktemp("code")
    (folder / "own.py").write_text(own_policy(BODY))
    (folder / "across.py").write_text(own_policy(BODY.replace("[self.body]", "[self.embed, self.head]")))
    return folder


def flags(code: Path, file: str = "own") -> list[str]:
    return [f"--policy.type={code / file}.py:Own", "--policy.device=cpu", f"--steps={STEPS}"]


def weights_of(run: Path) -> Path:
    return run / "checkpoints/last" / PRETRAINED / WEIGHTS


@pytest.fixture(scope="module")
def run(code, lowdim, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "run"
    return runs.train(lowdim, folder, flags(code), "--save_freq=2", "--ema.enable", "--optimizer.eps=1e-4")


# Modules.


def test_a_parameter_that_two_modules_register_stays_one_without_memory():
    weight = nn.Parameter(torch.zeros(4, 3))
    with parameters_without_memory():
        first, second, net = nn.Linear(3, 4), nn.Linear(3, 4), Net()
        first.weight, second.weight = weight, weight
    assert first.weight is second.weight and first.weight.is_meta
    assert net.head.weight is net.embed.weight


@pytest.mark.parametrize("empty", [True, False])
def test_weights_get_memory_once(empty):
    with parameters_without_memory() if empty else torch.device("cpu"):
        net = Net()
    with_memory(net, "cpu")
    assert net.head.weight is net.embed.weight and not net.head.weight.is_meta
    assert len([*net.parameters()]) == 3


def test_every_weight_has_one_name():
    net = Net()
    assert tied_names(net) == {"head.weight": "embed.weight"}
    assert [*unique_state(net)] == [*unique_parameters(net)] == ["embed.weight", "body.weight", "body.bias"]
    average = EMA(net, EMAConfig(decay=0.5).decay_at)
    average.begin_step()
    average.update(net)
    assert [*average.average] == [*unique_state(net)]
    assert tied_names(nn.Linear(2, 2)) == {}


def test_a_bfloat16_copy_would_hide_the_gradient_of_the_embedding():
    net = Net()
    copies = Bf16Copies(net, torch.optim.AdamW(net.parameters(), fused=True))
    with copies.in_use(), torch.autocast("cpu", torch.bfloat16):
        assert net.body.weight.dtype == torch.bfloat16
        assert net.head.weight is net.embed.weight and net.head.weight.dtype == torch.float32
        net(torch.tensor([1, 2])).square().sum().backward()
    assert net.embed.weight.grad is not None


# Runs.


def test_a_checkpoint_has_the_weight_once_and_resumes_bitwise(run, tmp_path):
    assert sorted(load_file(weights_of(run))) == [
        "body.bias",
        "body.weight",
        "embed.weight",
        "out.bias",
        "out.weight",
    ]
    cut = runs.cut_back(run, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(run, cut, STEPS)


def test_the_weight_is_loaded_under_either_name(run, tmp_path):
    folder = Path(shutil.copytree(weights_of(run).parent, tmp_path / "policy"))
    file = folder / WEIGHTS
    saved = load_file(file)
    embedding = saved.pop("embed.weight")
    for names in ({"embed.weight"}, {"head.weight"}, {"embed.weight", "head.weight"}):
        save_file({**saved, **{name: embedding.clone() for name in names}}, file)
        policy = load_pretrained(str(folder)).policy
        assert policy.head.weight is policy.embed.weight
        assert torch.equal(policy.head.weight, embedding)
    save_file({**saved, "embed.weight": embedding, "head.weight": embedding + 1}, file)
    with pytest.raises(CheckpointError, match=r"different values for head\.weight and embed\.weight"):
        load_pretrained(str(folder))


WAYS = {
    "ddp": ("own", ["--parallel.strategy=ddp"]),
    "fsdp": ("own", ["--parallel.strategy=fsdp"]),
    "fsdp, tied across blocks": ("across", ["--parallel.strategy=fsdp"]),
}


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_two_processes_compute_the_same_run_and_one_resumes_it(way, code, lowdim, run, tmp_path):
    file, more = WAYS[way]
    common = ["--save_freq=2", "--ema.enable", "--optimizer.eps=1e-4", "--batch_size=2", *more]
    two = tmp_path / "two"
    ranks.run(tmp_path, 2, ["train", *runs.flags(lowdim, two, flags(code, file), *common)])
    assert ranks.losses(two) == pytest.approx(ranks.losses(run), rel=1e-4)
    cut = runs.cut_back(two, tmp_path / "cut", 2)
    assert main(["resume", str(cut), "--batch_size=4", "--parallel.strategy=auto"]) == 0
    assert ranks.losses(cut) == pytest.approx(ranks.losses(run), rel=1e-4)
    assert main(["export", str(two)]) == 0
    exported, expected = load_file(weights_of(two)), load_file(weights_of(run))
    assert ranks.apart(exported, expected) < 5e-5
    policy = load_pretrained(str(two)).policy
    assert policy.head.weight is policy.embed.weight


def test_adapters_leave_a_tied_layer_alone():
    net = Net()
    add_adapters(net, LoraConfig(r=2), seed=0)
    assert isinstance(net.body, LoraLinear) and not isinstance(net.head, LoraLinear)
    with pytest.raises(ConfigError, match=r"target_modules=head: another module has the same weight"):
        add_adapters(Net(), LoraConfig(r=2, target_modules=["head"]), seed=0)
    with pytest.raises(ConfigError, match=r"head\.weight is the same weight as embed\.weight.*module embed"):
        add_adapters(Net(), LoraConfig(r=2, full_training_modules=["head"]), seed=0)


def test_a_tied_layer_is_trained_fully_beside_adapters(run, lowdim, tmp_path):
    more = [f"--policy.path={run}", "--lora.r=2", "--lora.full_training_modules=[embed]", "--steps=2"]
    tuned = runs.train(lowdim, tmp_path / "tuned", ["--policy.device=cpu"], *more)
    merged = load_pretrained(str(tuned)).policy
    alone = load_pretrained(str(weights_of(tuned).parent / "adapter")).policy
    base = load_file(weights_of(run))
    assert not torch.equal(merged.head.weight, base["embed.weight"])
    assert merged.head.weight is merged.embed.weight and alone.head.weight is alone.embed.weight
    assert torch.equal(merged.head.weight, alone.head.weight)


def test_a_plan_counts_the_weight_once(code):
    config = settings(f"{code / 'own.py'}:Own")
    trace = trace_step(config, 2, H200)
    count = 16 * 8 + 8 * 8 + 8 + 16 * 6 + 6
    assert trace.parameters == count
    assert trace.nbytes("weights") < 4 * count + 5 * 512  # each tensor takes whole blocks of 512 bytes
    assert trace.saved.exported == 4 * count
