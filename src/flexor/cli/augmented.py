"""`flexor data show --augmented`: what image augmentation makes of a dataset's images."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from flexor.core.console import print_result, progress
from flexor.core.errors import ConfigError
from flexor.core.output_paths import check_output_file, make_parents


def add_flags(verb: Any) -> None:
    verb.add_argument(
        "--augmented",
        type=Path,
        metavar="FILE.png",
        help="instead write a picture of augmented images, with settings of `flexor train`, such as "
        "--dataset.image_transforms.max_num_transforms=2 or --config=FILE",
    )


def run(parsed: argparse.Namespace, address: dict[str, Any], settings: list[str]) -> int:
    """`address`: of the dataset, as arguments of `open_dataset`; `settings`: those of a training run."""
    from flexor.config.parse import load_config
    from flexor.data.dataset import open_dataset
    from flexor.data.settings import parse_image_size
    from flexor.pages.images import png
    from flexor.policies.augment.grid import augmented_grid

    path: Path = parsed.augmented
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--augmented={path}: name a .png file.")
    check_output_file(path, "--augmented")
    config = load_config([*settings, f"--dataset.root={parsed.root}"])
    transforms = replace(config.dataset.image_transforms, enable=True)
    dataset = open_dataset(**address, size=parse_image_size(config.dataset.cache.size))
    grid = augmented_grid(dataset, transforms, seed=config.seed, progress=progress("augmenting"))
    make_parents(path).write_bytes(png(grid))
    names = [name for name, each in transforms.tfs.items() if each.weight > 0]
    count = min(transforms.max_num_transforms, len(names))
    text = (
        f"wrote {path}: in each row a camera's image as recorded, then as in the first training steps, with {count} "
        f"of {', '.join(names)}"
    )
    print_result({"file": str(path), "transforms": names, "per_image": count}, parsed.json, text)
    return 0
