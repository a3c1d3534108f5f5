"""Publishing of a result: the table on standard output, NAME.json, and NAME.png."""

import importlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.exhibit_result import Cell, ExhibitResult


def publish(result: ExhibitResult, *, name: str, folder: Path, facts: dict[str, Any]) -> None:
    """Print the table; write NAME.json and, if matplotlib is installed, NAME.png."""
    folder.mkdir(parents=True, exist_ok=True)
    _print(result, facts)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(facts | asdict(result), indent=1) + "\n", encoding="utf-8")
    sys.stdout.write(f"{path}\n")
    if result.plot is not None:
        _plot(result, facts, folder / f"{name}.png")


def show(cell: Cell) -> str:
    """Return the text of a table cell."""
    match cell:
        case None:
            return ""
        case float():
            return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:,.3g}"
        case int():
            return f"{cell:,}"
    return cell


def _print(result: ExhibitResult, facts: dict[str, Any]) -> None:
    table = Table(title=result.title, title_justify="left")
    for number, column in enumerate(result.columns):
        table.add_column(column, justify="left" if number == 0 else "right", overflow="fold")
    for row in result.rows:
        table.add_row(*map(show, row))
    console = Console()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    lines = [f"lengths: {line}" for line in result.lengths] + result.notes
    lines += [f"{name}: {facts[name]}" for name in ("processor", "cores", "date", "command")]
    lines.append(f"cores taken by others meanwhile: {facts['foreign_cores']}")
    sys.stdout.write("\n".join(lines) + "\n")


def _plot(result: ExhibitResult, facts: dict[str, Any], path: Path) -> None:
    try:
        plots = importlib.import_module("bench.plots")
    except ModuleNotFoundError as error:
        if error.name is None or not error.name.startswith("matplotlib"):
            raise
        sys.stdout.write("no plot: pip install 'kvmeter[bench]'\n")
        return
    plots.draw(result, facts, path)
    sys.stdout.write(f"{path}\n")
