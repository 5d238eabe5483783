"""Compiled blocks compute what the blocks compute, and change nothing else about a run."""

import functools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.core.errors import ConfigError
from flexor.train.compile import _check_compiler
from support import ranks, runs
from support.own_policy import own_policy

OWN = own_policy(
    """\
        layers = torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.GELU(), torch.nn.Linear(8, 2)
        self.block = torch.nn.Sequential(*layers)
    def loss(self, batch, noise):
        state = batch["observation.state"] + 0.1 * noise.normal("state", batch["observation.state"].shape)
        return Loss((self.block(state) - batch["action"][:, 0]).square().mean(-1), {})
    def shard_units(self):
        return [self.block] * self.config.blocks
""",
    settings="""    blocks: int = 1""",
)


@pytest.fixture
def own(tmp_path: Path) -> list[str]:
    (tmp_path / "own.py").write_text(OWN)
    return [f"--policy.type={tmp_path / 'own.py'}:Own", "--policy.device=cpu"]


def train_both(data: Path, folder: Path, flags: list[str], close: float) -> Path:
    """A run as it is and one with compiled blocks, which must come out alike: the latter."""
    from torch._dynamo.utils import counters

    common = ["--steps=4", "--save_freq=2", "--dataset.eval_split=0.25"]
    plain = runs.train(data, folder / "plain", flags, *common)
    counters.clear()
    compiled = runs.train(data, folder / "compiled", flags, *common, "--compile")
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]
    assert ranks.losses(compiled) == pytest.approx(ranks.losses(plain), rel=close)
    assert held_out(compiled) == pytest.approx(held_out(plain), rel=close)
    name = "checkpoints/last/pretrained_model/model.safetensors"
    assert ranks.apart(load_file(plain / name), load_file(compiled / name)) < close
    return compiled


@pytest.mark.slow
def test_the_same_run_and_bitwise_so_after_a_resume(own, lowdim, tmp_path, monkeypatch):
    """All of the compiler but its last part: a C++ compiler takes half a minute for these two kernels."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = train_both(lowdim, tmp_path, own, close=1e-5)
    cut = runs.cut_back(compiled, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(compiled, cut, 4)


@pytest.mark.gpu
def test_kernels_of_triton_compute_the_same_run(own, lowdim, tmp_path):
    flags = ["--policy.device=cuda", "--precision=no", "--step=eager"]
    train_both(lowdim, tmp_path, [*own, *flags], close=1e-3)


def held_out(run: Path) -> list[float]:
    return [line["held_out_loss"] for line in runs.metrics(run) if "held_out_loss" in line]


def test_a_policy_without_blocks_is_refused(own, lowdim, tmp_path, capsys):
    flags = runs.flags(lowdim, tmp_path / "run", own, "--compile", "--policy.blocks=0", "--steps=1")
    assert main(["train", *flags]) == 2
    assert "has no blocks to compile" in capsys.readouterr().err


def test_no_compiler_is_named_before_the_first_step(monkeypatch):
    import torch._inductor.config

    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", ("no-such-compiler",))
    with pytest.raises(ConfigError, match="install g\\+\\+"):
        _check_compiler(torch.device("cpu"))
