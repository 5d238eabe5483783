"""What others may read of settings: names instead of paths, no passwords."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexor.core.published import published, same_setting

NAMES = {
    "/home/ann/data/pens": "pens",
    "/home/ann/data/pens/": "pens",
    "/a/x,/b/y": "x,y",
    "/a/x, s3://bucket/y": "x, s3://bucket/y",
    "~/pens": "pens",
    "file:///home/ann/pens": "pens",
    "C:\\Users\\ann\\pens": "pens",
    "C:/Users/ann/pens": "pens",
    "/home/ann/own.py:Mine": "own.py:Mine",
    "ann/pens": "ann/pens",
    "data/pens": "data/pens",
    "https://ann:secret@host/home/ann/pens": "https://***@host/home/ann/pens",
    "pick the block / place it": "pick the block / place it",
    "": "",
    "/": "/",
}


@pytest.mark.parametrize(("value", "public"), NAMES.items())
def test_paths_become_names(value, public):
    assert published(value) == public == published(public)
    assert published({"a": [{"root": value}], "n": 3}) == {"a": [{"root": public}], "n": 3}


@given(st.lists(st.text("abc .", min_size=1).filter(lambda part: part.strip(" .")), min_size=2))
def test_no_folder_of_a_path_is_left(parts):
    assert "/" not in published("/" + "/".join(parts))


def test_a_setting_that_was_published_is_the_same():
    assert same_setting("pens", "/home/ann/pens") and same_setting(3, 3)
    assert same_setting("https://***@host/x", "https://ann:secret@host/x")
    assert not same_setting("pens", "/home/ann/cups") and not same_setting("/home/ann/pens", "pens")
