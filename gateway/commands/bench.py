"""`kvmeter bench`: runs one benchmark exhibit on this machine.

The command ships; the exhibits do not. They need the workloads and the pinned packages of a
checkout, and a figure should name the commit that it is of.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gateway.commands.options import DEFAULT_DATA_DIR, DataDir
from gateway.errors import CommandError

CHECKOUT = Path(__file__).resolve().parents[2]

EXHIBITS = {
    "static_continuous": "static against continuous batching (50 min; --batches 16: 17 min)",
    "kv_waste": "KV memory reserved and not used, contiguous against paged (15 min)",
    "naive": "transformers, one at a time and in padded batches, against ours (15 min)",
    "cached_ttft": "time to first token: cold, warm by tier, control (8 min)",
    "warm_ttft": "the same for one prefix, through the whole installation (1 min)",
    "in_flight_sharing": "sixteen identical cold prefixes at once (1 min)",
    "pin_pressure": "leases up to the cap, then open-loop load (5 min)",
    "interference": "a long prefill beside decodes, chunked on and off (3 min)",
    "caching_overhead": "what prefix caching costs at 0 % hits (10 min)",
    "peers": "W1, W2, W3 against kvmeter and any --peer NAME=URL (5 min, 3 a peer)",
    "step_time": "scheduler, bookkeeping and journal of a step (20 s)",
    "soak": "random load at a full pin cap: memory, files and blocks stay (30 min)",
    "lease_memory": "the engine's memory with 10,000 live leases (3 min)",
}
HELP = "\n\n".join([
    "Run one exhibit: a checked table, and JSON and a plot in DATA_DIR/bench.",
    "Each takes --quick for a look in under 30 s; `python -m bench.NAME --help` lists its flags. "
    "Durations are of a quiet machine with two cores.",
    *(f"{name}: {line}" for name, line in EXHIBITS.items()),
])  # fmt: skip


def bench(
    context: typer.Context,
    exhibit: Annotated[str, typer.Argument(metavar="EXHIBIT", help="One of those above.")],
    data_dir: DataDir = DEFAULT_DATA_DIR,
) -> None:
    """Become `python -m bench.EXHIBIT`, with the flags that follow it."""
    if exhibit not in EXHIBITS:
        raise CommandError(f"No such exhibit: {exhibit}; kvmeter bench --help lists them")
    if not (CHECKOUT / "bench" / f"{exhibit}.py").is_file():
        raise CommandError("The exhibits are in the source checkout, not in the package")
    out = str((data_dir / "bench").absolute())
    command = [sys.executable, "-m", f"bench.{exhibit}", "--out", out, *context.args]
    environment = {**os.environ, "PYTHONPATH": str(CHECKOUT)}
    os.execve(sys.executable, command, environment)  # noqa: S606 - our own interpreter
