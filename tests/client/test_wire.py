"""The codec: openpi's frames in both directions, and nothing that a frame can hold does harm."""

import ast
import contextlib
import re
import subprocess
import sys
import tomllib
import tracemalloc
from pathlib import Path

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import flexor
import flexor_client
from flexor_client.errors import WireError
from flexor_client.wire import DTYPE, Limits, pack, unpack
from support.frames_to_fuzz import hostile_frame

DTYPES = st.sampled_from(
    [
        "|b1",
        "|i1",
        "|u1",
        "<i2",
        ">i2",
        "<i4",
        "<u4",
        "<i8",
        ">u8",
        "<f2",
        "<f4",
        ">f4",
        "<f8",
    ]
)
ARRAYS = DTYPES.flatmap(
    lambda d: hnp.arrays(np.dtype(d), hnp.array_shapes(min_dims=0, max_dims=4, min_side=0))
)
PLAIN = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
MESSAGES = st.recursive(
    PLAIN | ARRAYS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


def same(value: object, other: object) -> bool:
    if isinstance(value, np.ndarray) and isinstance(other, np.ndarray):
        return (
            value.dtype == other.dtype and value.shape == other.shape and value.tobytes() == other.tobytes()
        )
    if isinstance(value, dict) and isinstance(other, dict):
        return value.keys() == other.keys() and all(same(value[key], other[key]) for key in value)
    if isinstance(value, list) and isinstance(other, list):
        return len(value) == len(other) and all(map(same, value, other))
    return type(value) is type(other) and (value == other or value != value)


@given(MESSAGES)
@settings(deadline=None)
def test_what_is_packed_comes_back(message):
    assert same(unpack(pack(message)), message)


def test_frames_are_those_of_openpi():
    """The bytes that openpi-client 0.1.2 writes for the same values."""
    array = np.arange(6, dtype="<f4").reshape(2, 3)
    assert msgpack.unpackb(pack({"a": array, "s": np.float32(1.5)})) == {
        "a": {b"__ndarray__": True, b"data": array.tobytes(), b"dtype": "<f4", b"shape": [2, 3]},
        "s": {b"__npgeneric__": True, b"data": 1.5, b"dtype": "<f4"},
    }
    turned = unpack(pack(array.T))
    assert same(turned, np.ascontiguousarray(array.T)) and not turned.flags.writeable
    assert unpack(pack(np.int16(-3))) == -3 and type(unpack(pack(np.int16(-3)))) is np.int16
    assert unpack(pack((1, 2))) == [1, 2]


def marked(**more: object) -> bytes:
    fields = {"__ndarray__": True, "data": b"12345678", "dtype": "<f4", "shape": [2], **more}
    return msgpack.packb({key.encode(): value for key, value in fields.items()})


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"", "ends too early"),
        (b"\xa5abc", "ends too early"),
        (b"\xc1", "extension type"),
        (b"\xc7\x00\x01", "extension type"),
        (b"\xd6\xff\x00\x00\x00\x00", "extension type"),  # a time stamp
        (pack(1) + b"\xc0", "follows the message"),
        (b"\xdd\xff\xff\xff\xff", "more than 5,000 values"),
        (b"\xdf\xff\xff\xff\xff", "more than 5,000 values"),
        (msgpack.packb([[0] * 900] * 6), "more than 5,000 values"),
        (b"\x91" * 17 + b"\xc0", "more than 16 deep"),
        (b"\x91" * 100_000, "more than 16 deep"),
        (b"\xa2\xff\xff", "not MessagePack: UnicodeDecodeError"),
        (msgpack.packb({1: 2}), "int is not allowed for map key"),
        (b"\x81\x90\x01", "list is not allowed for map key"),
        (marked(dtype="|O"), r"dtype '\|O' is not allowed"),
        (marked(dtype="<c8"), "is not allowed"),
        (marked(dtype="|V8"), "is not allowed"),
        (marked(dtype="<M8[s]"), "is not allowed"),
        (marked(dtype="f4,f4"), "is not allowed"),
        (marked(dtype="<f4\n"), "is not allowed"),
        (marked(dtype="<f16"), "is not allowed"),
        (marked(dtype="|S0"), "is not allowed"),
        (marked(dtype=4), "dtype 4 is not allowed"),
        (marked(shape=[3]), "has 12 bytes, but 8 were sent"),
        (marked(shape=[-2, -1]), "-2 where a size is expected"),
        (marked(shape=[2**39, 2**39]), "were sent"),
        (marked(shape=[2**64 - 1]), "where a size is expected"),
        (marked(shape=[True, 2]), "True where a size is expected"),
        (marked(shape=[2.0]), "where a size is expected"),
        (marked(shape="2"), "must be a list"),
        (marked(shape=[1] * 9), "at most 8 sizes"),
        (marked(data="text"), "must be bytes, not str"),
        (marked(dtype="<U2", shape=[1]), "is not allowed.*Send text as text"),
        (marked(dtype="|S8", shape=[1]), "is not allowed"),
        (msgpack.packb(["x" * 30_000] * 3), "more than 65,536 bytes of text"),
        (msgpack.packb({"x" * 70_000: 1}), "more than 65,536 bytes of text"),
        (msgpack.packb({b"__ndarray__": True}), "dtype None"),
        (msgpack.packb({b"__npgeneric__": True, b"data": 300, b"dtype": "|u1"}), "not a value of uint8"),
        (msgpack.packb({b"__npgeneric__": True, b"data": "3", b"dtype": "<f4"}), "must be a number, not str"),
        (msgpack.packb({b"__npgeneric__": True, b"data": [1], b"dtype": "<f4"}), "must be a number"),
    ],
)
def test_what_is_not_a_message_is_refused(frame, words):
    with pytest.raises(WireError, match=words):
        unpack(frame)


def test_a_frame_that_is_too_large_is_refused():
    with pytest.raises(WireError, match="at most 100 are allowed"):
        unpack(pack(b"x" * 200), Limits(frame_bytes=100))


@pytest.mark.parametrize(
    "value",
    [
        np.array([object()]),
        np.zeros(2, "c8"),
        np.array(["text"]),
        {1, 2},
        np.datetime64("2026-01-01"),
        2**65,
    ],
)
def test_what_cant_be_sent_is_refused(value):
    with pytest.raises(WireError, match="can't be sent"):
        pack({"value": value})


def test_fuzzing_raises_nothing_but_wire_errors_and_takes_little_memory():
    """A short version of benchmarks/fuzz_wire.py."""
    rng, refused = np.random.default_rng(0), 0
    tracemalloc.start()
    for _ in range(1500):
        frame = hostile_frame(rng)
        try:
            unpack(frame)
        except WireError:
            refused += 1
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 150 < refused < 1450  # both kinds are tried
    assert peak < 20e6


@given(st.binary(max_size=300))
@settings(deadline=None)
def test_any_bytes_are_read_or_refused(data):
    with contextlib.suppress(WireError):
        unpack(data)


def test_both_packages_have_the_same_version():
    root = Path(__file__).parents[2]
    ours, robots = (
        tomllib.loads((root / name).read_text())["project"]
        for name in ("pyproject.toml", "client/pyproject.toml")
    )
    assert robots["version"] == flexor.__version__ == flexor_client.__version__
    names = [{re.match(r"[\w-]+", each)[0] for each in project["dependencies"]} for project in (robots, ours)]
    assert names[0] <= names[1]  # Flexor contains the robots' package


def test_the_package_is_small_and_for_old_pythons():
    folder = Path(flexor_client.__file__).parent
    for file in folder.rglob("*.py"):
        ast.parse(file.read_text(), feature_version=(3, 9))
    code = "import flexor_client.wire, sys; assert not {'torch', 'flexor', 'PIL'} & {*sys.modules}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_no_name_of_a_dtype_that_passes_is_more_than_values():
    for name in ("<f4", "|b1", "=i8"):
        assert DTYPE.match(name) and not np.dtype(name).hasobject
