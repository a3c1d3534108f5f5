"""The command line, output folder and exit code that all exhibits share."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from bench.errors import BenchError
from bench.exhibit_result import ExhibitResult
from bench.machine import ForeignLoad, describe
from bench.publishing import publish

DEFAULT_MODEL = Path(__file__).parents[1] / "var/models/smollm2-135m-instruct"
DEFAULT_OUT = Path("var/bench")

Options = argparse.Namespace
Body = Callable[[Options], Awaitable[ExhibitResult]]


def present(
    doc: str | None,
    body: Body,
    *,
    extend: Callable[[argparse.ArgumentParser], object] | None = None,
    ports: Callable[[Options], Sequence[int]] = lambda _: (),
    arguments: Sequence[str] | None = None,
) -> None:
    """Run an exhibit named by its file and publish its result.

    `doc` is the exhibit's docstring, which `--help` prints. A BenchError ends the process with one
    sentence and exit code 1, and nothing is written. A result with a fault is written first and
    then ends the process in the same way. `ports` names those of servers that the exhibit measures.
    """
    name = Path(sys.argv[0]).stem
    assert doc is not None, "an exhibit has a docstring"
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = parser_of(name, doc)
    if extend is not None:
        extend(parser)
    options = parser.parse_args(arguments)
    foreign = ForeignLoad(ports=ports(options))
    try:
        result = asyncio.run(run(body, options))
    except* BenchError as group:
        sys.exit("\n".join(f"{name}: {error}" for error in leaves(group)))
    facts = {
        "exhibit": name,
        "command": " ".join(["python -m", f"bench.{name}", *arguments]),
        "quick": options.quick,
        "model": options.model.name,
        **describe(),
        "foreign_cores": foreign.cores(),
    }
    publish(result, name=name, folder=options.out, facts=facts)
    if result.fault is not None:
        sys.exit(f"{name}: {result.fault}")


async def run(body: Body, options: Options) -> ExhibitResult:
    """Await the body; `asyncio.run` takes only coroutines."""
    return await body(options)


def leaves(group: BaseExceptionGroup[BenchError]) -> list[BenchError]:
    """Return the errors of nested groups as one list."""
    found: list[BenchError] = []
    for error in group.exceptions:
        found += leaves(error) if isinstance(error, BaseExceptionGroup) else [error]
    return found


def parser_of(name: str, doc: str) -> argparse.ArgumentParser:
    """Return a parser with the flags that every exhibit takes."""
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=doc,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--quick", action="store_true", help="a run of under 30 s that yields no figure"
    )
    parser.add_argument("--model", type=Path, default=DEFAULT_MODEL, help="the model's folder")
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="where JSON and PNG go")
    return parser
