"""Our reading of committed datasets against what LeRobot 0.6.1 reads of them (see tests/parity)."""

import json
from pathlib import Path

import pytest

from parity.compare_data import compare
from support.legacy import to_v2

GOLDEN = Path(__file__).parents[1] / "golden/data"


@pytest.mark.parametrize("dump", ["h264", "h264_windows", "av1", "bframes"])
def test_same_as_lerobot(dump):
    expected = json.loads((GOLDEN / f"{dump}.json").read_text())
    assert compare(GOLDEN / dump.split("_")[0], expected) == []


@pytest.mark.parametrize("version", ["v2.1", "v2.0"])
def test_older_versions_same_as_lerobot(version, tmp_path):
    """The same packets and rows in the older layout: LeRobot reads them only after converting them back."""
    root = to_v2(GOLDEN / "h264", tmp_path / version, version)
    for dump in ("h264", "h264_windows"):
        expected = json.loads((GOLDEN / f"{dump}.json").read_text())
        assert compare(root, expected) == []


@pytest.mark.parametrize("camera", ["observation.images.top", "observation.images.wrist"])
def test_the_neighbour_of_a_frame_would_be_noticed(camera):
    """Guards the tests above, which compare thumbnails where the pixels depend on the machine."""
    dump = json.loads((GOLDEN / "h264.json").read_text()) | {"pixels": "another PyAV"}
    rows = dump["rows"]
    shifted = {row: rows[row] | {camera: rows[str((int(row) + 1) % 38)][camera]} for row in rows}
    assert len(compare(GOLDEN / "h264", dump | {"rows": shifted})) == 38
