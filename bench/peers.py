"""Workloads W1, W2, W3 over HTTP: kvmeter and its peers (full: 5 min, 3 more a peer).

    python -m bench.peers --peer vllm=http://127.0.0.1:8000 --peer llama=anthropic+http://…:8081

W1: 64 requests at once. W2: one 3,000-token prefix for 32 requests, four at a time, then the same
prefix with other suffixes. W3: a single stream. Rounds alternate between the servers, each with new
texts that a server which stays up has never seen: they carry a salt of the run, which is printed.
Ratios are of medians. For kvmeter, counts are compared with its records.
"""

import argparse
import random
import secrets
from collections.abc import Callable, Coroutine
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import httpx

from bench.chat_client import ChatReply, ChatRequest, Target, send, send_all, wall_seconds
from bench.errors import BenchError
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult, Plot
from bench.installations import extend as name_installation
from bench.installations import installation
from bench.timing import percentile
from bench.workloads import load, words

W1_SHORT = "W1 output tokens short of those asked for"
W2_PREFIX_TOKENS, W2_AT_ONCE = 3_000, 4
FIGURES = {  # name: whether a larger value is better
    "W1 tok/s": True, "W1 TTFT p50 ms": False, "W1 TPOT p50 ms": False,
    "W2 cold TTFT p50 ms": False, "W2 cold total s": False, "W2 warm TTFT p50 ms": False,
    "W2 warm total s": False, "W3 decode tok/s": True, "W3 prefill tok/s": True,
}  # fmt: skip
Figures = dict[str, float]


async def body(options: Options) -> ExhibitResult:
    """Run every workload on every target, round by round."""
    rounds = 1 if options.quick else options.rounds
    salt = options.salt or secrets.token_hex(4)
    runs: dict[str, list[Figures]] = {}
    with installation(options) as ours:
        targets = [ours.target(), *map(peer, options.peer)]
        for number in range(-1, rounds):  # the first round is not counted
            for target in targets:
                figures, replies = await run(target, f"{salt}.{number}", options)
                if target.name == "kvmeter":
                    ours.check(replies)
                if number >= 0 or options.quick:
                    runs.setdefault(target.name, []).append(figures)
            if options.quick:
                break
    result = tell(runs, rounds)
    result.notes.append(f"salt of the texts: {salt}")
    return result


async def run(target: Target, salt: str, options: Options) -> tuple[Figures, list[ChatReply]]:
    """Run the chosen workloads on a target, one after the other."""
    figures: Figures = {}
    replies: list[ChatReply] = []
    for name in options.workloads:
        more, came = await WORKLOADS[name](target, salt, quick=options.quick)
        figures |= more
        replies += came
    return figures, replies


async def run_w1(target: Target, salt: str, *, quick: bool) -> tuple[Figures, list[ChatReply]]:
    """Run W1: all requests at once."""
    w1 = load("w1").first(8, shrink=8) if quick else load("w1")
    requests = [
        ChatRequest(w1.text(i, salt=salt), job.output_tokens, system="Answer the question.")
        for i, job in enumerate(w1.jobs)
    ]
    seconds, replies = await wall_seconds(lambda: send_all(target, requests, at_once=len(requests)))
    return {
        "W1 tok/s": sum(r.timing.output_tokens for r in replies) / seconds,
        W1_SHORT: w1.output_tokens - sum(r.timing.output_tokens for r in replies),
        "W1 TTFT p50 ms": percentile([r.timing.ttft_ms for r in replies], 50),
        "W1 TPOT p50 ms": percentile([r.timing.tpot_ms for r in replies], 50),
    }, replies


async def run_w2(target: Target, salt: str, *, quick: bool) -> tuple[Figures, list[ChatReply]]:
    """Run W2: a shared prefix, cold and then warm."""
    w2 = load("w2")
    half = 4 if quick else len(w2.jobs) // 2
    prefix = words(random.Random(f"w2 prefix {salt}"), 600 if quick else W2_PREFIX_TOKENS)
    requests = [
        ChatRequest(w2.text(i, salt=salt), job.output_tokens, system=prefix, mark=True)
        for i, job in enumerate(w2.jobs[: 2 * half])
    ]
    figures: Figures = {}
    replies: list[ChatReply] = []
    for arm, part in (("cold", requests[:half]), ("warm", requests[half:])):
        seconds, came = await wall_seconds(
            lambda part=part: send_all(target, part, at_once=W2_AT_ONCE)  # type: ignore[misc]
        )
        figures[f"W2 {arm} TTFT p50 ms"] = percentile([r.timing.ttft_ms for r in came], 50)
        figures[f"W2 {arm} TTFT p95 ms"] = percentile([r.timing.ttft_ms for r in came], 95)
        figures[f"W2 {arm} total s"] = seconds
        figures[f"W2 {arm} cached tokens"] = sum(r.cached_tokens for r in came)
        replies += came
    return figures, replies


async def run_w3(target: Target, salt: str, *, quick: bool) -> tuple[Figures, list[ChatReply]]:
    """Run W3: one stream that decodes, then one long prompt."""
    w3 = load("w3").first(2, shrink=8) if quick else load("w3")
    decode, prefill = (
        ChatRequest(w3.text(i, salt=salt), job.output_tokens) for i, job in enumerate(w3.jobs)
    )
    first, second = await send(target, decode), await send(target, prefill)
    return {
        "W3 decode tok/s": 1000 / max(1e-9, first.timing.tpot_ms),
        "W3 prefill tok/s": second.prompt_tokens / second.timing.ttft_ms * 1000,
    }, [first, second]


Run = Callable[..., Coroutine[Any, Any, tuple[Figures, list[ChatReply]]]]
WORKLOADS: dict[str, Run] = {"w1": run_w1, "w2": run_w2, "w3": run_w3}


def peer(text: str) -> Target:
    """Parse NAME=URL or NAME=anthropic+URL; use the first model that the server lists."""
    name, _, url = text.partition("=")
    api, plus, rest = url.partition("+")
    if not url or (plus and api not in ("anthropic", "openai")):
        raise BenchError(f"not NAME=URL or NAME=anthropic+URL: {text}")
    address = rest if plus else url
    model = httpx.get(f"{address}/v1/models", timeout=30, trust_env=False)
    model_id = model.raise_for_status().json()["data"][0]["id"]
    if plus and api == "anthropic":
        return Target(name, address, "anthropic", model_id, {"anthropic-version": "2023-06-01"})
    return Target(name, address, "openai", model_id)


def tell(runs: dict[str, list[Figures]], rounds: int) -> ExhibitResult:
    """Return medians and ratios; in every row a ratio above 1 favours kvmeter."""
    peers = [name for name in runs if name != "kvmeter"]
    measured = runs["kvmeter"][0].keys()
    workloads = [name for name in WORKLOADS if any(f.startswith(name.upper()) for f in measured)]
    result = ExhibitResult(
        f"{', '.join(workloads).upper()} over HTTP, median of {rounds}",
        [load(name).lengths for name in workloads],
        ("figure", *runs, *(f"better than {name}" for name in peers)),
    )
    for figure, more_is_better in FIGURES.items():
        if figure not in measured:
            continue
        medians = {name: median(run[figure] for run in each) for name, each in runs.items()}
        ratios = [medians["kvmeter"] / medians[name] for name in peers]
        result.rows.append(
            (figure, *medians.values(), *(r if more_is_better else 1 / r for r in ratios))
        )
    if "w1" in workloads:
        short = {name: each[0][W1_SHORT] for name, each in runs.items()}
        result.notes.append(f"{W1_SHORT}: {short}")
    result.figures = dict(runs)
    bars: dict[str, list[tuple[float | str, float]]] = {
        name: [(f, median(r[f] for r in each)) for f in measured if f in FIGURES and "tok/s" in f]
        for name, each in runs.items()
    }
    result.plot = Plot("bars", "", "tokens/s", bars)
    return result


def peer_ports(options: Options) -> list[int]:
    """Return the ports of the peers, whose processor time is no foreign load."""
    addresses = (text.partition("=")[2].rpartition("+")[2] for text in options.peer)
    return [urlsplit(address).port or 80 for address in addresses]


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the exhibit's own flags."""
    name_installation(parser)
    parser.add_argument("--peer", action="append", default=[], metavar="NAME=URL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--salt", help="the salt of an earlier run, to have its texts again")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))


if __name__ == "__main__":
    present(__doc__, body, extend=extend, ports=peer_ports)
