"""Write the small datasets under tests/golden/data; dump what LeRobot reads of them with data_lerobot.py.

    python tests/parity/data_golden.py tests/golden/data
    cd tests/golden/data   # where lerobot is installed
    for name in h264 av1 bframes; do
        python ../../parity/data_lerobot.py --root $name --out $name.json
    done
    python ../../parity/data_lerobot.py --root h264 --out h264_windows.json --episodes 3,1 --deltas \
        '{"action": [-0.2, 0, 0.1, 0.5], "observation.images.top": [-0.3, 0], "observation.state": [0, 0.2],
          "observation.images.wrist": [-0.1, 0], "observation.matrix": [0, 0.1], "mode": [0, 0.1]}'

The datasets are committed because encoders differ from version to version, and so would the pixels.
"""

import sys
from pathlib import Path

import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1]))
from support.samples import reencode, write_sample


def main(folder: Path) -> None:
    write_sample(folder / "h264")
    write_sample(folder / "av1", codec="av1", gop=2, crf=30, video_files_mb=0.003)
    write_sample(folder / "bframes", fps=30)
    for video in (folder / "bframes/videos").rglob("*.mp4"):
        reencode(video, 30, bf="3", g="6", crf="20")
    for parquet in folder.rglob("*.parquet"):
        pack(parquet, drop_statistics="h264" not in parquet.parts)


def pack(parquet: Path, drop_statistics: bool) -> None:
    """Make a file small: these are in the repository. One dataset with statistics per episode is enough."""
    file = pq.ParquetFile(parquet)
    keep = [name for name in file.schema_arrow.names if not (drop_statistics and name.startswith("stats/"))]
    groups = [file.read_row_group(i, columns=keep) for i in range(file.num_row_groups)]
    tight = {"compression": "zstd", "use_dictionary": False, "write_statistics": False}
    with pq.ParquetWriter(parquet, groups[0].schema, **tight) as writer:
        for group in groups:
            writer.write_table(group)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
