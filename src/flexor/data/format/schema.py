"""Which features a dataset may have, and how a frame's values are checked and stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from flexor.core.errors import DatasetError

DEFAULT_FEATURES: dict[str, dict[str, Any]] = {
    "timestamp": {"dtype": "float32", "shape": [1], "names": None},
    "frame_index": {"dtype": "int64", "shape": [1], "names": None},
    "episode_index": {"dtype": "int64", "shape": [1], "names": None},
    "index": {"dtype": "int64", "shape": [1], "names": None},
    "task_index": {"dtype": "int64", "shape": [1], "names": None},
}
"""The columns of every dataset. The writer fills them in; a frame must not contain them."""

NUMERIC = {
    *("float16", "float32", "float64", "bool"),
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
}

LANGUAGE = "language"
"""The dtype of columns with annotations of what is said and done: a list of records in each row. They are copied."""

EVENTS = "language_events"
ANNOTATIONS = ("language_persistent", EVENTS)
"""LeRobot's columns of this dtype."""


def checked_features(features: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The features, each shape as a plain list; raises an error if a feature is invalid."""
    checked = {}
    for name, feature in features.items():
        dtype, shape = feature.get("dtype"), list(feature.get("shape", []))
        where = f"feature {name!r}"
        if "/" in name:
            raise DatasetError(f"{where}: the name of a feature must not contain '/'. Use '.' instead.")
        if dtype not in NUMERIC | {"image", "video", "string"}:
            numeric = ", ".join(sorted(NUMERIC))
            raise DatasetError(
                f"{where}: unknown dtype {dtype!r}. Use video, image, string or one of {numeric}."
            )
        if not shape or not all(isinstance(n, int) and n > 0 for n in shape):
            raise DatasetError(
                f"{where}: shape {shape} must be positive integers; use [1] for a single number."
            )
        if dtype in ("image", "video") and (len(shape) != 3 or shape[2] != 3):
            raise DatasetError(f"{where}: a camera's shape is [height, width, 3], got {shape}.")
        if dtype == "string" and shape != [1]:
            raise DatasetError(f"{where}: a string's shape is [1], got {shape}.")
        checked[name] = {"dtype": dtype, "shape": shape, "names": feature.get("names")}
    if not any(name not in DEFAULT_FEATURES for name in checked):
        raise DatasetError('No features given. Give at least {"action": {"dtype": ..., "shape": ...}}.')
    return checked


def checked_value(where: str, value: Any, feature: dict[str, Any]) -> Any:
    """The value as an array of the declared type and shape, or text."""
    dtype, shape = feature["dtype"], tuple(feature["shape"])
    if dtype == "string":
        if not isinstance(value, str):
            raise DatasetError(f"{where} must be a string, got {type(value).__name__}.")
        return value
    expected = np.dtype("uint8" if dtype in ("image", "video") else dtype)
    array = np.asarray(value)
    # A Python number or list has no fixed dtype: accept it if the kind (such as integer or float) fits.
    if not hasattr(value, "dtype") and np.can_cast(array.dtype, expected, "same_kind"):
        array = array.astype(expected)
    if array.dtype != expected:
        raise DatasetError(
            f"{where} must be {expected}, got {array.dtype}. Convert it: value.astype('{expected}')."
        )
    if array.shape != shape and not (array.shape == () and shape == (1,)):
        turned = array.ndim == 3 and array.transpose(1, 2, 0).shape == shape
        hint = " Images must be height x width x channels: use transpose(1, 2, 0)." if turned else ""
        raise DatasetError(f"{where} must have shape {shape}, got {array.shape}.{hint}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        bad = np.count_nonzero(~np.isfinite(array))
        raise DatasetError(
            f"{where}: {bad} of {array.size} values are NaN or infinite. Leave the episode out."
        )
    return array.copy().reshape(shape)


def arrow_type(feature: dict[str, Any], values: object = None) -> pa.DataType:
    """The feature's Arrow type as `datasets` writes it: fixed-size lists for vectors, nested lists for more axes.

    Annotations have the type of their `values`, which are copied.
    """
    if feature["dtype"] == LANGUAGE:
        assert isinstance(values, pa.Array | pa.ChunkedArray), feature
        return values.type
    if feature["dtype"] == "image":
        return pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    kind = pa.string() if feature["dtype"] == "string" else pa.from_numpy_dtype(feature["dtype"])
    shape = feature["shape"]
    if shape == [1]:
        return kind
    if len(shape) == 1:
        return pa.list_(kind, shape[0])
    for _ in shape:
        kind = pa.list_(kind)
    return kind


def hf_feature(feature: dict[str, Any]) -> dict[str, Any]:
    """The feature as the `huggingface` entry of the parquet schema describes it."""
    dtype, shape = feature["dtype"], feature["shape"]
    if dtype == "image":
        return {"_type": "Image"}
    assert dtype != LANGUAGE, "its records have no description here"
    if shape == [1]:
        return {"dtype": dtype, "_type": "Value"}
    if len(shape) == 1:
        return {"feature": {"dtype": dtype, "_type": "Value"}, "length": shape[0], "_type": "List"}
    return {"shape": shape, "dtype": dtype, "_type": f"Array{len(shape)}D"}
