"""One HTML page about a planned run, with plots. It loads no other files, and has a light and a dark mode."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from flexor.pages.page import page as html_page
from flexor.plan.compare import Comparison
from flexor.plan.memory.memory import MemoryPlanner
from flexor.plan.show.as_json import to_json
from flexor.plan.show.report import number, render
from flexor.plan.speed.time import step_time
from flexor.policies.external import short_name

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 640, 300, 64, 40, 16
POINTS = 600  # per curve; a step has thousands of operations
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)


STYLES = (("flexor.pages", "parts.css"), ("flexor.plan.show", "plan.css"))
SCRIPTS = (
    ("flexor.pages", "parts.js"),
    *(("flexor.plan.show", name) for name in ("plan_view.js", "plan_page.js")),
)


def page(study: Comparison) -> str:
    """The whole HTML file: the answer first, and all details at the end."""
    plan = study.plan
    title = f"{short_name(plan.config.policy.type)} on {plan.site.gpu.name}"
    figures = [("Memory during a step", memory_plot(study)), ("Step time by batch size", batch_plot(study))]
    plots = "\n".join(
        f"<figure>\n<figcaption>{caption}</figcaption>\n{plot}\n</figure>" for caption, plot in figures
    )
    text = f"<details><summary>All of it as text</summary>\n<pre>{html.escape(render(study))}</pre></details>"
    body = f'<div id="more" class="plan-bars">\n{plots}\n</div>\n{text}'
    data = {**to_json(study), "assumed": study.assumed}
    return html_page(title, body=body, data=data, styles=STYLES, scripts=SCRIPTS)


# The two plots.


def memory_plot(study: Comparison) -> str:
    plan = study.plan
    timeline = thinned([(float(op), float(size)) for op, size in plan.memory.timeline])
    first = timeline[0][0]
    points = [(op - first, size / 1e9) for op, size in timeline]
    room = (plan.site.gpu.memory - plan.memory.context) / 1e9
    top = max(size for _, size in points) * 1.1
    axes = Axes((0, points[-1][0]), (0, max(top, room) if room < 2 * top else top))
    plot = axes.frame("operation", "GB allocated", "{:.0f}".format, number) + axes.line(points)
    if room <= axes.y[1]:
        plot += axes.level(room, f"memory of the {plan.site.gpu.name}")
    return svg(plot)


def batch_plot(study: Comparison) -> str:
    plan = study.plan
    most = max(plan.largest_batch or 0, plan.split.batch_size)
    sizes = sorted({size for size in BATCHES if size <= most} | {plan.split.batch_size})
    planner = MemoryPlanner(plan.config, plan.site.gpu, world_size=plan.site.world_size, traces=study.traces)
    points = []
    for size in sizes:
        trace = planner.traces.at(size, plan.split.accumulation, plan.site.gpu, exact=False)
        parallelism, links = plan.memory.parallelism, plan.site.links
        step = step_time(trace, plan.site.gpu, config=plan.config, parallelism=parallelism, links=links)
        points.append((math.log2(size), step.seconds * 1e3))
    axes = Axes((0, max(1, points[-1][0])), (0, max(time for _, time in points) * 1.1))
    plot = axes.frame("batch size", "ms", lambda x: f"{2**x:.0f}", "{:.0f}".format, integers=True)
    plot += axes.line(points)
    for x, time in points:
        planned = round(2**x) == plan.split.batch_size
        plot += axes.dot(x, time, f"batch {2**x:.0f}: {time:.1f} ms", best=planned)
    return svg(plot)


def thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """A curve with fewer points that still shows the peaks."""
    every = -(-len(points) // POINTS)
    return [max(points[i : i + every], key=lambda point: point[1]) for i in range(0, len(points), every)]


# Drawing.


@dataclass(frozen=True)
class Axes:
    x: tuple[float, float]
    y: tuple[float, float]

    def at(self, x: float, y: float) -> tuple[float, float]:
        """The position of a point in the plot, in pixels."""
        right, low = WIDTH - 16, HEIGHT - BOTTOM
        across = (x - self.x[0]) / ((self.x[1] - self.x[0]) or 1)
        up = (y - self.y[0]) / ((self.y[1] - self.y[0]) or 1)
        return LEFT + across * (right - LEFT), low - up * (low - TOP)

    def frame(
        self,
        across: str,
        up: str,
        name_x: Callable[[float], str],
        name_y: Callable[[float], str],
        integers: bool = False,
    ) -> str:
        """Grid lines with their values, and the names of the axes. `integers`: a mark at each integer on the x axis."""
        marks = ticks(*self.x)
        if integers:
            marks = [math.ceil(self.x[0]) + i for i in range(int(self.x[1] - self.x[0]) + 1)]
        frame = ""
        for value in marks:
            x, y = self.at(value, self.y[0])
            name = html.escape(name_x(value))
            frame += f'<text x="{x:.0f}" y="{y + 16:.0f}" text-anchor="middle">{name}</text>'
        for value in ticks(*self.y):
            x, y = self.at(self.x[0], value)
            name = html.escape(name_y(value))
            frame += f'<line class="grid" x1="{x:.0f}" y1="{y:.1f}" x2="{WIDTH - 16}" y2="{y:.1f}"/>'
            frame += f'<text x="{x - 6:.0f}" y="{y + 4:.0f}" text-anchor="end">{name}</text>'
        frame += f'<text x="{WIDTH - 16}" y="{HEIGHT - 4}" text-anchor="end">{across}</text>'
        return frame + f'<text x="4" y="12">{up}</text>'

    def line(self, points: Sequence[tuple[float, float]]) -> str:
        places = [self.at(*point) for point in points]
        return f'<polyline class="line" points="{" ".join(f"{x:.1f},{y:.1f}" for x, y in places)}"/>'

    def dot(self, x: float, y: float, title: str, best: bool = False) -> str:
        across, down = self.at(x, y)
        kind = ' class="best"' if best else ""
        return f'<circle{kind} cx="{across:.1f}" cy="{down:.1f}" r="4"><title>{html.escape(title)}</title></circle>'

    def level(self, value: float, title: str) -> str:
        x, y = self.at(self.x[0], value)
        line = f'<line class="limit" x1="{x:.0f}" y1="{y:.1f}" x2="{WIDTH - 16}" y2="{y:.1f}"/>'
        return f'{line}<text x="{x + 6:.0f}" y="{y - 5:.0f}">{html.escape(title)}</text>'


def ticks(low: float, high: float) -> list[float]:
    """About five round values between two limits."""
    step = 10 ** math.floor(math.log10(((high - low) or 1) / 4))
    step *= next(times for times in (1, 2, 5, 10) if (high - low) / (step * times) <= 6)
    return [step * i for i in range(math.ceil(low / step), math.floor(high / step) + 1)]


def svg(inside: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{inside}</svg>'
