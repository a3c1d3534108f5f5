"""The result of an exhibit: a table, the figures behind it, and what to plot."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Cell = str | float | int | None


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot: named series of (x, y) points. For bars, x is a name."""

    kind: Literal["bars", "lines"]
    x: str
    y: str
    series: dict[str, list[tuple[float | str, float]]]


@dataclass(slots=True)
class ExhibitResult:
    """What an exhibit measured. `lengths` describes the length distribution of each workload."""

    title: str
    lengths: Sequence[str]
    columns: Sequence[str]
    rows: list[Sequence[Cell]] = field(default_factory=list)
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    plot: Plot | None = None
    fault: str | None = None  # the figures are true but break a limit: published, then exit code 1
