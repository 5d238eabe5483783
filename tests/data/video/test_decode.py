from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import DatasetError
from flexor.data.video.decode import decode, index_video
from flexor.data.video.frame_match import nearest
from support.samples import picture, write_video

PICTURES = [picture(i // 10, i % 13) for i in range(40)]
X264 = {"crf": "20", "b-adapt": "0", "sc_threshold": "0"}

KINDS = {
    "no B-frames": X264 | {"g": "4", "bf": "0"},
    "B-frames": X264 | {"g": "6", "bf": "3"},
    "B-frames, GOP 2": X264 | {"g": "2", "bf": "1"},
    "one GOP": X264 | {"g": "250", "bf": "2"},
    "open GOP": X264 | {"g": "5", "bf": "2", "x264-params": "open-gop=1"},
    "yuv444p": X264 | {"g": "4", "pix_fmt": "yuv444p"},
    "gray": X264 | {"g": "4", "pix_fmt": "gray"},
    "10 bit": X264 | {"g": "4", "pix_fmt": "yuv420p10le"},
    "AV1": {"codec": "libsvtav1", "g": "2", "crf": "30", "preset": "12"},
    "AV1, 10 bit": {"codec": "libsvtav1", "g": "4", "crf": "30", "preset": "12", "pix_fmt": "yuv420p10le"},
    "AV1, long GOP": {"codec": "libsvtav1", "g": "20", "crf": "30", "preset": "12"},
    "HEVC, open GOP": {"codec": "libx265", "g": "6", "bf": "2", "x265-params": "log-level=none:open-gop=1"},
    "MPEG-4": {"codec": "mpeg4", "g": "5", "bf": "1"},
}


@pytest.fixture(scope="module")
def videos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("videos")
    return {kind: write_video(folder / f"{i}.mp4", PICTURES, **KINDS[kind]) for i, kind in enumerate(KINDS)}


def sequential(path):
    """All frames from first to last, as LeRobot's PyAV backend converts them."""
    with av.open(str(path)) as container:
        frames = list(container.decode(video=0))
        return [f.time for f in frames], np.stack([f.to_ndarray(format="rgb24") for f in frames])


@pytest.mark.parametrize("kind", KINDS)
def test_every_frame_is_the_one_of_a_sequential_decode(videos, kind):
    index = index_video(videos[kind])
    times, pixels = sequential(videos[kind])
    assert len(index) == len(pixels) == len(PICTURES)
    np.testing.assert_allclose(index.times, times, atol=1e-9)
    np.testing.assert_array_equal(decode(videos[kind], range(len(index)), index), pixels)
    for frame in range(0, len(index), 3):  # each alone, so that each needs a seek
        np.testing.assert_array_equal(decode(videos[kind], [frame], index)[0], pixels[frame])


@pytest.mark.parametrize("kind", ["B-frames", "open GOP", "AV1", "HEVC, open GOP"])
@settings(max_examples=8)
@given(frames=st.lists(st.integers(0, 39), max_size=12))
def test_any_order_and_repeats(videos, kind, frames):
    _, pixels = sequential(videos[kind])
    np.testing.assert_array_equal(decode(videos[kind], frames), pixels[frames])


def test_open_groups_exist_and_start_one_key_frame_earlier(videos):
    """Guards the test above: a file without leading frames would prove nothing."""
    index = index_video(videos["open GOP"])
    keys = np.flatnonzero(index.key)
    group = np.searchsorted(keys, index.packet, side="right") - 1
    leading = index.start != keys[group]
    assert leading.any() and index.key.sum() > 2


def test_each_group_of_pictures_is_decoded_once(videos, monkeypatch):
    import flexor.data.video.decode as video

    fed = []
    original = video.read_video_packets
    monkeypatch.setattr(
        video, "read_video_packets", lambda *a: ((fed.append(n), (n, p))[1] for n, p in original(*a))
    )
    decode(videos["no B-frames"], [9, 8, 11, 9, 13])
    assert len(fed) == len(set(fed)) <= 8


def test_gops_and_packets(videos):
    index = index_video(videos["no B-frames"])
    assert index.gops.tolist() == [[i, i + 4] for i in range(0, 40, 4)]
    with videos["no B-frames"].open("rb") as file, av.open(str(videos["no B-frames"])) as container:
        packet = next(p for i, p in enumerate(container.demux(video=0)) if i == 5)
        file.seek(index.packets.offset[5])
        assert file.read(index.packets.size[5]) == bytes(packet)


def test_times_are_those_of_the_file_and_not_number_by_rate(tmp_path):
    pts = [7, 8, 10, 11, 15, 16, 17, 30]  # starts late, uneven
    path = write_video(tmp_path / "uneven.mp4", PICTURES[:8], pts, Fraction(1, 100), **X264, bf="2")
    index = index_video(path)
    np.testing.assert_allclose(index.times, np.array(pts) / 100, atol=1e-3)
    frame, distance = nearest(index.times, np.array([0.0, 0.104, 0.129, 0.16, 9.0]))
    assert frame.tolist() == [0, 2, 3, 5, 7]
    np.testing.assert_allclose(distance, [0.07, 0.004, 0.019, 0, 8.7], atol=2e-3)
    _, pixels = sequential(path)
    np.testing.assert_array_equal(decode(path, [7, 0, 4]), pixels[[7, 0, 4]])


def test_late_start_in_mp4(tmp_path):
    path = write_video(tmp_path / "late.mp4", PICTURES[:8], list(range(5, 13)), **X264, bf="2")
    times, pixels = sequential(path)
    index = index_video(path)
    np.testing.assert_allclose(index.times, times, atol=1e-9)
    np.testing.assert_array_equal(decode(path, range(8)), pixels)


def test_packets_hidden_by_an_edit_list_are_no_frames(tmp_path):
    """Cut into a GOP without encoding anew: the frames before the cut stay in the file, unseen."""
    intact = write_video(tmp_path / "whole.mp4", PICTURES[:20], **X264, g="10", bf="2")
    cut = tmp_path / "cut.mp4"
    with av.open(str(intact)) as reader, av.open(str(cut), "w") as writer:
        stream = reader.streams.video[0]
        copy = writer.add_stream_from_template(stream)
        offset = round(Fraction(3, 10) / stream.time_base)
        for packet in reader.demux(stream):
            if packet.size:
                packet.pts, packet.dts = packet.pts - offset, packet.dts - offset
                packet.stream = copy
                writer.mux(packet)
    times, pixels = sequential(cut)
    index = index_video(cut)
    assert len(index) == len(pixels) < 20 == len(index.packets.pts)
    np.testing.assert_allclose(index.times, times, atol=1e-9)
    np.testing.assert_array_equal(decode(cut, range(len(index))), pixels)
    np.testing.assert_array_equal(decode(cut, [2]), pixels[2:3])


def test_missing_file(tmp_path):
    with pytest.raises(DatasetError, match=r"gone\.mp4: the file is missing.*flexor data check"):
        index_video(tmp_path / "gone.mp4")


def test_no_video_at_all(tmp_path):
    (tmp_path / "text.mp4").write_text("hello")
    with pytest.raises(DatasetError, match=r"text\.mp4"):
        index_video(tmp_path / "text.mp4")


def test_a_file_without_its_end_cannot_be_opened(tmp_path):
    path = truncated(write_video(tmp_path / "cut.mp4", PICTURES, **X264, g="4"))
    with pytest.raises(DatasetError, match=r"cut\.mp4: .*damaged or truncated"):
        index_video(path)


def test_with_the_index_in_front_the_whole_part_is_read_and_the_rest_is_an_error(tmp_path):
    path = write_video(tmp_path / "cut.mp4", PICTURES, container={"movflags": "faststart"}, **X264, g="4")
    truncated(path)
    left = index_video(path)
    assert len(left) == len(PICTURES)
    np.testing.assert_array_equal(decode(path, range(4)), sequential_start(path, 4))
    with pytest.raises(DatasetError, match=r"cut\.mp4: .*can't be decoded"):
        decode(path, range(len(PICTURES)), left)


def truncated(path):
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.7)])
    return path


def sequential_start(path, count):
    with av.open(str(path)) as container:
        frames = container.decode(video=0)
        return np.stack([next(frames).to_ndarray(format="rgb24") for _ in range(count)])


def test_frame_number_out_of_range(videos):
    with pytest.raises(IndexError, match="40"):
        decode(videos["AV1"], [3, 40])
