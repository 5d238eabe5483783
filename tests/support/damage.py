"""Ways to break a good dataset, as disks, robots and people do."""

import json
from pathlib import Path

import av
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from flexor.data.video.decode import index_video
from support.small_datasets import TOP

DATA = "data/chunk-000/file-000.parquet"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
VIDEO = f"videos/{TOP}/chunk-000/file-000.mp4"


def edit_json(path: Path, change) -> None:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def edit_table(path: Path, **columns) -> None:
    """Replace columns of a parquet file by functions of them."""
    table = pq.read_table(path)
    for name, change in columns.items():
        position = table.column_names.index(name)
        values = change(table[name].to_pylist())
        table = table.set_column(position, table.field(name), pa.array(values, table.field(name).type))
    pq.write_table(table, path)


def set_rows(first: int, last: int, value):
    def change(values):
        new = [value(v, i) if callable(value) else value for i, v in enumerate(values[first:last])]
        return [*values[:first], *new, *values[last:]]

    return change


def truncate(path: Path, keep: float) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * keep)])


def damage_file(path: Path, rng: np.random.Generator) -> None:
    data = bytearray(path.read_bytes())
    kind = rng.integers(4)
    if kind == 0:
        path.unlink()
    elif kind == 1:
        path.write_bytes(data[: rng.integers(len(data))])
    else:
        start = int(rng.integers(len(data)))
        for i in range(start, min(start + (1 if kind == 2 else 40), len(data))):
            data[i] = int(rng.integers(256))
        path.write_bytes(data)


def damage_frame(path: Path, number: int) -> None:
    with av.open(str(path)) as container:
        packets = [p for p in container.demux(video=0) if p.size]
        packet = packets[number]
        position, size = packet.pos, packet.size
    data = bytearray(path.read_bytes())
    for i in range(size // 4, size // 4 + 10):
        data[position + i] ^= 0xFF
    path.write_bytes(data)


def patched(path: Path, target: Path, box: bytes, offset: int, value: bytes) -> Path:
    """A copy with some bytes of the first box of a kind replaced; `offset` counts from its content."""
    data = bytearray(path.read_bytes())
    at = data.rindex(box) + 4 + offset
    data[at : at + len(value)] = value
    target.write_bytes(data)
    return target


def overwrite_packets(video: Path, packets: range) -> None:
    """Replace packets of a video by noise: their frames do not decode."""
    index, data = index_video(video), bytearray(video.read_bytes())
    for packet in packets:
        at, size = int(index.packets.offset[packet]), int(index.packets.size[packet])
        data[at : at + size] = b"\xff" * size
    video.write_bytes(bytes(data))
