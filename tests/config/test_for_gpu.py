"""Settings that depend on the GPU: what they become, and that nothing else changes them."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from flexor.cli.main import main
from flexor.config.for_gpu import settle_for_gpu
from flexor.config.parse import load_config
from flexor.config.schema import TrainConfig
from flexor.core.errors import ConfigError
from flexor.policies import POLICIES, policy_class
from flexor.train.engine import base
from flexor.train.engine.base import lowest_capability
from flexor.train.ranks.processes import Processes
from support import runs

DATA = "--dataset.repo_id=a/b"
IN_BF16 = {
    "act",
    "diffusion",
    "multi_task_dit",
    "pi0",
    "pi05",
    "pi0_fast",
    "smolvla",
    "eo1",
    "xvla",
    "groot",
    "wall_x",
}


@pytest.mark.parametrize("kind", POLICIES)
@pytest.mark.parametrize("capability", [(9, 0), (8, 0), (7, 5), None])
def test_what_is_left_to_the_gpu(kind: str, capability: tuple[int, int] | None):
    config = TrainConfig(policy=policy_class(kind).Config())
    settled = settle_for_gpu(config, capability)
    new = capability is not None and capability >= (8, 0)
    assert settled.precision == ("bf16" if new and kind in IN_BF16 else "no")
    assert settled.channels_last == (capability is not None)
    assert (config.precision, config.channels_last) == ("auto", None)
    assert settle_for_gpu(settled, None) == settled  # settled once


@pytest.mark.parametrize("precision", ["no", "bf16", "fp16"])
@pytest.mark.parametrize("capability", [(9, 0), None])
def test_what_is_given_stays(precision: str, capability: tuple[int, int] | None):
    config = load_config([DATA, f"--precision={precision}", "--channels_last=false"])
    assert settle_for_gpu(config, capability) == config


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (12, 0)])
def test_gpus_that_multiply_in_fp8(capability: tuple[int, int]):
    config = load_config([DATA, "--precision=fp8"])
    assert settle_for_gpu(config, capability).precision == "fp8"
    assert settle_for_gpu(load_config([DATA]), capability).precision != "fp8"


@pytest.mark.parametrize(
    ("capability", "this"), [((8, 6), "has 8.6"), ((7, 5), "has 7.5"), (None, "is none")]
)
def test_others_are_refused(capability: tuple[int, int] | None, this: str):
    config = load_config([DATA, "--precision=fp8"])
    with pytest.raises(ConfigError, match=f"8.9 or higher.*{this}.*--precision=bf16"):
        settle_for_gpu(config, capability)


@pytest.mark.parametrize(
    "other", ["compile=true", "parallel.strategy=fsdp", "parallel.strategy=hsdp", "lora.base=4bit"]
)
def test_what_does_not_work_in_fp8(other: str):
    rank = ["--lora.r=2"] if "lora" in other else []
    config = load_config([DATA, "--precision=fp8", f"--{other}", *rank])
    with pytest.raises(ConfigError, match=f"precision=fp8 does not work with {other}"):
        settle_for_gpu(config, (9, 0))


def test_weights_in_bf16_require_that_precision():
    config = load_config([DATA, "--weights_dtype=bf16"])
    assert settle_for_gpu(config, (8, 6)).precision == "bf16"
    with pytest.raises(ConfigError, match="Set --precision=bf16"):
        settle_for_gpu(config, None)


def test_the_oldest_gpu_of_a_run_decides(monkeypatch):
    gathered = [(9, 0), (8, 0), (8, 6)]
    monkeypatch.setattr(Processes, "gather", lambda self, value: [*gathered, value])
    monkeypatch.setattr(base.torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert lowest_capability(Processes(), torch.device("cuda", 0)) == (7, 5)
    assert lowest_capability(Processes(), torch.device("cpu")) is None


def test_a_run_records_what_was_settled_and_keeps_it(lowdim, tiny_act, tmp_path, monkeypatch):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    written = yaml.safe_load((run / "config.yaml").read_text())
    assert (written["precision"], written["channels_last"], written["step"]) == ("no", False, "auto")
    # a resume on a GPU that would choose otherwise
    monkeypatch.setattr("flexor.train.resolve.lowest_capability", lambda *_: (9, 0))
    assert main(["resume", str(run), "--steps=2"]) == 0
    again = runs.flags(lowdim, run, tiny_act, "--steps=3", "--resume=auto")
    assert main(["train", *again]) == 0
    assert saved(run)["precision"] == "no" and not saved(run)["channels_last"]


def test_a_run_from_before_these_settings_stays_as_it_was(lowdim, tiny_act, tmp_path, monkeypatch):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=1")
    for name in ("config.yaml", "checkpoints/last/training_state/flexor.json"):
        forget(run / name)
    monkeypatch.setattr("flexor.train.checkpoint.folder.verify", lambda folder: None)
    monkeypatch.setattr("flexor.train.resolve.lowest_capability", lambda *_: (9, 0))
    assert main(["resume", str(run), "--steps=2"]) == 0
    assert saved(run)["precision"] == "no" and not saved(run)["channels_last"]


def forget(file: Path) -> None:
    """As written by a version without these settings."""
    content = json.loads(file.read_text()) if file.suffix == ".json" else yaml.safe_load(file.read_text())
    settings = content.get("config", content)
    for name in ("step", "channels_last"):
        del settings[name]
    file.write_text(json.dumps(content) if file.suffix == ".json" else yaml.safe_dump(content))


def saved(run: Path) -> dict:
    return json.loads((run / "checkpoints/last/training_state/flexor.json").read_text())["config"]
