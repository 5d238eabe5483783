"""Depth maps as LeRobot 0.6.1 wrote them (tests/golden/depth, made by tests/parity/depth.py): read, checked, batched,
normalised and shown. The live comparison is `make parity`."""

import contextlib
import json
import shutil
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from flexor.cli import main as cli
from flexor.core.batch import SAMPLE_ID
from flexor.core.errors import DatasetError
from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.format.depth import DepthScale, depths_of_codes
from flexor.data.format.stats import to_json
from flexor.data.loader.loader import Loader
from flexor.data.loader.open import open_loader
from flexor.data.repair.repair import repair_dataset
from flexor.data.settings import CacheConfig, DatasetConfig
from flexor.data.show.strips import depth_colours
from flexor.data.statistics import compute_stats, in_stored_unit
from flexor.data.video.on_device import rgb_on_device
from flexor.data.video.planes import PlaneFormat, to_rgb
from flexor.data.video.tiff import float_tiff
from flexor.policies.act.config import ACTConfig
from flexor.policies.fit import fit_to_dataset, statistics
from flexor.policies.processing.pipeline import PREPROCESSOR, Pipeline
from parity.depth import CASES, DEPTH, rows
from support.damage import edit_json
from support.own_policy import own_policy

GOLDEN = Path(__file__).parents[1] / "golden/depth"


def copied(tmp_path: Path, name: str, **info: object) -> Path:
    """A stored dataset with another `info` of its depth map."""
    root = tmp_path / name
    shutil.copytree(GOLDEN / name, root)

    def change(data: dict) -> None:
        feature = data["features"][DEPTH]["info"]
        feature.update(info)
        for key in [key for key, value in feature.items() if value is None]:
            del feature[key]

    edit_json(root / "meta/info.json", change)
    return root


def test_depths_and_statistics_are_those_that_lerobot_reads():
    compared = dict(rows(GOLDEN))
    assert len(compared) == 4 * len(CASES) and max(compared.values()) < 1e-6


def test_codes_are_spread_like_a_logarithm():
    table = depths_of_codes(DepthScale(output="m"))
    assert (
        table[0] == pytest.approx(0.01, abs=1e-5)
        and table[-1] == pytest.approx(10)
        and (np.diff(table) > 0).all()
    )
    steps = np.diff(np.log(table.astype(np.float64) + 3.5))
    assert steps.min() == pytest.approx(steps.max(), rel=2e-2)
    full = depths_of_codes(DepthScale())
    assert np.array_equal(full, np.rint(full)) and abs(full / 1000 - table).max() <= 0.0005 + 1e-6


@pytest.mark.parametrize("name", CASES)
def test_a_dataset_of_lerobots_has_no_problem(name: str):
    assert check_dataset(GOLDEN / name).findings == []


@pytest.mark.parametrize(
    ("info", "kind"),
    [
        ({"video.depth_min": 11.0}, "depth-scale"),
        ({"video.shift": -5.0}, "depth-scale"),
        ({"depth_unit": "inch"}, "depth-scale"),
        ({"depth_unit": None}, "depth-unit"),
    ],
)
def test_a_scale_without_meaning_is_found(tmp_path: Path, info: dict, kind: str):
    root = copied(tmp_path, "video", **info)
    problems = [problem.name for problem in check_dataset(root, deep=False).findings]
    assert problems == [kind]
    dataset = open_dataset(root=root)
    assert (DEPTH in dataset.absent) == (kind == "depth-scale")


def test_a_malformed_scale_is_no_traceback(tmp_path: Path):
    root = copied(tmp_path, "video", **{"video.depth_min": "near"})
    with pytest.raises(DatasetError, match="near"):
        open_dataset(root=root)
    assert any(problem.name == "info-field" for problem in check_dataset(root, deep=False).findings)


def test_without_a_unit_images_stay_as_they_are(tmp_path: Path):
    root = copied(tmp_path, "uint16", depth_unit=None)
    in_m, in_mm = (open_dataset(root=root, depth_unit=unit).read([0])[DEPTH] for unit in ("m", "mm"))
    assert np.array_equal(in_m, in_mm) and in_mm.max() == 12_000


@pytest.mark.parametrize("name", CASES)
def test_computed_statistics_are_close_to_those_of_the_recording(name: str):
    dataset = open_dataset(root=GOLDEN / name, depth_unit="m")
    stored = json.loads((GOLDEN / name / "meta/stats.json").read_text())[DEPTH]
    computed = to_json(in_stored_unit(dataset, compute_stats(dataset, [DEPTH])))[DEPTH]
    assert computed["count"] == stored["count"]
    coarse = name in ("video", "linear")  # cut off at the greatest depth, and rounded to codes
    for key in ("mean", "q50") if coarse else stored:
        far = 0.2 if coarse and key == "mean" else 0.01 if coarse else 2e-3
        assert np.ravel(computed[key]) == pytest.approx(np.ravel(stored[key]), rel=far, abs=1e-3)


@pytest.mark.parametrize(("tier", "cached"), [("stream", "raw"), ("ram", "raw"), ("ram", "jpeg")])
@pytest.mark.parametrize("name", CASES)
def test_batches_have_the_same_depths(name: str, tier: str, cached: str):
    """Also where other cameras are cached as JPEG: depth maps never are."""
    dataset = open_dataset(root=GOLDEN / name)
    settings = DatasetConfig(cache=CacheConfig(tier=tier, gb=0.1, format=cached))
    loader = open_loader(dataset, settings, {DEPTH: [-1, 0]}, cameras=[DEPTH], batch_size=4)
    assert isinstance(loader, Loader)
    for (batch,) in loader.steps(0, 5):
        expected = dataset.read(batch[SAMPLE_ID].numpy(), {DEPTH: [-1, 0]})[DEPTH]
        assert batch[DEPTH].dtype == torch.float32
        assert np.array_equal(batch[DEPTH].numpy(), expected)


@pytest.mark.parametrize(
    ("layout", "unit"), [("gray12", "mm"), ("gray16", "m"), ("gray16", "mm"), ("grayf32", "m")]
)
def test_the_same_depths_on_a_device(layout: str, unit: str):
    format = PlaneFormat(6, 10, layout, depth=DepthScale(unit=unit))
    rng = np.random.default_rng(0)
    if layout == "grayf32":
        pixels = rng.uniform(0, 9, (3, 60)).astype("<f4")
    else:
        pixels = rng.integers(0, 4096 if layout == "gray12" else 65_536, (3, 60), dtype=np.uint16)
    planes = pixels.view(np.uint8).reshape(3, -1)
    assert planes.shape[1] == format.nbytes
    depths = rgb_on_device(format, torch.from_numpy(planes.copy()))
    assert depths.shape == (3, 1, 6, 10) and depths.dtype == torch.float32
    for i in range(3):
        exact = np.empty((6, 10, 1), np.float32)
        to_rgb(format, planes[i], exact)
        assert np.array_equal(depths[i, 0].numpy(), exact[..., 0])


def test_scaling_invents_no_depths():
    full = open_dataset(root=GOLDEN / "uint16").read([0])[DEPTH]
    small = open_dataset(root=GOLDEN / "uint16", size=(12, 16)).read([0])[DEPTH]
    assert small.shape == (1, 1, 12, 16) and set(small.ravel()) <= set(full.ravel())


@dataclass
class DepthPolicyConfig(ACTConfig):
    takes_depth: ClassVar[bool] = True


def test_a_policy_that_takes_depth_gets_it_normalised():
    dataset = open_dataset(root=GOLDEN / "video", depth_unit="m")
    policy = fit_to_dataset(DepthPolicyConfig(), dataset)
    assert policy.input_features[DEPTH].shape == (1, 24, 40)
    stats = statistics(dataset, policy, use_imagenet=True)
    assert stats[DEPTH]["mean"].shape == (1, 1, 1) and 0.5 < stats[DEPTH]["mean"].item() < 5  # not ImageNet's
    batch = {DEPTH: torch.from_numpy(dataset.read([0, 1])[DEPTH])}
    depths = Pipeline(PREPROCESSOR, policy.steps_before(stats))(dict(batch))[DEPTH]
    expected = (batch[DEPTH] - stats[DEPTH]["mean"].item()) / (stats[DEPTH]["std"].item() + 1e-8)
    assert torch.allclose(depths, expected, atol=1e-5)


LOOKS = """
        self.layer = torch.nn.Linear(2, 2)
    def loss(self, batch, noise):
        depth = batch["observation.images.depth"]
        assert depth.dtype == torch.float32 and depth.shape[1:] == (1, 24, 40)
        assert abs(depth.mean()) < 3  # normalised, not millimetres
        seen = torch.stack([depth.mean((1, 2, 3)), depth[:, 0, 10, 10]], 1)
        return Loss(((self.layer(seen) - batch["action"][:, 0]) ** 2).mean(1), {})
    def predict(self, batch, noise):
        depth = batch["observation.images.depth"]
        return self.layer(torch.stack([depth.mean((1, 2, 3)), depth[:, 0, 10, 10]], 1))[:, None]
"""


def test_a_policy_of_ones_own_is_trained_on_depth(tmp_path: Path):
    takes = """    from typing import ClassVar
    from dataclasses import field
    takes_depth: ClassVar[bool] = True
    normalization_mapping: dict = field(default_factory=lambda: {"VISUAL": "MEAN_STD"})
"""
    (tmp_path / "sees.py").write_text(own_policy(LOOKS, takes))
    flags = [
        f"--policy.type={tmp_path / 'sees.py'}:Own",
        "--policy.device=cpu",
        "--steps=2",
        "--batch_size=2",
    ]
    flags += [f"--dataset.root={GOLDEN / 'video'}", f"--output_dir={tmp_path / 'run'}"]
    assert cli.main(["train", *flags]) == 0


def test_other_policies_train_without_it(log_lines: list[str]):
    dataset = open_dataset(root=GOLDEN / "video")
    assert DEPTH not in fit_to_dataset(ACTConfig(), dataset).input_features
    assert any(f"{DEPTH} is not used" in line for line in log_lines)


@pytest.mark.parametrize("name", ["video", "float32"])
def test_repair_keeps_depth_maps(tmp_path: Path, name: str):
    report = repair_dataset(GOLDEN / name, tmp_path / "new")
    assert report.ok
    first, second = (open_dataset(root=root) for root in (GOLDEN / name, tmp_path / "new"))
    assert np.array_equal(first.read([0, 5])[DEPTH], second.read([0, 5])[DEPTH])


def test_near_and_far_have_colours_and_nothing_is_black():
    colours = depth_colours(np.array([[0.0, 500, 2000, np.nan, 9000]]), 500, 2000)
    assert (depth_colours(np.full((1, 1), 10.0), 500, 2000, nothing=10.0) == 0).all()
    assert colours[0].tolist() == [[0, 0, 0], [253, 231, 37], [68, 1, 84], [0, 0, 0], [68, 1, 84]]


def test_damaged_float_images_are_errors():
    import pyarrow.parquet as pq

    table = pq.read_table(next((GOLDEN / "float32/data").rglob("*.parquet")))
    data = table[DEPTH][0].as_py()["bytes"]
    assert float_tiff(data).shape == (24, 40)
    rng = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(data[: rng.integers(8, len(data))])
        for place in rng.integers(4, len(damaged), 3):
            damaged[place] = rng.integers(256)
        with contextlib.suppress(ValueError):
            float_tiff(bytes(damaged))
    huge = data.replace(struct.pack("<HHII", 256, 4, 1, 40), struct.pack("<HHII", 256, 4, 1, 1 << 27))
    for damaged in (b"II*\0" + struct.pack("<I", 1 << 30), huge):
        with pytest.raises(ValueError, match="damaged"):
            float_tiff(damaged)
    assert huge != data


@pytest.mark.parametrize("order", ["<f4", ">f4"])
def test_float_images_of_both_byte_orders_and_several_strips(order: str):
    depths = np.random.default_rng(0).normal(size=(7, 5)).astype(np.float32)
    depths[0] = np.nan, np.inf, -np.inf, -0.0, 1e-42
    mark = order[0]
    tags = {256: 5, 257: 7, 258: 32, 259: 1, 262: 1, 277: 1, 278: 3, 339: 3}
    strips = [depths[row : row + 3].astype(order).tobytes() for row in range(0, 7, 3)]
    entries = len(tags) + 2
    lists = 8 + 2 + 12 * entries + 4
    place = lists + 2 * 4 * len(strips)
    offsets = [place + sum(map(len, strips[:number])) for number in range(len(strips))]
    values = {tag: struct.pack(f"{mark}HHII", tag, 4, 1, value) for tag, value in tags.items()}
    values[273] = struct.pack(f"{mark}HHII", 273, 4, len(strips), lists)
    values[279] = struct.pack(f"{mark}HHII", 279, 4, len(strips), lists + 4 * len(strips))
    head = (b"II*\0" if mark == "<" else b"MM\0*") + struct.pack(f"{mark}IH", 8, entries)
    head += b"".join(values[tag] for tag in sorted(values)) + struct.pack(f"{mark}I", 0)
    head += struct.pack(f"{mark}6I", *offsets, *map(len, strips))
    assert float_tiff(head + b"".join(strips)).tobytes() == depths.tobytes()
    with pytest.raises(ValueError, match="damaged"):
        float_tiff(head + b"".join(strips)[:-4])
