"""Typed settings from plain data: what is taken, and that what is refused is named."""

from dataclasses import dataclass, field
from typing import Any, Literal

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from flexor.core.errors import ConfigError
from flexor.core.foreign_files import QuickLoader
from flexor.core.typed import (
    QuickDumper,
    Text,
    closest,
    coerce,
    from_plain,
    help_texts,
    to_plain,
    type_name,
)

Precision = Literal["no", "bf16"]


@pytest.mark.parametrize(
    "typed, expected, value",
    [
        ("1e-4", float, 1e-4),
        ("1E-4", float, 1e-4),
        ("3", float, 3.0),
        ("1_000", int, 1000),
        ("1e5", int, 100_000),
        ("1e3", int | None, 1000),
        ("010", int, 10),  # not YAML's octal
        ("-3", int, -3),
        ("null", int | None, None),
        ("None", str | None, None),
        ("true", bool, True),
        ("False", bool, False),
        ("true", str, "true"),
        ("012", str, "012"),
        ("1e-4", str | None, "1e-4"),
        ("[1, 2]", list[int], [1, 2]),
        ("[1, 2]", list[int] | None, [1, 2]),
        ("[0.9, 0.95]", tuple[float, float], (0.9, 0.95)),
        ("{a: 1}", dict[str, Any], {"a": 1}),
        ("[a, b]", list[str] | str, ["a", "b"]),
        ("a", list[str] | str, "a"),
        ("no", Precision, "no"),
        ("bf16", Precision | None, "bf16"),
    ],
)
def test_typed_text(typed, expected, value):
    value_ = coerce(Text(typed), expected, "key")
    assert value_ == value and type(value_) is type(value)


@pytest.mark.parametrize("value", [True, False, "no", "bf16"])
def test_yaml_turns_no_into_a_boolean(value):
    if value is True:
        with pytest.raises(ConfigError, match=r"key=True is not valid: expected no\|bf16"):
            coerce(value, Precision, "key")
    else:
        assert coerce(value, Precision, "key") in ("no", "bf16")


@pytest.mark.parametrize(
    "typed, expected",
    [
        ("1.5", int),
        ("1e400", int),
        ("1e-3", int),
        ("true", int),
        ("9" * 5000, float),
        ("nan", float),
        ("inf", float),
        ("true", float),
        ("1", bool),
        ("maybe", bool),
        ("null", int),
        ("3", list[int]),
        ("[1, x]", list[int]),
        ("[1", list[int]),
        ("[0.9]", tuple[float, float]),
        ("[a]", dict[str, int]),
        ("bf32", Precision),
        ("2020-99-99", bool),
        ("", int),
    ],
)
def test_wrong_type_names_key_value_and_type(typed, expected):
    with pytest.raises(ConfigError) as error:
        coerce(Text(typed), expected, "group.key")
    assert str(error.value).startswith("group.key=")
    assert f"expected {type_name(expected)}" in str(error.value)


TYPES = [int, float, bool, str, int | None, list[int] | None, tuple[float, float], dict[str, Any], Precision]
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.text().map(Text) | PLAIN, st.sampled_from(TYPES))
def test_anything_is_taken_or_refused(value, expected):
    try:
        coerce(value, expected, "key")
    except ConfigError as error:
        assert str(error).startswith("key=")


@dataclass
class Base:
    plain: int = 1
    """Inherited."""


@dataclass
class Leaf(Base):
    """Not a field's text."""

    rate: float = 1.0
    """A rate
    over two lines."""
    bare: int = 0
    names: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Names."""


def test_help_texts_are_the_docstrings_below_fields():
    assert help_texts(Leaf) == {"plain": "Inherited.", "rate": "A rate over two lines.", "names": "Names."}


def test_there_and_back():
    leaf = from_plain(Leaf, {"rate": "1e-3", "names": {"a": [1, 2]}})
    assert leaf == Leaf(rate=1e-3, names={"a": (1, 2)})
    assert from_plain(Leaf, to_plain(leaf)) == leaf


def test_unknown_key_suggests():
    with pytest.raises(ConfigError, match=r"Unknown setting x\.raet=3\. Did you mean x\.rate"):
        from_plain(Leaf, {"raet": 3}, "x")


def test_closest_lists_everything_when_nothing_is_near():
    assert closest("zzz", ["alpha", "beta"]) == "Available: alpha, beta."


@given(
    st.recursive(st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), st.lists)
)
@settings(max_examples=60)
def test_what_is_dumped_quickly_is_read_by_everything(value):
    """libyaml and PyYAML's own code, where there are both."""
    text = yaml.dump({"value": value}, Dumper=QuickDumper, sort_keys=False)
    for loader in (QuickLoader, yaml.SafeLoader):
        assert yaml.load(text, loader) == {"value": value}
