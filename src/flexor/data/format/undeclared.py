"""Columns that the tables have although meta/info.json does not declare them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.data.format.metadata import LARGEST_FRAME, Feature
from flexor.data.format.schema import DEFAULT_FEATURES

PREFIXES = ("observation.", "action", "next.")


def undeclared_features(file: Path, declared: Iterable[str]) -> dict[str, Feature]:
    """Those that are read like declared ones: LeRobot's own, states and actions. None if the table can't be read."""
    features = stored_features(file, declared)
    numbers = {name: feature for name, feature in features.items() if feature.is_numeric}
    return {n: f for n, f in numbers.items() if n in DEFAULT_FEATURES or n.startswith(PREFIXES)}


def stored_features(file: Path, without: Iterable[str] = ()) -> dict[str, Feature]:
    """The columns of numbers and texts in a table, with the types and shapes that they have in it."""
    try:
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            names = [n for n in schema.names if n not in {*without} and not _is_image(schema.field(n).type)]
            row = next(table.iter_batches(1, columns=names), None) if names else None
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return {}
    features = {name: _feature(name, schema.field(name).type, row) for name in names} if row else {}
    return {name: feature for name, feature in features.items() if feature is not None}


def _is_image(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_binary(kind) or pa.types.is_large_binary(kind))


def _feature(name: str, kind: pa.DataType, row: pa.RecordBatch) -> Feature | None:
    """None if the column has neither numbers nor texts, or matrices."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return Feature(name, "string", (1,))
    width = 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        first = row[name][0].as_py()
        kind, width = kind.value_type, len(first) if first else 0
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not number or not 0 < width <= LARGEST_FRAME or (name in DEFAULT_FEATURES and width != 1):
        return None
    return Feature(name, str(np.dtype(kind.to_pandas_dtype())), (width,))
