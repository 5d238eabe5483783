"""Annotations of an episode that loses its beginning: their times count from its new start."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def shifted(cells: pa.ChunkedArray, seconds: float) -> pa.ChunkedArray:
    """Records in each row, with times that are `seconds` earlier. Records without times are unchanged.

    A record from before the new start gets a negative time: it is still the one that applies at the start.
    """
    chunks = [_shifted(chunk, seconds) for chunk in cells.chunks]
    return pa.chunked_array(chunks, type=cells.type)


def _shifted(cells: pa.Array, seconds: float) -> pa.Array:
    kind = cells.type
    record = kind.value_type if pa.types.is_list(kind) else None
    if record is None or not pa.types.is_struct(record) or record.get_field_index("timestamp") < 0:
        return cells
    position, records = record.get_field_index("timestamp"), cells.values
    fields = [records.field(i) for i in range(record.num_fields)]
    times = fields[position]
    moved = times.to_numpy(zero_copy_only=False).astype(np.float64) - seconds
    fields[position] = pa.array(moved, times.type, mask=times.is_null().to_numpy(zero_copy_only=False))
    mask = records.is_null() if records.null_count else None
    records = pa.StructArray.from_arrays(fields, fields=list(record), mask=mask)
    empty = cells.is_null() if cells.null_count else None
    return pa.ListArray.from_arrays(cells.offsets, records, type=kind, mask=empty)


def has_events(cells: pa.ChunkedArray) -> np.ndarray:
    """Which rows have a record. [T]"""
    counts = [len(cell) if cell is not None else 0 for cell in cells.to_pylist()]
    return np.array(counts) > 0
