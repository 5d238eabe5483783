"""A run that computes with bfloat16 copies of its weights is the run that casts them, with less to do."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from flexor.cli.main import main
from flexor.config.schema import OptimizerConfig, TrainConfig
from flexor.core.errors import FlexorError
from flexor.plan.speed.measure import Stopwatch
from flexor.plan.trace.rehearsal import Rehearsal
from flexor.plan.trace.trace import trace_step
from flexor.policies.act.config import ACTConfig
from flexor.policies.adapters import LoraConfig
from flexor.policies.diffusion.config import DiffusionConfig
from flexor.policies.features import Kind, PolicyFeature
from flexor.train import build
from flexor.train.build import may_keep_copies
from flexor.train.engine.base import norm_in_float32
from flexor.train.optim import bf16_copies
from flexor.train.optim.bf16_copies import Bf16Copies
from flexor.train.ranks.split import Split
from support import runs, small_resnet
from support.plans import H200, plan_memory, settings
from support.small_policies import small_flags

STEPS = 4
POLICIES = ["act", "diffusion", "multi_task_dit"]
KINDS = [torch.optim.Adam, torch.optim.AdamW]


@pytest.fixture
def copied(monkeypatch) -> list[Bf16Copies]:
    """The copies of each run. Runs on a CPU have some too, and torch's optimizer updates them."""
    created: list[Bf16Copies] = []

    class Noted(Bf16Copies):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            created.append(self)

    monkeypatch.setattr(build, "DEVICES", ("cpu", "cuda", "meta"))
    monkeypatch.setattr(build, "Bf16Copies", Noted)
    return created


def flags_of(name: str, tiny_act: list[str], folder: Path) -> list[str]:
    if name == "act":
        return [*tiny_act]
    folder.mkdir()
    resnet = [small_resnet.FLAG] if name == "diffusion" else []
    return [*small_flags(name, folder), *resnet, "--policy.device=cpu"]


def train(data: Path, folder: Path, policy: list[str], *more: str) -> Path:
    return runs.train(data, folder, policy, f"--steps={STEPS}", "--precision=bf16", *more)


@pytest.mark.parametrize("name", POLICIES)
def test_the_run_has_the_bits_of_one_that_casts(name, dataset, tiny_act, tmp_path, copied, monkeypatch):
    """Weights, their average, the optimizer's state, losses. Held-out losses use the float32 weights in between."""
    policy = flags_of(name, tiny_act, tmp_path / "models")
    more = ["--ema.enable=true", "--dataset.eval_split=0.25", "--eval_steps=2"]
    more += ["--optimizer.grad_clip_norm=0"]  # a CPU clips in other ways without copies
    copies = train(dataset, tmp_path / "copies", policy, *more)
    assert len(copied) == 1 and copied[0].copies
    monkeypatch.setattr(build, "DEVICES", ())
    casts = train(dataset, tmp_path / "casts", policy, *more)
    assert len(copied) == 1
    for ours, theirs in zip(runs.figures(copies), runs.figures(casts), strict=True):
        assert ours.pop("grad_norm") == pytest.approx(theirs.pop("grad_norm"), rel=1e-5)
        assert ours == theirs
    first, second = runs.tensors(copies, STEPS), runs.tensors(casts, STEPS)
    assert first.keys() == second.keys()
    assert [each for each in first if not torch.equal(first[each], second[each])] == []
    assert runs.state(copies, STEPS) == runs.state(casts, STEPS)


def test_a_resumed_run_is_the_uninterrupted_one(dataset, tiny_act, tmp_path, copied):
    """Clipped, too."""
    uninterrupted = train(
        dataset, tmp_path / "whole", tiny_act, "--save_freq=2", "--optimizer.grad_clip_norm=0.1"
    )
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    assert len(copied) == 2
    runs.assert_same(uninterrupted, cut, STEPS)


def test_the_policy_has_its_own_weights_outside_of_a_forward_pass():
    network = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 1))
    network[0].bias.requires_grad_(False)  # a frozen weight has no gradient, so it must not have a copy
    optimizer = torch.optim.Adam(network.parameters(), fused=True)
    copies = Bf16Copies(network, optimizer)
    parameters = dict(network.named_parameters())
    with torch.no_grad():
        parameters["0.weight"].fill_(1 / 3)  # as a checkpoint that is loaded
    with pytest.raises(FlexorError), copies.in_use():
        inside = dict(network.named_parameters())
        raise FlexorError
    lower = {name for name, weight in inside.items() if weight.dtype == torch.bfloat16}
    assert lower == {"0.weight", "2.weight", "2.bias"} and [*inside] == [*parameters]
    assert torch.equal(inside["0.weight"], parameters["0.weight"].bfloat16())
    assert all(weight is parameters[name] for name, weight in network.named_parameters())


def camera(*shape: int) -> PolicyFeature:
    return PolicyFeature(Kind.VISUAL, shape)


BF16 = TrainConfig(
    policy=DiffusionConfig(), optimizer=OptimizerConfig(type="adam"), precision="bf16", compile=False
)
UNEQUAL = ACTConfig(input_features={"a": camera(3, 32, 32), "b": camera(3, 48, 32)})


@pytest.mark.parametrize(
    ("config", "split", "expected"),
    [
        (BF16, Split(8, 1, 1), True),
        (BF16, Split(8, 2, 1), False),
        (BF16, Split(8, 1, 2), True),
        (replace(BF16, precision="fp16"), Split(8, 1, 1), False),
        (replace(BF16, precision="no"), Split(8, 1, 1), False),
        (replace(BF16, weights_dtype="bf16"), Split(8, 1, 1), False),
        (replace(BF16, optimizer=OptimizerConfig(type="sgd")), Split(8, 1, 1), False),
        (replace(BF16, optimizer=OptimizerConfig(type="adamw_8bit")), Split(8, 1, 1), False),
        (replace(BF16, compile=True), Split(8, 1, 1), False),
        (replace(BF16, activation_checkpointing=True), Split(8, 1, 1), False),
        (replace(BF16, lora=LoraConfig(r=4)), Split(8, 1, 1), False),
        (replace(BF16, policy=DiffusionConfig(compile_model=True)), Split(8, 1, 1), False),
        (replace(BF16, policy=DiffusionConfig(gradient_checkpointing=True)), Split(8, 1, 1), False),
        (replace(BF16, policy=ACTConfig()), Split(8, 1, 1), True),
        (replace(BF16, policy=UNEQUAL), Split(8, 1, 1), False),
    ],
)
def test_which_runs_have_copies(config, split, expected):
    assert may_keep_copies(config, split) == expected


def test_the_norm_of_gradients_of_several_types():
    torch.manual_seed(0)
    gradients = [torch.randn(300, 7).bfloat16(), torch.randn(5), torch.randn(2, 3).bfloat16(), torch.randn(9)]
    exact = torch.cat([each.double().flatten() for each in gradients]).norm()
    norm = norm_in_float32(gradients)
    assert norm.dtype == torch.float32 and float(norm) == pytest.approx(float(exact), rel=1e-6)
    gradients[2][0, 0] = torch.nan
    assert norm_in_float32(gradients).isnan()


# Plans


def test_a_plan_has_copies_instead_of_casts(monkeypatch):
    config = settings("diffusion", policy={"down_dims": (128, 256)}, precision="bf16", channels_last=True)
    copied = trace_step(config, 2, H200, 1)
    with monkeypatch.context() as patch:
        patch.setattr(build, "may_keep_copies", lambda *_: False)
        cast = trace_step(config, 2, H200, 1)
    weights = [p for p in copied.ops if p.name == "flexor::adam_with_copies"]
    assert len(weights) == 1 and not any(op.name == "flexor::adam_with_copies" for op in cast.ops)
    assert copied.nbytes("gradients") < 0.52 * cast.nbytes("gradients")
    assert 0.48 < copied.nbytes("casts") / copied.nbytes("weights") < 0.52
    casts = [
        sum(op.read for op in trace.ops if op.name == "_to_copy" and op.phase in ("forward", "backward"))
        for trace in (copied, cast)
    ]
    assert casts[1] - casts[0] > 1.4 * copied.nbytes("weights")  # 4 bytes each forward, 2 backward
    for step in ("eager", "graph"):
        run = replace(config, step=step)
        ours = plan_memory(run, H200, 2)
        plain = replace(run, gradient_accumulation_steps=2)  # without copies
        assert ours.total < plan_memory(plain, H200, 2).total


# On a GPU


def updated(kind: type, decay: float, scale: float | None, ours: bool) -> list[Tensor]:
    """Weights, moments and copies after five steps, by Flexor's kernel or by torch's and a cast."""
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape).cuda()) for shape in [(1,), (513, 3), (4096,), (70, 1001)]]
    weights.append(nn.Parameter(torch.randn(24, 16, 5, 3).cuda().to(memory_format=torch.channels_last)))
    groups = [{"params": weights[:2], "lr": torch.tensor(3e-3).cuda()}, {"params": weights[2:]}]
    optimizer = kind(
        groups, lr=torch.tensor(1e-3).cuda(), betas=(0.95, 0.999), weight_decay=decay, fused=True
    )
    copies = Bf16Copies(nn.Module(), optimizer)
    copies.copies = {weight: nn.Parameter(weight.detach().bfloat16()) for weight in weights}
    for _ in range(5):
        for weight, copy in copies.copies.items():
            copy.grad = torch.randn_like(weight).bfloat16() * 1e-2
            weight.grad = None if ours else copy.grad.float()
        optimizer.grad_scale = None if scale is None else torch.tensor(scale).cuda()
        if ours:
            copies.step(optimizer)
        else:
            optimizer.step()
            copies.copies = {weight: nn.Parameter(weight.detach().bfloat16()) for weight in weights}
    for weight, copy in copies.copies.items():
        assert torch.equal(copy, weight.bfloat16()) and copy.stride() == weight.stride()
        assert int(optimizer.state[weight]["step"]) == 5
    moments = [optimizer.state[weight][name] for name in ("exp_avg", "exp_avg_sq") for weight in weights]
    return [*(weight.detach() for weight in weights), *moments]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [None, 3.7])
@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_computes_what_torch_computes(kind, decay, scale, monkeypatch):
    expected = updated(kind, decay, scale, ours=False)
    monkeypatch.setattr(bf16_copies, "LARGE", 1)
    weights, again = (updated(kind, decay, scale, ours=True) for _ in range(2))
    for ours, same, theirs in zip(weights, again, expected, strict=True):
        assert torch.equal(ours, same)
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=1e-6 * float(theirs.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["false", "true"])
@pytest.mark.parametrize("name", POLICIES)
def test_a_run_on_a_gpu_is_the_one_that_casts(name, layout, dataset, tiny_act, tmp_path, copied, monkeypatch):
    """The first loss is the same, bit by bit. After that the two optimizers round differently."""
    monkeypatch.setattr(bf16_copies, "LARGE", 256)  # both ways to update a weight
    policy = [f for f in flags_of(name, tiny_act, tmp_path / "models") if "device" not in f]
    more = [
        f"--channels_last={layout}",
        "--steps=20",
        "--policy.device=cuda",
        "--deterministic=true",
        "--optimizer.grad_clip_norm=1",
    ]
    copies = train(dataset, tmp_path / "copies", policy, *more)
    assert copied and copied[-1].copies  # the run's plan has some before
    copied.clear()
    monkeypatch.setattr(build, "DEVICES", ())
    casts = train(dataset, tmp_path / "casts", policy, *more)
    assert not copied
    ours, theirs = (runs.figures(run) for run in (copies, casts))
    assert ours[0]["loss"] == theirs[0]["loss"]
    assert ours[0]["grad_norm"] == pytest.approx(theirs[0]["grad_norm"], rel=1e-6)
    assert [x["loss"] for x in ours] == pytest.approx([x["loss"] for x in theirs], rel=2e-2)
    first, second = runs.tensors(copies, 20), runs.tensors(casts, 20)
    assert first.keys() == second.keys()
    # all weights together: biases of keys have no effect, so their gradients are noise, which Adam enlarges
    ours, theirs = (
        torch.cat(
            [
                weights[each].double().flatten()
                for each in sorted(weights)
                if each.startswith("pretrained_model")
            ]
        )
        for weights in (first, second)
    )
    assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


@pytest.mark.gpu
def test_copies_take_no_more_memory(monkeypatch):
    def peak() -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        wide = {"down_dims": (256, 512)}
        config = settings("diffusion", policy=wide, precision="bf16", channels_last=True)
        run = Rehearsal(config, 2, 1, Stopwatch(), torch.device("cuda", 0))
        for _ in range(3):
            run.step(0)
        return torch.cuda.max_memory_allocated() - before

    peak()  # memory that libraries take once
    copies = peak()
    monkeypatch.setattr(build, "DEVICES", ())
    assert copies <= 1.001 * peak()
