"""A report: a table for people, JSON for machines, a plot for both, under one name."""

import importlib
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Plot:
    """What to draw: named series of (x, y); bars have names for x."""

    kind: Literal["bars", "lines"]
    x: str
    y: str
    series: dict[str, list[tuple[float | str, float]]]


@dataclass(slots=True)
class Report:
    """One exhibit's outcome. `lengths` names the length distribution of every workload in it."""

    title: str
    lengths: Sequence[str]
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plot: Plot | None = None
    fault: str | None = None  # the figures are true, and not as they must be: exit code 1


def publish(report: Report, *, name: str, folder: Path, facts: dict[str, Any]) -> None:
    """Print the table; write NAME.json and, where matplotlib is installed, NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _print(report, facts)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(facts | asdict(report), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}\n")
    if report.plot is not None:
        _draw(report, facts, folder / f"{name}.png")


def show(cell: Cell) -> str:
    """A cell as people read it."""
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:,.3g}"
        case int():
            return f"{cell:,}"
    return cell


def _print(report: Report, facts: dict[str, Any]) -> None:
    table = Table(title=report.title, title_justify="left")
    for number, column in enumerate(report.columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in report.rows:
        table.add_row(*map(show, row))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    lines = [f"lengths: {line}" for line in report.lengths] + report.notes
    lines += [f"{name}: {facts[name]}" for name in ("processor", "cores", "date", "command")]
    lines.append(f"cores taken by others meanwhile: {facts['foreign_cores']}")
    sys.stdout.write("\n".join(lines) + "\n")


def _draw(report: Report, facts: dict[str, Any], path: Path) -> None:
    try:
        plots = importlib.import_module("bench.plots")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        sys.stdout.write("no plot: pip install 'kvmeter[bench]'\n")
        return
    plots.draw(report, facts, path)
    sys.stdout.write(f"{path}\n")
