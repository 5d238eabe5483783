"""Adapters: what is trained and what stays, the same run after a resume and on many processes, and what is saved."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.core.rng import Noise
from flexor.core.run_files import PRETRAINED, TRAINING_STATE, WEIGHTS
from flexor.policies.adapters import LoraConfig, LoraLinear, add_adapters, is_adapter, merged
from flexor.policies.pretrained import load_pretrained
from flexor.train.build import make_policy
from flexor.train.checkpoint.tensors import RAW_MODEL
from support import ranks, runs
from support.plans import settings

LORA = ["--lora.r=2", "--lora.alpha=4"]
HEAD = "--lora.full_training_modules=[action_head]"
STEPS = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.second.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x).relu()).relu())


def test_an_adapter_starts_without_effect_and_is_all_that_is_trained():
    net, x = Net(), torch.randn(3, 4)
    before = net(x)
    add_adapters(net, LoraConfig(r=2, full_training_modules=["head"]), seed=0)
    assert torch.equal(net(x), before)
    trained = [name for name, p in net.named_parameters() if p.requires_grad]
    assert trained == [
        "first.lora_A",
        "first.lora_B",
        "head.weight",
        "head.bias",
    ]  # `second` was frozen before
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    for _ in range(3):
        net(x).square().sum().backward()
        optimizer.step()
    assert not torch.allclose(net(x), before)
    assert not torch.allclose(net.first(x), nn.functional.linear(x, net.first.weight, net.first.bias))


def test_the_default_device_does_not_change_where_an_adapter_starts():
    here, elsewhere = Net(), Net()
    add_adapters(here, LoraConfig(r=2), seed=0)
    with torch.device("meta"):  # as a GPU while weights are made there, to measure a step
        add_adapters(elsewhere, LoraConfig(r=2), seed=0)
    assert torch.equal(here.first.lora_A, elsewhere.first.lora_A)


def test_merged_weights_compute_the_same():
    net, x = Net(), torch.randn(3, 4)
    config = LoraConfig(r=3, alpha=6, dropout=0.5)
    add_adapters(net, config, seed=0)
    nn.init.normal_(net.first.lora_B)
    plain = Net()
    plain.load_state_dict(merged(net.state_dict(), config))
    assert not torch.equal(plain.first.weight, net.first.weight)
    torch.testing.assert_close(net.eval()(x), plain(x))
    assert not torch.allclose(net.train()(x), plain(x))  # dropout


@pytest.mark.parametrize(
    ("targets", "adapted"),
    [
        ("all-linear", ["first", "head"]),
        (["head"], ["head"]),
        (".*(ir).*", ["first"]),
    ],
)
def test_which_layers_are_adapted(targets, adapted):
    net = Net()
    add_adapters(net, LoraConfig(r=1, target_modules=targets), seed=0)
    assert [name for name, module in net.named_modules() if isinstance(module, LoraLinear)] == adapted


@pytest.mark.parametrize(("kind", "around"), [("pi0", 5), ("pi05", 4)])
def test_a_policy_names_the_layers_that_are_adapted_by_default(kind, around):
    """LeRobot's: queries and values of the expert, and the layers around it."""
    policy = make_policy(settings(kind, (28, 28), lora=LoraConfig(r=2)))
    adapted = [name for name, module in policy.named_modules() if isinstance(module, LoraLinear)]
    expert = [name for name in adapted if "gemma_expert" in name]
    assert len(expert) == 2 * len(policy.model.paligemma_with_expert.expert.layers)
    assert all(name.endswith(("q_proj", "v_proj")) for name in expert)
    assert len(adapted) - len(expert) == around


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target_modules": ["head", "heat"]}, "lora.target_modules=heat.*Did you mean head"),
        ({"target_modules": ["second"]}, "lora.target_modules=second"),
        ({"full_training_modules": ["tail"]}, "lora.full_training_modules=tail"),
    ],
)
def test_names_that_nothing_has(settings, message):
    with pytest.raises(ConfigError, match=message):
        add_adapters(Net(), LoraConfig(r=1, **settings), seed=0)


@pytest.fixture(scope="module")
def base(lowdim, tiny_act, tmp_path_factory) -> Path:
    """What is fine-tuned."""
    return runs.train(
        lowdim,
        tmp_path_factory.mktemp("base") / "run",
        tiny_act,
        "--steps=3",
        "--seed=7",
        "--policy.dropout=0",
    )


def fine_tune(lowdim: Path, run: Path, base: Path, *more: str) -> list[str]:
    start = [f"--policy.path={base}", "--policy.device=cpu"]
    settings = [f"--steps={STEPS}", "--save_freq=3", "--optimizer.eps=1e-5", *LORA, HEAD, *more]
    return ["train", *runs.flags(lowdim, run, start, *settings)]


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints" / "last" / PRETRAINED / WEIGHTS)


@pytest.fixture(scope="module")
def tuned(base, lowdim, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("tuned") / "run"
    assert main(fine_tune(lowdim, run, base)) == 0
    return run


def test_what_is_saved_is_merged_and_nothing_else_has_moved(tuned, base):
    before, after = weights(base), weights(tuned)
    assert before.keys() == after.keys()
    raw = load_file(tuned / "checkpoints" / "last" / TRAINING_STATE / RAW_MODEL)
    adapted = {name.replace("lora_A", "weight") for name in raw if name.endswith("lora_A")}
    head = {name for name in before if name.startswith("model.action_head.")}
    assert {name for name in before if not torch.equal(before[name], after[name])} == adapted | head
    assert all(torch.equal(raw[name], before[name]) for name in before if name not in head)


def test_the_saved_policy_acts_as_the_adapted_one(tuned, lowdim):
    merged_policy = load_pretrained(str(tuned)).policy
    adapted = make_policy(load_config([f"--config={tuned / 'config.yaml'}"])).eval()
    adapted.load_state_dict(load_file(tuned / "checkpoints" / "last" / TRAINING_STATE / RAW_MODEL))
    batch = {
        name: torch.randn(3, *feature.shape) for name, feature in merged_policy.config.input_features.items()
    }
    noise = Noise(0, 0, torch.arange(3))
    with torch.no_grad():
        ours, theirs = (p.predict(batch, noise) for p in (adapted, merged_policy))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_the_adapters_alone_load_as_the_merged_policy(tuned, base):
    """And they can be trained on."""
    alone = tuned / "checkpoints" / "last" / PRETRAINED / "adapter"
    assert not (alone / WEIGHTS).exists()
    ours = load_pretrained(str(alone)).policy.state_dict()
    for name, tensor in weights(tuned).items():
        torch.testing.assert_close(ours[name], tensor, msg=name)


def test_training_starts_from_adapters_alone(tuned, lowdim, tmp_path):
    alone = tuned / "checkpoints" / "last" / PRETRAINED / "adapter"
    assert main(fine_tune(lowdim, tmp_path / "run", alone, "--steps=1")) == 0
    moved = {
        name for name, tensor in weights(tmp_path / "run").items() if not tensor.equal(weights(tuned)[name])
    }
    assert moved and not any("backbone" in name for name in moved)
    start = weights(tuned)
    assert all(torch.dist(tensor, start[name]) < 0.1 for name, tensor in weights(tmp_path / "run").items())


@pytest.mark.parametrize("more", [["--lora.dropout=0.2"], ["--ema.enable", "--checkpoint.async=true"]])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(more, base, lowdim, tmp_path):
    assert main(fine_tune(lowdim, tmp_path / "whole", base, *more)) == 0
    cut = runs.cut_back(tmp_path / "whole", tmp_path / "cut", 3)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(tmp_path / "whole", cut, STEPS)


def test_another_rank_is_another_run(tuned):
    assert main(["resume", str(tuned), "--lora.r=3"]) == 2


@pytest.mark.slow
@pytest.mark.ranks
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("begin", ["checkpoint", "afresh"])
def test_many_processes_train_the_same_adapters(strategy, begin, base, lowdim, tiny_act, tmp_path):
    def command(run: Path, size: int, *more: str) -> list[str]:
        flags = fine_tune(lowdim, run, base, f"--batch_size={size}", "--policy.dropout=0", *more)
        return flags if begin == "checkpoint" else [f for f in flags if "policy.path" not in f] + tiny_act

    ranks.run(tmp_path / "1", 1, command(tmp_path / "alone", 4))
    many = [f"--parallel.strategy={strategy}", "--checkpoint.export=false"]
    ranks.run(tmp_path / "2", 2, command(tmp_path / "many", 2, *many, "--save_checkpoint=true"))
    assert ranks.losses(tmp_path / "many") == pytest.approx(ranks.losses(tmp_path / "alone"), rel=1e-5)
    alone, several = weights(tmp_path / "alone"), weights(tmp_path / "many")
    assert ranks.apart(alone, several) < 5e-5
    assert not any(is_adapter(name) for name in several)
    if strategy == "fsdp":  # of a checkpoint that was saved in shards only
        first = tmp_path / "many" / "checkpoints" / "000003"
        assert not (first / PRETRAINED / WEIGHTS).exists()
        assert main(["export", str(first)]) == 0
        assert load_file(first / PRETRAINED / WEIGHTS).keys() == alone.keys()
        assert (first / PRETRAINED / "adapter").is_dir() == (begin == "checkpoint")
