"""The engine as a whole: frames are right, decoded once, in every tier, on any number of ranks, within the budget."""

import hashlib
import logging
import os
import shutil
import signal
from collections import Counter

import numpy as np
import pytest
import torch

from flexor.core.batch import SAMPLE_ID
from flexor.core.errors import ConfigError, DatasetError
from flexor.data.dataset import open_dataset
from flexor.data.loader.choose_order import fit_lanes
from flexor.data.loader.open import open_loader
from flexor.data.settings import CacheConfig, DatasetConfig, OrderConfig
from flexor.data.video.decode import index_video
from support import runs
from support.damage import overwrite_packets
from support.limits import LIMIT_S
from support.samples import LENGTHS, write_sample

TOP, WRIST = "observation.images.top", "observation.images.wrist"
WINDOWS = {
    "single": {},
    "neighbours": {TOP: [-1, 0], WRIST: [-1, 0]},
    "stride": {TOP: [-6, -3, 0], WRIST: [-6, -3, 0]},
    "one camera": {TOP: [-2, -1, 0]},
}
FRAME = 48 * 64 * 3 // 2


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("streaming") / "data")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FLEXOR_CACHE", str(tmp_path / "cache"))


def load(root, deltas=None, *, tier="stream", episodes=None, order=None, bad="raise", cache=None, **options):
    dataset = open_dataset(root=root, episodes=episodes)
    settings = DatasetConfig(
        on_bad_frame=bad, cache=CacheConfig(tier=tier, **cache or {}), order=order or OrderConfig()
    )
    options = {"batch_size": 6, "seed": 7, "num_workers": 2} | options
    return open_loader(dataset, settings, deltas or {}, cameras=[TOP, WRIST], **options)


def ids(steps) -> np.ndarray:
    return np.concatenate([batch[SAMPLE_ID].numpy() for step in steps for batch in step])


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("tier", ["stream", "ram", "disk"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_every_frame_is_the_one_that_random_access_reads(root, windows, tier, workers):
    loader = load(root, WINDOWS[windows], tier=tier, num_workers=workers, accumulation=2)
    plain = open_dataset(root=root)
    for step in loader.steps(0, 8):  # two and a half epochs
        for batch in step:
            expected = plain.read(batch[SAMPLE_ID].numpy(), WINDOWS[windows], [TOP, WRIST])
            for camera in (TOP, WRIST):
                assert torch.equal(batch[camera], torch.from_numpy(expected[camera])), (windows, camera)
    assert loader.tier == tier


@pytest.mark.parametrize("kind", ["streaming", "cached", "resident", "uniform"])
def test_an_epoch_is_every_sample_once(root, kind):
    loader = load(root, tier="ram", order=OrderConfig(kind), batch_size=1)
    for epoch in range(3):
        sample_ids = ids(loader.steps(epoch * 38, (epoch + 1) * 38))
        assert sorted(sample_ids) == list(range(38))


@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
@pytest.mark.parametrize("windows", ["single", "stride"])
def test_ranks_share_the_global_batch(root, ranks, windows):
    order = OrderConfig("streaming", lanes=6, pool=4, unit=1)
    undivided = load(root, WINDOWS[windows], batch_size=12, order=order)
    parts = [
        load(root, WINDOWS[windows], batch_size=12 // ranks, rank=r, world_size=ranks, order=order)
        for r in range(ranks)
    ]
    for step, *shares in zip(undivided.steps(0, 7), *(part.steps(0, 7) for part in parts)):
        assert ids([step]).tolist() == ids(shares).tolist()
        pictures = torch.cat([share[0][TOP] for share in shares])
        assert torch.equal(step[0][TOP], pictures)


@pytest.mark.parametrize("start", [1, 4, 9])
def test_any_step_can_be_the_first(root, start):
    loader, later = load(root), load(root)
    for step, other in zip(list(loader.steps(0, 12))[start:], later.steps(start, 12), strict=True):
        assert all(torch.equal(step[0][key], other[0][key]) for key in (SAMPLE_ID, TOP, WRIST))
    assert later.pool.used == 0 or start < 12


@pytest.mark.parametrize("windows", ["single", "stride"])
def test_a_frame_is_decoded_once_per_epoch_when_streaming(root, windows):
    loader = load(root, WINDOWS[windows], batch_size=1)
    list(loader.steps(0, 38))
    # windows a stride apart would decode three frames per sample otherwise
    assert loader.counters()["decoded"] == 2 * 38
    assert loader.counters()["delivered"] == 2 * 38 * (3 if windows == "stride" else 1)
    assert loader.counters()["misses"] == 0 and loader.pool.used == 0
    list(loader.steps(38, 76))
    assert loader.counters()["decoded"] == 4 * 38


@pytest.mark.parametrize("tier", ["ram", "disk"])
def test_a_kept_frame_is_decoded_once_ever(root, tier, tmp_path):
    root = shutil.copytree(root, tmp_path / "new")
    for video in root.glob("videos/**/*.mp4"):
        video.touch()  # nothing is kept of it yet
    loader = load(root, tier=tier, batch_size=1)
    list(loader.steps(0, 3 * 38))
    assert loader.counters()["decoded"] == 2 * 38
    again = load(root, tier=tier, batch_size=1)  # another run at the same time, or later
    list(again.steps(0, 38))
    assert again.counters()["decoded"] == 0


def test_what_was_kept_of_another_content_is_not_used(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "copy")
    list(load(copy, tier="disk").steps(0, 7))
    for video in copy.glob("videos/**/*.mp4"):
        video.touch()
    again = load(copy, tier="disk")
    list(again.steps(0, 7))
    assert again.counters()["decoded"] > 0


@pytest.mark.parametrize("budget", [0, 3 * FRAME, 9 * FRAME])
def test_memory_stays_within_the_budget_whatever_the_order_wants(root, budget):
    """All units would be in the pool at once; there is room for a few frames of 76."""
    order = OrderConfig("streaming", lanes=1, pool=38, unit=1)
    expected = ids(load(root, order=order).steps(0, 12))
    loader = load(root, order=order, cache={"pool_gb": budget / 1e9})
    plain = open_dataset(root=root)
    sample_ids = []
    for (batch,) in loader.steps(0, 12):
        sample_ids += batch[SAMPLE_ID].tolist()
        assert torch.equal(batch[TOP], torch.from_numpy(plain.read(batch[SAMPLE_ID].numpy())[TOP]))
    assert sample_ids == expected.tolist()
    assert loader.counters()["misses"] > 0
    largest = 2 * 6 * max(FRAME, 24 * 32 * 3)  # what one step needs comes on top
    assert loader.pool.peak <= budget + largest * 9  # and steps that are planned ahead


def test_the_order_fits_the_room(root):
    small = load(root, cache={"pool_gb": 8 * FRAME / 1e9})
    large = load(root)
    assert small.order.lanes * small.order.pool < large.order.lanes * large.order.pool


@pytest.mark.parametrize(
    ("count", "size", "room", "expected"),
    [
        (10_000, 2, 4_000, (64, 62)),  # each batch is spread over all lanes
        (10_000, 250, 2_000, (4, 500)),  # long groups of pictures: some units in each lane
        (10_000, 250, 10, (1, 10)),
        (100, 2, 4_000, (4, 50)),  # few units: where lanes meet they are decoded twice
    ],
)
def test_lanes(count, size, room, expected):
    assert fit_lanes(64, count * size, count, room) == expected


def test_the_order_of_a_run_is_written_down_and_kept(root):
    dataset = open_dataset(root=root)
    settings = DatasetConfig(cache=CacheConfig(tier="stream", pool_gb=20 * FRAME / 1e9))
    first = open_loader(dataset, settings, {}, cameras=[TOP, WRIST], batch_size=6)
    order = first.order_config
    assert order.kind == "streaming" and order.lanes and order.pool
    resumed = DatasetConfig(cache=CacheConfig(tier="ram"), order=order)  # where there is more room
    again = open_loader(open_dataset(root=root), resumed, {}, cameras=[TOP, WRIST], batch_size=6)
    assert ids(first.steps(0, 12)).tolist() == ids(again.steps(0, 12)).tolist()


def test_auto_takes_what_has_room_and_says_so(root, caplog):
    with caplog.at_level(logging.DEBUG, "flexor"):
        assert load(root, tier="auto").tier == "ram"
        assert "of frames in memory" in caplog.text
        assert load(root, tier="auto", cache={"gb": 1e-6}).tier == "stream"
        assert "streaming, each frame is decoded once per epoch" in caplog.text


def test_no_gpu_no_gpu_tier(root):
    with pytest.raises(ConfigError, match="tier=gpu needs a GPU"):
        load(root, tier="gpu")


def test_no_gpu_no_gpu_decoder(root):
    dataset, settings = open_dataset(root=root), DatasetConfig(decoder="nvdec")
    with pytest.raises(ConfigError, match=r"decoder=nvdec can't be used: images go to cpu.*Leave it out"):
        open_loader(dataset, settings, {}, cameras=[TOP], batch_size=2)


def test_jpeg(root):
    loader = load(root, tier="ram", batch_size=38, cache={"format": "jpeg"})
    (raw,), (decoded,) = loader.steps(0, 2)
    raw, decoded = (batch[TOP][batch[SAMPLE_ID].argsort()].float() for batch in (raw, decoded))
    assert not torch.equal(raw, decoded) and (raw - decoded).abs().mean() < 3


def test_smaller_pictures(root):
    dataset = open_dataset(root=root, size=(24, 40))
    settings = DatasetConfig(cache=CacheConfig(tier="ram"))
    loader = open_loader(dataset, settings, {}, cameras=[TOP, WRIST], batch_size=4)
    (batch,) = next(loader.steps(0, 1))
    assert batch[TOP].shape == batch[WRIST].shape == (4, 3, 24, 40)
    assert dataset.features[TOP].chw == (3, 24, 40)


# Frames that do not decode.


@pytest.fixture
def broken(root, tmp_path):
    """The second group of pictures of the first video is noise from its second packet on."""
    copy = shutil.copytree(root, tmp_path / "broken")
    video = sorted(copy.glob(f"videos/{TOP}/**/*.mp4"))[0]
    overwrite_packets(video, range(5, 8))
    return copy


BAD = [5, 6]  # the first episode has 7 frames, packet 7 is the next one's first: a key frame


def bad_rows(root) -> list[int]:
    plain, bad = open_dataset(root=root), []
    for row in range(38):
        try:
            plain.read(np.array([row]), cameras=[TOP])
        except DatasetError:
            bad.append(row)
    return bad


@pytest.mark.parametrize("tier", ["stream", "ram"])
def test_bad_frames_can_be_left_out(broken, root, tier, caplog):
    bad = bad_rows(broken)
    assert bad and len(bad) < 7
    loader = load(broken, tier=tier, bad="skip", batch_size=6)
    sample_ids = ids(loader.steps(0, 19))
    counts = Counter(sample_ids.tolist())
    assert set(counts) == set(range(38)) - set(bad)
    assert len(sample_ids) == 19 * 6  # batches stay full
    assert loader.counters()["skipped_samples"] == 3 * len(bad)
    assert loader.counters()["bad_frames"] >= len(bad)
    loader.close()
    assert caplog.text.count("clips have frames that can't be decoded; their samples are skipped") == 1
    intact = open_dataset(root=root)
    for (batch,) in load(broken, tier=tier, bad="skip").steps(0, 7):
        assert torch.equal(batch[TOP], torch.from_numpy(intact.read(batch[SAMPLE_ID].numpy())[TOP]))


def test_bad_frames_can_be_replaced_by_the_nearest(broken, root, caplog):
    bad = bad_rows(broken)
    loader = load(broken, bad="nearest", batch_size=1)
    intact = open_dataset(root=root)
    images = {}
    for (batch,) in loader.steps(0, 38):
        images[int(batch[SAMPLE_ID])] = batch[TOP][0]
    assert sorted(images) == list(range(38))
    last_good = max(row for row in range(7) if row not in bad)
    for row in bad:
        if row < 7:
            assert torch.equal(images[row], torch.from_numpy(intact.read(np.array([last_good]))[TOP][0]))
    loader.close()
    assert "nearest frame replaces them" in caplog.text
    assert loader.counters()["substituted_samples"] == len(bad)


def test_bad_frames_can_stop_the_run(broken):
    with pytest.raises(DatasetError, match=r"episode \d, camera .*top, .*frame \d+: .*on_bad_frame=skip"):
        list(load(broken, bad="raise").steps(0, 7))


def test_a_video_that_is_not_one_costs_its_episodes_only(root, tmp_path, caplog):
    copy = shutil.copytree(root, tmp_path / "broken")
    video = sorted(copy.glob(f"videos/{TOP}/**/*.mp4"))[0]
    video.write_bytes(video.read_bytes()[:200])
    sample_ids = ids(load(copy, bad="skip").steps(0, 7))
    assert 0 not in sample_ids and len(set(sample_ids.tolist())) >= 38 - LENGTHS[0] - LENGTHS[1] - 4
    with pytest.raises(DatasetError, match=r"file-000\.mp4"):
        load(copy, bad="raise")


def test_a_batch_of_nothing_but_bad_frames_is_an_error(root, tmp_path):
    copy = shutil.copytree(root, tmp_path / "broken")
    for video in copy.glob(f"videos/{TOP}/**/*.mp4"):
        index, data = index_video(video), bytearray(video.read_bytes())
        first = int(index.packets.offset[4])
        data[first : int((index.packets.offset + index.packets.size).max())] = b"\xff" * (
            int((index.packets.offset + index.packets.size).max()) - first
        )
        video.write_bytes(bytes(data))
    with pytest.raises(DatasetError, match="none of its 1 samples can be decoded"):
        list(load(copy, bad="skip", batch_size=1).steps(0, 38))


# As many processes, killed and resumed: what a rank delivers is a function of the step alone.


def deliver(root, ranks, rank, start, stop, queue, kill_at):
    torch.set_num_threads(1)
    order = OrderConfig("streaming", lanes=12, pool=3, unit=1)
    loader = load(
        root, WINDOWS["neighbours"], batch_size=12 // ranks, rank=rank, world_size=ranks, order=order
    )
    for number, (batch,) in enumerate(loader.steps(start, stop), start):
        digest = [hashlib.sha256(picture.contiguous().numpy()).hexdigest() for picture in batch[TOP]]
        queue.put((number, rank, batch[SAMPLE_ID].tolist(), digest))
        if number == kill_at:
            queue.close()
            queue.join_thread()  # or the kill would lose what was said
            os.kill(os.getpid(), signal.SIGKILL)


def run_ranks(root, ranks, start, stop, kill_at=-1) -> dict[int, list]:
    """{step: samples and digests of the global batch} of so many processes."""
    queue = runs.SERVER.Queue()
    processes = [
        runs.SERVER.Process(target=deliver, args=(root, ranks, rank, start, stop, queue, kill_at))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    last = stop - 1 if kill_at < 0 else kill_at
    parts = [queue.get(timeout=LIMIT_S) for _ in range((last + 1 - start) * ranks)]
    for process in processes:
        process.join(LIMIT_S)
    delivered: dict[int, list] = {}
    for number, _, samples, digests in sorted(parts):
        delivered.setdefault(number, []).extend(zip(samples, digests))
    return delivered


@pytest.mark.slow
@pytest.mark.ranks
def test_killed_ranks_go_on_as_another_number_of_ranks(root):
    uninterrupted = run_ranks(root, 1, 0, 8)
    before = run_ranks(root, 3, 0, 8, kill_at=4)
    after = run_ranks(root, 2, 5, 8)
    assert before | after == uninterrupted and len(uninterrupted) == 8


# a damaged cache


def damage(folder, how: str) -> None:
    """Of all caches of frames."""
    for data in folder.rglob("frames/*/data"):
        if how == "truncated":
            os.truncate(data, data.stat().st_size // 3)
        else:
            content = bytearray(data.read_bytes())
            content[:: len(content) // 50] = bytes(b ^ 1 for b in content[:: len(content) // 50])
            with data.open("r+b") as file:  # in place: it is mapped
                file.write(content)


def check_batches(loader, root, first: int, stop: int) -> None:
    """They are those of a loader without a cache."""
    plain = load(root, tier="stream", device=loader.device, order=OrderConfig("uniform"))
    for step, other in zip(loader.steps(first, stop), plain.steps(first, stop), strict=True):
        assert step[0][SAMPLE_ID].tolist() == other[0][SAMPLE_ID].tolist()
        for camera in (TOP, WRIST):
            images, plain_images = (as_tensor(batch[camera]) for batch in (step[0], other[0]))
            assert torch.equal(images, plain_images), camera
    plain.close()


def as_tensor(images) -> torch.Tensor:
    return images if isinstance(images, torch.Tensor) else images.on(torch.device("cpu"))


@pytest.mark.parametrize("device", ["cpu", None])
def test_damaged_frames_are_decoded_again(root, device, tmp_path, log_lines):
    options = {"tier": "disk", "device": device, "order": OrderConfig("uniform")}
    filling = load(root, **options)
    list(filling.steps(0, 7))
    filling.close()
    damage(tmp_path / "cache", "flipped")
    loader = load(root, **options)
    check_batches(loader, root, 0, 14)
    assert sum("has damaged frames" in line for line in log_lines) == 2  # once for each camera
    loader.close()
    log_lines.clear()
    again = load(root, **options)  # and mended
    check_batches(again, root, 0, 7)
    assert not any("has damaged frames" in line for line in log_lines)


def read_truncated(root, device, folder, shared_memory) -> None:
    from flexor.data.frames import cache_folders

    cache_folders.SHARED_MEMORY = shared_memory
    os.environ["FLEXOR_CACHE"] = str(folder)
    loader = load(root, tier="disk", device=device, order=OrderConfig("uniform"))
    check_batches(loader, root, 0, 8)
    damage(folder, "truncated")
    check_batches(loader, root, 8, 20)
    os._exit(0)


@pytest.mark.ranks(waits=True)
@pytest.mark.parametrize("device", ["cpu", None])
def test_a_cache_that_is_truncated_while_training_reads_it(root, device, tmp_path):
    reader = runs.SERVER.Process(target=read_truncated, args=(root, device, tmp_path / "cache", tmp_path))
    reader.start()
    reader.join()
    assert reader.exitcode == 0
