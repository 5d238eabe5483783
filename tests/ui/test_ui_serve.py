"""A policy server in the application, in a real browser."""

from pathlib import Path

import pytest

from flexor.core.errors import ConfigError
from flexor.ui.policy_server import WatchedServer
from support.browser import Browser, find_browser
from support.serving import RawClient, numbers, observation, serving
from support.ui_pages import check_page, serving_ui, text_of

in_browser = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium here (FLEXOR_TEST_BROWSER names one)"
)


@in_browser
def test_robots_latency_and_refusals(tmp_path: Path):
    key = "secret key"
    with serving(numbers(), api_key=key) as (url, _), Browser(find_browser()) as browser:
        headers = {"Authorization": f"Api-Key {key}"}
        with RawClient(url, additional_headers=headers) as robot:
            robot.ask(observation(1, prompt="<b>put it there</b>"))
            with serving_ui(tmp_path, policy_server=WatchedServer(url, key)) as server:
                check_page(browser, f"{server.link}#serve", "document.querySelector('.robot') !== null")
                text = text_of(browser, ".robot")
                assert "1 request" in text and "<b>put it there</b>" in text
                assert "the model" in text_of(browser, ".bar-of-parts")
                assert "every request was answered" in text_of(browser, "main")
                robot.ask(observation(1))
                browser.wait(
                    "document.querySelector('.robot')?.innerText.includes('2 requests')"
                )  # it is live


@in_browser
def test_without_a_server_the_page_says_how_to_start_one(tmp_path: Path):
    with (
        Browser(find_browser()) as browser,
        serving_ui(tmp_path, policy_server=WatchedServer("http://127.0.0.1:9")) as server,
    ):
        browser.open(f"{server.link}#serve")
        browser.wait("document.querySelector('.empty') !== null")
        assert "flexor serve" in text_of(browser, ".command") and "no server answers" in text_of(
            browser, ".empty"
        )


def test_a_wrong_key_is_said():
    with serving(numbers(), api_key="right") as (url, _):
        assert "FLEXOR_API_KEY" in WatchedServer(url, "wrong").status()["problem"]
        assert WatchedServer(url, "right").status()["server"]["policy"]
    assert "no server answers" in WatchedServer(url, "right").status()["problem"]


@pytest.mark.parametrize("url", ["file:///etc/passwd", "8000", "ws://"])
def test_addresses_that_are_none_are_refused(url: str):
    with pytest.raises(ConfigError, match="--server"):
        WatchedServer(url)
