"""What the README says is so: its commands, its two targets, its example."""

import ast
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.gateway.test_commands import commands

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def make(*arguments: str) -> str:
    """What make prints, also when it is make that runs the tests."""
    inherited = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS"}
    return subprocess.run(
        ["make", *arguments],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name not in inherited},
        check=True,
        capture_output=True,
        text=True,
    ).stdout


def test_the_first_screen_says_how_to_run_and_how_to_test() -> None:
    first_screen = "\n".join(README.splitlines()[:25])

    assert re.search(r"^\$ make run\b", first_screen, re.MULTILINE)
    assert re.search(r"^\$ make test\b", first_screen, re.MULTILINE)


def test_every_make_command_is_a_target_with_a_help_line() -> None:
    documents = README + (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    shown = make("help")
    targets = set(re.findall(r"^make (\w+)", shown, re.MULTILINE))

    used = set(
        re.findall(r"\bmake (run|test|check|fix|soak|coverage|migrate|install|help)\b", documents)
    )
    told = set(re.findall(r"^\$ make (\w+)", documents, re.MULTILINE))

    assert targets == {
        "help", "install", "run", "test", "check", "fix", "soak", "coverage", "migrate",
    }  # fmt: skip
    assert told | used <= targets


def test_make_run_ends_in_the_command_that_is_tested() -> None:
    """The system tests start `kvmeter up`; this is the last step from `make run` to it."""
    recipe = make("--dry-run", "--always-make", "run")

    assert recipe.splitlines()[-1] == "exec .venv/bin/kvmeter up"
    assert "--constraint constraints.txt --editable ." in recipe
    assert "[dev]" not in recipe, "serving needs no developer's package"


def test_the_tables_of_commands_names_every_command() -> None:
    table = README.split("## Commands")[1].split("## Settings")[0]
    rows = re.findall(r"^\| `kvmeter ([a-z -]+?)(?: [\[A-Z-].*?)?` \|", table, re.MULTILINE)
    named = {tuple(row.split(" --")[0].split()) for row in rows}

    assert named == set(commands())


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_examples_are_python(number: int) -> None:
    ast.parse(blocks("python")[number])


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")

    assert script.split("\n")[-3:] == ["make check", "make test", ""]
