"""Records on an actor's disk: each keeps its number, whatever ends, and what is cut off is not taken for one."""

import pytest

from flexor_client.errors import ClientError
from flexor_client.spool import ENTRY, HEADER, Spool

RECORDS = [bytes([number]) * (10 + number) for number in range(8)]


def filled(folder=None, count: int = 8) -> Spool:
    spool = Spool(folder)
    assert [spool.append(record) for record in RECORDS[:count]] == [*range(1, count + 1)]
    return spool


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_is_acknowledged_is_not_given_again(on_disk, tmp_path):
    spool = filled(tmp_path if on_disk else None)
    assert spool.after(0, 3, 1000) == RECORDS[:3]
    assert spool.after(2, 100, 30) == RECORDS[2:4]  # 12 and 13 bytes
    assert spool.after(2, 100, 1) == RECORDS[2:3]  # one at least
    spool.acknowledge(5)
    assert (spool.acknowledged, spool.last) == (5, 8)
    assert spool.after(5, 100, 1000) == RECORDS[5:]
    spool.acknowledge(8)
    assert spool.after(8, 100, 1000) == [] and spool.append(b"x") == 9
    spool.close()


def test_another_process_goes_on_where_the_last_one_was(tmp_path):
    spool = filled(tmp_path)
    spool.acknowledge(6)
    spool.close()
    again = Spool(tmp_path)
    assert again.id == spool.id and again.last == 8
    assert (
        again.after(0, 100, 1000) == RECORDS
    )  # that some are acknowledged is not on the disk: the learner says so
    again.acknowledge(6)
    assert again.after(6, 100, 1000) == RECORDS[6:] and again.append(b"x") == 9
    again.close()
    assert Spool(tmp_path / "other").id != spool.id


@pytest.mark.parametrize("cut", [1, 5, len(RECORDS[-1]), len(RECORDS[-1]) + ENTRY.size - 1])
def test_a_record_that_was_not_written_to_its_end_is_cut_off(cut, tmp_path):
    filled(tmp_path).close()
    path = tmp_path / "records.spool"
    path.write_bytes(path.read_bytes()[:-cut])
    spool = Spool(tmp_path)
    assert spool.after(0, 100, 1000) == RECORDS[:-1] and spool.append(b"new") == 8
    spool.close()
    again = Spool(tmp_path)
    assert again.after(7, 100, 1000) == [b"new"]
    again.close()


def test_the_file_does_not_grow_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr("flexor_client.spool.REWRITE_BYTES", 100)
    spool = filled(tmp_path)
    spool.acknowledge(8)
    assert (tmp_path / "records.spool").stat().st_size == HEADER.size
    assert spool.append(b"nine") == 9
    spool.close()
    again = Spool(tmp_path)
    assert (again.acknowledged, again.last, again.id) == (8, 9, spool.id) and again.after(8, 9, 99) == [
        b"nine"
    ]
    again.close()


def test_a_learner_that_has_more_than_the_spool(tmp_path):
    """The end of the file was lost with the power: numbers must not be used twice."""
    spool = filled(tmp_path)
    spool.acknowledge(20)
    assert spool.append(b"next") == 21
    spool.close()
    again = Spool(tmp_path)
    assert again.last == 21 and again.after(20, 9, 99) == [b"next"]
    again.close()


def test_two_processes_can_not_use_one_spool(tmp_path):
    spool = Spool(tmp_path)
    with pytest.raises(ClientError, match="in use by another actor"):
        Spool(tmp_path)
    spool.close()
    Spool(tmp_path).close()


def test_another_file_is_no_spool(tmp_path):
    (tmp_path / "records.spool").write_bytes(b"something else")
    with pytest.raises(ClientError, match="no spool"):
        Spool(tmp_path)
