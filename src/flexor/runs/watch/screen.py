"""The screen of `flexor watch`: lines of text that fit a given size."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich.text import Text

from flexor.core.text import one_line
from flexor.runs.reader import RunReader
from flexor.runs.series import TIME, Series, smoothed
from flexor.runs.signals import SIGNALS
from flexor.runs.state import STATUS, RunState, is_alarm
from flexor.runs.text import duration_text, short_title, title_of, value_text
from flexor.runs.watch.chart import ChartLine, chart, sparkline

FIRST = (
    *("loss", "held_out_loss", "samples_per_s", "data_wait", "gpu_busy", "lr", "grad_norm"),
    *("eval_success_rate", "epoch"),
)
COLOURS = ("cyan", "yellow", "green", "magenta", "blue", "red")
STATUS_STYLES = {"running": "green", "finished": "cyan", "stopped": "red", "silent": "yellow"}
CELL, VALUE = 44, 11  # characters of a figure
GROUP = 10  # of the name of a group of them
MIN_CHART = 5  # lines
MAX_HEALTH = 3  # findings about learning that are shown, the newest
SMOOTHINGS = (0.0, 0.9, 0.99)
HELP = (
    "left, right, tab, 1 to 9   another run",
    "c                          compare all runs, or show one",
    "up, down                   another curve",
    "m                          all figures that the run reports, or those that matter",
    "l                          logarithmic axis",
    "s                          smooth the curve: off, a little, a lot",
    "h                          this help",
    "q                          quit; the run continues",
)


@dataclass
class Screen:
    """The state of the screen, which keys change."""

    runs: list[RunReader]
    comparing: bool = False
    selected: int = 0
    metric: str = "loss"
    log: bool = False
    smoothing: int = 0
    help: bool = False
    plain: bool = False  # only characters of ASCII
    everything: bool = False  # all figures, not only those that matter

    def press(self, key: str) -> bool:
        """Handle a key. Return False to quit."""
        if key == "q":
            return False
        if key in ("right", "n", "left", "p") and self.runs:
            self.selected = (self.selected + (1 if key in ("right", "n") else -1)) % len(self.runs)
        elif key.isdigit() and 0 < int(key) <= len(self.runs):
            self.selected, self.comparing = int(key) - 1, False
        elif key in ("c", "enter"):
            self.comparing = not self.comparing
        elif key in ("up", "down"):
            names = self.metrics()
            at = names.index(self.metric) if self.metric in names else -1
            self.metric = names[(at + (1 if key == "down" else -1)) % len(names)] if names else self.metric
        elif key == "m":
            self.everything = not self.everything
        elif key == "l":
            self.log = not self.log
        elif key == "s":
            self.smoothing = (self.smoothing + 1) % len(SMOOTHINGS)
        if key in ("h", "?"):
            self.help = not self.help
        elif key == "escape":
            self.help = False
        return True

    def metrics(self) -> list[str]:
        """Names of the available curves, the usual ones first."""
        runs = self.runs if self.comparing else self.runs[self.selected : self.selected + 1]
        names = dict.fromkeys(name for run in runs for name in run.series)
        return sorted(names, key=_place)

    def lines(self, width: int, height: int) -> list[Text]:
        """At most `height` lines of at most `width` characters."""
        self.selected = min(self.selected, max(len(self.runs) - 1, 0))
        if not self.runs:
            lines = [Text("no run yet"), Text("Waiting for a run to begin in this folder.", style="dim")]
        elif self.help:
            lines = [Text("keys", style="bold"), Text(""), *(Text(f"  {line}") for line in HELP)]
        elif self.comparing:
            lines = self._compare(width, height - 1)
        else:
            lines = self._single(self.runs[self.selected], width, height - 1)
        lines = lines[: max(height - 1, 0)]
        lines += [Text("")] * (height - 1 - len(lines)) + [self._keys()]
        for line in lines:
            line.plain = one_line(line.plain)  # files of a run may be a stranger's
            line.no_wrap = True
            line.truncate(width, overflow="crop" if self.plain else "ellipsis")
        return lines[:height]

    def _keys(self) -> Text:
        several = f"run {self.selected + 1} of {len(self.runs)}  " if len(self.runs) > 1 else ""
        switch = "arrows runs, curves  c compare" if len(self.runs) > 1 else "arrows curves"
        return Text(f"{several}{switch}  l log axis  s smooth  h help  q quit", style="dim")

    # One run.

    def _single(self, run: RunReader, width: int, height: int) -> list[Text]:
        state = run.state()
        head, foot = [_headline(state, width, self.plain), Text(_times(state))], _foot(state)
        figures = self._figures(run, state, width, max(height - len(head) - len(foot) - MIN_CHART - 1, 1))
        room = height - len(head) - len(figures) - len(foot) - 1
        curve: list[Text] = []
        if room >= 3:
            lines = self._curves([run], [COLOURS[0]])
            curve = [self._title(), *chart(lines, width, room, log=self.log, plain=self.plain)]
        return [*head, *curve, *figures, *foot]

    def _title(self) -> Text:
        weight = SMOOTHINGS[self.smoothing]
        how = [text for text, on in (("log axis", self.log), (f"smoothed {weight:g}", weight)) if on]
        title = Text(title_of(self.metric), style="bold")
        return title.append(f"  {', '.join(how)}", style="dim") if how else title

    def _curves(self, runs: Sequence[RunReader], colours: Sequence[str]) -> list[ChartLine]:
        lines = []
        for run, colour in zip(runs, colours):
            series = run.series.get(self.metric)
            if series is None:
                continue
            x = [at - series.x[0] for at in series.x] if series.axis == TIME else series.x
            lines.append(ChartLine(x, smoothed(series.y, SMOOTHINGS[self.smoothing]), colour))
        return lines

    def _figures(self, run: RunReader, state: RunState, width: int, most: int) -> list[Text]:
        """The newest values in columns, each with its history; those that matter in groups."""
        series = run.series
        groups = {"": self.metrics()} if self.everything else main_figures(series)
        label = 0 if self.everything or width < GROUP + CELL else GROUP
        columns = max((width - label) // CELL, 1)
        rows = []
        for group, names in groups.items():
            cells = [
                self._figure(name, series[name], state.values.get(name), (width - label) // columns)
                for name in names
            ]
            for at in range(0, len(cells), columns):
                head = Text(f"{'' if at else group.lower():{label}}"[:label], style="dim")
                rows.append(Text("").join([head, *cells[at : at + columns]]))
        return rows[:most]

    def _figure(self, name: str, series: Series, value: float | None, width: int) -> Text:
        text = value_text(name, value)
        room = max(min(width, CELL) - VALUE - 2, 8)
        title = one_line(short_title(name))
        cell = Text(f"{title} ", style="dim", no_wrap=True)
        cell.append(
            f"{text:>{max(VALUE, room - len(title))}} ",
            style="not dim bold" if value is not None else "not dim red",
        )
        left = min(width, CELL) - cell.cell_len
        cell.append(
            f"{sparkline(series.y, max(left - 2, 0), self.plain):{max(left, 1)}}", style="not dim cyan"
        )
        return cell

    # Several runs.

    def _compare(self, width: int, height: int) -> list[Text]:
        states = [run.state() for run in self.runs]
        rows_shown = max(min(len(states), height // 2), 1)
        first = min(max(self.selected - rows_shown // 2, 0), len(states) - rows_shown)
        visible = range(first, first + rows_shown)
        colours = [COLOURS[number % len(COLOURS)] for number in range(len(states))]
        table = compare_table([states[i] for i in visible], width - 2)
        rows = [Text(f"  {table[0]}", style="dim")]
        for number, text in zip(visible, table[1:]):
            mark = Text(">" if number == self.selected else " ", style="bold")
            row = mark.append("* " if self.plain else "● ", style=f"not bold {colours[number]}")
            rows.append(row.append(text, style="bold" if number == self.selected else "not bold"))
        room = height - len(rows) - 2
        if room < 3:
            return rows
        # The run that is selected is drawn last, above the others.
        order = sorted(range(len(states)), key=lambda number: number == self.selected)
        lines = self._curves([self.runs[i] for i in order], [colours[i] for i in order])
        curves = chart(lines, width, room, log=self.log, plain=self.plain)
        return [self._title(), *curves, *rows]


def _place(name: str) -> tuple[int, int]:
    """The usual ones first, then those of the run, of GPUs, and of the machine."""
    if name in FIRST:
        return 0, FIRST.index(name)
    return (2 if "gpu" in name else 3) if "." in name else 1, 0


def main_figures(series: Mapping[str, Series]) -> dict[str, list[str]]:
    """The signals that matter, as far as a run has them, by their group."""
    groups: dict[str, list[str]] = {}
    for signal in SIGNALS:
        name = next((name for name in signal.names if name in series), None)
        if name is not None:
            groups.setdefault(signal.group, []).append(name)
    return groups


def compare_table(states: Sequence[RunState], width: int) -> list[str]:
    """A line of headings and one per run. Empty columns are left out, and the last ones if there is no room."""
    columns: list[tuple[str, list[str]]] = [
        ("run", [one_line(state.name)[: max(width // 3, 8)] for state in states]),
        ("", [STATUS[state.status] for state in states]),
        ("step", [step_text(state) for state in states]),
    ]
    for name in FIRST[:5]:
        if any(name in state.values for state in states):
            cells = [value_text(name, s.values[name]) if name in s.values else "" for s in states]
            columns.append((title_of(name), cells))
    left = [duration_text(state.left_s) if state.left_s is not None else "" for state in states]
    columns.insert(4, ("time left", left))
    lines = [""] * (len(states) + 1)
    for heading, cells in columns:
        wide = max(len(text) for text in (heading, *cells))
        if len(lines[0]) + wide + 2 > width:
            break
        lines = [f"{line}{text:{wide}}  " for line, text in zip(lines, (heading, *cells))]
    return lines


def step_text(state: RunState) -> str:
    return f"{state.step:,} of {state.steps:,}" if state.steps else f"{state.step:,}"


def _headline(state: RunState, width: int, plain: bool) -> Text:
    line = Text(one_line(state.name), style="bold", no_wrap=True)
    line.append(f"  {STATUS[state.status]}", style=STATUS_STYLES.get(state.status, "yellow"))
    line.append(f"  step {step_text(state)}", style="not bold")
    if state.steps:
        share = min(state.step / state.steps, 1.0)
        line.append(f"  {100 * share:.0f} %  ", style="not bold")
        room = min(width - line.cell_len, 40)
        if room >= 8:
            full, rest = ("#", "-") if plain else ("█", "░")
            done = math.floor(share * room)
            line.append(full * done + rest * (room - done), style="not bold cyan")
    return line


def _times(state: RunState) -> str:
    parts = []
    if state.elapsed_s is not None:
        parts.append(f"{duration_text(state.elapsed_s)} so far")
    if state.left_s is not None:
        end = time.localtime(time.time() + state.left_s)
        day = "%H:%M" if state.left_s < 12 * 3600 else "%d %b %H:%M"
        parts.append(f"{duration_text(state.left_s)} left, until {time.strftime(day, end)}")
    if state.step_s is not None:
        parts.append(f"{duration_text(state.step_s)} per step")
    if state.reported_s_ago is not None:
        parts.append(f"last report {duration_text(max(state.reported_s_ago, 1.0))} ago")
    return "  ".join(parts) or "nothing reported yet"


def _foot(state: RunState) -> list[Text]:
    lines = []
    if state.verdict:
        style = "bold yellow" if is_alarm(state.verdict) else ""
        lines.append(Text(f"verdict     {one_line(state.verdict)}", style=style))
    for number, finding in enumerate(state.health[-MAX_HEALTH:]):
        line = Text(f"{'' if number else 'health':12}", style="yellow")
        line.append(finding.name, style="bold").append(f": {finding.evidence}", style="not bold")
        lines.append(line)
    if len(state.health) > MAX_HEALTH:
        more = len(state.health) - MAX_HEALTH
        lines.append(Text(f"{'':12}and {more} more: see train.log, or `flexor report`", style="yellow"))
    if state.plan:
        lines.append(Text("plan        " + "; ".join(plan_text(state))))
    lines.append(Text(f"checkpoint  {_checkpoint(state)}"))
    if state.damaged_lines:
        lines.append(Text(f"damaged     {state.damaged_lines} lines can't be read", style="yellow"))
    if state.log_line:
        lines.append(Text(f"log         {one_line(state.log_line)}"))
    return lines


def plan_text(state: RunState) -> list[str]:
    """Each figure of the plan with what was measured."""
    texts = []
    for row in state.plan:
        parts = [title_of(row.name)]
        if row.planned is not None:
            parts.append(f"{value_text(row.name, row.planned)} planned,")
        actual = "not measured yet" if row.actual is None else f"{value_text(row.name, row.actual)} measured"
        parts.append(actual)
        if row.planned and row.actual is not None:
            parts.append(f"({100 * (row.actual / row.planned - 1):+.0f} %)")
        texts.append(" ".join(parts))
    return texts


def _checkpoint(state: RunState) -> str:
    if not state.checkpoints:
        return "none yet"
    newest = state.checkpoints[-1]
    age = duration_text(max(time.time() - newest.saved, 1.0))
    text = f"step {newest.step:,}, {age} ago, {value_text('size_bytes', newest.bytes)}; {len(state.checkpoints)} in all"
    if state.status == "stopped":
        text += f". Continue with: flexor resume {state.folder}"
    return text
