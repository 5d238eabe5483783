"""`last` and the numbers of checkpoints: after copies, on file systems without links, with more digits."""

import errno
import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.cli.main import main
from flexor.policies.pretrained import find_folder
from flexor.train.checkpoint import folder as checkpoint
from support import runs

STEPS = 4


@pytest.fixture(scope="module")
def finished(lowdim, tiny_act, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("finished") / "run"
    return runs.train(lowdim, folder, tiny_act, f"--steps={STEPS}", "--save_freq=1")


def names(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def followed(run: Path, copy: Path, *steps: int) -> Path:
    """A copy that followed links, with only some of its checkpoints."""
    shutil.copytree(run, copy)
    assert not (copy / "checkpoints" / "last").is_symlink()
    for step, folder in checkpoint.complete(copy / "checkpoints").items():
        if step not in steps:
            shutil.rmtree(folder)
    return copy


def test_copy_that_followed_the_link(finished, tmp_path):
    copy = followed(finished, tmp_path / "copy", 2, 4)
    assert main(["resume", str(copy), "--steps=5"]) == 0
    assert names(copy) == ["000002", "000004", "000005", "last"]
    assert (copy / "checkpoints" / "last").resolve().name == "000005"
    runs.assert_checkpoints_whole(copy)


def test_copy_with_nothing_but_last(finished, tmp_path):
    copy = followed(finished, tmp_path / "copy")
    assert names(copy) == ["last"]
    assert find_folder(str(copy)) == copy / "checkpoints" / "last" / "pretrained_model"
    assert main(["resume", str(copy)]) == 0
    assert names(copy) == ["000004", "last"] and (copy / "checkpoints" / "last").is_symlink()
    runs.assert_same(finished, copy, STEPS)


def test_copy_that_is_older_than_the_run(finished, tmp_path):
    """A folder `last` of step 4 in a run that was at step 2 when it was copied here."""
    copy = followed(finished, tmp_path / "copy", 1, 2)
    assert main(["resume", str(copy)]) == 0
    assert names(copy) == ["000001", "000002", "000004", "last"]
    runs.assert_same(finished, copy, STEPS)


def test_stale_folder_is_not_taken_for_the_newest(finished, tmp_path):
    copy = followed(finished, tmp_path / "copy", 1, 2, 3, 4)
    last = copy / "checkpoints" / "last"
    shutil.rmtree(last)
    shutil.copytree(copy / "checkpoints" / "000002", last)
    assert find_folder(str(copy)) == copy / "checkpoints" / "000004" / "pretrained_model"
    assert main(["resume", str(copy), "--steps=5"]) == 0
    assert last.resolve().name == "000005"
    runs.assert_checkpoints_whole(copy)


@pytest.mark.parametrize("content", ["other", "no checkpoint"])
def test_a_folder_of_something_else_is_not_lost(content, finished, tmp_path, log_lines):
    copy = followed(finished, tmp_path / "copy", 4)
    manifest = copy / "checkpoints" / "last" / checkpoint.MANIFEST
    if content == "other":
        manifest.write_text(json.dumps({**json.loads(manifest.read_text()), "more": 1}))
    else:
        manifest.unlink()
    assert main(["resume", str(copy)]) == 0
    assert names(copy) == ["000004", "last", "last.copy-1"]
    assert any("renamed to last.copy-1" in line for line in log_lines)
    assert (copy / "checkpoints" / "last.copy-1" / "pretrained_model" / "config.json").is_file()


@pytest.fixture
def without_links(monkeypatch):
    """A file system such as exFAT, or a share of Windows."""

    def symlink_to(self: Path, target: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "symlink_to", symlink_to)


def test_no_links(finished, without_links, lowdim, tiny_act, tmp_path, log_lines):
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=3", "--save_freq=1")
    assert names(run) == ["000001", "000002", "000003"]
    assert sum("finds it by its number" in line for line in log_lines) == 1
    newest = run / "checkpoints" / "000003" / "pretrained_model"
    for named in (run, run / "checkpoints" / "last", run / "checkpoints" / "last" / "pretrained_model"):
        assert find_folder(str(named)) == newest
    assert main(["export", str(run / "checkpoints" / "last"), f"--output={tmp_path / 'exported'}"]) == 0
    assert main(["resume", str(run), "--steps=4"]) == 0
    path = run / "checkpoints" / "last" / "pretrained_model" / "train_config.json"
    assert main(["train", "--resume=true", f"--config_path={path}", f"--steps={STEPS}"]) == 0
    runs.assert_same(finished, run, STEPS)


def test_a_link_that_was_lost_on_the_way(finished, tmp_path):
    copy = shutil.copytree(finished, tmp_path / "copy", symlinks=True)
    (copy / "checkpoints" / "last").unlink()
    assert find_folder(str(copy / "checkpoints" / "last")).parent.name == "000004"
    assert main(["push", str(copy / "checkpoints" / "last"), "--repo_id=me/policy", "--dry-run"]) == 0


# Numbers


def fake(checkpoints: Path, name: str, manifest: bool = True) -> Path:
    folder = checkpoints / name
    (folder / "pretrained_model").mkdir(parents=True)
    (folder / "pretrained_model" / "config.json").write_text("{}")
    if manifest:
        (folder / "training_state").mkdir()
        (folder / checkpoint.MANIFEST).write_text(json.dumps({"step": int(name), "files": {}}))
    return folder


@pytest.mark.parametrize("manifest", [True, False])
def test_a_million_is_more_than_999999(manifest, tmp_path):
    for name in ("999999", "1000000", "000100"):
        fake(tmp_path / "checkpoints", name, manifest)
    assert find_folder(str(tmp_path)).parent.name == "1000000"
    if manifest:
        assert [*checkpoint.complete(tmp_path / "checkpoints")] == [100, 999999, 1000000]
        assert checkpoint.newest(tmp_path / "checkpoints").name == "1000000"


def test_lerobots_runs_say_with_last_which_is_complete(tmp_path):
    for name in ("000100", "000200"):
        fake(tmp_path / "checkpoints", name, manifest=False)
    (tmp_path / "checkpoints" / "last").symlink_to("000100")
    assert find_folder(str(tmp_path)).parent.name == "last"


def test_a_step_with_more_digits_replaces_the_one_with_fewer(finished, tmp_path):
    """A run of more steps than it was to have saves a step again, under a longer name."""
    copy = runs.cut_back(finished, tmp_path / "copy", 3)
    folder = checkpoint.Folder(copy / "checkpoints", 3, 12_345_678)
    shutil.copytree(copy / "checkpoints" / "000003", folder.temporary)
    folder.finish()
    assert names(copy) == ["00000003", "000001", "000002", "last"]
    assert [*checkpoint.complete(copy / "checkpoints")] == [1, 2, 3]


@given(
    steps=st.sets(st.integers(1, 60), min_size=1, max_size=12),
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 20),
)
@settings(max_examples=80)
def test_what_makes_room_would_have_gone_anyway(steps, keep_last, keep_every):
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Path(folder)
        new, earlier = max(steps) + 1, sorted(steps)
        for step in earlier:
            fake(checkpoints, f"{step:06d}")
        removed = checkpoint.Folder(checkpoints, new, 100).make_room(keep_last, keep_every)
        assert earlier[-1] not in removed and sorted(checkpoint.complete(checkpoints)) == sorted(
            {*earlier} - {*removed}
        )
        fake(checkpoints, f"{new:06d}")
        more = checkpoint.prune(checkpoints, keep_last, keep_every)
        expected = checkpoint._surplus([*earlier, new], keep_last, keep_every)
        assert sorted([*removed, *more]) == expected
        if keep_last is not None:  # the newest is the only one of these that waits for the new one
            assert {*more} <= {earlier[-1]}
