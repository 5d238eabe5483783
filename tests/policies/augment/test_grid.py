"""`flexor data show --augmented`: a picture of what a policy will see."""

import io
import json

import av
import numpy as np
import pytest

from flexor.cli.main import main
from flexor.core.errors import ConfigError
from flexor.data.dataset import open_dataset
from flexor.data.settings import ImageTransformConfig, ImageTransformsConfig
from flexor.policies.augment.grid import GAP, SMALLEST, augmented_grid


def read(path) -> np.ndarray:
    with av.open(io.BytesIO(path.read_bytes()), format="png_pipe") as container:
        return next(container.decode(video=0)).to_ndarray(format="rgb24")


def test_the_first_column_is_what_was_recorded(dataset):
    opened = open_dataset(root=dataset)
    names = opened.cameras
    times = {name: SMALLEST // opened.features[name].chw[2] for name in names}
    sizes = [tuple(side * times[name] for side in opened.features[name].chw[1:]) for name in names]
    assert min(times.values()) > 1  # they are small
    bright = {"b": ImageTransformConfig(1.0, "ColorJitter", {"brightness": [0.5, 0.5]})}
    settings = ImageTransformsConfig(True, 1, False, bright)
    done = []
    grid = augmented_grid(
        opened, settings, seed=1, samples=2, steps=3, progress=lambda *now: done.append(now)
    )
    assert done == [(1, 2), (2, 2)]
    assert grid.shape[0] == GAP + 2 * sum(height + GAP for height, _ in sizes)
    rows, top = [0, len(opened) - 1], GAP
    for row in rows:
        for name, (height, width) in zip(names, sizes):
            image = opened.read([row], cameras=[name])[name][0].transpose(1, 2, 0)
            image = image.repeat(times[name], 0).repeat(times[name], 1)
            line = grid[top : top + height]
            assert np.array_equal(line[:, GAP : GAP + width], image)
            second = line[:, 2 * GAP + width : 2 * (GAP + width)]
            assert np.abs(second - image * 0.5).max() <= 0.51
            top += height + GAP


def test_a_picture_is_written(dataset, tmp_path, capsys):
    file = tmp_path / "grid.png"
    flags = ["--dataset.image_transforms.max_num_transforms=2", "--dataset.image_transforms.tfs.hue.weight=0"]
    assert main(["data", "show", str(dataset), f"--augmented={file}", "--json", *flags]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["per_image"] == 2 and "hue" not in report["transforms"] and len(report["transforms"]) == 5
    picture = read(file)
    assert picture.shape[0] > 50 and len(np.unique(picture)) > 50
    assert main(["data", "show", str(dataset), f"--augmented={tmp_path / 'again.png'}", *flags]) == 0
    assert (tmp_path / "again.png").read_bytes() == file.read_bytes()
    assert "in each row" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--augmented=grid.jpg"], "name a .png file"),
        (
            ["--augmented=x.png", "--dataset.image_transforms.tfs={a: {type: Blur}}"],
            "'Blur' is not supported",
        ),
        (["--augmented=x.png", "--dataset.image_transforms.tfs={}"], "No image transform has a weight"),
        (["--augmented=x.png", "--no.such.thing=1"], "Unknown setting no.such.thing"),
    ],
)
def test_what_can_not_be_shown_is_refused(flags, message, dataset, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["data", "show", str(dataset), *flags]) != 0
    assert message in capsys.readouterr().err
    assert not [*tmp_path.iterdir()]


def test_a_dataset_without_cameras_is_refused(lowdim):
    with pytest.raises(ConfigError, match="has no cameras to augment"):
        augmented_grid(open_dataset(root=lowdim), ImageTransformsConfig(True), seed=0)
