"""The application: its page, and what each address answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.core.text import one_line
from flexor.core.version import VERSION
from flexor.pages.page import page
from flexor.ui.replies import LinesReply, NotFound, Reply, Request, json_reply
from flexor.ui.runs import RunShelf
from flexor.ui.server import Route, UIServer

if TYPE_CHECKING:
    from flexor.ui.plans import Planning

STYLES = (("flexor.pages", "parts.css"), ("flexor.plan.show", "plan.css"), ("flexor.ui", "ui.css"))
SCRIPTS = (
    *(("flexor.pages", "parts.js"), ("flexor.plan.show", "plan_view.js")),
    *(("flexor.ui", name) for name in ("app.js", "runs.js", "run.js", "plan.js", "main.js")),
)


def make_server(port: int, folders: list[Path]) -> UIServer:
    """The application's server, which does not answer yet: `serve_forever` does."""
    shelf = RunShelf(folders)
    html = page("Flexor", data=_about(folders), styles=STYLES, scripts=SCRIPTS, live=True)

    def home(request: Request) -> Reply:
        if request.words:
            raise NotFound("There is nothing here.")
        return Reply(html.encode(errors="replace"), "text/html; charset=utf-8")

    return UIServer(port, {"": home, **_run_reads(shelf), **_plan_reads()}, _run_writes(shelf))


def _about(folders: list[Path]) -> dict[str, Any]:
    return {"version": VERSION, "folders": [one_line(str(folder.absolute())) for folder in folders]}


def _run_reads(shelf: RunShelf) -> Mapping[str, Route]:
    def as_list(function: Callable[..., Any], *names: str) -> Route:
        return lambda request: json_reply(function(*(request.query.get(n, "").split() for n in names)))

    return {
        "runs": lambda request: json_reply(shelf.rows()),
        "plots": as_list(shelf.plots, "runs"),
        "curves": as_list(shelf.curves, "runs", "names"),
        "differences": as_list(shelf.differences, "runs"),
        "run": lambda request: json_reply(shelf.detail(_first(request))),
        "log": lambda request: json_reply({"text": shelf.log_text(_first(request))}),
        "video": lambda request: shelf.video(_first(request), "/".join(request.words[1:])),
    }


def _plan_reads() -> Mapping[str, Route]:
    @cache
    def planning() -> Planning:
        """Imported when somebody plans: it takes torch."""
        from flexor.ui.plans import Planning

        return Planning()

    def plan(request: Request) -> LinesReply:
        from flexor.ui.plans import PlanRequest

        return LinesReply(planning().answers(PlanRequest.read(request.query)))

    return {"plan": plan, "plan-options": lambda request: json_reply(planning().options())}


def _run_writes(shelf: RunShelf) -> Mapping[str, Route]:
    def notes(request: Request) -> Reply:
        shelf.write_notes(_first(request), str(request.content.get("text", "")))
        return json_reply({"saved": True})

    return {"notes": notes}


def _first(request: Request) -> str:
    if not request.words:
        raise NotFound("The address names nothing.")
    return request.words[0]
