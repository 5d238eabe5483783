"""Optimizers: settings that count, options without meaning refused; the moving average."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from flexor.config.optimizer import resolve_optimizer
from flexor.config.parse import load_config
from flexor.config.schema import EMAConfig, OptimizerConfig
from flexor.core.errors import ConfigError
from flexor.policies.act.config import ACTConfig
from flexor.policies.base import ParamGroup
from flexor.train.optim.ema import EMA
from flexor.train.optim.optimizers import build_optimizer
from flexor.train.optim.sgd import SGD
from support import runs


def test_what_is_given_wins_then_the_preset_then_the_default():
    policy = ACTConfig(optimizer_lr=3e-5)
    assert resolve_optimizer(OptimizerConfig(), policy).lr == 3e-5
    filled = resolve_optimizer(OptimizerConfig(lr=1.0, eps=1e-6), policy)
    assert (filled.type, filled.lr, filled.eps, filled.weight_decay) == ("adamw", 1.0, 1e-6, 1e-4)
    assert filled.betas == (0.9, 0.999) and filled.grad_clip_norm == 10
    sgd = resolve_optimizer(OptimizerConfig(type="sgd"), policy)
    assert (sgd.momentum, sgd.betas, sgd.lr, sgd.weight_decay) == (0.0, None, 3e-5, 1e-4)
    assert resolve_optimizer(filled, policy) == filled


@pytest.mark.parametrize(
    "option, named", [({"momentum": 0.9}, "momentum"), ({"type": "sgd", "betas": (0.9, 0.9)}, "betas")]
)
def test_option_without_meaning_for_the_optimizer(option, named):
    with pytest.raises(ConfigError, match=rf"optimizer\.{named} has no effect with"):
        resolve_optimizer(OptimizerConfig(**option), ACTConfig())


@pytest.mark.parametrize(
    "more, kind, expected",
    [
        (["--optimizer.lr=1e-4"], torch.optim.AdamW, {"lr": 1e-4, "weight_decay": 1e-4}),
        (["--optimizer.lr=1e-4", "--policy.optimizer_lr=9"], torch.optim.AdamW, {"lr": 1e-4}),
        (["--policy.optimizer_lr=9", "--optimizer.lr=1e-4"], torch.optim.AdamW, {"lr": 1e-4}),
        (
            ["--optimizer.type=adam", "--optimizer.lr=1e-4"],
            torch.optim.Adam,
            {"lr": 1e-4, "weight_decay": 1e-4},
        ),
        (
            ["--optimizer.type=sgd", "--optimizer.lr=1", "--optimizer.momentum=0.5"],
            SGD,
            {"lr": 1.0, "momentum": 0.5, "dampening": 0.0},
        ),
        (
            ["--optimizer.betas=[0.5,0.6]", "--optimizer.eps=1e-3"],
            torch.optim.AdamW,
            {"betas": (0.5, 0.6), "eps": 1e-3},
        ),
    ],
)
def test_settings_are_what_the_optimizer_uses(more, kind, expected, lowdim, tiny_act, tmp_path):
    from flexor.data.dataset import open_dataset
    from flexor.policies.fit import fit_to_dataset
    from flexor.train.build import build_state
    from flexor.train.engine.base import Engine
    from flexor.train.ranks.split import split_batch

    flags = [f for f in runs.flags(lowdim, tmp_path, tiny_act) if "optimizer" not in f]
    config, dataset = load_config([*flags, *more]), open_dataset(root=lowdim)
    config = replace(config, policy=fit_to_dataset(config.policy, dataset))
    state = build_state(config, dataset, Engine(torch.device("cpu")), split_batch(config, 1))
    assert type(state.optimizer) is kind
    group = state.optimizer.param_groups[0]
    assert {name: group[name] for name in expected} == expected
    assert [type(group[name]) for name in expected] == [
        *map(type, expected.values())
    ]  # LeRobot's, when it resumes


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_moving_average_follows(device):
    torch.manual_seed(0)
    model = nn.BatchNorm1d(2).to(device)
    ema = EMA(model, EMAConfig(decay=0.9).decay_at)
    with torch.no_grad():
        model.weight.fill_(2.0)
    model.num_batches_tracked.fill_(7)
    ema.begin_step()
    ema.update(model)
    decay = 2 / 11  # the first update forgets the start
    assert ema.average["weight"].tolist() == pytest.approx([decay + 2 * (1 - decay)] * 2)
    assert int(ema.average["num_batches_tracked"]) == 7
    for _ in range(1000):
        ema.begin_step()
        ema.update(model)
    assert ema.average["weight"].tolist() == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [  # of diffusers' EMAModel with use_ema_warmup, in its updates 1, 2, 3, 10 and 100000
        (
            {"power": 0.75, "decay": 0.9999},
            [0, 0.405396442499, 0.561308662349, 0.822172058996, 0.999822172059],
        ),
        ({"power": 0.75, "decay": 0.99, "min_decay": 0.99}, [0, 0.99, 0.99, 0.99, 0.99]),
        ({"power": 0.75, "update_after_step": 2, "min_decay": 0.3}, [0, 0, 0, 0.789775896187, 0.999]),
    ],
)
def test_schedules_of_lerobots_average(settings, expected):
    decays = [EMAConfig(**settings).decay_at(update) for update in (1, 2, 3, 10, 100_000)]
    assert decays == pytest.approx(expected, abs=1e-11)


@pytest.mark.parametrize("kind", ["sgd", "adam", "adamw"])
def test_bfloat16_weights_move_on_a_cpu(kind):
    """All of them: torch's fused SGD moves only the last few of a tensor."""
    policy = nn.Linear(33, 8, bias=False).bfloat16()
    groups = [ParamGroup(list(policy.parameters()))]
    policy.param_groups = lambda: groups  # type: ignore[assignment]
    before = policy.weight.detach().clone()
    policy.weight.grad = torch.ones_like(policy.weight)
    config = resolve_optimizer(OptimizerConfig(type=kind, lr=0.5, weight_decay=0), ACTConfig())
    build_optimizer(config, policy).step()
    assert ((before - policy.weight) > 0.2).all()
