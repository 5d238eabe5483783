"""The columns of an episode as they are written into a new dataset."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pyarrow as pa

from flexor.data.check.layout import Layout
from flexor.data.check.tables import numbers
from flexor.data.format.metadata import Feature
from flexor.data.format.schema import LANGUAGE
from flexor.data.frames.clips import image_bytes, image_frame
from flexor.data.repair.tables import Columns
from flexor.pages.images import png


def episode_columns(layout: Layout, columns: Columns, rows: pa.Table) -> dict[str, Any]:
    """Arrays of numbers [T, ...], lists of texts or encoded images, annotations. None for what is no image.

    A column that does not have its declared shape raises a ValueError that says how it differs.
    """
    result: dict[str, Any] = {}
    for name in rows.column_names:
        feature = columns.feature(name)
        if feature.is_numeric:
            values = numbers(rows[name], feature)
            if isinstance(values, str):
                raise ValueError(f"{name}: {values}")
            shape = () if feature.shape == (1,) else feature.shape
            result[name] = values.reshape(len(values), *shape)
        elif feature.dtype == LANGUAGE:
            result[name] = rows[name]
        elif feature.is_image:
            result[name] = _images(layout.features.get(name, feature), rows[name])
        else:
            result[name] = rows[name].to_pylist()
    return result


def _images(declared: Feature, column: pa.ChunkedArray) -> list[bytes | None]:
    """Arrays of pixels become PNG images."""
    images = image_bytes(column).to_pylist()
    if not declared.is_array:
        return images
    with suppress(ValueError):  # another size than declared
        return [image and png(image_frame(image, declared).to_ndarray(format="rgb24")) for image in images]
    return [None] * len(images)
