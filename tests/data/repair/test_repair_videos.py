"""Repairs of videos as other encoders leave them: reordered frames, edit lists, sound, frames without a row."""

import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from flexor.data.check.check import check_dataset
from flexor.data.dataset import open_dataset
from flexor.data.repair.remux import resets_decoder
from flexor.data.repair.repair import repair_dataset
from flexor.data.video.decode import decode, index_video, read_video_packets
from support.damage import (
    VIDEO,
    patched,
)
from support.repairs import ALL, assert_same, declare, repair
from support.samples import reencode, write_video
from support.small_datasets import FPS, LENGTHS, SIDE, TOP, encoded, picture

# --- videos as other encoders leave them


@pytest.mark.parametrize("name", ["one", "v2.1"])
@pytest.mark.parametrize(
    "options",
    [
        {"bf": "3", "g": "250", "sc_threshold": "0"},
        {"bf": "2", "g": "5", "x264-params": "open-gop=1:b-adapt=0:scenecut=0"},
        {"codec": "libsvtav1", "g": "6"},
    ],
    ids=["b-frames", "open groups", "av1"],
)
def test_reordered_frames(broken, name, options):
    """B-frames; in one file for all, episodes do not begin on key frames then, and the file is copied whole."""
    root = broken(name, encoded(**options))
    report = repair(root)
    assert [plan.new for plan in report.episodes] == ALL and all(not plan.repairs for plan in report.episodes)
    assert_same(root, report)
    assert ("video files copied unchanged" in str(report)) == (name == "one")


def test_reordered_frames_are_set_right_too(originals, broken):
    """B-frames at unsteady times: the copy's are steady, and no frame is lost or moved."""

    def unsteady(root: Path) -> None:
        for path in sorted(root.rglob("*.mp4")):
            index = index_video(path)
            images = [picture_of(path, i) for i in range(len(index))]
            pts = [0, *(10 * i + (4 if i % 2 else -4) for i in range(1, len(images)))]
            write_video(path, images, pts, Fraction(1, 10 * FPS), bf="3", g="250")

    root = broken("v2.1", unsteady)
    before = {path: decoded(path) for path in sorted(root.rglob("*.mp4"))}
    report = repair(root)
    assert f"episodes 0-3: {TOP}: frames moved to the times of their rows" in str(report)
    dataset = open_dataset(root=report.out)
    for plan in report.included:
        part = dataset.select([plan.new]).read(np.arange(plan.length))
        expected = before[root / plan.episode.videos[TOP].file]
        apart = np.moveaxis(part[TOP], 1, -1).astype(int) - expected
        assert np.abs(apart).max() < 10  # neighbours are 50 apart; on some CPUs colours are rounded otherwise


def decoded(path: Path) -> np.ndarray:
    return decode(path, np.arange(len(index_video(path))))


def picture_of(path: Path, frame: int) -> np.ndarray:
    return decoded(path)[frame]


def test_an_episode_that_can_be_neither_cut_nor_kept_in_place_is_left_out(broken):
    """One file, one key frame, unsteady times: the first episode can be cut off, the others can't."""

    def unsteady(root: Path) -> None:
        images = list(decoded(root / VIDEO))
        pts = [10 * i + (2 if i % 2 else 0) for i in range(len(images))]
        write_video(root / VIDEO, images, pts, Fraction(1, 10 * FPS), bf="0", g="250", sc_threshold="0")

    report = repair(broken("one", unsteady))
    assert [plan.episode.index for plan in report.included] == [0]
    assert "can't be cut out" in report.excluded[0].reason


def test_streams_that_differ_are_not_joined(broken):
    def mix(root: Path) -> None:
        reencode(root / f"videos/chunk-000/{TOP}/episode_000001.mp4", FPS, codec="libsvtav1")
        reencode(root / f"videos/chunk-001/{TOP}/episode_000002.mp4", FPS, bf="2", g="6", profile="high")

    root = broken("v2.0", mix)
    report = repair(root)
    assert len(list(report.out.glob(f"videos/{TOP}/*/*.mp4"))) == 4
    assert len(list(report.out.glob(f"videos/{SIDE}/*/*.mp4"))) == 1
    assert_same(root, report)


@pytest.mark.parametrize("bframes", ["0", "3"])
def test_frames_without_a_row(broken, bframes):
    """A video with more frames than rows: those that timestamps lead to are taken, if they can be."""

    def prolong(root: Path) -> None:
        path = root / f"videos/chunk-000/{TOP}/episode_000000.mp4"
        images = [picture(0, i) for i in range(LENGTHS[0] + 5)]
        write_video(path, images, time_base=Fraction(1, FPS), bf=bframes, g="250")

    root = broken("v2.1", prolong)
    report = repair_dataset(root, root.with_name("repaired"))
    assert report.ok and [plan.new for plan in report.episodes] == ALL
    assert f"episode 0: {TOP}: frames without a row removed" in str(report)
    assert_same(root, report)


def test_frames_hidden_by_an_edit_list(broken):
    """The first frame shown is no key frame: what is hidden before it is needed, and so the file is copied whole."""

    def hide(root: Path) -> None:
        path = root / f"videos/chunk-000/{TOP}/episode_000000.mp4"
        images = [picture(9, i) for i in range(3)] + [picture(0, i) for i in range(LENGTHS[0])]
        write_video(path, images, time_base=Fraction(1, FPS), bf="0", g="250")
        ticks = round(3 / FPS / index_video(path).packets.time_base)
        patched(path, path, b"elst", 8, struct.pack(">Ii", 1000 * LENGTHS[0] // FPS, ticks))

    root = broken("v2.1", hide)
    assert len(index_video(root / f"videos/chunk-000/{TOP}/episode_000000.mp4")) == LENGTHS[0]
    report = repair(root)
    assert f"camera {TOP}: 1 video files copied unchanged" in str(report)
    assert_same(root, report)


def test_sound_is_left_behind(broken):
    def add_sound(root: Path) -> None:
        path = root / f"videos/chunk-000/{TOP}/episode_000000.mp4"
        with av.open(str(path), "w") as container:
            sound = container.add_stream("aac", rate=16000)
            stream = container.add_stream("libx264", rate=FPS, options={"bf": "2"})
            stream.width, stream.height, stream.pix_fmt = 48, 32, "yuv420p"
            for i in range(LENGTHS[0]):
                container.mux(stream.encode(av.VideoFrame.from_ndarray(picture(0, i), format="rgb24")))
            noise = np.zeros((1, 16000), np.float32)
            frame = av.AudioFrame.from_ndarray(noise, format="fltp", layout="mono")
            frame.sample_rate = 16000
            container.mux([*sound.encode(frame), *sound.encode(None), *stream.encode(None)])

    root = broken("v2.0", add_sound)
    report = repair(root)
    assert f"camera {TOP}: the audio in its videos is not copied" in str(report)
    for path in report.out.rglob("*.mp4"):
        with av.open(str(path)) as container:
            assert [stream.type for stream in container.streams] == ["video"]
    assert_same(root, report)


def test_depth_maps_are_copied_though_they_are_not_read(originals, broken):
    root = broken("v2.1", declare(SIDE, info={"video.is_depth_map": True}))
    out = root.with_name("repaired")
    report = repair_dataset(root, out)
    # A depth map of three channels, which training leaves out.
    assert {p.name for p in check_dataset(out).findings} == {"stats-missing", "depth-scale"} and report.ok
    copied = decoded(out / f"videos/{SIDE}/chunk-000/file-000.mp4")
    assert np.array_equal(copied, decoded(originals / f"one/videos/{SIDE}/chunk-000/file-000.mp4"))
    assert SIDE in open_dataset(root=out).absent


@pytest.mark.parametrize(
    ("options", "anew"),
    [
        ({"g": "4", "bf": "0"}, True),
        ({"g": "4", "bf": "2", "x264-params": "open-gop=1:b-adapt=0:scenecut=0"}, False),
        ({"codec": "libx265", "g": "4", "x265-params": "log-level=none:open-gop=0:scenecut=0"}, True),
        ({"codec": "libx265", "g": "4", "x265-params": "log-level=none:open-gop=1:scenecut=0"}, False),
        ({"codec": "libsvtav1", "g": "4"}, True),
    ],
    ids=["h264", "h264, open groups", "hevc", "hevc, open groups", "av1"],
)
def test_key_frames_that_may_follow_other_packets(tmp_path, options, anew):
    """Decoders forget what was before at some key frames, and not at others."""
    if options.get("codec", "libx264") not in av.codecs_available:
        pytest.skip("FFmpeg is built without this encoder")
    # not smaller: x265 writes beyond the memory of tiny images on some processors
    pictures = [picture(0, i, height=128, width=192) for i in range(20)]
    index = index_video(write_video(tmp_path / "video.mp4", pictures, **options))
    keys = [bytes(p) for i, p in read_video_packets(index, 0, len(index.key)) if index.key[i]]
    facts = index.packets
    assert len(keys) > 2 and resets_decoder(facts.codec, facts.extradata, keys[0])
    assert {resets_decoder(facts.codec, facts.extradata, key) for key in keys[1:]} == {anew}
