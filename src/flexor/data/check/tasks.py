"""The task part of a check: every file that names an episode's task must name the same one."""

from __future__ import annotations

from flexor.data.check.layout import Layout, read_other_episodes, read_other_tasks
from flexor.data.check.report import CheckReport
from flexor.data.check.tables import Tables
from flexor.data.format.row_tasks import disagree

USED = "training uses the task of the rows, as LeRobot does; `flexor data repair` writes it everywhere"


def check_tasks(layout: Layout, tables: Tables, report: CheckReport) -> None:
    """Compare the tasks of rows with those that the metadata lists, current and left over from another version."""
    _check_table(layout, tables, report)
    _check_order(layout, report)
    current, old = ("meta/episodes", "meta/episodes.jsonl")[:: 1 if layout.is_v3 else -1]
    leftover = read_other_episodes(layout)
    for episode in layout.episodes:
        numbers = [int(n) for n in tables.tasks.get(episode.index, []) if n in layout.tasks]
        rows = [layout.tasks[n] for n in numbers if layout.tasks[n]]
        listed = {current: [str(task) for task in episode.tasks], old: leftover.get(episode.index, [])}
        if not disagree(rows, listed[current]):
            continue
        parts = [f"{file} says {_quoted(texts)}" for file, texts in listed.items() if texts]
        message = f"its rows (task_index {_numbers(numbers)}) say {_quoted(rows)}, but {', '.join(parts)}"
        report.warning("task-conflict", message, USED, episode=episode.index)


def _check_table(layout: Layout, tables: Tables, report: CheckReport) -> None:
    """Compare the texts of tasks with a table that another version of the format left."""
    current, old = ("meta/tasks.parquet", "meta/tasks.jsonl")[:: 1 if layout.is_v3 else -1]
    other = read_other_tasks(layout)
    used = {int(n) for numbers in tables.tasks.values() for n in numbers if n in layout.tasks}
    for number in sorted(used & other.keys()):
        if layout.tasks[number] != other[number]:
            message = (
                f"task {number} is {layout.tasks[number]!r} in {current}, but {other[number]!r} in {old}"
            )
            fix = f"training uses {current}; if that is right, delete {old}"
            report.warning("task-conflict", message, fix, file=old)


def _check_order(layout: Layout, report: CheckReport) -> None:
    numbers = list(layout.tasks)
    if layout.is_v3 and numbers != list(range(len(numbers))):
        message = (
            f"the file has the tasks {_numbers(numbers)} in this order: LeRobot reads task 1 from its second row, "
            "Flexor from the row with task_index 1"
        )
        fix = "`flexor data repair` numbers them in order"
        report.warning("task-order", message, fix, file="meta/tasks.parquet")


def _numbers(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:8])) + (" ..." if len(numbers) > 8 else "")


def _quoted(texts: list[str]) -> str:
    return " and ".join(map(repr, texts[:3])) + (" ..." if len(texts) > 3 else "") if texts else "none"
