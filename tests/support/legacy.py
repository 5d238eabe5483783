"""Make v2.1 and v2.0 datasets for tests, out of a v3.0 one: one parquet and one mp4 per episode."""

import json
from fractions import Fraction
from pathlib import Path

import av
import pyarrow.parquet as pq

DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"


def to_v2(root: Path, out: Path, version: str = "v2.1", chunks_size: int = 2) -> Path:
    """Convert; chunks of two episodes, so that paths in later chunks are tested as well."""
    info = json.loads((root / "meta/info.json").read_text())
    videos = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
    files = sorted((root / "meta/episodes").rglob("*.parquet"))
    episodes = [row for file in files for row in pq.read_table(file).to_pylist()]
    for row in episodes:
        place = {"episode_chunk": row["episode_index"] // chunks_size, "episode_index": row["episode_index"]}
        _split_data(root, out / DATA_PATH.format(**place), info, row)
        for name in videos:
            _split_video(root, out / VIDEO_PATH.format(video_key=name, **place), info, row, name)
    _write_metadata(root, out, info, episodes, version, chunks_size, len(videos))
    return out


def _split_data(root: Path, target: Path, info: dict, row: dict) -> None:
    file = info["data_path"].format(chunk_index=row["data/chunk_index"], file_index=row["data/file_index"])
    table = pq.read_table(root / file)
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.filter(_is(table, row["episode_index"])), target)


def _is(table: object, episode: int) -> object:
    import pyarrow.compute as pc

    return pc.equal(table["episode_index"], episode)  # type: ignore[index]


def _split_video(root: Path, target: Path, info: dict, row: dict, name: str) -> None:
    """Copy the packets of one episode; each begins with a key frame, so nothing is encoded again."""
    part = {key: row[f"videos/{name}/{key}"] for key in ("chunk_index", "file_index", "from_timestamp")}
    source = root / info["video_path"].format(video_key=name, **part)
    target.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(source)) as reader, av.open(str(target), "w") as writer:
        stream = reader.streams.video[0]
        copy = writer.add_stream_from_template(stream, opaque=True)
        assert stream.time_base is not None
        first = round(Fraction(part["from_timestamp"]).limit_denominator(10**6) / stream.time_base)
        end = first + round(row["length"] / Fraction(info["fps"]) / stream.time_base)
        for packet in reader.demux(stream):
            if packet.size and packet.pts is not None and first <= packet.pts < end:
                packet.pts, packet.dts = packet.pts - first, packet.dts - first
                packet.stream = copy
                writer.mux(packet)


def _write_metadata(
    root: Path, out: Path, info: dict, episodes: list[dict], version: str, chunks_size: int, videos: int
) -> None:
    meta = out / "meta"
    meta.mkdir(parents=True, exist_ok=True)
    for key in ("data_files_size_in_mb", "video_files_size_in_mb"):
        info.pop(key)
    info |= {"codebase_version": version, "chunks_size": chunks_size, "data_path": DATA_PATH}
    info |= {"video_path": VIDEO_PATH if videos else None, "total_videos": videos * len(episodes)}
    info["total_chunks"] = -(-len(episodes) // chunks_size)
    (meta / "info.json").write_text(json.dumps(info))
    keep = ("episode_index", "tasks", "length")
    _write_lines(meta / "episodes.jsonl", [{key: row[key] for key in keep} for row in episodes])
    tasks = pq.read_table(root / "meta/tasks.parquet").to_pylist()
    _write_lines(meta / "tasks.jsonl", [{k: t[k] for k in ("task_index", "task")} for t in tasks])
    if version == "v2.0":
        (meta / "stats.json").write_text((root / "meta/stats.json").read_text())
    else:
        _write_lines(meta / "episodes_stats.jsonl", [_episode_stats(row) for row in episodes])


def _episode_stats(row: dict) -> dict:
    stats: dict[str, dict] = {}
    for key, value in row.items():
        if key.startswith("stats/"):
            _, feature, name = key.split("/")
            stats.setdefault(feature, {})[name] = value
    return {"episode_index": row["episode_index"], "stats": stats}


def _write_lines(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
