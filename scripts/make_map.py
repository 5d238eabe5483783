"""Write the map of the source into docs/design.md and docs/modules.md, from the first lines of packages and modules.

    python scripts/make_map.py [--check]

With --check nothing is written: the exit code is 1 if a page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCES = [ROOT / "src/flexor", ROOT / "client/src/flexor_client"]
DESIGN, MODULES = ROOT / "docs/design.md", ROOT / "docs/modules.md"
BEGIN, END = "<!-- map: python scripts/make_map.py -->\n", "<!-- end of the map -->\n"
INTRODUCTION = """# Modules

Every module and the first line of its docstring. `python scripts/make_map.py` writes this page.
[Design](design.md) explains how they fit together.
"""


def first_line(file: Path) -> str:
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise SystemExit(f"{file.relative_to(ROOT)}: its first line must say what it is for.")
    return text.splitlines()[0]


def packages(source: Path) -> Iterator[Path]:
    return (file.parent for file in sorted(source.rglob("__init__.py"), key=lambda file: file.parent.parts))


def modules(package: Path) -> list[Path]:
    return sorted(file for file in package.glob("*.py") if file.name != "__init__.py")


def folder_map() -> str:
    """The packages as a tree, each with its first line."""
    rows = []
    for source in SOURCES:
        for package in packages(source):
            depth = len(package.relative_to(source).parts)
            name = package.relative_to(ROOT).as_posix() if depth == 0 else package.name
            rows.append((f"{'  ' * depth}{name}/", first_line(package / "__init__.py")))
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(["```text", *(f"{name:{width}}{line}" for name, line in rows), "```", ""])


def module_page() -> str:
    """A section for each package, with a row for each of its modules."""
    sections = [INTRODUCTION]
    for source in SOURCES:
        for package in packages(source):
            rows = [f"- `{file.stem}`: {first_line(file)}" for file in modules(package)]
            title = package.relative_to(source.parent).as_posix()
            sections.append(
                "\n".join([f"## {title}", "", first_line(package / "__init__.py"), "", *rows, ""])
            )
    return "\n".join(sections)


def design_page() -> str:
    """The page as it is, with today's map between the two marks."""
    before, begin, rest = DESIGN.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{DESIGN}: the marks around the map are missing"
    return before + begin + folder_map() + end + after


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if a page is out of date"
    )
    check = parser.parse_args().check
    outdated = []
    for page, text in ((DESIGN, design_page()), (MODULES, module_page())):
        if not page.exists() or page.read_text() != text:
            outdated.append(page.relative_to(ROOT).as_posix())
            if not check:
                page.write_text(text)
    for name in outdated:
        print(f"{name} {'is out of date: run python scripts/make_map.py' if check else 'written'}")
    return int(check and bool(outdated))


if __name__ == "__main__":
    sys.exit(main())
