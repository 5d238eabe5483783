"""Image augmentation: torchvision's pictures, LeRobot's choice, and the same for a sample wherever it is computed."""

import itertools
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from flexor.config.parse import load_config
from flexor.core.batch import IMAGE_PREFIX
from flexor.core.errors import ConfigError
from flexor.core.rng import GraphNoise, Noise, NoiseKeys
from flexor.data.settings import ImageTransformConfig, ImageTransformsConfig, default_transforms
from flexor.kernels import triton as triton_folder
from flexor.policies.act.config import ACTConfig
from flexor.policies.augment import plain
from flexor.policies.augment import step as module
from flexor.policies.augment.draw import TransformSampler
from flexor.policies.augment.operations import ImageOp, describe_transforms, read_transforms
from flexor.policies.augment.step import AugmentImages, augmentation, augmented
from flexor.policies.features import Kind, PolicyFeature
from flexor.policies.processing.pipeline import Pipeline, StepContext
from parity import augment_flexor
from parity.augment_cases import CASES, PARAMETERS
from support.image_transforms import ALL

TOP, WRIST = f"{IMAGE_PREFIX}s.top", f"{IMAGE_PREFIX}s.wrist"


def settings(
    *names: str, count: int = 3, random_order: bool = True, **entries: tuple
) -> ImageTransformsConfig:
    shares_of_operations = {name: ImageTransformConfig(1.0, *ALL[name]) for name in names}
    shares_of_operations |= {name: ImageTransformConfig(*entry) for name, entry in entries.items()}
    return ImageTransformsConfig(True, count, random_order, shares_of_operations)


def cameras(channels: int = 3, size: tuple[int, int] = (12, 17)) -> dict[str, PolicyFeature]:
    return {
        TOP: PolicyFeature(Kind.VISUAL, (channels, *size)),
        WRIST: PolicyFeature(Kind.VISUAL, (channels, 16, 10)),
    }


def made(*names: str, channels: int = 3, **more) -> AugmentImages:
    step = augmentation(settings(*names, **more), cameras(channels))
    assert step is not None
    return step


def images(samples: int, channels: int = 3, frames: int = 2) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randint(0, 256, (samples, frames, *f.shape), dtype=torch.uint8, generator=generator)
        for name, f in cameras(channels).items()
    }


def training(ids: Tensor, step: int = 7, seed: int = 1) -> StepContext:
    return StepContext(training=True, noise=Noise(seed, step, ids))


# torchvision's definitions


@pytest.fixture(scope="module")
def golden() -> dict[str, tuple[float, float]]:
    with np.load(augment_flexor.GOLDEN) as theirs:
        assert {*theirs} == {f"image {name}" for name in CASES} | {f"drawn {name}" for name in PARAMETERS}
        return {name: (far, limit) for name, far, limit in augment_flexor.differences(theirs)}


@pytest.mark.parametrize("name", CASES)
def test_images_are_torchvisions(name, golden):
    far, limit = golden[f"image {name}"]
    assert far <= limit


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters_are_distributed_as_torchvisions(name, golden):
    far, limit = golden[f"drawn {name}"]
    assert far <= limit


def test_noise_is_normal_and_of_each_frame():
    step = augmentation(
        settings(noise=(1.0, "GaussianNoise", {"mean": 0, "sigma": 0.1, "clip": False})), cameras()
    )
    flat = {TOP: torch.full((40, 2, 3, 12, 17), 128, dtype=torch.uint8)}
    noise_of_images = (step(flat, training(torch.arange(40)))[TOP] - 128 / 255) / 0.1
    assert abs(noise_of_images.mean()) < 0.03 and abs(noise_of_images.std() - 1) < 0.03
    assert abs((noise_of_images[:, 0] * noise_of_images[:, 1]).mean()) < 0.03  # frames differ
    assert abs((noise_of_images[1:] * noise_of_images[:-1]).mean()) < 0.03  # samples too
    assert (noise_of_images.abs() > 2).float().mean() == pytest.approx(0.0455, abs=0.01)


# LeRobot's choice


def test_the_defaults_are_lerobots():
    defaults = ImageTransformsConfig()
    assert (defaults.enable, defaults.max_num_transforms, defaults.random_order) == (False, 3, False)
    kinds = {name: (each.weight, each.type, each.kwargs) for name, each in defaults.tfs.items()}
    assert kinds == {
        "brightness": (1.0, "ColorJitter", {"brightness": [0.8, 1.2]}),
        "contrast": (1.0, "ColorJitter", {"contrast": [0.8, 1.2]}),
        "saturation": (1.0, "ColorJitter", {"saturation": [0.5, 1.5]}),
        "hue": (1.0, "ColorJitter", {"hue": [-0.05, 0.05]}),
        "sharpness": (1.0, "SharpnessJitter", {"sharpness": [0.5, 1.5]}),
        "affine": (1.0, "RandomAffine", {"degrees": [-5.0, 5.0], "translate": [0.05, 0.05]}),
    }


def orders_drawn(weights: dict[str, float], count: int, random_order: bool, samples: int = 6000) -> Tensor:
    tfs = {name: ImageTransformConfig(weight, *ALL[name]) for name, weight in weights.items()}
    transforms = read_transforms(ImageTransformsConfig(True, count, random_order, tfs))
    draw = TransformSampler(transforms, count, random_order, [(8, 8)])
    return draw(Noise(0, 0, torch.arange(samples)), samples, torch.device("cpu")).ops[:, 0]


def test_transforms_are_chosen_by_weight_without_repetition():
    weights = {"brightness": 1.0, "contrast": 2.0, "saturation": 5.0, "hue": 0.0}
    ops = orders_drawn(weights, 2, random_order=True)
    values = {ImageOp.BRIGHTNESS: 1 / 8, ImageOp.CONTRAST: 2 / 8, ImageOp.SATURATION: 5 / 8}
    for first, second in itertools.permutations(values, 2):  # as torch.multinomial draws one after the other
        expected = values[first] * values[second] / (1 - values[first])
        share = ((ops[:, 0] == first) & (ops[:, 1] == second)).float().mean().item()
        assert share == pytest.approx(expected, abs=0.03)
    assert not (ops[:, 0] == ops[:, 1]).any() and not (ops == ImageOp.HUE).any()


def test_without_random_order_they_are_applied_as_listed():
    ops = orders_drawn({"hue": 1.0, "brightness": 1.0, "contrast": 1.0}, 2, random_order=False)
    assert {tuple(row) for row in ops.tolist()} == {(4, 1), (4, 2), (1, 2)}


def test_more_transforms_than_there_are_means_all_of_them():
    assert (
        orders_drawn({"hue": 1.0, "brightness": 1.0}, 3, random_order=False, samples=5).tolist()
        == [[4, 1]] * 5
    )


def test_several_colours_in_one_transform_come_in_a_random_order():
    ops = orders_drawn({"jitter": 1.0}, 1, random_order=False)
    assert {*map(tuple, ops.tolist())} == {*itertools.permutations((1, 2, 3, 4))}


def test_erasing_happens_with_its_probability():
    step = augmentation(settings(erase=(1.0, "RandomErasing", {"p": 0.3, "value": 1.0})), cameras())
    erased = step({TOP: torch.zeros(500, 1, 3, 12, 17, dtype=torch.uint8)}, training(torch.arange(500)))[TOP]
    assert erased.flatten(1).any(1).float().mean().item() == pytest.approx(0.3, abs=0.07)


# keyed noise


@pytest.mark.parametrize("channels", [3, 1])
def test_a_sample_looks_the_same_however_its_batch_is_split(channels):
    step, batch, ids = made(*ALL, channels=channels), images(12, channels), torch.arange(12) * 31
    augmented_batch = step(batch, training(ids))
    for size in (1, 5):
        parts = [
            step({name: value[n : n + size] for name, value in batch.items()}, training(ids[n : n + size]))
            for n in range(0, 12, size)
        ]
        for name in batch:
            assert torch.equal(torch.cat([part[name] for part in parts]), augmented_batch[name])
    assert all(value.isfinite().all() for value in augmented_batch.values())


def test_another_step_seed_or_sample_looks_different():
    step, batch = made("brightness", "contrast", "crop"), images(4)
    ids = torch.arange(4)
    contexts = training(ids), training(ids, step=8), training(ids, seed=2), training(ids + 4)
    results = [step(batch, context)[TOP] for context in contexts]
    for first, second in itertools.combinations(results, 2):
        assert all(not torch.equal(*pair) for pair in zip(first, second))
    assert torch.equal(step(batch, training(ids))[TOP], results[0])


def test_a_graph_draws_the_same():
    step, batch, ids = made(*ALL), images(4), torch.arange(4)
    keys = NoiseKeys(torch.device("cpu"))
    step(batch, StepContext(training=True, noise=GraphNoise(keys, ids)))  # finds out which names are drawn
    assert len(keys.places) == 1  # one draw for everything: each takes a GPU dozens of small kernels
    keys.write(1, 7)
    replayed = step(batch, StepContext(training=True, noise=GraphNoise(keys, ids)))
    assert all(torch.equal(replayed[name], value) for name, value in step(batch, training(ids)).items())


@pytest.mark.parametrize("name", [name for name in ALL if name != "noise"])
def test_all_frames_of_a_window_get_the_same(name):
    still = {TOP: images(6, frames=1)[TOP].expand(-1, 3, -1, -1, -1)}
    frames = made(name)(still, training(torch.arange(6)))[TOP]
    assert torch.equal(frames[:, 0], frames[:, 1]) and torch.equal(frames[:, 0], frames[:, 2])
    assert not torch.equal(frames[:, 0], still[TOP][:, 0] / 255)


def test_each_camera_has_its_own_choice():
    both = {TOP: PolicyFeature(Kind.VISUAL, (3, 8, 8)), WRIST: PolicyFeature(Kind.VISUAL, (3, 8, 8))}
    step = augmentation(settings("brightness", "crop"), both)
    same = images(8)[TOP][..., :8, :8]
    augmented_batch = step({TOP: same, WRIST: same}, training(torch.arange(8)))
    assert all(not torch.equal(*pair) for pair in zip(augmented_batch[TOP], augmented_batch[WRIST]))


# the kernels


def as_kernels(monkeypatch, yes: bool) -> None:
    monkeypatch.setattr(module, "has_kernels", lambda _: yes)


@pytest.mark.gpu
@pytest.mark.parametrize("channels", [3, 1])
@pytest.mark.parametrize("name", ALL)
def test_kernels_compute_the_same(name, channels, monkeypatch):
    step, batch = made(name, "brightness", channels=channels, count=2), images(16, channels)
    batch, ids = {key: value.cuda() for key, value in batch.items()}, torch.arange(16).cuda()
    results = {}
    for fused in (True, False):
        as_kernels(monkeypatch, fused)
        results[fused] = step(batch, training(ids))
    for key in batch:
        far = (results[True][key] - results[False][key]).abs()
        assert (far > 2e-5).float().mean() < 1e-3  # a nearest neighbour may be another


INTERPRETED = """
import torch
from flexor.policies.augment import step as module
from test_augment import ALL, images, made, training
step, batch, ids = made(*[name for name in ALL if name != "jitter"], count=2), images(12, frames=1), torch.arange(12)
found = {}
for fused in (True, False):
    module.has_kernels = lambda _: fused
    found[fused] = step(batch, training(ids))
for key in batch:
    assert ((found[True][key] - found[False][key]).abs() > 2e-5).float().mean() < 1e-3
"""


def test_kernels_compute_the_same_in_tritons_interpreter():
    pytest.importorskip("triton")
    folders = [*sys.path, str(Path(__file__).parent)]
    environment = {
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": ":".join(folders),
        "PATH": "",
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run(
        [sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_kernels_know_the_numbers_of_the_operations():
    source = Path(triton_folder.__file__).with_name("augment.py")
    numbers: dict[str, int] = {}
    for line in source.read_text().splitlines():
        left, _, right = line.partition(" = (tl.constexpr(n) for n in (")
        if right:
            numbers |= dict(zip(left.split(", "), map(int, right.rstrip("):").split(", "))))
    assert numbers == {op.name: op.value for op in ImageOp if op is not ImageOp.IDENTITY}


@pytest.mark.parametrize("name", ALL)
def test_a_plan_sees_what_a_gpu_does(name):
    step = made(name)
    batch = {key: value.to("meta") for key, value in images(3).items()}
    augmented_batch = step(batch, training(torch.arange(3, device="meta")))
    for key in batch:
        assert augmented_batch[key].shape == batch[key].shape and augmented_batch[key].dtype == torch.float32


def test_without_a_look_at_what_was_chosen_it_is_the_same(monkeypatch):
    """As on a GPU without Triton."""
    step, batch, ids = made(*ALL), images(12), torch.arange(12)
    expected = step(batch, training(ids))
    monkeypatch.setattr(
        module, "apply_slot", lambda *arguments, look: plain.apply_slot(*arguments, look=False)
    )
    augmented_batch = step(batch, training(ids))
    assert all(torch.equal(augmented_batch[name], value) for name, value in expected.items())


# the processing around it


def before_the_policy() -> Pipeline:
    config = ACTConfig(input_features=cameras(), output_features={"action": PolicyFeature(Kind.ACTION, (2,))})
    image = {"mean": [[[0.4]]] * 3, "std": [[[0.2]]] * 3}
    stats = {TOP: image, WRIST: image, "action": {"mean": [0.0, 0.0], "std": [1.0, 1.0]}}
    return config.pipelines(stats, "cpu")[0]


def test_images_are_augmented_before_they_are_normalised():
    before, step, batch = before_the_policy(), made("brightness"), images(3)
    pipeline = augmented(before, step)
    assert [*map(type, pipeline.steps)] == [
        *map(type, before.steps[:3]),
        AugmentImages,
        type(before.steps[3]),
    ]
    context = training(torch.arange(3))
    expected = (step(batch, context)[TOP] - 0.4) / (0.2 + 1e-8)
    assert torch.allclose(pipeline(batch, context)[TOP], expected, atol=1e-6)


def test_outside_of_training_nothing_is_augmented():
    before, batch = before_the_policy(), images(3)
    expected, augmented_batch = before(batch), augmented(before, made(*ALL))(batch)
    assert all(torch.equal(augmented_batch[name], value) for name, value in expected.items())


def test_what_is_off_is_not_there():
    off = ImageTransformsConfig()
    assert augmentation(off, cameras()) is None
    assert augmentation(settings(), cameras()) is None  # no transforms
    assert augmentation(settings("hue"), {}) is None
    before = before_the_policy()
    assert augmented(before, None) is before


def test_depth_is_left_as_it_is():
    step = augmentation(settings("brightness"), cameras(), skip=[WRIST])
    batch = images(3)
    context = StepContext(training=True, noise=training(torch.arange(3)).noise, keeps_bytes=True)
    augmented_batch = step(batch, context)
    assert augmented_batch[WRIST] is batch[WRIST] and augmented_batch[TOP].dtype == torch.float32


def test_a_policy_without_a_place_for_it_is_refused():
    with pytest.raises(ConfigError, match="has neither the step Normalize nor ToDevice"):
        augmented(Pipeline("before", []), made("hue"))


# refusals

WRONG = {
    "type": (("MotionBlur", {}), r"one\.type='MotionBlur' is not supported.*Identity.*--dataset.*weight=0"),
    "nearly a type": (("ColourJitter", {}), "Did you mean ColorJitter"),
    "argument": (
        ("ColorJitter", {"brightnes": 1}),
        r"Unknown setting .*\.kwargs\.brightnes=1\. Did you mean .*ness",
    ),
    "no arguments": (("Identity", {"p": 1}), "Identity takes no arguments"),
    "text": (
        ("ColorJitter", {"hue": "a lot"}),
        r"kwargs\.hue='a lot' is not valid for ColorJitter: expected a number",
    ),
    "order": (("ColorJitter", {"contrast": [1.2, 0.8]}), "the lower value first"),
    "negative": (("ColorJitter", {"saturation": [-1, 1]}), "at least 0"),
    "hue": (("ColorJitter", {"hue": [-0.6, 0.1]}), "from -0.5 to 0.5"),
    "hue as a number": (("ColorJitter", {"hue": 0.6}), "from 0 to 0.5"),
    "one": (("ColorJitter", {"contrast": [1.0]}), r"expected \[low, high\]"),
    "infinite": (("SharpnessJitter", {"sharpness": float("inf")}), "expected a number"),
    "nothing": (("SharpnessJitter", {}), r"sharpness=None is not valid"),
    "no angle": (("RandomAffine", {}), r"degrees=None is not valid"),
    "shift": (("RandomAffine", {"degrees": 1, "translate": [0, 2]}), "from 0 to 1"),
    "one shift": (("RandomAffine", {"degrees": 1, "translate": 0.1}), "part of the width"),
    "scale": (("RandomAffine", {"degrees": 1, "scale": [0, 2]}), "above 0"),
    "way": (("RandomAffine", {"degrees": 1, "interpolation": "bicubic"}), "expected nearest or bilinear"),
    "fill": (("RandomAffine", {"degrees": 1, "fill": [1, 2]}), "each of three channels"),
    "centre": (("RandomAffine", {"degrees": 1, "center": 4}), r"\[x, y\]"),
    "size": (("RandomResizedCrop", {"size": [0, 2]}), r"\[height, width\]"),
    "ratio": (("RandomResizedCrop", {"ratio": [0, 2]}), "above 0"),
    "kernel": (("GaussianBlur", {"kernel_size": 4}), "an odd number of pixels"),
    "no kernel": (("GaussianBlur", {}), "an odd number of pixels"),
    "sigma": (("GaussianBlur", {"kernel_size": 3, "sigma": 0}), "above 0"),
    "noise": (("GaussianNoise", {"std": [-1, 1]}), "at least 0"),
    "both kinds of noise": (("GaussianNoise", {"std": 1, "sigma": 1}), r"Unknown setting .*\.sigma"),
    "probability": (("RandomErasing", {"p": 2}), "from 0 to 1"),
    "value": (("RandomErasing", {"value": "black"}), "expected a number"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_can_not_be_is_refused_with_its_name(name):
    entry, message = WRONG[name]
    with pytest.raises(ConfigError, match=message) as error:
        read_transforms(settings(one=(1.0, *entry)))
    assert str(error.value).removeprefix("Unknown setting ").startswith("dataset.image_transforms.tfs.one.")


def test_a_negative_weight_is_refused():
    with pytest.raises(ConfigError, match=r"tfs\.one\.weight=-1 must be at least 0"):
        read_transforms(settings(one=(-1, "Identity", {})))


def test_what_has_no_weight_may_be_anything():
    assert read_transforms(settings("hue", one=(0.0, "JPEGCompression", {"quality": 3})))[0].name == "hue"


def test_images_of_another_size_are_refused():
    for kind, arguments, message in (
        ("RandomResizedCrop", {"size": [8, 8]}, r"size=\[8, 8\], but images of .*top are \[12, 17\]"),
        ("GaussianBlur", {"kernel_size": 23}, r"kernel_size=\[23, 23\] is too large for images of .*wrist"),
    ):
        with pytest.raises(ConfigError, match=message):
            augmentation(settings(one=(1.0, kind, arguments)), cameras())
    with pytest.raises(ConfigError, match="top has 4 channels"):
        augmentation(settings("hue"), cameras(4))
    assert augmentation(settings(one=(1.0, "RandomResizedCrop", {"size": [12, 17]})), {TOP: cameras()[TOP]})


def test_the_default_of_lerobot_leaves_nothing_out():
    assert [each.name for each in read_transforms(ImageTransformsConfig())] == [*default_transforms()]


def test_a_misspelt_transform_is_refused():
    with pytest.raises(ConfigError, match=r"tfs\.brightnes\. Did you mean brightness\?.*needs a type"):
        load_config(["--config=demo", "--dataset.image_transforms.tfs.brightnes.weight=0"])
    both = [
        "--dataset.image_transforms.tfs.mine.type=ColorJitter",
        "--dataset.image_transforms.tfs.hue.weight=2",
    ]
    transforms = load_config(["--config=demo", *both]).dataset.image_transforms
    words = "brightness, contrast, saturation, hue (weight 2), sharpness, affine, mine; 3 per image"
    assert describe_transforms(transforms) == words
