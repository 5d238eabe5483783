"""The page for browsers, in a real one."""

from urllib.parse import quote

import numpy as np
import pytest

from support.browser import Browser, find_browser
from support.serving import CAMERA, SIZE, RawClient, numbers, observation, serving

pytestmark = pytest.mark.skipif(
    find_browser() is None, reason="there is no Chromium here (FLEXOR_TEST_BROWSER names one)"
)


@pytest.fixture(scope="module")
def browser():
    with Browser(find_browser()) as browser:
        yield browser


def test_the_page_shows_clients_latency_and_images(browser):
    red = np.full((SIZE, SIZE, 3), (250, 0, 0), np.uint8)
    key = "k/e y"
    with serving(numbers(), api_key=key) as (url, _):
        with RawClient(url, additional_headers={"Authorization": f"Api-Key {key}"}) as robot:
            for _ in range(3):
                robot.ask(observation(1, prompt="<b>put it there</b>") | {CAMERA: red})
            browser.open(url.replace("ws://", f"http://me:{quote(key, safe='')}@"))
            browser.wait("document.querySelector('.client img')?.complete")
            assert browser.run("document.querySelector('h1').textContent") == "act policy"
            text = browser.run("document.querySelector('.client').innerText")
            assert "3 requests" in text and "<b>put it there</b>" in text and CAMERA in text
            rows = browser.run("[...document.querySelectorAll('#latency tr')].map((row) => row.innerText)")
            assert len(rows) == 6 and "median" in rows[0] and "the model" in rows[3]
            colour = browser.run(
                "(() => { const c = document.createElement('canvas').getContext('2d');"
                " c.drawImage(document.querySelector('.client img'), 0, 0);"
                " return [...c.getImageData(2, 2, 1, 1).data]; })()"
            )
            assert colour[0] > 230 and max(colour[1:3]) < 30
            robot.ask(observation(1))
            browser.wait("document.querySelector('.client')?.innerText.includes('4 requests')")  # it is live
        browser.wait("document.querySelectorAll('.client').length === 0")
        assert browser.errors == [] and {u.split("@")[-1].split("/", 3)[-1] for u in browser.requests} <= {
            "",
            "status",
        }
    browser.wait("document.querySelector('.lost') !== null")


def test_without_the_key_there_is_no_page(browser):
    with serving(numbers(), api_key="secret") as (url, _):
        browser.open(url.replace("ws://", "http://me:wrong@"))
        assert browser.run("document.getElementById('status')") is None
