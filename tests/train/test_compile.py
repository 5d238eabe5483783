"""Compiled blocks compute what the blocks compute, and change nothing else about a run."""

import functools
import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.config.parse import load_config
from flexor.core.errors import ConfigError
from flexor.policies.base import Policy
from flexor.train.build import make_policy
from flexor.train.compile import CompileTime, _check_compiler, compile_blocks
from support import ranks, runs
from support.limits import LIMIT_S
from support.own_policy import own_policy

OWN_POLICY = own_policy(
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


ONE_LAYER = own_policy(
    """\
        self.block = torch.nn.Linear(2, 2)
    def loss(self, batch, noise):
        return Loss((self.block(batch["observation.state"]) - batch["action"][:, 0]).square().mean(-1), {})
    def shard_units(self):
        return [self.block]
"""
)


@pytest.fixture
def blocks(tmp_path: Path) -> list[str]:
    (tmp_path / "own.py").write_text(OWN_POLICY)
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
def test_the_same_run_and_bitwise_so_after_a_resume(blocks, lowdim, tmp_path, monkeypatch):
    """All of the compiler but its last part: a C++ compiler takes half a minute for these two kernels."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    compiled = train_both(lowdim, tmp_path, blocks, close=1e-5)
    cut = runs.cut_back(compiled, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(compiled, cut, 4)


@pytest.mark.slow
@pytest.mark.ranks
def test_a_second_run_finds_the_code_of_the_first(lowdim, tmp_path, monkeypatch):
    """With the C++ compiler, in processes of their own, as a user starts them: torch's imports must not choose the
    folder. The block is a single layer, because each of its kernels takes the compiler ten seconds."""
    (tmp_path / "own.py").write_text(ONE_LAYER)
    blocks = [f"--policy.type={tmp_path / 'own.py'}:Own", "--policy.device=cpu"]
    monkeypatch.setenv("TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS", "0")  # worth it for many kernels
    monkeypatch.setenv("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else programs that try the CPU's are compiled first
    monkeypatch.setenv("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no processes for that, which import torch
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "")  # may have been set in this process
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "cache/compiled"
    logged = []
    for name in ("first", "second"):
        flags = runs.flags(lowdim, tmp_path / name, blocks, "--steps=3", "--compile")
        process = runs.start("train", *flags)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, errors
        logged.append(told(errors.splitlines()))
    (first,), (second,) = logged  # one line each, though there are three steps
    assert "compiled 1 block in " in first
    assert first.endswith(f"; the next run with the same settings takes them from the cache ({folder})")
    assert f"took 1 block from the cache ({folder}) in " in second


@pytest.mark.slow
def test_compiling_again_is_told_and_the_users_folder_is_kept(
    blocks, lowdim, tmp_path, monkeypatch, log_lines
):
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    torch._dynamo.reset()  # other tests compile the same policy
    policy = make_own(blocks, lowdim)
    compile_blocks(policy, torch.device("cpu"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    compiling = CompileTime(policy)
    for batch in (4, 4, 5, 6):
        policy.block(torch.zeros(batch, 2)).sum().backward()
        compiling.log()
    first, again, *_ = told(log_lines)  # the third size is compiled for any, or checked once more
    assert first.startswith("compiled 1 block in ") and again.endswith(" (again, for other inputs)")
    assert compiling.seconds > 0


def told(lines: list[str]) -> list[str]:
    return [line for line in lines if re.search(r"(compiled|took) \d+ block", line)]


def make_own(blocks: list[str], data: Path) -> Policy:
    config = load_config([*blocks, f"--dataset.root={data}"])
    return make_policy(config)


@pytest.mark.gpu
def test_kernels_of_triton_compute_the_same_run(blocks, lowdim, tmp_path):
    flags = ["--policy.device=cuda", "--precision=no", "--step=eager"]
    train_both(lowdim, tmp_path, [*blocks, *flags], close=1e-3)


def held_out(run: Path) -> list[float]:
    return [line["held_out_loss"] for line in runs.metrics(run) if "held_out_loss" in line]


def test_a_policy_without_blocks_is_refused(blocks, lowdim, tmp_path, capsys):
    flags = runs.flags(lowdim, tmp_path / "run", blocks, "--compile", "--policy.blocks=0", "--steps=1")
    assert main(["train", *flags]) == 2
    assert "has no blocks to compile" in capsys.readouterr().err


def test_no_compiler_is_named_before_the_first_step():
    import torch._inductor.config

    # not monkeypatch, after which torch no longer knows the setting
    with (
        torch._inductor.config.patch({"cpp.cxx": ("no-such-compiler",)}),
        pytest.raises(ConfigError, match="install g\\+\\+"),
    ):
        _check_compiler(torch.device("cpu"))
