"""Pages in one file: nothing from outside gets in, text stays text, files of others are not overwritten."""

import json
import re
from pathlib import Path

import pytest

from flexor.core.errors import ConfigError
from flexor.pages.page import as_json, check_writable, page, write_page

HOSTILE = "</script><script>alert(1)</script><!-- ]]> & \u2028 \x00 \ud800 'quoted' \"too\""


def test_data_can_not_end_its_script():
    text = as_json({"task": HOSTILE, "list": [float("nan"), float("inf"), 1.5]})
    assert not set("<>&\u2028") & set(text)
    assert json.loads(text) == {"task": HOSTILE, "list": [None, None, 1.5]}


def test_a_title_is_text():
    assert "<title>&lt;b&gt;</title>" in page("<b>")


def test_a_page_names_no_address():
    text = page(
        "t", data={}, scripts=[("flexor.data.show", "show.js")], styles=[("flexor.data.show", "show.css")]
    )
    addresses = set(re.findall(r"https?://[^\"'\s)]+", text))
    assert addresses == {"http://www.w3.org/2000/svg"}  # a name, which is not loaded


def test_only_the_pages_own_script_may_run():
    policy = re.search(
        r'Content-Security-Policy" content="([^"]+)"',
        page("t", data=1, scripts=[("flexor.pages", "plots.js")]),
    )
    assert policy and "default-src 'none'" in policy[1] and "script-src 'sha256-" in policy[1]
    assert "script" not in page("t", body="<p>text</p>").split("<style>")[0]


def test_what_is_not_our_page_is_not_overwritten(tmp_path: Path):
    file = tmp_path / "page.html"
    write_page(file, page("one"))
    write_page(file, page("two" + HOSTILE))
    assert "two" in file.read_text() and [*tmp_path.iterdir()] == [file]
    file.write_text("my notes")
    with pytest.raises(ConfigError, match="not a page written by Flexor"):
        write_page(file, page("three"))
    assert file.read_text() == "my notes"
    with pytest.raises(ConfigError, match="is a folder"):
        check_writable(tmp_path)
    write_page(tmp_path / "new" / "page.html", page("four"))  # its folder is created
