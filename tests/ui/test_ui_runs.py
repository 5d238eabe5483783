"""Runs in the application, in a real browser."""

import json
import time
from pathlib import Path

import pytest

from flexor.ui.runs import RunShelf
from support.browser import Browser, find_browser
from support.run_folders import add_lines, report, write_run
from support.ui_pages import check_page, press, resize, serving_ui, text_of, type_into

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium here (FLEXOR_TEST_BROWSER names one)"
)
READY = "document.querySelectorAll('.plots path.curve').length > 0"


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser()) as browser:
        yield browser


def full_run(folder: Path, **more) -> Path:
    run = write_run(folder, **more)
    for step, rate in ((500, 0.2), (1000, 0.6)):
        result = {"eval_success_rate": rate, "eval_success_low": rate - 0.1, "eval_success_high": rate + 0.1}
        add_lines(run / "metrics.jsonl", report(step + 1, **result, held_out_loss=1.5 - rate))
    sample = {"cpu": 0.5, "ram_own_gb": 3.0, "gpus": [{"index": 0, "util": 0.9}]}
    times = [{"time": 1e9 + step, **report(step)} for step in (1100, 1200)]
    add_lines(run / "metrics.jsonl", *times)
    add_lines(run / "system.jsonl", {"time": 1e9 + 1150, "span": 5.0, "step": 1150, **sample})
    (run / "train.log").write_text("it began\nit went on\n")
    return run


def plots(browser: Browser) -> list[str]:
    return browser.run("[...document.querySelectorAll('.plots .lines')].map((e) => e.dataset.name)")


def test_every_width_light_and_dark(browser: Browser, tmp_path: Path):
    full_run(tmp_path / "one")
    full_run(tmp_path / "two-with-a-name-that-is-quite-long_and_has_no_place_to_break", last=2000)
    with serving_ui(tmp_path) as server:
        check_page(browser, f"{server.link}#runs", READY)
        run_id = browser.run("document.querySelector('.run-name').hash.split('/')[1]")
        check_page(browser, f"{server.link}#runs/{run_id}", READY)


def test_a_run_that_learns_while_it_acts(tmp_path: Path):
    run = write_run(tmp_path / "sac", last=0, settings={"policy": {"type": "sac"}})
    acting = {"return": 0.5, "intervention_rate": 0.1, "q": 0.3, "entropy": -1.0, "temperature": 0.01}
    add_lines(
        run / "metrics.jsonl",
        {"step": 100, "loss": 0.1, "success_rate": 0.25, "transitions_per_s": 9.0, **acting},
    )
    shelf = RunShelf([tmp_path])
    [row] = shelf.rows()
    assert row["success"] == {"step": 100, "rate": 0.25}
    signals = shelf.plots([row["id"]])["signals"]
    groups = {group: [s["title"] for s in signals if s["group"] == group] for group in ("Acting", "Speed")}
    assert groups["Acting"][0] == "Success, last 20 episodes" and len(groups["Acting"]) == 6
    assert groups["Speed"] == ["Steps per second"]


def test_an_empty_folder_says_what_to_do(browser: Browser, tmp_path: Path):
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait("document.querySelector('.empty') !== null")
        assert "flexor demo" in text_of(browser, ".command") and browser.errors == []
        full_run(tmp_path / "new")  # and what begins appears by itself
        browser.wait(READY)


def test_the_signals_that_matter_are_drawn_and_the_rest_is_folded(browser: Browser, tmp_path: Path):
    full_run(tmp_path / "run")
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait(READY)
        names = plots(browser)
        assert names[:5] == ["Loss", "Held-out loss", "Success rate", "Gradient norm", "Learning rate"]
        assert "Processor, all cores" in names and len(names) <= 12
        assert text_of(browser, ".run-facts .figures") == "60 % success"
        summaries = browser.run("[...document.querySelectorAll('.folds summary')].map((e) => e.innerText)")
        assert any("everything else" in text for text in summaries)
        browser.run("document.querySelector('.folds details').open = true")
        browser.run("document.querySelector('.folds').scrollIntoView()")
        browser.wait("document.querySelectorAll('.folds path.curve').length > 0")
        # the success rate is drawn from 0 to 100 %, with its interval
        axis = browser.run(
            "[...document.querySelectorAll('[data-name=\"Success rate\"] text')].map((e) => e.textContent)"
        )
        assert {"0 %", "100 %"} <= {*axis}
        assert browser.run("document.querySelectorAll('[data-name=\"Success rate\"] .interval').length") == 1
        # samples of the machine are at the step at which they were taken
        system = browser.run("document.querySelector('[data-name=\"Processor, all cores\"]').key")
        assert json.loads(system)[0]["x"] == [1150]
        assert browser.errors == []


def test_the_pointer_shows_all_runs_at_a_step(browser: Browser, tmp_path: Path):
    for name in ("one", "two"):
        write_run(tmp_path / name)
    add_lines(tmp_path / "two/metrics.jsonl", report(1100, loss=9.5))
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait(READY)
        browser.point('[data-name="Loss"] svg', 0.97)
        browser.wait("document.querySelector('.tooltip:not([hidden])') !== null")
        rows = browser.run("[...document.querySelectorAll('.tooltip tr')].map((e) => e.innerText)")
        assert rows[0] == "two\t9.5" and rows[1].startswith("one")
        cursors = browser.run(
            "[...document.querySelectorAll('.cursor')].map((e) => Number(e.getAttribute('x1')))"
        )
        assert sum(place > 0 for place in cursors) > 3  # on all plots
        assert browser.errors == []


def test_runs_are_chosen_by_keyboard_and_opened(browser: Browser, tmp_path: Path):
    write_run(tmp_path / "one")
    write_run(tmp_path / "two", settings={"optimizer": {"type": "adamw", "lr": 5e-4}})
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait("document.querySelectorAll('.run-row input:checked').length === 2")
        browser.wait("document.querySelector('.compare table') !== null")
        assert "optimizer.lr" in text_of(browser, ".compare table")
        browser.run("document.querySelector('.run-row input').focus()")
        press(browser, " ")
        browser.wait("document.querySelectorAll('.run-row input:checked').length === 1")
        assert browser.run("document.activeElement.dataset.run !== undefined")  # still on the same row
        browser.wait("document.querySelectorAll('[data-name=Loss] path.curve').length === 1")
        press(browser, "Tab")
        press(browser, "Enter")
        browser.wait("document.querySelector('.run-head h1') !== null")
        assert text_of(browser, ".run-head h1") in ("one", "two") and browser.errors == []


def test_a_run_grows_while_it_is_watched(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "run")
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait(READY)
        run_id = browser.run("document.querySelector('.run-name').hash.split('/')[1]")
        browser.open(f"{server.link}#runs/{run_id}")
        browser.wait(READY)
        assert "step 1,000 of 2,000" in text_of(browser, ".run-head")
        add_lines(run / "metrics.jsonl", report(1100, loss=0.125))
        browser.wait("document.querySelector('[data-name=Loss] .newest').innerText === '0.125'")
        assert "step 1,100 of 2,000" in text_of(browser, ".run-head") and browser.errors == []


def test_notes_are_kept_in_the_folder(browser: Browser, tmp_path: Path):
    run = full_run(tmp_path / "run")
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait(READY)
        run_id = browser.run("document.querySelector('.run-name').hash.split('/')[1]")
        browser.open(f"{server.link}#runs/{run_id}")
        browser.wait(READY)
        type_into(browser, ".notes textarea", "warm up longer")
        browser.wait("document.querySelector('.notes small').innerText.includes('Saved')")
        assert (run / "notes.md").read_text() == "warm up longer"
        browser.run("document.querySelector('.log').closest('details').open = true")
        browser.wait("document.querySelector('.log').innerText.includes('it went on')")
        browser.open(f"{server.link}#runs/{run_id}")
        browser.wait("document.querySelector('.notes textarea').value === 'warm up longer'")
        assert browser.errors == []


def test_names_of_strangers_are_texts(browser: Browser, tmp_path: Path):
    hostile = "<img src=x onerror='window.hacked=1'>"
    run = write_run(tmp_path / hostile.replace("/", "|"), settings={"policy": {"type": hostile}})
    add_lines(run / "metrics.jsonl", report(1100, **{hostile: 1.0}, verdict=f"data-bound: {hostile}"))
    (run / "train.log").write_text(hostile)
    with serving_ui(tmp_path) as server:
        browser.open(f"{server.link}#runs")
        browser.wait(READY)
        browser.run("document.querySelector('.folds details').open = true")
        run_id = browser.run("document.querySelector('.run-name').hash.split('/')[1]")
        browser.open(f"{server.link}#runs/{run_id}")
        browser.wait(READY)
        assert browser.run("window.hacked") is None and browser.errors == []


def test_two_hundred_runs_and_twenty_drawn(browser: Browser, tmp_path: Path):
    for number in range(200):
        write_run(tmp_path / f"run{number:03}", last=1000 if number > 20 else 20_000, steps=20_000)
    with serving_ui(tmp_path) as server:
        resize(browser, 1280)
        browser.open(f"{server.link}#runs")
        browser.wait("document.querySelectorAll('.run-row').length === 200")
        browser.wait("document.querySelector('.side-head').innerText.startsWith('200 runs')")
        browser.run("localStorage.clear()")
        ids = browser.run(
            "fetch('/runs').then((r) => r.json()).then((rows) => rows.slice(0, 20).map((row) => row.id))"
        )
        key = browser.run("MEMORY")
        browser.run(f"localStorage.setItem({json.dumps(f'{key}:selected')}, {json.dumps(json.dumps(ids))})")
        browser.open(f"{server.link}#runs")
        browser.wait("document.querySelectorAll('[data-name=Loss] path.curve').length === 20")
        # the longest time in which the page does not react, while somebody moves over the plots
        browser.run(
            "window.longest = 0; new PerformanceObserver((list) => list.getEntries().forEach((entry) =>"
            " { window.longest = Math.max(window.longest, entry.duration); })).observe({ type: 'longtask' })"
        )
        for place in range(10):
            browser.point("[data-name=Loss] svg", 0.2 + place / 20)
        time.sleep(0.3)
        assert browser.run("window.longest") < 5000 and browser.errors == []
