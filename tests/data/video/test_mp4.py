"""Packet tables read from `moov`: the same as FFmpeg's demuxer gives, packet by packet."""

import os
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import DatasetError
from flexor.data.storage.ranges import LocalRanges
from flexor.data.video.mp4 import Packets, Unsupported, read_packets
from support.damage import patched
from support.samples import picture, write_sample, write_video

PICTURES = [picture(i // 10, i % 13) for i in range(40)]
X264 = {"crf": "20", "b-adapt": "0", "sc_threshold": "0"}
X265 = {"codec": "libx265", "x265-params": "log-level=none"}
AV1 = {"codec": "libsvtav1", "crf": "40", "preset": "12"}
VARIABLE = [0, 1, 3, 4, 8, 9, 10, 15, *range(16, 48)]

KINDS: dict[str, dict] = {
    "h264, GOP 1": X264 | {"g": "1"},
    "h264, GOP 2": X264 | {"g": "2", "bf": "0"},
    "h264, GOP 10": X264 | {"g": "10", "bf": "0"},
    "h264, GOP 250": X264 | {"g": "250", "bf": "0"},
    "h264, B-frames": X264 | {"g": "6", "bf": "3"},
    "h264, B-frames, one GOP": X264 | {"g": "250", "bf": "2"},
    "h264, open GOP": X264 | {"g": "5", "bf": "2", "x264-params": "open-gop=1"},
    "h264, 4:4:4": X264 | {"g": "4", "pix_fmt": "yuv444p"},
    "h264, in front": X264 | {"g": "4", "container": {"movflags": "faststart"}},
    "h264, negative delays": X264 | {"g": "6", "bf": "2", "container": {"movflags": "negative_cts_offsets"}},
    "h264, no edit list": X264 | {"g": "6", "bf": "2", "container": {"use_editlist": "0"}},
    "h264, late start": X264 | {"g": "4", "bf": "0", "pts": list(range(7, 47))},
    "h264, late start, B-frames": X264 | {"g": "4", "bf": "2", "pts": list(range(7, 47))},
    "h264, odd movie scale": X264 | {"g": "4", "pts": list(range(7, 47)), "time_base": Fraction(1001, 30000)},
    "h264, variable rate": X264 | {"g": "4", "bf": "0", "pts": VARIABLE},
    "h264, variable rate, B-frames": X264 | {"g": "4", "bf": "2", "pts": VARIABLE},
    "hevc": X265 | {"g": "10", "bf": "0"},
    "hevc, B-frames": X265 | {"g": "10", "bf": "3"},
    "hevc, open GOP": X265 | {"g": "6", "bf": "2", "x265-params": "log-level=none:open-gop=1"},
    "av1, GOP 2": AV1 | {"g": "2"},
    "av1, GOP 20": AV1 | {"g": "20", "container": {"movflags": "faststart"}},
    "vp9": {"codec": "libvpx-vp9", "g": "10", "cpu-used": "8"},
    "mpeg4": {"codec": "mpeg4", "g": "5", "bf": "0"},
    "mpeg4, GOP 1": {"codec": "mpeg4", "g": "1"},
    "mpeg4, B-frames": {"codec": "mpeg4", "g": "5", "bf": "2"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("mp4")


@pytest.fixture(scope="module")
def video(folder):
    """A file of a kind, written when first asked for."""

    def get(kind: str) -> Path:
        path = folder / f"{list(KINDS).index(kind)}.mp4"
        return path if path.is_file() else write_video(path, PICTURES, **KINDS[kind])

    return get


def demuxed(path: Path) -> Packets:
    """The same from FFmpeg's demuxer."""
    rows = []
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        context = stream.codec_context
        for packet in container.demux(stream):
            if packet.size:
                rows.append((packet.pos, packet.size, packet.is_keyframe, packet.pts, packet.is_discard))
        offset, size, key, pts, hidden = (np.array(column) for column in zip(*rows))
        return Packets(
            width=context.width,
            height=context.height,
            codec=context.codec.canonical_name,
            extradata=context.extradata or b"",
            time_base=float(stream.time_base),
            offset=offset,
            size=size,
            key=key.astype(bool),
            pts=pts,
            hidden=hidden.astype(bool),
        )


def assert_same(ours: Packets, theirs: Packets) -> None:
    for name in ("width", "height", "codec", "extradata", "time_base"):
        assert getattr(ours, name) == getattr(theirs, name), name
    for name in ("offset", "size", "key", "pts", "hidden"):
        np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name), name)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_to_the_demuxer(video, kind):
    assert_same(read_packets(LocalRanges(video(kind))), demuxed(video(kind)))


def test_the_kinds_are_what_they_say(video):
    """Guards the test above: edit lists, delays and moov on either side do occur in it."""
    assert video("h264, in front").read_bytes().find(b"moov") < 100
    assert video("h264, GOP 2").read_bytes().find(b"moov") > 100
    assert b"ctts" in video("h264, B-frames").read_bytes()
    assert b"elst" not in video("h264, no edit list").read_bytes()
    assert read_packets(LocalRanges(video("h264, late start"))).pts[0] > 0
    assert read_packets(LocalRanges(video("mpeg4, GOP 1"))).key.all()


@pytest.mark.parametrize("size", [(48, 64), (50, 66), (33, 47)])
@pytest.mark.parametrize("codec", ["libsvtav1", "mpeg4"])
def test_picture_sizes(folder, codec, size):
    if codec == "libsvtav1" and min(size) < 64:
        size = (size[0] + 40, size[1] + 40)
    path = write_video(
        folder / f"{codec}{size[0]}.mp4", [picture(0, i, *size) for i in range(4)], codec=codec
    )
    assert_same(read_packets(LocalRanges(path)), demuxed(path))


@pytest.mark.parametrize("kind", ["h264, GOP 2", "h264, B-frames", "av1, GOP 2", "mpeg4, B-frames", "hevc"])
def test_files_put_together_without_encoding(video, folder, kind):
    """As LeRobot makes one file of many episodes: FFmpeg's concat demuxer, packets copied."""
    listing = folder / "list.ffconcat"
    listing.write_text("ffconcat version 1.0\n" + f"file '{video(kind)}'\n" * 3)
    path = folder / f"joined-{kind}.mp4"
    with (
        av.open(str(listing), format="concat", options={"safe": "0"}) as source,
        av.open(str(path), "w", options={"movflags": "faststart"}) as target,
    ):
        stream = target.add_stream_from_template(source.streams.video[0], opaque=True)
        stream.time_base = source.streams.video[0].time_base
        for packet in source.demux(video=0):
            if packet.dts is not None:
                packet.stream = stream
                target.mux(packet)
    ours = read_packets(LocalRanges(path))
    assert len(ours) == 120
    assert_same(ours, demuxed(path))


@pytest.mark.parametrize("codec", ["h264", "av1"])
def test_files_of_our_writer(tmp_path, codec):
    for path in write_sample(tmp_path / "set", codec=codec).rglob("*.mp4"):
        assert_same(read_packets(LocalRanges(path)), demuxed(path))


def test_video_beside_sound(folder):
    """The second track: the first one is not video."""
    path = folder / "sound.mp4"
    with av.open(str(path), "w") as container:
        sound = container.add_stream("aac", rate=16000)
        stream = container.add_stream("libx264", rate=10, options=X264)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        for image in PICTURES[:20]:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 16000), np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16000
        container.mux(sound.encode(frame))
        container.mux(sound.encode(None))
        container.mux(stream.encode(None))
    assert_same(read_packets(LocalRanges(path)), demuxed(path))


@pytest.mark.parametrize(
    "kind", ["h264, GOP 10", "h264, B-frames", "h264, open GOP", "mpeg4, B-frames", "av1, GOP 20"]
)
@settings(max_examples=40)
@given(start=st.floats(0, 1.1), length=st.floats(0.01, 1.5))
def test_any_single_edit(video, folder, kind, start, length):
    """Cut in the middle of groups, before the first and after the last frame."""
    path = video(kind)
    last = int(demuxed(path).pts.max())
    # Movie ticks are milliseconds; these clips have ten frames in a second.
    edit = struct.pack(">Ii", max(int(length * 4000), 1), int(start * last))
    cut = patched(path, folder / f"cut-{os.getpid()}.mp4", b"elst", 8, edit)
    try:
        ours = read_packets(LocalRanges(cut))
    except Unsupported as reason:
        assert str(reason) in ("an edit that shows nothing", "frames shown before they are decoded")
        return
    assert_same(ours, demuxed(cut))


def test_long_boxes(video, folder):
    """A box whose size needs 64 bits, here a filler before everything else."""
    data = video("h264, GOP 2").read_bytes()
    path = folder / "long.mp4"
    start = data.index(b"moov") - 4
    # At the end of the file, so that no packet moves.
    path.write_bytes(data[:start] + struct.pack(">I4sQ", 1, b"free", 5000) + bytes(4984) + data[start:])
    assert_same(read_packets(LocalRanges(path)), demuxed(path))


def test_only_headers_and_tables_are_read(video):
    class Counted(LocalRanges):
        total = 0

        def read(self, offset, count):
            self.total += count
            return super().read(offset, count)

    ranges = Counted(video("h264, GOP 1"))
    packets = read_packets(ranges)
    assert ranges.total < ranges.size - packets.size.sum() + 100


@pytest.mark.parametrize("dataset", ["pusht", "gr00t_picknplace"])
def test_real_files(dataset):
    root = Path(__file__).parents[4] / "shared/data" / dataset
    if not root.is_dir():
        pytest.skip(f"{dataset} is not on this machine")
    for path in root.rglob("*.mp4"):
        assert_same(read_packets(LocalRanges(path)), demuxed(path))


# Damage: what is wrong and where is said; what another tool may still read is left to it.


def test_unfinished_recording(video, folder):
    data = video("h264, GOP 2").read_bytes()
    path = folder / "unfinished.mp4"
    path.write_bytes(data[: data.index(b"moov") - 4])
    with pytest.raises(DatasetError, match=r"unfinished\.mp4: it has no index \(no moov box\)"):
        read_packets(LocalRanges(path))


def test_cut_in_the_packets(video, folder):
    path = folder / "cut.mp4"
    path.write_bytes(video("h264, GOP 2").read_bytes()[:2000])
    with pytest.raises(DatasetError, match=r"it ends at byte 2000, in the middle of box b'mdat'"):
        read_packets(LocalRanges(path))


def test_cut_in_the_tables(video, folder):
    path = folder / "cut.mp4"
    path.write_bytes(video("h264, GOP 2").read_bytes()[:-100])
    with pytest.raises(DatasetError, match="in the middle of box b'moov'"):
        read_packets(LocalRanges(path))


def test_packets_past_the_end(video, folder):
    """The table is whole: what is missing shows when it is read, and what is not missing can be."""
    path = video("h264, in front")
    data = bytearray(path.read_bytes())
    at = data.index(b"mdat") - 4
    data[at : at + 4] = bytes(4)
    expected = demuxed(path)
    end = int(expected.offset[30])
    cut = folder / "past.mp4"
    cut.write_bytes(data[:end])
    packets = read_packets(LocalRanges(cut))
    assert len(packets) == 40 and (packets.offset + packets.size > end).sum() == 10


@settings(max_examples=150)
@given(place=st.floats(0, 1, exclude_max=True), value=st.binary(min_size=1, max_size=4))
def test_damaged_tables_never_crash(video, folder, place, value):
    data = bytearray(video("h264, B-frames").read_bytes())
    start = data.index(b"moov") - 4
    at = start + int(place * (len(data) - start))
    data[at : at + len(value)] = value
    path = folder / f"damaged-{os.getpid()}.mp4"
    path.write_bytes(data)
    try:
        packets = read_packets(LocalRanges(path))
    except (DatasetError, Unsupported):
        return
    assert len(packets.offset) == len(packets.size) == len(packets.key) == len(packets.pts)


@pytest.mark.parametrize(
    "container", [{"movflags": "frag_keyframe+empty_moov"}, {"movflags": "frag_keyframe"}]
)
def test_fragments_are_left_to_the_demuxer(folder, container):
    path = write_video(folder / "fragments.mp4", PICTURES, container=container, **X264)
    with pytest.raises(Unsupported, match="fragments"):
        read_packets(LocalRanges(path))


def test_other_containers_and_codecs_are_left_to_the_demuxer(folder):
    path = write_video(folder / "other.mkv", PICTURES[:5], **X264)
    with pytest.raises(Unsupported, match="not an MP4 file"):
        read_packets(LocalRanges(path))
    path = write_video(folder / "other.mp4", PICTURES[:5], codec="mjpeg", pix_fmt="yuvj420p")
    with pytest.raises(Unsupported):
        read_packets(LocalRanges(path))
    path.write_bytes(b"")
    with pytest.raises(Unsupported, match="too short"):
        read_packets(LocalRanges(path))
