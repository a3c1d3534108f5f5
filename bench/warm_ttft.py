"""Time to the first token over the public API, with and without a cached prefix (1 min).

Three interleaved arms, each through a complete `kvmeter up`: *cold* writes a fresh 3,000-token
prefix, *warm* reads it with another question, and *control* sends a new prefix, to show whether the
machine changed during the run. A time counts only if usage and engine record agree with its arm.
The exhibit fails if the warm arm takes more than a quarter of the cold one's time.
"""

import argparse
import random
import time
from statistics import median

import httpx

from bench.chat_client import ChatRequest, Target, send
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.installations import check_record, installation
from bench.installations import extend as name_installation
from bench.timing import median_interval
from bench.workloads import words

WARM_SHARE_MAX = 0.25  # of the cold time
CONTROL_MOVES_MOST = 0.25


async def body(options: Options) -> ExhibitResult:
    """Run the arms; the first round is not counted."""
    rounds, prefix_tokens = (2, 1_000) if options.quick else (options.rounds, 3_000)
    chance = random.Random(options.seed)
    arms: dict[str, list[float]] = {"cold": [], "warm": [], "control": []}
    with installation(options) as ours, ours.client() as client:
        target = ours.target()
        for number in range(rounds + 1):
            prefix, control = (words(chance, prefix_tokens) for _ in range(2))
            times = {
                "cold": await ask(target, client, prefix, "What is this?", expects="write"),
                "warm": await ask(target, client, prefix, "Name one word.", expects="read"),
                "control": await ask(target, client, control, "What is this?", expects="plain"),
            }
            for arm, milliseconds in times.items() if number > 0 else ():
                arms[arm].append(milliseconds)
    return tell(arms, rounds, prefix_tokens, options)


async def ask(
    target: Target, client: httpx.Client, prefix: str, question: str, *, expects: str
) -> float:
    """Send one request, check its bill, and return its time to first token in milliseconds."""
    reply = await send(target, ChatRequest(question, 8, system=prefix, mark=expects != "plain"))
    record = check_record(client, reply)
    usage, engine = record["usage"], record["engine"]
    read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    seen = "read" if read and not written else "write" if written and not read else "plain"
    if seen != expects or engine["tokens_reused_promised"] != read:
        raise BenchError(f"a {expects} arm was billed {usage} and computed {engine}")
    if expects != "read" and engine["tokens_reused_gift"]:
        raise BenchError(f"a {expects} arm reused {engine['tokens_reused_gift']} tokens")
    return reply.timing.ttft_ms


def tell(
    arms: dict[str, list[float]], rounds: int, prefix_tokens: int, options: Options
) -> ExhibitResult:
    """Return the table. Raises BenchError if the warm arm is slow or the control moved."""
    medians = {arm: median(times) for arm, times in arms.items()}
    result = ExhibitResult(
        f"Time to first token, {prefix_tokens:,}-token prefix, median of {rounds}",
        [f"fixed: prefix {prefix_tokens}, seed {options.seed}"],
        ("arm", "ms", "95 % interval", "x cold"),
    )
    for arm, times in arms.items():
        low, high = median_interval(times)
        interval = f"{low:,.0f} to {high:,.0f}"
        result.rows.append((arm, medians[arm], interval, medians[arm] / medians["cold"]))
    if not options.quick:
        if medians["warm"] > WARM_SHARE_MAX * medians["cold"]:
            raise BenchError("the warm arm took more than a quarter of the cold one")
        if abs(medians["control"] / medians["cold"] - 1) > CONTROL_MOVES_MOST:
            raise BenchError(f"the control moved: {medians}")
    result.figures = dict(arms)
    points: list[tuple[float | str, float]] = list(medians.items())
    result.plot = Plot("bars", "", "time to first token, ms", {"p50": points})
    return result


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the exhibit's own flags."""
    name_installation(parser)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)


if __name__ == "__main__":
    present(__doc__, body, extend=extend)
