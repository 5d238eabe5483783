"""Text from outside (a camera, a task, a run, a server's answer) never reaches a terminal or a page as it is."""

import ast
import json
import shutil
import threading
from html import escape
from pathlib import Path

import pytest
import yaml
from markdown_it import MarkdownIt

from flexor.cli.main import _print_traceback, _print_traceback_of_thread, main
from flexor.core.console import print_error, print_result, print_text, progress, table
from flexor.core.errors import DatasetError
from flexor.core.text import markdown
from flexor.data.push.card import dataset_card
from flexor.train.hub.card import model_card
from flexor_client.errors import RefusedError
from support import runs

HTML = MarkdownIt("commonmark").enable(["table", "strikethrough"])
ROOT = Path(__file__).parents[1]
# files that call `print` themselves, and why
PRINT = {
    "src/flexor/core/console.py": "the place for it",
    "src/flexor/cli/ui.py": "the link, whose token print_text would hide",
    "src/flexor/data/show/terminal.py": "images, as codes for the terminal",
    "src/flexor/bench/serve_load.py": "numbers, for the process that started it",
    "src/flexor/bench/decode_alone.py": "numbers, for the process that started it",
}
EVIL = "top\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202e"
SCRIPT = "</script><img src=x onerror=alert(1)>[click](javascript:alert(1)) | `cell` <b>"


def is_harmless(text: str) -> bool:
    return not any((ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c == "\u202e" for c in text)


def test_one_place_prints():
    printing = set()
    for root in ("src", "client/src"):
        for path in (ROOT / root).rglob("*.py"):
            calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
            if any(isinstance(call.func, ast.Name) and call.func.id == "print" for call in calls):
                printing.add(path.relative_to(ROOT).as_posix())
    assert printing == PRINT.keys()


def test_what_is_printed(capsys):
    print_result({"camera": EVIL}, False, f"camera {EVIL}\nsecond line")
    print_result({"camera": EVIL}, True, "")
    print_error(f"camera {EVIL}")
    print_text(table([["camera", EVIL + "\nfake"]]))
    output = capsys.readouterr()
    assert is_harmless(output.out) and is_harmless(output.err) and "\\x1b[2J" in output.out
    assert (
        output.out.splitlines()[1] == "second line"
        and json.loads(output.out.splitlines()[2])["camera"] == EVIL
    )


def test_progress_bars(capsys, monkeypatch):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    report = progress(f"pushing {EVIL}")
    report(1, 2)
    assert "owned" in (text := capsys.readouterr().err) and "\x1b]0;" not in text and "\x9b" not in text


@pytest.mark.parametrize(("kind", "newline"), [(DatasetError, "\n"), (RefusedError, "\\n")])
def test_errors_wherever_they_are_shown(kind, newline):
    assert is_harmless(str(kind(f"no camera {EVIL}"))) and "\\x1b[2J" in str(kind(EVIL))
    assert str(kind("wörter\n漢字 🙂")) == f"wörter{newline}漢字 🙂"


def test_the_traceback_of_a_bug(capsys):
    try:
        raise ValueError(f"https://ann:secret@host {EVIL}")
    except ValueError as error:
        _print_traceback(type(error), error, error.__traceback__)
    text = capsys.readouterr().err
    assert is_harmless(text) and "secret" not in text and "\nValueError: https://***@host top\\x1b" in text


def test_the_traceback_of_a_thread(capsys, monkeypatch):
    def fail() -> None:
        raise ValueError(EVIL)

    monkeypatch.setattr("threading.excepthook", _print_traceback_of_thread)
    thread = threading.Thread(target=fail)
    thread.start()
    thread.join()
    text = capsys.readouterr().err
    assert is_harmless(text) and "\nValueError: top\\x1b" in text


@pytest.fixture
def hostile(lowdim, tiny_act, tmp_path) -> Path:
    """A run whose files say what its author wants them to."""
    run = runs.train(lowdim, tmp_path / "run", tiny_act, "--steps=2", "--log_freq=1")
    settings = yaml.safe_load((run / "config.yaml").read_text())
    settings["job_name"] = settings["dataset"]["repo_id"] = EVIL + SCRIPT
    (run / "config.yaml").write_text(yaml.safe_dump(settings))
    record = json.loads((run / "run.json").read_text())
    record["dataset"] |= {
        "name": EVIL + SCRIPT,
        "robot_type": SCRIPT,
        "tasks": [EVIL, SCRIPT],
        "cameras": [SCRIPT],
    }
    (run / "run.json").write_text(json.dumps(record))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1] |= {EVIL: 1.0, "verdict": EVIL, "health": [{"what": EVIL, "evidence": EVIL, "change": EVIL}]}
    lines[-1]["diagnosis"] = {"verdict": EVIL, "evidence": EVIL}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "train.log").write_text(f"{EVIL}\n")
    return run


@pytest.mark.parametrize("verb", ["watch --once", "diagnose", "push --repo_id=ann/x --dry-run", "report"])
def test_a_strangers_run(hostile, verb, capsys):
    words = verb.split()
    assert main([words[0], str(hostile), *words[1:]]) == 0
    output = capsys.readouterr()
    assert is_harmless(output.out) and is_harmless(output.err) and output.out.strip()


@pytest.mark.parametrize("verb", ["data info", "data check", "data show --terminal --graphics=blocks"])
def test_a_strangers_dataset(lowdim, tmp_path, verb, capsys):
    root = shutil.copytree(lowdim, tmp_path / "hostile")
    info = json.loads((root / "meta/info.json").read_text())
    info["robot_type"] = EVIL
    info["features"]["observation.state"]["names"] = [EVIL] * info["features"]["observation.state"]["shape"][
        0
    ]
    info["features"][EVIL] = {"dtype": "float32", "shape": [1], "names": [EVIL]}
    (root / "meta/info.json").write_text(json.dumps(info))
    words = verb.split()
    main([*words[:2], str(root), *words[2:]])
    output = capsys.readouterr()
    assert is_harmless(output.out.replace("\x1b[38;2", "").replace("\x1b[0m", "")) and is_harmless(output.err)


# Cards


def test_a_text_in_markdown_is_nothing_but_a_text():
    for text in (
        SCRIPT,
        "# a",
        "- a",
        "1. a",
        "a_b_c *d* $x$ &amp; ~~e~~",
        "===",
        "12) b",
        "    code",
        "---",
    ):
        assert (
            HTML.render(f"- {markdown(text)}\n")
            == f"<ul>\n<li>{escape(' '.join(text.split()))}</li>\n</ul>\n"
        )
        assert HTML.render(f"| a |\n|---|\n| {markdown(text)} |\n").count("<td>") == 1
    assert markdown("a\nb\x1b") == "a b"
    assert markdown("act, 12 x H200, 0.5") == "act, 12 x H200, 0.5"


def test_cards_of_strangers(hostile):
    info = {
        "codebase_version": SCRIPT,
        "robot_type": SCRIPT,
        "features": {SCRIPT: {"dtype": "video", "shape": [1]}},
    }
    for card in (dataset_card(info, [SCRIPT, f"a\n# {EVIL}"], "ann/pens"), model_card(hostile, 2, "ann/x")):
        body = card.split("---\n", 2)[2]
        page = HTML.render(body)
        assert is_harmless(body) and SCRIPT.split()[0].replace("<", "&lt;").replace(">", "&gt;") in page
        for text in ("<img", "<script", "</script", "<b>", 'href="javascript', "<code>cell"):
            assert text not in page
