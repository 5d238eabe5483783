"""The page about runs in a real browser: its numbers are those of the run's files."""

import base64
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flexor.cli import main as cli
from flexor.core.errors import ConfigError
from flexor.evaluate.film import write_video
from flexor.pages.images import png
from flexor.runs.reader import RunReader
from flexor.runs.report.breakdown import breakdown
from flexor.runs.report.page import report_data, write_report
from flexor.runs.report.settings import differing, flat_settings
from flexor.runs.series import Series
from support.browser import Browser, find_browser
from support.run_folders import add_checkpoint, add_lines, report, write_run
from support.ui_pages import check_page

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"
GREY = [np.full((32, 32, 3), 8 * number, np.uint8) for number in range(20)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    program = find_browser()
    if program is None:
        pytest.skip("no Chromium on this machine: install the package chromium, or set FLEXOR_TEST_BROWSER")
    with Browser(program) as started:
        yield started


def full_run(folder: Path, **more: Any) -> Path:
    """A run with everything that a page can show."""
    plan = {
        "planned_step_s": 0.008,
        "step_s": 0.0095,
        "planned_allocated_bytes": 3e9,
        "allocated_bytes": 3.3e9,
    }
    run = write_run(folder, record={"plan": plan}, **more)
    held_out = [
        {"step": step, "held_out_loss": 1 / step, "eval_success_rate": step / 2000} for step in (500, 1000)
    ]
    add_lines(run / "metrics.jsonl", *held_out)
    add_lines(run / "gpu.jsonl", *({"time": 1e9 + i, "power_w": 400 + i} for i in range(50)))
    for step in (500, 1000):
        add_checkpoint(run, step)
        write_video(run / "videos" / f"{step:06d}" / "episode_7_success.mp4", GREY, 10)
    (run / "augmented.png").write_bytes(png(GREY[10]))
    return run


def opened(
    browser: Browser, runs: list[Path], file: Path, dark: bool = False, **options: Any
) -> dict[str, Any]:
    result = write_report(runs, file, **options)
    browser.open(file, dark)
    browser.wait("document.querySelectorAll('.lines svg path.curve').length > 0")
    assert browser.errors == [] and browser.requests == [file.as_uri()]
    return result


def plot(name: str) -> str:
    return f'.lines[data-name="{name}"]'


def texts(browser: Browser, selector: str) -> list[str]:
    return browser.run(f"[...document.querySelectorAll({json.dumps(selector)})].map(e => e.textContent)")


def figures(browser: Browser, name: str) -> list[float]:
    """The values in the legend of a plot, and with a pointer the steps that they are of."""
    return [
        float(word.replace(",", "")) for t in texts(browser, f"{plot(name)} b") for word in t.split(" at ")
    ]


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_of_one_run(browser: Browser, tmp_path: Path, dark: bool):
    run = full_run(tmp_path / "run")
    opened(browser, [run], tmp_path / "page.html", dark)
    sections = [
        "Run",
        "Curves",
        "Where the time of a step goes",
        "What holds it back",
        "Plan and reality",
        "Settings",
        "Checkpoints",
    ]
    assert texts(browser, "h2") == [*sections, "Images", "Videos of evaluations"]
    assert texts(browser, "#curves h3") == ["Learning", "Speed", "gpu, over time"]
    for name in ("loss", "held-out loss", "success rate", "learning rate", "data wait", "gpu.power w"):
        assert browser.run(f"document.querySelectorAll({json.dumps(plot(name))}).length") == 1, name
    plan = ["step time", "8 ms", "9.5 ms", "+19 %", "peak memory", "3.00 GB", "3.30 GB", "+10 %"]
    assert texts(browser, "#plan td") == plan
    assert texts(browser, "#checkpoints code") == ["checkpoints/000500", "checkpoints/001000"]
    assert "optimizer.lr" in texts(browser, "#settings td")
    colour = browser.run("getComputedStyle(document.body).backgroundColor")
    assert colour == ("rgb(22, 24, 28)" if dark else "rgb(255, 255, 255)")


def test_numbers_are_those_of_the_file(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    opened(browser, [run], tmp_path / "page.html")
    for name, key in (("loss", "loss"), ("gradient norm", "grad_norm"), ("samples/s", "samples_per_s")):
        assert figures(browser, name) == [pytest.approx(lines[-1][key], rel=1e-4)]
    # Under the pointer: the report nearest to it. The plot begins 62 pixels from the left, and ends 10 from the right.
    wide = browser.run(f"document.querySelector({json.dumps(plot('loss') + ' svg')}).clientWidth")
    for number in (0, 3, 9):
        browser.point(f"{plot('loss')} svg", (62 + number / 9 * (wide - 72)) / wide)
        value, step = figures(browser, "loss")
        assert step == lines[number]["step"] and value == pytest.approx(lines[number]["loss"], rel=1e-4)


def test_the_curve_goes_where_its_values_are(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "run")
    values = [report(step)["loss"] for step in range(100, 1001, 100)]
    opened(browser, [run], tmp_path / "page.html")
    x, y = curves_drawn(browser, "loss")
    assert np.allclose(np.diff(x), np.diff(x)[0], atol=0.2)
    scaled = (np.array(values) - min(values)) / (max(values) - min(values))
    assert np.allclose((y.max() - y) / (y.max() - y.min()), scaled, atol=0.01)
    browser.run("document.querySelector('#log').click()")
    _, y = curves_drawn(browser, "loss")
    logs = np.log(values)
    scaled = (logs - logs.min()) / (logs.max() - logs.min())
    assert np.allclose((y.max() - y) / (y.max() - y.min()), scaled, atol=0.01)
    assert browser.errors == []


def curves_drawn(browser: Browser, name: str) -> tuple[np.ndarray, np.ndarray]:
    browser.run(f"document.querySelector({json.dumps(plot(name))}).scrollIntoView({{behavior: 'instant'}})")
    browser.wait(f"document.querySelector({json.dumps(plot(name) + ' path.curve')}) !== null")
    path = browser.run(
        f"document.querySelector({json.dumps(plot(name) + ' path.curve:not(.faint)')}).getAttribute('d')"
    )
    points = np.array([[float(word) for word in part.split()] for part in path[1:].split("L")])
    return points[:, 0], points[:, 1]


def test_zoom_is_shared_and_ends_with_a_double_click(browser: Browser, tmp_path: Path):
    opened(browser, [full_run(tmp_path / "run")], tmp_path / "page.html")
    before = curves_drawn(browser, "loss")[0]
    browser.drag(f"{plot('loss')} svg", 0.4, 0.8)
    after = curves_drawn(browser, "loss")[0]
    assert np.diff(after)[0] == pytest.approx(np.diff(before)[0] / 0.4 * (1 - 72 / _wide(browser)), rel=0.02)
    assert np.diff(curves_drawn(browser, "gradient norm")[0])[0] == pytest.approx(np.diff(after)[0], abs=0.2)
    power = curves_drawn(browser, "gpu.power w")[0]  # over time: it has an axis of its own
    browser.double_click(f"{plot('gradient norm')} svg")
    assert np.allclose(curves_drawn(browser, "loss")[0], before)
    assert np.allclose(curves_drawn(browser, "gpu.power w")[0], power) and browser.errors == []


def _wide(browser: Browser) -> float:
    return browser.run(f"document.querySelector({json.dumps(plot('loss') + ' svg')}).clientWidth")


def test_smoothing(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "run", last=0)
    values = [3.0, 1.0, 2.0, 0.0, 5.0]
    add_lines(run / "metrics.jsonl", *({"step": i + 1, "loss": v, "same": 0.1} for i, v in enumerate(values)))
    opened(browser, [run], tmp_path / "page.html")
    slider = "document.querySelector('#smoothing')"
    browser.run(f"({slider}.value = 0.5, {slider}.dispatchEvent(new Event('input')))")
    assert browser.run("document.querySelectorAll('.faint').length") == 2
    average, norm, smooth = 0.0, 0.0, []
    for value in values:
        average, norm = 0.5 * average + 0.5 * value, 0.5 * norm + 0.5
        smooth.append(average / norm)
    _, y = curves_drawn(browser, "loss")
    scaled = (np.array(smooth) - min(smooth)) / (max(smooth) - min(smooth))
    assert np.allclose((y.max() - y) / (y.max() - y.min()), scaled, atol=0.01)
    assert len({*curves_drawn(browser, "same")[1]}) == 1  # rounding is not drawn as a curve
    assert browser.errors == []


def test_runs_are_compared(browser: Browser, tmp_path: Path):
    first = full_run(tmp_path / "one")
    second = write_run(tmp_path / "two", last=2000, settings={"optimizer": {"type": "adamw", "lr": 5e-4}})
    result = opened(browser, [first, second], tmp_path / "page.html")
    assert [(run["name"], run["status"]) for run in result["runs"]] == [
        ("one", "stopped"),
        ("two", "finished"),
    ]
    assert texts(browser, "#settings td") == ["optimizer.lr", "0.0001", "0.0005"]
    assert figures(browser, "loss") == pytest.approx([report(1000)["loss"], report(2000)["loss"]], rel=1e-4)
    strokes = browser.run(
        f"[...document.querySelectorAll({json.dumps(plot('loss') + ' path')})].map(e => e.style.stroke)"
    )
    assert len({*strokes}) == 2
    axis = "document.querySelector('#axis')"
    browser.run(f"({axis}.selectedIndex = 1, {axis}.dispatchEvent(new Event('input')))")
    browser.wait("document.querySelectorAll('.lines svg path.curve').length > 0")
    browser.point(f"{plot('loss')} svg", 0.999)
    *_, value, hours = figures(browser, "loss")
    assert value == pytest.approx(report(2000)["loss"], rel=1e-4) and hours == pytest.approx(
        20 / 3600, rel=1e-3
    )
    assert browser.errors == []


def test_videos_play_and_images_are_there(browser: Browser, tmp_path: Path):
    opened(browser, [full_run(tmp_path / "run")], tmp_path / "page.html")
    browser.run("document.querySelector('#images').scrollIntoView()")
    browser.wait("document.querySelector('#images img')?.naturalWidth === 32")
    browser.run("document.querySelector('#videos').scrollIntoView()")
    browser.wait("document.querySelector('video')?.readyState >= 1")
    assert texts(browser, "#videos figcaption") == [
        "step 1,000: episode_7_success.mp4",
        "step 500: episode_7_success.mp4",
    ]
    assert browser.run("document.querySelector('video').duration") == pytest.approx(2.0, abs=0.1)
    browser.run("document.querySelector('video').play()")
    browser.wait("document.querySelector('video').currentTime > 0")
    assert browser.errors == []


def test_what_does_not_fit_is_named(browser: Browser, tmp_path: Path):
    run = full_run(tmp_path / "run")
    (run / "videos/001000/long.mp4").write_bytes(b"0" * 900_000)
    result = opened(browser, [run], tmp_path / "page.html", limit=1_000_000)
    assert result["not_embedded"] == ["videos/001000/long.mp4"] and result["embedded"] == 3
    assert result["bytes"] <= 1_000_000
    assert texts(browser, "#videos .soft") == ["Not on this page, for its size: videos/001000/long.mp4"]


def test_a_verdict_and_damaged_lines_are_shown(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), settings={"job_name": HOSTILE})
    add_lines(
        run / "metrics.jsonl", report(1100, loss=None, verdict=f"data-bound {HOSTILE}", **{HOSTILE: 1.0})
    )
    with (run / "metrics.jsonl").open("a") as out:
        out.write('not JSON\n{"step": 1200, "lo')
    opened(browser, [run], tmp_path / "page.html")
    assert texts(browser, ".verdict") == [f"data-bound {HOSTILE}"]
    assert "1 line of its metrics can't be read." in texts(browser, ".run .warning")
    assert texts(browser, f"{plot('loss')} b") == ["not finite"]
    assert browser.run(f"document.querySelectorAll({json.dumps(plot('loss') + ' .gap')}).length") == 1
    assert browser.run("window.hacked") is None


def test_what_was_found_about_learning_is_listed(browser: Browser, tmp_path: Path):
    begun = {
        "what": "dead action dimension",
        "evidence": f"action[6] {HOSTILE}",
        "change": "record it",
        "step": 0,
    }
    spike = {"what": "loss spike", "evidence": "loss 5", "change": "lower --optimizer.lr", "step": 12200}
    run = write_run(tmp_path / "run", record={"health": [begun, spike, "x"]})
    opened(browser, [run], tmp_path / "page.html")
    assert texts(browser, ".health li b") == ["dead action dimension", "loss spike"]
    assert texts(browser, ".health li div")[0] == f"action[6] {HOSTILE}"
    assert texts(browser, ".health li span") == [" step 12,200"]
    assert browser.run("window.hacked") is None


def test_what_holds_a_run_back_is_shown(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "run", last=0)
    lines = [report(step, step_s=0.01, data_wait=0.6) for step in range(100, 1100, 100)]
    add_lines(run / "metrics.jsonl", *lines)
    opened(browser, [run], tmp_path / "page.html")
    assert texts(browser, "#diagnosis h3") == ["data-bound"]
    assert "it waits for data 60 % of the time" in texts(browser, "#diagnosis p")[0]
    assert "60 %" in texts(browser, "#diagnosis td") and browser.errors == []


def test_it_prints_on_a_few_pages_with_all_curves(browser: Browser, tmp_path: Path):
    """Plots far below the window are drawn, too; groups of plots that nobody needs on paper are left out."""
    run = full_run(tmp_path / "run")
    for step in range(1100, 1400, 100):
        add_lines(run / "metrics.jsonl", report(step, loader={f"part_{i}_s": 0.1 * i for i in range(40)}))
    opened(browser, [run], tmp_path / "page.html")
    hidden = "[...document.querySelectorAll('.lines svg')].filter((e) => !e.querySelector('path')).length"
    assert browser.run(hidden) > 10  # as on the screen, before anybody scrolls
    pdf = base64.b64decode(browser._send("Page.printToPDF")["data"])
    assert browser.run(hidden) == 0
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf)) <= 6 and browser.errors == []


def test_every_width_light_and_dark(browser: Browser, tmp_path: Path):
    runs, page = [full_run(tmp_path / name) for name in ("one", "two")], tmp_path / "page.html"
    write_report(runs, page)
    check_page(browser, page.as_uri(), "document.querySelectorAll('.lines svg').length > 0")


def test_a_run_that_has_reported_nothing(browser: Browser, tmp_path: Path):
    run = write_run(tmp_path / "run", last=0)
    write_report([run], None)
    browser.open(run / "report.html")
    assert "Nothing was reported." in texts(browser, "#curves p") and browser.errors == []


def test_long_runs_take_little_room(tmp_path: Path):
    run = write_run(tmp_path / "run", last=0)
    lines = [report(step, loss=math.sin(step) + (50 if step == 11_111 else 0)) for step in range(1, 20_001)]
    add_lines(run / "metrics.jsonl", *lines)
    reader = RunReader(run)
    reader.poll()
    data = report_data([reader], limit=2_000_000)
    curve = data["runs"][0]["series"]["loss"]
    assert curve["count"] == 20_000 and len(curve["x"]) <= 5000 and len(json.dumps(data)) < 2_000_000
    assert 11_111 in curve["x"] and curve["x"][-1] == 20_000


def test_samples_of_the_machine(browser: Browser, tmp_path: Path):
    """As a run writes them: several per step, a list of GPUs, a list of cores; and their means in the metrics."""
    run = write_run(tmp_path / "run", last=0)
    add_lines(run / "metrics.jsonl", report(100, system={"cpu": 0.5, "gpu_util": 0.9}))
    cores = [0.1 * (core % 4) for core in range(32)]
    for i in range(5):
        gpus = [{"index": g, "name": "H200", "util": 0.5 + 0.1 * g, "throttled": []} for g in range(2)]
        sample = {
            "time": 1e9 + 60 * i,
            "span": 60.0,
            "step": 100,
            "cpu": 0.01 * i,
            "cpu_cores": cores,
            "gpus": gpus,
        }
        add_lines(run / "system.jsonl", sample)
    opened(browser, [run], tmp_path / "page.html")
    assert texts(browser, "#curves h3") == ["Learning", "Speed", "system, over time", "system"]
    assert figures(browser, "system.cpu") == [0.04] and figures(browser, "system.gpu util") == [0.9]
    assert texts(browser, f"{plot('system.gpus.util')} .legend span") == ["0 0.5", "1 0.6"]
    cores_shown = texts(browser, f"{plot('system.cpu cores')} .legend span")
    assert cores_shown == ["mean 0.15", "lowest 0", "highest 0.3"]
    browser.point(f"{plot('system.cpu')} svg", 0.999)
    assert figures(browser, "system.cpu") == [0.04, 4]  # minutes


# --- parts


def test_the_parts_of_a_step_add_up():
    x = [100.0, 200.0]
    series = {
        "samples_per_s": Series("step", x, [400.0, 200.0]),
        "data_wait": Series("step", x, [0.25, 0.0]),
        "gpu_busy": Series("step", x, [0.5, 1.0]),
    }
    curve = breakdown(series, 4, 100)
    assert curve is not None and curve["x"] == [100, 200]
    assert {part["name"]: part["y"] for part in curve["parts"]} == {
        "waiting for data": [2.5, 0.0],
        "GPU busy": [5.0, 20.0],
        "GPU idle for other reasons": [2.5, 0.0],
    }
    more = breakdown(series | {"forward_s": Series("step", x, [0.003, 0.008])}, 4, 100)
    assert more is not None
    assert [part["name"] for part in more["parts"]] == [
        "waiting for data",
        "forward",
        "computing and the rest",
    ]
    assert np.sum([part["y"] for part in more["parts"]], axis=0) == pytest.approx([10.0, 20.0])
    assert breakdown({}, 4, 100) is None and breakdown(series, None, 100) is None


def test_parts_of_several_ranks_are_not_more_than_the_step():
    """One rank computes for long, the other one waits for it: the largest times of both are more than the step."""
    x = [100.0, 200.0]
    seconds = {"forward_s": [0.004, 0.014], "backward_s": [0.005, 0.005], "communication_s": [0.003, 0.005]}
    series = {name: Series("step", x, values) for name, values in seconds.items()}
    result = breakdown(series | {"samples_per_s": Series("step", x, [400.0, 400.0])}, 4, 100)
    assert result is not None
    parts = {part["name"]: part["y"] for part in result["parts"]}
    assert {*parts} == {"forward", "backward", "communication"}
    assert parts["communication"] == pytest.approx([1.0, 0.0])
    assert parts["forward"] == pytest.approx([4.0, 14 * 10 / 19])
    assert np.sum([*parts.values()], axis=0) == pytest.approx([10.0, 10.0])


def test_differences_of_settings():
    first = flat_settings({"steps": 5, "optimizer": {"lr": 1e-4, "betas": [0.9, 0.99]}, "empty": {}})
    second = flat_settings(
        {"steps": 5, "optimizer": {"lr": 1e-3, "betas": [0.9, 0.99]}, "new": None, "empty": {}}
    )
    assert differing([first, second]) == [("optimizer.lr", ["0.0001", "0.001"]), ("new", [None, "null"])]
    assert differing([first]) == []


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path / "runs" / "one")
    assert cli.main(["report", str(run), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (
        result["file"] == str(run / "report.html") and result["bytes"] == (run / "report.html").stat().st_size
    )
    write_run(tmp_path / "runs" / "two")
    assert cli.main(["report", "runs"]) == 0
    assert capsys.readouterr().out.startswith("report.html: ") and (tmp_path / "report.html").is_file()
    (tmp_path / "report.html").write_text("mine")
    assert cli.main(["report", "runs"]) == 2 and "not a page" in capsys.readouterr().err
    (tmp_path / "empty").mkdir()
    assert cli.main(["report", "empty"]) == 2 and "no run in" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="--max-mb"):
        write_report([run], tmp_path / "small.html", limit=1000)


def test_a_page_has_no_files_that_links_lead_to(tmp_path: Path):
    """A stranger's run could have the user's own files on a page that is shown to others."""
    run = full_run(tmp_path / "run")
    (tmp_path / "home").mkdir()
    (tmp_path / "home/mine.png").write_bytes(b"secret")
    (tmp_path / "home/mine.mp4").write_bytes(b"secret")
    (run / "notes.png").symlink_to(tmp_path / "home/mine.png")
    (run / "videos/001000/film.mp4").symlink_to(tmp_path / "home/mine.mp4")
    result = write_report([run], tmp_path / "page.html")
    assert result["embedded"] == 3 and "c2VjcmV0" not in (tmp_path / "page.html").read_text()
