"""What MkDocs does besides its defaults: the README is the home page, and linked files outside of docs/ come along.

Pages stay readable where they are, with links that work there.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HOME = "index.md"
LINK = re.compile(r"(\]\()([^)\s#:]+)((?:#[^)\s]*)?\))")
GROUP = re.compile(r"^\*\*(.+)\*\*$")
ENTRY = re.compile(r"^- \[([\w-]+)\]\(([\w./-]+\.md)\)")


# --- MkDocs calls these


def on_config(config: Any) -> Any:
    """The navigation: the groups of docs/index.md."""
    config["nav"] = [{"Flexor": HOME}, *navigation((ROOT / "docs" / HOME).read_text())]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what pages link to outside of docs/."""
    from mkdocs.structure.files import File

    for path in outside_files():
        content = (ROOT / path).read_bytes()
        files.append(File.generated(config, site_path(path), content=content))
    return files


def on_page_read_source(page: Any, config: Any) -> str | None:
    """The home page is the README."""
    return (ROOT / "README.md").read_text() if page.file.src_uri == HOME else None


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links, as they are in the site."""
    return relink(markdown, repository_path(page.file.src_uri))


# --- paths in the repository, and in the site


def navigation(index: str) -> list[dict[str, list[dict[str, str]]]]:
    groups: list[dict[str, list[dict[str, str]]]] = []
    for line in index.splitlines():
        if heading := GROUP.match(line):
            groups.append({heading[1]: []})
        elif (entry := ENTRY.match(line)) and groups:
            next(iter(groups[-1].values())).append({entry[1]: site_path(join("docs/index.md", entry[2]))})
    return groups


def site_path(path: str) -> str:
    """Where a file of the repository is in the site."""
    if path in ("README.md", "docs/index.md"):
        return HOME
    return path.removeprefix("docs/")


def repository_path(path: str) -> str:
    """Where a file of the site is in the repository."""
    if path == HOME:
        return "README.md"
    return f"docs/{path}" if (ROOT / "docs" / path).is_file() else path


def join(page: str, link: str) -> str:
    """The file that a page links to, from the repository's root."""
    return posixpath.normpath(posixpath.join(posixpath.dirname(page), link))


def relink(markdown: str, page: str) -> str:
    here = posixpath.dirname(site_path(page)) or "."

    def replaced(match: re.Match[str]) -> str:
        target = site_path(join(page, match[2]))
        return f"{match[1]}{posixpath.relpath(target, here)}{match[3]}"

    return LINK.sub(replaced, markdown)


def outside_files() -> list[str]:
    """Files outside of docs/ that are linked from a page of the site, or from one of these."""
    pages = [
        "README.md",
        *(f"docs/{path.relative_to(ROOT / 'docs')}" for path in (ROOT / "docs").rglob("*.md")),
    ]
    outside: set[str] = set()
    while pages:
        page = pages.pop()
        for path in linked_files(page):
            if path not in outside and not path.startswith("docs/") and path != "README.md":
                outside.add(path)
                pages += [path] if path.endswith(".md") else []
    return sorted(outside)


def linked_files(page: str) -> Iterator[str]:
    for _, link, _ in LINK.findall((ROOT / page).read_text()):
        path = join(page, link)
        if (ROOT / path).is_file():
            yield path
