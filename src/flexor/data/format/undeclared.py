"""Columns that the tables have although meta/info.json does not declare them: LeRobot's own, states and actions."""

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
    """Those columns of a table, with the types and shapes that they have in it. None if it can't be read."""
    try:
        with pq.ParquetFile(file) as table:
            schema = table.schema_arrow
            names = [name for name in schema.names if name not in {*declared}]
            used = [name for name in names if name in DEFAULT_FEATURES or name.startswith(PREFIXES)]
            row = next(table.iter_batches(1, columns=used), None) if used else None
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        return {}
    features = {name: _feature(name, schema.field(name).type, row) for name in used} if row else {}
    return {name: feature for name, feature in features.items() if feature is not None}


def _feature(name: str, kind: pa.DataType, row: pa.RecordBatch) -> Feature | None:
    """None if the column has no numbers, or matrices."""
    width = 1
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        first = row[name][0].as_py()
        kind, width = kind.value_type, len(first) if first else 0
    number = pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_floating(kind)
    if not number or not 0 < width <= LARGEST_FRAME or (name in DEFAULT_FEATURES and width != 1):
        return None
    return Feature(name, str(np.dtype(kind.to_pandas_dtype())), (width,))
