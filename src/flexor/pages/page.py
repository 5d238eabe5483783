"""One self-contained HTML page: styles, scripts, data and images are inside, and nothing is loaded from anywhere.

Its policy (Content-Security-Policy) allows exactly its own scripts, and embedded images and videos. So even text that
a bug failed to escape could neither run nor send anything.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from flexor.core.errors import ConfigError
from flexor.core.output_paths import check_output_file, make_parents, replacing
from flexor.core.secrets import redacted, redacted_values

GENERATOR = '<meta name="generator" content="Flexor">'
SHARED_STYLES = (("flexor.pages", "shared.css"),)
SHARED_SCRIPTS = (("flexor.pages", "shared.js"), ("flexor.pages", "plots.js"), ("flexor.pages", "lines.js"))
Files = Sequence[tuple[str, str]]
"""Package and file name of styles or scripts, in the order in which they are included."""


def page(
    title: str,
    *,
    body: str = "",
    data: object = None,
    styles: Files = (),
    scripts: Files = (),
    live: bool = False,
    videos: bool = False,
) -> str:
    """The whole file. `body` is HTML; `data` is what the scripts read with `pageData()`.

    Pages without scripts get only the shared styles. With `live`, scripts may ask the server that sent the page, which
    may also have its images and videos. `videos`: some are embedded.
    """
    title, body, data = redacted(title), redacted(body), redacted_values(data)
    style = "".join(_read(*file) for file in (*SHARED_STYLES, *styles))
    script = "".join(_read(*file) for file in (*SHARED_SCRIPTS, *scripts)) if scripts else ""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    server = " 'self'" if live else ""
    policy = f"default-src 'none'; img-src data:{server}; style-src 'unsafe-inline'"
    if videos or live:
        policy += f"; media-src data:{server}"
    if script:
        policy += f"; script-src 'sha256-{digest}'" + ("; connect-src 'self'" if live else "")
        body += f'\n<script type="application/json" id="page-data">{as_json(data)}</script>\n'
        body += f"<script>{script}</script>"
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f"{GENERATOR}\n"
        '<link rel="icon" href="data:,">\n'
        '<meta name="viewport" content="width=device-width">\n'
        f"<title>{html.escape(title)}</title>\n<style>{style}</style>\n<body>\n{body}\n</body>\n</html>\n"
    )


def as_json(data: object) -> str:
    """JSON that is safe inside a <script>: it contains no `<`, so it can neither end the element nor begin another."""
    text = json.dumps(_plain(data), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for char in "<>&\u2028\u2029":
        text = text.replace(char, f"\\u{ord(char):04x}")
    return text


def write_page(path: Path, text: str) -> None:
    """Write a page, complete or not at all. A file that is not a page of Flexor's is not overwritten."""
    check_writable(path)
    with replacing(make_parents(path)) as aside:
        aside.write_text(text, encoding="utf-8", errors="replace")  # a lone surrogate can't be written


def check_writable(path: Path, flag: str = "--output") -> None:
    """Raise an error if a page can't be written there: to be called before long work."""
    check_output_file(path, flag)
    if path.exists():
        with path.open("rb") as file:
            begin = file.read(1024)
        if GENERATOR.encode() not in begin:
            raise ConfigError(
                f"{flag}={path} exists and is not a page written by Flexor: name another file, or delete it."
            )


def _read(package: str, name: str) -> str:
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _plain(data: Any) -> Any:
    """The data with null for NaN and infinity, which JSON does not have."""
    if isinstance(data, dict):
        return {str(key): _plain(value) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_plain(value) for value in data]
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    return data
