"""A new policy on a vision-language model needs no line in shared code: one folder trains, plans, is captured in CUDA
graphs, is saved, exported, resumed on other processes and served. Its backbone has tied embeddings, images of two
sizes and a chat template."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from flexor.cli.main import main
from flexor.core.rng import Noise
from flexor.policies.pretrained import load_pretrained
from flexor.train.graph import WARM_UP, GraphStep
from flexor_client.remote import RemotePolicy
from support import ranks, runs
from support.limits import LIMIT_S
from support.samples import FEATURES, write_sample
from support.serving import serving
from support.tokenizers import make_tokenizer

FOLDER = Path(__file__).parents[1] / "support/tiny_qwen_policy"
SPECIAL_TOKENS = "<|im_start|> <|im_end|> <|vision_start|> <|image_pad|> <|vision_end|>"
MAX_LINES = 200
STEPS = 4
TIED = ("lm_head.weight", "embed_tokens.weight")


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    features = {name: feature for name, feature in FEATURES.items() if name != "observation.matrix"}
    return write_sample(tmp_path_factory.mktemp("data") / "two_cameras", features=features)


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    words = "user robot push pull"
    tokenizer = make_tokenizer(tmp_path_factory.mktemp("tokenizer"), words, SPECIAL_TOKENS)
    return [
        f"--policy.type={FOLDER / 'policy.py'}:TinyQwenPolicy",
        f"--policy.tokenizer_name={tokenizer}",
        "--policy.device=cpu",
        "--optimizer.eps=1e-4",
    ]


@pytest.fixture(scope="module")
def run(data, flags, tmp_path_factory) -> Path:
    """An uninterrupted one."""
    folder = tmp_path_factory.mktemp("runs") / "uninterrupted"
    return runs.train(data, folder, flags, f"--steps={STEPS}", "--save_freq=2")


def weights(run: Path) -> dict[str, torch.Tensor]:
    return load_file(run / "checkpoints/last/pretrained_model/model.safetensors")


def observation(step: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(step)
    return {
        "observation.images.top": rng.integers(0, 256, (48, 64, 3), np.uint8),
        "observation.images.wrist": rng.integers(0, 256, (24, 32, 3), np.uint8),
        "observation.state": rng.normal(size=3).astype(np.float32),
    }


def batch_of(*steps: int) -> dict[str, np.ndarray]:
    """As a policy takes them: images [B, 3, H, W]."""
    rows = [observation(step) for step in steps]
    stacked = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return {name: np.moveaxis(v, -1, 1) if v.ndim == 4 else v for name, v in stacked.items()}


def test_it_is_short():
    files = [file for file in FOLDER.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    assert 0 < sum(len(file.read_text().splitlines()) for file in files) <= MAX_LINES


def test_it_trains_with_both_cameras_and_a_tied_head(run):
    losses = [line["loss"] for line in runs.figures(run)]
    assert len(losses) == STEPS and np.isfinite(losses).all()
    first, last = (load_pretrained(str(run / f"checkpoints/{step:06d}")).policy.vlm for step in (2, STEPS))
    assert last.lm_head.weight is last.language_model.embed_tokens.weight
    for name, weight in last.named_parameters():
        assert not torch.equal(weight, first.get_parameter(name)), name


def test_a_resumed_run_is_bitwise_the_uninterrupted_one(run, tmp_path):
    cut = runs.cut_back(run, tmp_path / "cut", 2)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(run, cut, STEPS)


def test_the_tied_weight_is_saved_once(run):
    assert sum(name.endswith(TIED) for name in weights(run)) == 1


def test_an_exported_policy_acts_the_same(run, tmp_path):
    assert main(["export", str(run), f"--output={tmp_path / 'exported'}"]) == 0
    chunks = [
        load_pretrained(str(folder)).chunk(batch_of(0, 1), ["push", "pull"], Noise(0, 0, torch.arange(2)))
        for folder in (run, tmp_path / "exported")
    ]
    assert chunks[0].shape == (2, 4, 2) and np.array_equal(*chunks)


def test_images_and_the_task_matter_and_the_other_samples_do_not(run):
    policy = load_pretrained(str(run))
    noise = Noise(0, 0, torch.zeros(1, dtype=torch.long))
    alone = policy.chunk(batch_of(0), ["push"], noise)
    together = policy.chunk(batch_of(0, 1), ["push", "pull"], Noise(0, 0, torch.tensor([0, 1])))
    assert np.abs(together[:1] - alone).max() < 1e-5
    assert not np.array_equal(policy.chunk(batch_of(0), ["pull"], noise), alone)
    for name in ("observation.images.top", "observation.images.wrist"):
        darker = batch_of(0)
        darker[name] = darker[name] // 2
        assert not np.array_equal(policy.chunk(darker, ["push"], noise), alone), name


def test_it_is_planned(data, flags, run, capsys):
    """Traced on tensors without values. The tied weight counts once."""
    assert main(["plan", *flags[:2], f"--dataset.root={data}", "--gpu=4090", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    once = sum(weight.numel() for weight in weights(run).values())
    assert plan["fits"] and plan["parameters"] == plan["trained_parameters"] == once


def test_it_is_served(run):
    local = load_pretrained(str(run)).chunk(batch_of(3), ["push"])
    with serving(load_pretrained(str(run))) as (url, _), RemotePolicy(url, timeout_s=LIMIT_S) as robot:
        chunk = robot.chunk(observation(3), "push")
    assert np.allclose(chunk, local[0], atol=1e-5)


def test_it_is_fine_tuned_with_adapters(data, run, tmp_path):
    """The tied weight, which an adapter of one of its layers would untie, stays as it is."""
    start = [f"--policy.path={run}", "--policy.device=cpu", "--lora.r=2"]
    tuned = weights(runs.train(data, tmp_path / "tuned", start, "--steps=2"))
    before = weights(run)
    changed = {name for name in before if not torch.equal(before[name], tuned[name])}
    assert any(name.endswith("q_proj.weight") for name in changed)
    assert not changed & {name for name in before if name.endswith(TIED)}


@pytest.mark.ranks
def test_a_sharded_run_resumes_on_one_process(data, flags, run, tmp_path):
    sharded = tmp_path / "sharded"
    more = ["--steps=2", "--save_freq=2", "--batch_size=2", "--parallel.strategy=fsdp"]
    ranks.run(tmp_path / "two", 2, ["train", *runs.flags(data, sharded, flags, *more)])
    ranks.run(tmp_path / "one", 1, ["resume", str(sharded), f"--steps={STEPS}"])
    assert ranks.losses(sharded) == pytest.approx(ranks.losses(run), rel=1e-5)
    assert ranks.apart(ranks.weights(sharded, STEPS), ranks.weights(run, STEPS)) < 5e-5


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_steps_as_a_cuda_graph_are_bitwise_the_eager_ones(precision, data, flags, tmp_path, monkeypatch):
    replays: list[int] = []
    replay = GraphStep._replay
    monkeypatch.setattr(GraphStep, "_replay", lambda *args: replays.append(0) or replay(*args))
    common = [*flags, "--policy.device=cuda", f"--precision={precision}", "--deterministic=true"]
    count = WARM_UP + 4
    eager, graph = (
        runs.train(data, tmp_path / step, [*common, f"--step={step}"], f"--steps={count}")
        for step in ("eager", "graph")
    )
    assert len(replays) == count - WARM_UP
    runs.assert_same(eager, graph, count)


@pytest.mark.gpu
def test_predictions_as_a_cuda_graph_are_bitwise_the_eager_ones(run):
    policy = load_pretrained(str(run), "cuda")
    for robots in (1, 2):
        steps, tasks = range(robots), ["push", "pull"][:robots]
        chunks = [policy.chunk(batch_of(*steps), tasks) for _ in range(4)]  # eager, captured, replayed
        assert all(np.array_equal(chunk, chunks[0]) for chunk in chunks)
    assert len(policy.graphs.captured) == 2 and not policy.graphs.gave_up
