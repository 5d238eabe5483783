"""The application: its page, and what each address answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexor.core.text import one_line
from flexor.core.version import VERSION
from flexor.pages.page import page
from flexor.ui.policy_server import WatchedServer
from flexor.ui.replies import FileReply, LinesReply, NotFound, Reply, Request, json_reply
from flexor.ui.runs import RunShelf
from flexor.ui.server import Route, UIServer

if TYPE_CHECKING:
    from flexor.ui.datasets import DatasetShelf
    from flexor.ui.plans import Planning
    from flexor.ui.samples import SampleShelf

STYLES = (("flexor.pages", "parts.css"), ("flexor.plan.show", "plan.css"), ("flexor.ui", "ui.css"))
INFO = "meta/info.json"  # of a dataset
SCRIPTS = (
    *(("flexor.pages", "parts.js"), ("flexor.plan.show", "plan_view.js")),
    *(
        ("flexor.ui", name)
        for name in ("app.js", "runs.js", "run.js", "plan.js", "data.js", "sample.js", "serve.js", "main.js")
    ),
)


def make_server(
    port: int, folders: list[Path], *, lists: Path | None = None, policy_server: WatchedServer | None = None
) -> UIServer:
    """The application's server, which does not answer yet: `serve_forever` does.

    `folders`: of runs and of datasets. `lists`: where lists of episodes to leave out are written.
    """
    datasets = [folder for folder in folders if (folder / INFO).is_file()]
    shelf = RunShelf([folder for folder in folders if folder not in datasets])
    html = page("Flexor", data=_about(folders), styles=STYLES, scripts=SCRIPTS, live=True)

    def home(request: Request) -> Reply:
        if request.words:
            raise NotFound("There is nothing here.")
        return Reply(html.encode(errors="replace"), "text/html; charset=utf-8")

    data_reads, data_writes = _data_routes(datasets, shelf, lists or Path.cwd())
    serving = policy_server or WatchedServer()
    reads = {
        "": home,
        **_run_reads(shelf),
        **_plan_reads(),
        **data_reads,
        "serving": lambda request: json_reply(serving.status()),
    }
    return UIServer(port, reads, {**_run_writes(shelf), **data_writes})


def _about(folders: list[Path]) -> dict[str, Any]:
    return {"version": VERSION, "folders": [one_line(str(folder.absolute())) for folder in folders]}


def _run_reads(shelf: RunShelf) -> Mapping[str, Route]:
    def as_list(function: Callable[..., Any], *names: str) -> Route:
        return lambda request: json_reply(function(*(request.query.get(n, "").split() for n in names)))

    return {
        "runs": lambda request: json_reply(shelf.rows()),
        "plots": as_list(shelf.plots, "runs"),
        "curves": as_list(shelf.curves, "runs", "names"),
        "videos": as_list(shelf.videos, "runs"),
        "differences": as_list(shelf.differences, "runs"),
        "run": lambda request: json_reply(shelf.detail(_first(request))),
        "log": lambda request: json_reply({"text": shelf.log_text(_first(request))}),
        "video": lambda request: shelf.video(_first(request), "/".join(request.words[1:])),
    }


def _data_routes(
    datasets: list[Path], runs: RunShelf, lists: Path
) -> tuple[Mapping[str, Route], Mapping[str, Route]]:
    @cache
    def shelf() -> DatasetShelf:
        """Imported when somebody looks at data."""
        from flexor.ui.datasets import DatasetShelf

        return DatasetShelf(datasets, runs.configs, lists)

    @cache
    def samples() -> SampleShelf:
        """Imported when somebody looks at one: it takes torch."""
        from flexor.ui.samples import SampleShelf

        return SampleShelf(runs.named_configs, shelf().opened)

    def sample(request: Request) -> Reply:
        dataset, episode = [*request.words, "", ""][:2]
        if not episode.isdecimal():
            raise NotFound("The address names no episode.")
        return json_reply(samples().sample(dataset, int(episode), request.query))

    def of_episode(method: str) -> Route:
        def route(request: Request) -> Reply | FileReply:
            dataset, index, *camera = [*request.words, ""][:2] + request.words[2:]
            if not index.isdecimal():
                raise NotFound("The address names no episode.")
            result = getattr(shelf(), method)(dataset, int(index), *camera[:1])
            return result if isinstance(result, FileReply) else json_reply(result)

        return route

    reads: dict[str, Route] = {
        "datasets": lambda request: json_reply(shelf().rows()),
        "dataset": lambda request: json_reply(shelf().overview(_first(request))),
        "check": lambda request: json_reply(shelf().check(_first(request))),
        "sample": sample,
        "sample-choices": lambda request: json_reply(samples().choices(_first(request))),
        "episode": of_episode("episode"),
        "episode-video": of_episode("video"),
        "episode-clip": of_episode("encoded"),
    }
    exclude: Route = lambda request: json_reply(  # noqa: E731
        shelf().exclude(_first(request), request.content.get("episodes"))
    )
    return reads, {"exclude": exclude}


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
