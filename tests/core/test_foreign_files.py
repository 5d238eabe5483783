"""Files from strangers: what is malformed, too large or nested too deeply is a ValueError, never a crash."""

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from flexor.core import foreign_files
from flexor.core.foreign_files import (
    parse_json,
    parse_yaml,
    read_json,
    read_json_lines,
    read_json_object,
    read_text,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(JSON)
def test_valid_documents_are_read_as_they_are(value):
    assert parse_json(json.dumps(value)) == value
    assert parse_yaml(yaml.safe_dump(value, allow_unicode=False)) == value


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "\ud800", '{"a": 1', "1" * 5000, "1" * 400, ""])
def test_json_that_is_none_is_an_error(tmp_path, text):
    with pytest.raises(ValueError):
        parse_json(text)
    (tmp_path / "x.json").write_text(text, errors="surrogatepass")
    with pytest.raises(ValueError):
        read_json(tmp_path / "x.json")


def laughs(line: str) -> str:
    lines = [line.format(number=n, parts=", ".join([f"*a{n - 1}"] * 9)) for n in range(1, 30)]
    return "\n".join(["a0: &a0 {k: 1}", *lines])


BOMBS = {
    "deep": "[" * 100_000,
    "deep and closed": "[" * 20_000 + "]" * 20_000,
    "aliases": laughs("a{number}: &a{number} [{parts}]"),
    "merge keys": laughs("a{number}: &a{number}\n  <<: [{parts}]"),
    "an alias of itself": "a: &a [*a]",
    "objects of Python": "!!python/object/apply:os.system [true]",
    "not closed": "{a: [1",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_that_would_crash_or_fill_the_memory_is_refused(bomb):
    with pytest.raises(ValueError):
        parse_yaml(BOMBS[bomb])


def test_aliases_of_a_person_are_fine():
    text = "camera: &size {height: 3, width: 4}\nother: *size\nthird:\n  <<: *size\n  width: 5\n"
    assert parse_yaml(text, yaml.SafeLoader)["third"] == {"height": 3, "width": 5}


def test_a_file_over_the_limit_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(foreign_files, "LARGEST_DOCUMENT", 1 << 20)
    (tmp_path / "x.json").write_text("1" + " " * (1 << 20))
    with pytest.raises(ValueError, match="larger than 1 MB"):
        read_text(tmp_path / "x.json", 1 << 20)
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n' + "x" * (2 << 20))
    lines = read_json_lines(tmp_path / "x.jsonl")
    assert next(lines) == {"a": 1}
    with pytest.raises(ValueError, match="line 2: it is larger"):
        next(lines)


def test_lines_and_objects(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n\n  \n[2]\n{"a"')
    lines = read_json_lines(tmp_path / "x.jsonl")
    assert [next(lines), next(lines)] == [{"a": 1}, [2]]
    with pytest.raises(ValueError, match="line 5"):
        next(lines)
    (tmp_path / "x.json").write_text("[]")
    with pytest.raises(ValueError, match="contains a list, not a JSON object"):
        read_json_object(tmp_path / "x.json")
