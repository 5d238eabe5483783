"""Names in the package and the client say what they hold; functions fit on a screen, files have one subject."""

import ast
import functools
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(path for folder in ("src", "client") for path in (ROOT / folder).rglob("*.py"))
MOST_LINES_OF_A_FUNCTION = 60
MOST_LINES_OF_A_FILE = 450
EMPTY_WORDS = {
    *("found", "own", "one", "what", "there", "wanted", "known", "given", "seen", "kept", "said", "asked"),
    *("held", "drawn", "shown", "chosen", "brought", "among", "others", "whole"),
}
"""They do not say what a variable holds or what a function does, nor do they with underscores or in capitals."""


def bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and name of all that `tree` gives a name: parameters, variables, attributes, functions, classes."""
    for node in ast.walk(tree):
        match node:
            case ast.arg(arg=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield node.lineno, name
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)) | ast.ExceptHandler(name=str(name)):
                yield node.lineno, name
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                yield node.lineno, name
            case (
                ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)) | ast.MatchMapping(rest=str(name))
            ):
                yield node.lineno, name


def empty_names(tree: ast.AST) -> list[tuple[int, str]]:
    return sorted((line, name) for line, name in bindings(tree) if name.strip("_").lower() in EMPTY_WORDS)


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def test_no_name_is_an_empty_word():
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for line, name in empty_names(parsed(path))
    ]
    assert not uses, "names that do not say what they hold:\n" + "\n".join(uses)


def test_no_function_is_longer_than_a_screen():
    long = [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.name}, {lines} lines"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := node.end_lineno - node.lineno + 1) > MOST_LINES_OF_A_FUNCTION
    ]
    assert not long, f"more than {MOST_LINES_OF_A_FUNCTION} lines:\n" + "\n".join(long)


def test_no_file_is_too_long():
    long = [
        f"{path.relative_to(ROOT)}: {lines} lines"
        for path in FILES
        if (lines := len(path.read_text().splitlines())) > MOST_LINES_OF_A_FILE
    ]
    assert not long, f"more than {MOST_LINES_OF_A_FILE} lines:\n" + "\n".join(long)


@pytest.mark.parametrize(
    "source",
    [
        *("def f(found): ...", "def f(*found): ...", "def f(*, found=1): ...", "def f(**found): ..."),
        *("lambda found: 1", "async def f(found, /): ...", "def found(): ...", "async def found(): ..."),
        *("class Found: ...", "class A:\n    found: int", "class A:\n    def found(self): ..."),
        *("found = 1", "found: int = 1", "found += 1", "_found = 1", "a, *found = b", "self.found = 1"),
        *("self._found += 1", "a.b.found: int = 1", "for found in a: ...", "with a as found: ..."),
        *("with a as (b, found): ...", "[found for found in a]", "{a: 1 for a, found in b}", "(found := 1)"),
        *("try: ...\nexcept A as found: ...", "import a as found", "from a import b as found"),
        *("match a:\n    case found: ...", "match a:\n    case [1, *found]: ..."),
        *("match a:\n    case {1: 2, **found}: ...", "match a:\n    case A(b=1 as found): ..."),
        'f"{(found := 1)}"',
    ],
)
def test_every_kind_of_binding_counts(source):
    assert [name.strip("_").lower() for _, name in empty_names(ast.parse(source))] == ["found"]


@pytest.mark.parametrize(
    "source",
    ["a = found", "f(found=1)", "a = b.found", 'a = {"found": 1}', "found_files = 1", "import found"],
)
def test_what_others_named_does_not_count(source):
    assert not empty_names(ast.parse(source))
