"""Runs that encode each image once: the same losses, resumed and on several ranks; and when images are encoded in every
step instead."""

import json
import shutil
from pathlib import Path

import pytest

from flexor.cli.main import main
from flexor.data.frames import cache_folders
from flexor.data.frames.cache_folders import list_caches
from flexor.train import encode_images, image_features
from support import ranks, runs
from support.graphs import note_replays, without_device
from support.small_policies import small_flags

STEPS = 28  # at 8 samples: 1.6 epochs
ON = "steps neither decode nor encode them"
OFF = "images are encoded in every step (dataset.cache.features): "
FEATURES_OFF = "--dataset.cache.features=off"
CLIP_FROZEN = ["--policy.vision_encoder_lr_multiplier=0", "--policy.image_crop_is_random=false"]


@pytest.fixture(scope="module")
def smolvla(tmp_path_factory):
    return ["--policy.device=cpu", *small_flags("smolvla", tmp_path_factory.mktemp("models"))]


@pytest.fixture(scope="module")
def pi0(tmp_path_factory):
    return ["--policy.device=cpu", *small_flags("pi0", tmp_path_factory.mktemp("models"))]


@pytest.fixture(scope="module")
def xvla(tmp_path_factory):
    return ["--policy.device=cpu", *small_flags("xvla", tmp_path_factory.mktemp("models"))]


@pytest.fixture(autouse=True)
def own_caches(tmp_path, monkeypatch):
    (tmp_path / "shm").mkdir()
    monkeypatch.setattr(cache_folders, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))


def train(data, run: Path, flags, *more: str) -> Path:
    return runs.train(data, run, flags, f"--steps={STEPS}", "--batch_size=8", "--save_freq=0", *more)


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in runs.metrics(run) if "loss" in line]


def said(log_lines, text: str) -> bool:
    return any(text in line for line in log_lines)


# The same run


@pytest.mark.parametrize("tier", ["auto", "ram", "disk"])
def test_the_same_losses_as_with_images(tier, dataset, smolvla, tmp_path, log_lines):
    plain = train(dataset, tmp_path / "plain", smolvla, FEATURES_OFF)
    assert not said(log_lines, ON) and not said(log_lines, OFF)
    encoded = train(dataset, tmp_path / "encoded", smolvla, f"--dataset.cache.features={tier}")
    assert said(log_lines, ON)
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)
    assert len(losses(plain)) == STEPS


def test_xvla_with_a_frozen_encoder(dataset, xvla, tmp_path, log_lines):
    """Also with a view that no camera fills."""
    flags = [*xvla, "--policy.freeze_vision_encoder=true", "--policy.num_image_views=2"]
    plain = train(dataset, tmp_path / "plain", flags, FEATURES_OFF)
    encoded = train(dataset, tmp_path / "encoded", flags)
    assert said(log_lines, ON)
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)


def test_groot_by_default(dataset, tmp_path, log_lines):
    flags = ["--policy.device=cpu", *small_flags("groot", tmp_path / "models")]
    plain = train(dataset, tmp_path / "plain", flags, FEATURES_OFF)
    encoded = train(dataset, tmp_path / "encoded", flags)
    assert said(log_lines, ON)
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize("mode", ["train_expert_only", "freeze_vision_encoder"])
def test_pi0_with_a_frozen_encoder(mode, dataset, pi0, tmp_path, log_lines):
    flags = [*pi0, f"--policy.{mode}=true"]
    plain = train(dataset, tmp_path / "plain", flags, FEATURES_OFF)
    encoded = train(dataset, tmp_path / "encoded", flags)
    assert said(log_lines, ON)
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize("separate", [False, True])
def test_windows_of_images_and_an_encoder_for_each_camera(separate, dataset, tmp_path, log_lines):
    """A policy that sees two time steps, and takes one vector of each image."""
    flags = ["--policy.device=cpu", *small_flags("multi_task_dit", tmp_path), *CLIP_FROZEN]
    flags.append(f"--policy.use_separate_rgb_encoder_per_camera={str(separate).lower()}")
    plain = train(dataset, tmp_path / "plain", flags, FEATURES_OFF)
    encoded = train(dataset, tmp_path / "encoded", flags)
    assert said(log_lines, ON)
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)


@pytest.mark.parametrize("tier", ["auto", "ram", "disk"])
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(tier, dataset, smolvla, tmp_path, log_lines):
    """Also if it encodes only the images that are left, and reads few of them twice."""
    flags = [*smolvla, f"--dataset.cache.features={tier}", "--gradient_accumulation_steps=2"]
    uninterrupted = train(dataset, tmp_path / "whole", flags, "--save_freq=14")
    cut = runs.cut_back(uninterrupted, tmp_path / "cut", 14)
    shutil.rmtree(tmp_path / "cache")
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(uninterrupted, cut, STEPS)
    assert sum(ON in line for line in log_lines) == 2


def test_it_may_be_changed_on_resume(dataset, smolvla, tmp_path, log_lines):
    run = train(dataset, tmp_path / "run", smolvla, "--save_freq=14")
    cut = runs.cut_back(run, tmp_path / "cut", 14)
    assert main(["resume", str(cut), FEATURES_OFF]) == 0
    assert sum(ON in line for line in log_lines) == 1
    assert losses(cut) == pytest.approx(losses(run), rel=1e-4)


def test_held_out_loss_and_episodes_in_between_see_images(dataset, smolvla, tmp_path, log_lines):
    environment = [
        "--env.type=place",
        "--env.kwargs.image_size=32",
        "--env.max_steps=6",
        "--env_eval_freq=14",
    ]
    more = ["--dataset.eval_split=0.25", "--eval_steps=14", *environment, "--eval.n_episodes=2"]
    plain = train(dataset, tmp_path / "plain", smolvla, FEATURES_OFF, *more)
    encoded = train(dataset, tmp_path / "encoded", smolvla, *more)
    assert said(log_lines, ON)
    names = ("held_out_loss", "eval_success_rate")
    for name in names:
        values = [[line[name] for line in runs.metrics(run) if name in line] for run in (plain, encoded)]
        assert values[0] and values[1] == pytest.approx(values[0], rel=1e-4)


def test_chosen_episodes_and_a_checkpoint_like_any_other(dataset, smolvla, tmp_path, log_lines):
    more = ["--dataset.exclude_episodes=1", "--steps=40"]
    plain = train(dataset, tmp_path / "plain", smolvla, FEATURES_OFF, *more)
    encoded = train(dataset, tmp_path / "encoded", smolvla, *more)
    assert said(log_lines, ON)
    files = [
        sorted(path.relative_to(run).as_posix() for path in (run / "checkpoints").rglob("*"))
        for run in (plain, encoded)
    ]
    assert files[0] == files[1]
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)


def test_several_datasets_one_without_the_camera(dataset, smolvla, tmp_path, log_lines):
    from flexor.sim.record import record_dataset

    other = record_dataset(tmp_path / "other", episodes=2, image_size=32)
    renamed = "rename_map: {observation.image: observation.images.second}"
    mix = f"--dataset.mix=[{{root: {dataset}}}, {{root: {other}, {renamed}}}]"
    flags = [*smolvla, mix, "--dataset.on_missing_camera=mask"]
    common = ["--steps=60", "--batch_size=8", "--log_freq=1", "--save_freq=0", "--optimizer.lr=1e-3"]

    def run(name, *more):
        folder = tmp_path / name
        assert main(["train", *flags, f"--output_dir={folder}", *common, *more]) == 0
        return folder

    plain = run("plain", FEATURES_OFF)
    encoded = run("encoded", "--dataset.cache.features=disk")
    assert said(log_lines, ON)
    assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)
    # images that are missing are one black image
    frames = {info.camera: info.ready for info in list_caches()}
    first, second = (
        json.loads((root / "meta/info.json").read_text())["total_frames"] for root in (dataset, other)
    )
    assert frames == {"observation.image": first + 1, "observation.images.second": second + 1}


# On disk


def test_a_later_run_finds_them_on_disk(dataset, smolvla, tmp_path, log_lines, monkeypatch):
    flags = [*smolvla, "--dataset.cache.features=disk"]
    first = train(dataset, tmp_path / "first", flags)
    monkeypatch.setattr(encode_images.FeaturePass, "_store", None)  # nothing is stored any more
    auto = train(dataset, tmp_path / "second", smolvla, "--policy.n_action_steps=2")
    assert losses(auto) == losses(first)
    assert sum(ON in line for line in log_lines) == 2
    assert len(list_caches()) == 1


def test_other_weights_have_other_features(dataset, smolvla, tmp_path):
    flags = [*smolvla, "--dataset.cache.features=disk", "--policy.load_vlm_weights=false"]
    for seed in (1, 2):
        encoded = train(dataset, tmp_path / f"run{seed}", flags, f"--seed={seed}")
        plain = train(dataset, tmp_path / f"plain{seed}", flags, f"--seed={seed}", FEATURES_OFF)
        assert losses(encoded) == pytest.approx(losses(plain), rel=1e-4)
    assert len(list_caches()) == 2
    train(dataset, tmp_path / "larger", flags, "--seed=1", "--policy.resize_imgs_with_padding=[64,64]")
    assert len(list_caches()) == 3


def test_a_pass_that_fails_leaves_what_it_has_done(dataset, smolvla, tmp_path, monkeypatch):
    flags = [*smolvla, "--dataset.cache.features=disk"]
    encode, calls = encode_images.ImageEncoding.__call__, []

    def fails(self, *arguments):
        calls.append(1)
        if len(calls) == 4:  # the first is that of a black image
            raise KeyboardInterrupt
        return encode(self, *arguments)

    common = [f"--steps={STEPS}", "--batch_size=8", "--save_freq=0"]
    with monkeypatch.context() as patch:
        patch.setattr(encode_images.ImageEncoding, "__call__", fails)
        assert main(["train", *runs.flags(dataset, tmp_path / "run", flags, *common)]) != 0
    (info,) = list_caches()
    assert 0 < info.ready < info.frames
    run = train(dataset, tmp_path / "run", flags, "--resume=auto")
    assert losses(run) == losses(train(dataset, tmp_path / "other", flags))
    (info,) = list_caches()
    assert info.ready == info.frames


def test_a_disk_that_becomes_full(dataset, smolvla, tmp_path, monkeypatch, log_lines):
    with monkeypatch.context() as patch:
        patch.setattr("flexor.data.frames.cache.LOOK_EVERY", 1)
        patch.setattr("flexor.data.frames.cache.free_bytes", lambda folder: 0)
        flags = [*smolvla, "--dataset.cache.features=disk", "--dataset.cache.tier=ram"]
        encoded = train(dataset, tmp_path / "run", flags)
    assert said(log_lines, f"{OFF}there was no room for those of 137 images")
    plain = train(dataset, tmp_path / "plain", smolvla, FEATURES_OFF)
    assert losses(encoded) == losses(plain)


# Off, and why


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (["--steps=20"], "each would be read only 1.2 times"),
        (["--dataset.image_transforms.enable=true"], "dataset.image_transforms changes images at random"),
        (
            ["--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"],
            "the image encoder is trained",
        ),
        (["--dataset.cache.gb=0.000001"], "they take "),
        (["--dataset.cache.tier=stream"], "dataset.cache.tier=stream"),
    ],
    ids=["few steps", "augmented", "trained", "no room", "streamed"],
)
def test_off_with_a_reason(more, reason, dataset, smolvla, tmp_path, log_lines):
    train(dataset, tmp_path / "run", smolvla, *more)
    assert sum(line.startswith(OFF + reason) for line in log_lines) == 1
    assert not said(log_lines, ON)


def test_what_is_asked_for_and_can_not_be(dataset, smolvla, tmp_path, capsys):
    trained = ["--policy.train_expert_only=false", "--policy.freeze_vision_encoder=false"]
    flags = runs.flags(dataset, tmp_path / "run", smolvla, "--dataset.cache.features=ram", *trained)
    assert main(["train", *flags]) != 0
    assert "dataset.cache.features=ram: the image encoder is trained" in capsys.readouterr().err


def test_a_policy_without_an_encoder_says_nothing(dataset, tiny_act, tmp_path, log_lines, capsys):
    runs.train(dataset, tmp_path / "run", tiny_act, "--steps=1")
    assert not said(log_lines, "features")
    flags = runs.flags(dataset, tmp_path / "other", tiny_act, "--dataset.cache.features=disk")
    assert main(["train", *flags]) != 0
    assert "policy.type=act has no image encoder that can be frozen" in capsys.readouterr().err


def test_asked_for_although_the_run_is_short(dataset, smolvla, tmp_path, log_lines):
    train(dataset, tmp_path / "run", smolvla, "--steps=2", "--dataset.cache.features=ram")
    assert said(log_lines, "features of 16 images are ready")


# In the memory of the device


def keep_on_the_device() -> None:
    """As on a GPU, with the host's memory."""
    image_features.pick_feature_tier = lambda *_: "gpu"


def test_features_on_the_device(dataset, smolvla, tmp_path, monkeypatch, log_lines):
    in_ram = train(dataset, tmp_path / "ram", smolvla)
    monkeypatch.setattr(image_features, "pick_feature_tier", lambda *_: "gpu")
    assert losses(train(dataset, tmp_path / "run", smolvla)) == losses(in_ram)
    assert said(log_lines, "of features on the GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["ram", "disk", "gpu"])
def test_steps_on_a_gpu_are_captured_and_read_features(
    tier, dataset, smolvla, tmp_path, log_lines, monkeypatch
):
    flags = [*without_device(smolvla), "--precision=bf16", "--deterministic=true"]
    plain = train(dataset, tmp_path / "plain", flags, FEATURES_OFF)
    replays = note_replays(monkeypatch)
    flags.append(f"--dataset.cache.features={tier}")
    graph = train(dataset, tmp_path / "graph", flags, "--step=graph", "--save_freq=14")
    assert said(log_lines, ON) and len(replays) > STEPS // 2
    assert losses(graph) == pytest.approx(losses(plain), rel=0.02)
    eager = train(dataset, tmp_path / "eager", flags, "--step=eager")
    assert losses(graph) == losses(eager)
    cut = runs.cut_back(graph, tmp_path / "cut", 14)
    assert main(["resume", str(cut)]) == 0
    runs.assert_same(graph, cut, STEPS)


# Several ranks

WAYS = {
    "ddp": [],
    "ddp, on the device": [],
    "fsdp": ["--parallel.strategy=fsdp"],
    "fsdp, on the device": ["--parallel.strategy=fsdp"],
}


@pytest.fixture(scope="module")
def alone(dataset, smolvla, tmp_path_factory) -> list[float]:
    """The losses of one process."""
    folder = tmp_path_factory.mktemp("alone")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLEXOR_CACHE", str(folder / "cache"))
        return ranks.losses(train(dataset, folder / "run", smolvla))


@pytest.mark.ranks
@pytest.mark.parametrize("way", WAYS)
def test_any_number_of_ranks_reads_the_same_features(way, dataset, smolvla, alone, tmp_path):
    more = [f"--steps={STEPS}", "--batch_size=4", "--save_freq=14", *WAYS[way]]
    folder = tmp_path / "two"
    then = dict.fromkeys(range(2), keep_on_the_device) if "device" in way else None
    two = ranks.Ranks(folder, 2, ["train", *runs.flags(dataset, folder / "run", smolvla, *more)], then=then)
    assert two.end() == [0, 0], two.errors()
    assert ON in two.errors()
    assert ranks.losses(folder / "run") == pytest.approx(alone, rel=1e-4)
    cut = runs.cut_back(folder / "run", tmp_path / "cut", 14)  # goes on as one process
    assert main(["resume", str(cut), "--parallel.strategy=auto"]) == 0
    assert ranks.losses(cut) == pytest.approx(alone, rel=1e-4)
