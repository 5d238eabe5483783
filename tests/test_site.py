"""The docs as a site: what MkDocs is told. `make site` builds it, with every link checked."""

from pathlib import Path

import site_hooks
import yaml

ROOT = Path(__file__).parents[1]


def test_every_page_is_in_the_navigation():
    groups = site_hooks.navigation((ROOT / "docs/index.md").read_text())
    pages = [
        page for group in groups for entries in group.values() for entry in entries for page in entry.values()
    ]
    here = {path.name for path in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert {page for page in pages if (ROOT / "docs" / page).is_file()} == here and len(pages) == len(
        {*pages}
    )
    assert {page for page in pages if not (ROOT / page).is_file()} == here, "a page outside of docs/ is there"
    assert [*groups[0]] == ["Tutorials"]


def test_links_lead_to_the_same_files():
    assert site_hooks.relink("[a](docs/train.md#x)", "README.md") == "[a](train.md#x)"
    assert site_hooks.relink("[a](../README.md)", "docs/train.md") == "[a](index.md)"
    assert site_hooks.relink("[a](../benchmarks/x.md)", "docs/train.md") == "[a](benchmarks/x.md)"
    assert site_hooks.relink("[a](../../docs/a.md)", "benchmarks/results/x.md") == "[a](../../a.md)"
    unchanged = "[a](https://example.org/x) [b](#here) `[c]`"
    assert site_hooks.relink(unchanged, "docs/train.md") == unchanged


def test_linked_files_come_along():
    assert {"CONTRIBUTING.md", "LICENSE"} <= {*site_hooks.outside_files()}


def test_nothing_is_loaded_from_a_network():
    text = (ROOT / "mkdocs.yml").read_text().replace("!!python/object/apply:pymdownx.slugs.slugify", "")
    settings = yaml.safe_load(text)
    assert settings["theme"]["font"] is False
    assert settings["plugins"] == ["search"] and "extra_javascript" not in settings
