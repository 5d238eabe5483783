"""Records on disk: each is there as soon as it was appended, and an incomplete one is cut off."""

import numpy as np
import pytest

from flexor.core.errors import CheckpointError
from flexor.policies.features import Kind, PolicyFeature
from flexor.rl.records import RecordFile, first_record, record_type, step_record

OBSERVED = {
    "observation.state": PolicyFeature(Kind.STATE, (2,)),
    "observation.image": PolicyFeature(Kind.VISUAL, (3, 4, 5)),
}
LAYOUT = record_type(OBSERVED, 3)


def observation(number: int) -> dict[str, np.ndarray]:
    image = np.full((3, 4, 5), number % 256, np.uint8)
    return {"observation.state": np.array([number, -number], np.float32), "observation.image": image}


def fill(file: RecordFile, steps: int) -> None:
    file.append(first_record(LAYOUT, observation(0)))
    for step in range(1, steps):
        action = np.full(3, step, np.float32)
        file.append(
            step_record(LAYOUT, observation(step), action, reward=step / 2, terminated=step == steps - 1)
        )


def test_what_was_appended_is_read_again(tmp_path):
    fill(RecordFile(tmp_path, LAYOUT), 5)  # not closed, as after a kill
    again = RecordFile(tmp_path, LAYOUT)
    records = again.read(0, again.count)
    assert again.count == 5
    assert records["is_step"].tolist() == [0, 1, 1, 1, 1]
    assert records["observation.state"][:, 0].tolist() == [0, 1, 2, 3, 4]
    assert records["observation.image"][3].tolist() == observation(3)["observation.image"].tolist()
    assert records["reward"].tolist() == [0, 0.5, 1, 1.5, 2]
    assert records["terminated"].tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize("cut", [1, 4, 30, LAYOUT.itemsize - 1])
def test_a_record_that_was_not_written_to_its_end_is_cut_off(cut, tmp_path):
    fill(RecordFile(tmp_path, LAYOUT), 4)
    path = tmp_path / "records.bin"
    path.write_bytes(path.read_bytes()[:-cut])
    again = RecordFile(tmp_path, LAYOUT)
    assert again.count == 3 and path.stat().st_size == 3 * LAYOUT.itemsize
    again.append(step_record(LAYOUT, observation(9), np.zeros(3, np.float32)))
    assert RecordFile(tmp_path, LAYOUT).read(3, 1)["observation.state"][0, 0] == 9


def test_a_damaged_record_ends_what_is_read(tmp_path):
    """As after a loss of power, when the file has its length but not its contents."""
    fill(RecordFile(tmp_path, LAYOUT), 600)
    path = tmp_path / "records.bin"
    data = bytearray(path.read_bytes())
    data[550 * LAYOUT.itemsize + 20] ^= 1
    path.write_bytes(data)
    assert RecordFile(tmp_path, LAYOUT).count == 550


def test_records_of_other_observations_are_refused(tmp_path):
    fill(RecordFile(tmp_path, LAYOUT), 2)
    with pytest.raises(CheckpointError, match="other observations or actions"):
        RecordFile(tmp_path, record_type(OBSERVED, 4))
