"""Plots of results as PNG; the only module that needs matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure

from bench.exhibit_result import ExhibitResult, Plot


def draw(result: ExhibitResult, facts: dict[str, Any], path: Path) -> None:
    """Write the result's plot as a PNG, captioned with machine, date and command."""
    plot = result.plot
    assert plot is not None, "nothing to draw"
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    if plot.kind == "bars":
        _bars(axes, plot)
    else:
        for name, points in plot.series.items():
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
    axes.set(title=result.title, xlabel=plot.x, ylabel=plot.y)
    axes.set_ylim(bottom=0)
    axes.grid(axis="y", alpha=0.3)
    axes.legend()
    caption = f"{facts['processor']}, {facts['cores']} cores, {facts['date']}: {facts['command']}"
    figure.supxlabel(caption, fontsize=6)
    figure.savefig(path, dpi=120)


def _bars(axes: Any, plot: Plot) -> None:
    groups = list(dict.fromkeys(str(x) for points in plot.series.values() for x, _ in points))
    width = 0.8 / len(plot.series)
    for number, (name, points) in enumerate(plot.series.items()):
        places = [groups.index(str(x)) + number * width for x, _ in points]
        axes.bar(places, [y for _, y in points], width, label=name)
    centre = 0.4 - width / 2
    axes.set_xticks([i + centre for i in range(len(groups))], groups)
