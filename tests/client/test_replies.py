"""What a server sends is checked: sizes, types, numbers, texts; whatever it is, there is a message or an error."""

import contextlib
import copy

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor_client.errors import WireError
from flexor_client.replies import REPLY_BYTES, read_metadata, read_result, stable_fields
from flexor_client.wire import pack
from support.frames_to_fuzz import hostile_reply

METADATA = {
    "server": "flexor",
    "version": "0.1.0",
    "protocol": 1,
    "policy": "act",
    "language": False,
    "actions": [4, 2],
    "action_steps": 3,
    "observation_steps": [-1, 0],
    "reply": "chunk",
    "continues_chunks": False,
    "action_range": {"low": [-1.0, 0.0], "high": [1.0, 0.0]},
    "inputs": {"observation.state": {"shape": [3], "image": False}},
    "limits": {"frame_bytes": 100_000, "sessions": 64, "requests_per_s": 200.0},
}
CHUNK = np.arange(8, dtype=np.float32).reshape(4, 2)


def test_metadata_and_results_come_back():
    metadata = read_metadata(pack(METADATA))
    assert metadata == METADATA
    result = read_result(pack({"actions": CHUNK, "server_timing": {"infer_ms": 1.0}}), metadata)
    np.testing.assert_array_equal(result["actions"], CHUNK)
    assert read_result(pack({"actions": CHUNK[:1]}), metadata)["actions"].shape == (1, 2)  # one action
    assert (
        read_result(pack({"expired": {"age_ms": 3, "deadline_ms": 2.5}}), metadata)["expired"]["age_ms"] == 3
    )


def test_other_servers_may_say_other_things():
    """openpi's servers send what they like, or nothing."""
    other = {
        "policy": {"kind": "pi0"},
        "inputs": 3,
        "version": None,
        "reset_pose": np.zeros(7),
        "server": "openpi",
    }
    assert read_metadata(pack({})) == {} and read_metadata(pack(other))["inputs"] == 3
    assert read_result(pack({"actions": np.zeros((50, 32)), "state": np.zeros(7)}), {})["actions"].shape == (
        50,
        32,
    )
    assert stable_fields(read_metadata(pack(other))) == dict.fromkeys(stable_fields({}))


@pytest.mark.parametrize(
    "change",
    [
        {"actions": [4]},
        {"actions": [4, 0]},
        {"actions": [2**40, 2]},
        {"actions": [10_000, 10_000]},
        {"actions": np.array([4, 2])},
        {"action_steps": 0},
        {"action_steps": True},
        {"action_steps": "3"},
        {"observation_steps": []},
        {"observation_steps": [-(10**9), 0]},  # the robot would keep so many observations
        {"observation_steps": [1]},
        {"observation_steps": [-1] * 1000},
        {"reply": "both"},
        {"reply": np.ones(3)},
        {"continues_chunks": "no"},
        {"action_range": [0, 1]},
        {"action_range": {"low": [0.0, 0.0]}},
        {"action_range": {"low": [0.0], "high": [1.0]}},
        {"action_range": {"low": [0.0, float("nan")], "high": [1.0, 1.0]}},
        {"action_range": {"low": [0.0, float("-inf")], "high": [1.0, 1.0]}},
        {"action_range": {"low": [2.0, 0.0], "high": [1.0, 1.0]}},
        {"action_names": [1, 2]},
        {"action_names": ["x" * 1000, "y"]},
        {"limits": {"frame_bytes": "much"}},
        {"limits": 3},
        {"policy": 3},
        {"inputs": {"x": 3}},
        {"inputs": {"x": {"shape": [-1], "image": True}}},
        {"language": 1},
        {"protocol": 2},
        {"protocol": None},
        {"protocol": True},
        {"protocol": np.ones(2)},
    ],
)
def test_metadata_that_can_not_be_meant_is_refused(change):
    with pytest.raises(WireError, match=r"metadata must be|version"):
        read_metadata(pack({**METADATA, **change}))


def test_another_version_of_the_protocol_says_what_to_do():
    with pytest.raises(WireError, match=r"version 2 of it, and this flexor-client version 1: install"):
        read_metadata(pack({**METADATA, "protocol": 2}))


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ({"actions": [[1.0, 2.0]]}, "a float array"),
        ({"actions": CHUNK[0]}, "a float array"),
        ({"actions": CHUNK.astype(int)}, "a float array"),
        ({"actions": CHUNK[:0]}, "a float array"),
        ({"actions": np.zeros((5, 2))}, r"are \[5, 2\], but the server announced \[4, 2\]"),
        ({"actions": np.zeros((4, 3))}, "announced"),
        ({"actions": np.where(CHUNK > 6, np.nan, CHUNK)}, "not finite"),
        ({"actions": np.where(CHUNK > 6, np.inf, CHUNK)}, "not finite"),
        ({"actions": CHUNK, "more": b"x" * 100_000}, "bytes"),
        ({"expired": 3}, "expired must say"),
        ({"expired": {"age_ms": "old"}}, "expired must say"),
        ([CHUNK], "a list instead of a map"),
        (None, "instead of a map"),
    ],
)
def test_results_that_can_not_be_used_are_refused(result, words):
    with pytest.raises(WireError, match=words):
        read_result(pack(result), METADATA)


def test_sizes_are_limited_before_anything_is_made():
    with pytest.raises(WireError, match="bytes"):
        read_metadata(pack({"x": b"x" * REPLY_BYTES}))
    with pytest.raises(WireError, match="values"):
        read_metadata(b"\xdd\xff\xff\xff\xff")
    with pytest.raises(WireError, match="text"):
        read_metadata(msgpack.packb({"x": "y" * 100_000}))


def test_texts_are_printable_wherever_they_are():
    hostile = "\x1b[2Jrm\r\u202e\n"
    metadata = read_metadata(pack({**METADATA, "policy": hostile, hostile: [hostile, {"x": hostile}]}))
    assert "\x1b" not in f"{metadata}" and metadata["policy"] == r"\x1b[2Jrm\r\u202e\n"
    assert all(text.isprintable() for text in (*metadata, metadata["policy"]))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from([*METADATA]), VALUES)
@settings(deadline=None)
def test_whatever_stands_in_a_field_is_read_or_refused(name, value):
    with contextlib.suppress(WireError):
        read_metadata(pack({**copy.deepcopy(METADATA), name: value}))
    for field in ("actions", "expired"):
        with contextlib.suppress(WireError):
            read_result(pack({field: value}), METADATA)


def test_fuzzing_raises_nothing_but_wire_errors():
    """A short version of benchmarks/fuzz_wire.py."""
    rng, refused = np.random.default_rng(1), 0
    for _ in range(1500):
        frame = hostile_reply(rng)
        for read in (read_metadata, lambda frame: read_result(frame, METADATA)):
            try:
                read(frame)
            except WireError:
                refused += 1
    assert 500 < refused < 2990
