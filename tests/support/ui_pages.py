"""The application's server in a thread, and what every page of it must be."""

from __future__ import annotations

import base64
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flexor.ui.application import make_server
from flexor.ui.server import UIServer
from support.browser import Browser

WIDTHS = (400, 800, 1280, 2000)
MOST_PAGES = 10  # of paper

# Elements with text whose contrast with what is behind them is below 4.5, as WCAG computes it; 3 for large text.
CONTRAST = """(() => {
  const numbers = (text) => (text.match(/[\\d.]+/g) ?? []).map(Number);
  const linear = (c) => (c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  const light = ([r, g, b]) => [r, g, b].map((c) => linear(c / 255))
    .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (element) => {
    for (let at = element; at; at = at.parentElement) {
      const colour = numbers(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const bad = [];
  for (const element of document.querySelectorAll("body *")) {
    const text = [...element.childNodes].filter((node) => node.nodeType === 3).map((node) => node.data.trim()).join("");
    if (!text || !element.checkVisibility({ checkOpacity: true })) continue;
    if (element.closest("[disabled], option, script, .skip, video")) continue;
    const style = getComputedStyle(element);
    const front = element.closest("svg") ? style.fill : style.color;
    const [a, b] = [light(numbers(front)), light(behind(element))].sort((x, y) => y - x);
    const [size, bold] = [parseFloat(style.fontSize), style.fontWeight >= 700];
    const large = size >= 24 || (size >= 18.66 && bold);
    const contrast = (a + 0.05) / (b + 0.05);
    if (contrast < (large ? 3 : 4.5)) bad.push([text.slice(0, 40), contrast.toFixed(2)]);
  }
  return bad;
})()"""

# Controls without a name for who does not see them.
NAMELESS = """[...document.querySelectorAll("button, input, select, textarea, a[href], summary")]
  .filter((element) => element.checkVisibility() && !element.ariaLabel)
  .filter((element) => !element.textContent.trim() && !element.labels?.length && !element.closest("label"))
  .map((element) => element.outerHTML.slice(0, 99))"""

# Elements that are cut off at the right edge of the window, but for those in parts that scroll or clip.
TOO_WIDE = """[...document.querySelectorAll("body *")]
  .filter((element) => element.checkVisibility() && element.getBoundingClientRect().right > innerWidth + 1)
  .filter((element) => {
    if (element.closest(".skip, .tooltip")) return false;
    for (let at = element; at !== document.body; at = at.parentElement) {
      if (at.tagName === "svg" || at.tagName === "SELECT" || getComputedStyle(at).overflowX !== "visible") return false;
    }
    return true;
  })
  .map((element) => element.outerHTML.slice(0, 120))"""


# Plots without a curve or an area, but for those in folded parts.
BLANK_PLOTS = """[...document.querySelectorAll(".lines")]
  .filter((plot) => plot.checkVisibility() && !plot.querySelector("svg path"))
  .map((plot) => plot.innerText)"""

TWO_FRAMES = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(1))))"


@contextmanager
def serving_ui(*folders: Path, **more: Any) -> Iterator[UIServer]:
    server = make_server(0, list(folders), **more)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def resize(browser: Browser, width: int, height: int = 900) -> None:
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser._send("Emulation.setDeviceMetricsOverride", **metrics)


def check_page(browser: Browser, address: str, ready: str) -> None:
    """In light and dark, on phones and large screens: nothing is cut off, all can be read, and nothing goes wrong.

    And on paper: a few pages, on which every plot is drawn.
    """
    for dark in (False, True):
        resize(browser, WIDTHS[-1] if dark else WIDTHS[0])
        browser.open(address, dark=dark)
        browser.wait(ready)
        for width in reversed(WIDTHS) if dark else WIDTHS:
            resize(browser, width)
            browser.run(TWO_FRAMES)
            where = f"{address} at {width} pixels, {'dark' if dark else 'light'}"
            assert not browser.run("document.documentElement.scrollWidth > innerWidth"), where
            wide = browser.run(TOO_WIDE)
            assert wide == [], f"{where}: {wide}"
            assert browser.errors == [], where
        pale, nameless = browser.run(CONTRAST), browser.run(NAMELESS)
        assert pale == [] and nameless == [], f"{address}: {pale} {nameless}"
    press(browser, "Tab")
    assert browser.run("document.activeElement !== document.body"), (
        f"{address} can't be used with the keyboard"
    )
    resize(browser, 1280)
    check_print(browser, address)


def check_print(browser: Browser, where: str) -> None:
    """Even where somebody looks at it in the dark."""
    pdf = base64.b64decode(browser._send("Page.printToPDF", printBackground=True)["data"])
    assert 1 <= len(re.findall(rb"/Type\s*/Page[^s]", pdf)) <= MOST_PAGES, where
    assert browser.run(BLANK_PLOTS) == [], where
    dark = [{"name": "prefers-color-scheme", "value": "dark"}]
    browser._send("Emulation.setEmulatedMedia", media="print", features=dark)
    assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)", where
    browser._send("Emulation.setEmulatedMedia", media="", features=[])


def press(browser: Browser, key: str) -> None:
    for kind in ("keyDown", "keyUp"):
        text = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
        code = {"Enter": 13, "Tab": 9, " ": 32, "ArrowRight": 39, "ArrowLeft": 37}.get(key, 0)
        browser._send("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code, **text)


def text_of(browser: Browser, selector: str) -> str:
    return browser.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")


def type_into(browser: Browser, selector: str, text: str) -> None:
    browser.run(f"document.querySelector({json.dumps(selector)}).focus()")
    browser._send("Input.insertText", text=text)
