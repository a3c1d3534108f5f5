"""Exhibits run from a command line, and the list of them is complete."""

import ast
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.commands.bench import EXHIBITS

ROOT = Path(__file__).parents[2]


def run(*command: str, out: Path) -> dict[str, object]:
    """Run a command in the checkout; the exhibit's JSON."""
    done = subprocess.run(
        [sys.executable, "-m", *command, "--quick", "--out", str(out)],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.json")
    has_plot = importlib.util.find_spec("matplotlib") is not None
    assert path.with_suffix(".png").exists() == has_plot
    facts: dict[str, object] = json.loads(path.read_text())
    assert facts["quick"]
    assert all(facts[name] for name in ("processor", "date", "command", "lengths"))
    return facts


def test_in_flight_sharing_computes_a_prefix_once(tiny_folder: Path, tmp_path: Path) -> None:
    facts = run("bench.in_flight_sharing", "--model", str(tiny_folder), out=tmp_path)

    figures = facts["figures"]
    assert isinstance(figures, dict)
    assert figures["shared"]["computed"] == 512 + 6 * 16
    assert figures["caching off"]["computed"] == 6 * (512 + 16)


def test_a_step_is_timed_through_the_command(tmp_path: Path) -> None:
    facts = run("gateway.commands", "bench", "step_time", out=tmp_path)

    figures = facts["figures"]
    assert isinstance(figures, dict)
    assert len(figures["decoding"]) == len(figures["turnover"]) == 200


def test_the_command_lists_every_exhibit() -> None:
    files = {p.stem: p.read_text("utf-8") for p in sorted((ROOT / "bench").glob("*.py"))}
    exhibits = {name for name, source in files.items() if "    present(__doc__, body" in source}

    assert exhibits == set(EXHIBITS)


@pytest.mark.parametrize("name", EXHIBITS)
def test_an_exhibit_says_what_it_shows_and_how_long_it_takes(name: str) -> None:
    docstring = ast.get_docstring(ast.parse((ROOT / "bench" / f"{name}.py").read_text("utf-8")))
    table = (ROOT / "docs/benchmarks.md").read_text("utf-8")

    assert docstring is not None
    assert "(full: " in docstring.splitlines()[0]
    assert f"`kvmeter bench {name}" in table
