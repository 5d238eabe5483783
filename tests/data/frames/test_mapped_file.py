"""Files that another process truncates while they are mapped: zeros that are told, instead of an end by SIGBUS."""

import faulthandler
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

from flexor.data.frames import mapped_file
from flexor.data.frames.mapped_file import MappedFile
from support.runs import SERVER

ROWS, SIZE = 64, 200_000


def filled(path: Path) -> Path:
    path.write_bytes(b"\1" * (ROWS * SIZE))
    return path


def in_a_process(function, *arguments) -> int:
    """What would end the tests if it failed; its exit code."""
    process = SERVER.Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def read_while_truncated(path: Path, to: int) -> None:
    """Threads copy frames. None may take zeros for what was in the file."""
    mapped = MappedFile(filled(path), np.uint8)
    rows = mapped.array.reshape(ROWS, SIZE)
    wrong, began = [], threading.Barrier(4)

    def read(seed: int) -> None:
        rng, out = np.random.default_rng(seed), np.empty((8, SIZE), np.uint8)
        began.wait()
        while True:
            np.take(rows, rng.integers(0, ROWS, 8), axis=0, out=out, mode="clip")
            right = bool((out == 1).all())
            if mapped.lost or not mapped.complete:
                return
            if not right:
                wrong.append(seed)
                return

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    began.wait()
    os.truncate(path, to)
    for thread in threads:
        thread.join()
    os._exit(len(wrong))


@pytest.mark.ranks(waits=True)
@pytest.mark.parametrize("to", [0, 4096 * 3 + 17, SIZE * ROWS // 2])
def test_truncated_while_threads_read(to, tmp_path):
    assert in_a_process(read_while_truncated, tmp_path / "file", to) == 0


def read_elsewhere(path: Path) -> None:
    MappedFile(filled(path), np.uint8)
    other = np.memmap(filled(path.with_name("other")), np.uint8, mode="r")
    os.truncate(path.with_name("other"), 0)
    os._exit(int(other[SIZE]))


@pytest.mark.ranks(waits=True)
def test_other_mappings_are_not_touched(tmp_path):
    assert in_a_process(read_elsewhere, tmp_path / "file") == -signal.SIGBUS


def send_to_itself(path: Path) -> None:
    faulthandler.disable()
    MappedFile(filled(path), np.uint8)
    os.kill(os.getpid(), signal.SIGBUS)
    os._exit(0)


@pytest.mark.ranks(waits=True)
def test_a_signal_that_was_sent_is_not_swallowed(tmp_path):
    assert in_a_process(send_to_itself, tmp_path / "file") == -signal.SIGBUS


def replaced_handler(path: Path) -> None:
    mapped = MappedFile(filled(path), np.uint8)
    faulthandler.enable()  # takes the signal over
    later = MappedFile(filled(path.with_name("later")), np.uint8)
    os.truncate(path, 0)
    os.truncate(path.with_name("later"), 0)
    assert mapped.array[SIZE] == later.array[SIZE] == 0 and mapped.lost and later.lost
    os._exit(0)


@pytest.mark.ranks(waits=True)
def test_a_handler_that_was_installed_meanwhile_is_kept_behind_ours(tmp_path):
    assert in_a_process(replaced_handler, tmp_path / "file") == 0


def test_addresses_are_forgotten_with_the_mapping(tmp_path):
    before = len(mapped_file._areas)
    mapped = MappedFile(filled(tmp_path / "file"), np.uint8)
    view = mapped.array[:SIZE]
    del mapped
    assert len(mapped_file._areas) == before + 1 and view[5] == 1
    del view
    assert len(mapped_file._areas) == before


def test_it_cannot_be_written_to(tmp_path):
    mapped = MappedFile(filled(tmp_path / "file"), np.uint8)
    assert not mapped.array.flags.writeable and mapped.complete and not mapped.lost
