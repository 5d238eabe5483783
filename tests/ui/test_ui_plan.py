"""Plans in the application, and as one file, in a real browser."""

import json
from pathlib import Path

import pytest

from flexor.cli import main as cli
from flexor.core.errors import ConfigError
from flexor.ui.plans import Planning, PlanRequest
from support.browser import Browser, find_browser
from support.ui_pages import check_page, serving_ui, text_of

in_browser = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium here (FLEXOR_TEST_BROWSER names one)"
)
SMALL = {"policy.type": "act", "policy.dim_model": "64", "policy.n_heads": "4", "cameras": "1x96x96"}
HARMS = ["time", "hardware", "rounding", "learning"]
PLANNED = "document.querySelector('.verdict-line') !== null"


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser()) as browser:
        yield browser


@pytest.fixture(scope="module")
def planning() -> Planning:
    return Planning()


def messages(planning: Planning, **query: str) -> dict:
    """All messages of an answer as one; the choices together."""
    result: dict = {"choices": []}
    for message in planning.answers(
        PlanRequest.read({**SMALL, **{k.replace("__", "."): v for k, v in query.items()}})
    ):
        result["choices"] += message.pop("choices", [])
        result |= message
    return result


def planned(planning: Planning, query: dict[str, str]) -> dict:
    """The plan, without what follows it."""
    answers = planning.answers(PlanRequest.read(query))
    return next(message for message in answers if "plan" in message)


def test_an_answer_is_the_plan_of_the_command_line(planning: Planning, capsys: pytest.CaptureFixture[str]):
    result = messages(planning, gpu="RTX 4090", batch_size="4", steps="1000")
    assert result["done"] and result["command"].startswith("flexor train --policy.type=act")
    settings = [f"--{name}={value}" for name, value in SMALL.items()]
    assert cli.main(["plan", *settings, "--gpu=RTX 4090", "--batch_size=4", "--steps=1000", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    for name in ("memory", "time", "host", "money", "global_batch_size", "parameters"):
        assert result["plan"][name] == printed[name], name
    assert result["largest"] == printed["largest_batch"]
    choices = {(each["gpu"], each["gpus"]): each for each in result["choices"]}
    assert len(choices) == len(result["choices"]) >= 50
    assert choices["RTX 4090", 1]["run_s"] == pytest.approx(result["plan"]["time"]["run_s"], rel=0.02)


def test_a_change_of_the_batch_needs_no_new_trace(planning: Planning):
    planned(planning, {**SMALL, "batch_size": "4"})
    made = {id(traces): len(traces.made) for traces in planning._traces.values()}
    for change in ({"batch_size": "16"}, {"steps": "77"}, {"gpu": "RTX 3090"}, {"frames": "9"}):
        planned(planning, {**SMALL, **change})
    assert {id(traces): len(traces.made) for traces in planning._traces.values()} == made
    planned(planning, {**SMALL, "policy.dim_model": "32"})
    assert len(planning._traces) == len(made) + 1


def test_a_newer_request_ends_the_one_before(planning: Planning):
    older = planning.answers(PlanRequest.read(SMALL))
    while "plan" not in next(older):
        pass
    planned(planning, SMALL)
    assert not [message for message in older if "choices" in message]


def test_what_does_not_fit_comes_with_changes_that_keep_the_training_first(planning: Planning):
    query = {**SMALL, "gpu": "RTX 3060", "batch_size": "4096", "cameras": "2x480x640"}
    answers = planning.answers(PlanRequest.read(query))
    assert not next(message for message in answers if "plan" in message)["plan"]["fits"]
    advice = next(message for message in answers if "changes" in message)
    harms = [change["harm"] for change in advice["changes"]]
    assert harms == sorted(harms, key=HARMS.index)
    assert harms[0] == "time" and advice["remedy"]


@pytest.mark.parametrize(
    ("query", "problem"),
    [({"gpus": "0"}, "gpus=0"), ({"frames": "1e3"}, "frames=1e3"), ({"state": "-1"}, "state=-1")],
)
def test_numbers_that_are_none_are_refused(query: dict[str, str], problem: str):
    with pytest.raises(ConfigError, match=problem):
        PlanRequest.read(query)


@pytest.mark.parametrize(
    "query",
    [
        {"policy.type": "no"},
        {"policy.type": "/tmp/own.py:Own"},
        {"gpu": "no"},
        {"cameras": "1x1"},
        {"colour": "red"},
    ],
)
def test_settings_that_are_wrong_are_said(planning: Planning, query: dict[str, str]):
    [message] = planning.answers(PlanRequest.read({**SMALL, **query}))
    assert message["error"]


@in_browser
def test_the_plan_answers_first_and_follows_changes(browser: Browser, tmp_path: Path):
    with serving_ui(tmp_path) as server:
        small = {"cameras": "1x96x96", "more": "--policy.dim_model=64 --policy.n_heads=4", "steps": "500"}
        browser.open(f"{server.link}#runs")
        browser.run(f"remember('plan', {json.dumps(small)})")
        browser.open(f"{server.link}#plan")
        browser.wait(PLANNED)
        assert text_of(browser, ".verdict-line") == "act fits on RTX 4090"
        assert "--policy.dim_model=64" in text_of(browser, ".command code")
        assert text_of(browser, ".bar-of-parts").count("GB") > 3
        browser.wait("document.querySelectorAll('.choices tbody tr').length > 3")
        browser.wait("document.querySelector('.scatter') !== null")
        browser.wait("document.querySelector('.results').dataset.done === 'true'")
        assert "cheapest" in text_of(browser, ".choices") and "cheapest" in browser.run(
            "document.querySelector('.scatter').textContent"
        )
        browser.run(
            "[...document.querySelectorAll('.choices th button')].find((e) => e.innerText === 'Run').click()"
        )
        assert browser.run("document.querySelector('th[aria-sort]').innerText") == "Run ↑"
        select = "[...document.querySelectorAll('.plan-form select')].find((e) => e.value === 'RTX 4090')"
        browser.run(
            f"(({{}}) => {{ const s = {select}; s.value = 'L4'; s.dispatchEvent(new Event('input')); }})({{}})"
        )
        browser.wait("document.querySelector('.verdict-line').innerText === 'act fits on L4'")
        assert browser.errors == []


@in_browser
def test_every_width_of_the_plan(browser: Browser, tmp_path: Path):
    with serving_ui(tmp_path) as server:
        small = {"cameras": "1x96x96", "more": "--policy.dim_model=64 --policy.n_heads=4"}
        browser.open(f"{server.link}#runs")
        browser.run(f"remember('plan', {json.dumps(small)})")
        check_page(
            browser, f"{server.link}#plan", f"{PLANNED} && document.querySelector('.choices') !== null"
        )


@in_browser
@pytest.mark.parametrize(
    ("gpu", "answer"), [("RTX 4090,A100 80GB", "act fits on RTX 4090"), ("RTX 3060", "act does not fit")]
)
def test_the_page_of_a_plan_has_its_answer_first(browser: Browser, tmp_path: Path, gpu: str, answer: str):
    size = "8" if "4090" in gpu else "4096"
    settings = [f"--{name}={value}" for name, value in SMALL.items()] + [f"--batch_size={size}"]
    page = tmp_path / "plan.html"
    assert cli.main(["plan", *settings, f"--gpu={gpu}", f"--html={page}"]) == ("not" in answer)
    address = page.resolve().as_uri()
    check_page(browser, address, PLANNED)
    assert text_of(browser, ".verdict-line").startswith(answer)
    top = browser.run("document.querySelector('.verdict-line').getBoundingClientRect().bottom + scrollY")
    assert top < 300 and "GB" in text_of(browser, ".figures-row")
    assert ("What makes it fit" in text_of(browser, "body")) == ("not" in answer)
    assert browser.requests == [address]  # it loads nothing
