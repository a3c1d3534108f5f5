"""How much sooner the first token comes when its prefix is cached.

Three arms, the median of `--rounds` each, interleaved: *cold* writes a fresh 3,000-token prefix,
*warm* reads it with another question, *control* sends a prefix never seen before, so that a machine
that merely warmed up shows. Every arm's usage and engine record are checked before its time counts.

    python -m bench.warm_ttft                      # starts a server of its own
    python -m bench.warm_ttft --url http://127.0.0.1:8080 --data-dir var
"""

import argparse
import json
import os
import platform
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

PREFIX_TOKENS = 3_000
WARM_SHARE_MAX = 0.25  # of the cold time; more would mean that the prefix was computed after all
WORDS = ("amber", "basin", "cedar", "delta", "ember", "fjord", "grove", "harbor", "islet", "jetty")


class BenchError(Exception):
    """A figure would not mean what it says."""


def main() -> None:
    """Run the arms and print a table and JSON."""
    arguments = parse_arguments()
    with server(arguments) as (url, data_dir):
        keys = json.loads((data_dir / "first-keys.json").read_text(encoding="utf-8"))
        headers = {"x-api-key": keys["api_key"], "anthropic-version": "2023-06-01"}
        with httpx.Client(base_url=url, headers=headers, timeout=300, trust_env=False) as client:
            arms = measure(client, rounds=arguments.rounds, seed=arguments.seed)
    report(arms, seed=arguments.seed)
    if median(arms["warm"]) > WARM_SHARE_MAX * median(arms["cold"]):
        sys.exit("warm_ttft: the warm arm took more than a quarter of the cold one")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--data-dir", type=Path, default=Path("var"), help="the server's data")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    return parser.parse_args()


@contextmanager
def server(arguments: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """The server named on the command line, or a fresh one for the time of the run."""
    if arguments.url:
        yield arguments.url, arguments.data_dir
        return
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        process = subprocess.Popen(
            [sys.executable, "-m", "gateway.commands", "up", "--port", str(port)],
            env={**os.environ, "DATA_DIR": folder},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        try:
            if not any(line.startswith("kvmeter ready: ") for line in process.stdout):
                raise BenchError("the server did not start")
            yield f"http://127.0.0.1:{port}", Path(folder)
        finally:
            process.terminate()
            process.wait()


def measure(client: httpx.Client, *, rounds: int, seed: int) -> dict[str, list[float]]:
    """Milliseconds to the first token, by arm; one round before counts for nothing."""
    chance = random.Random(seed)
    model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
    arms: dict[str, list[float]] = {"cold": [], "warm": [], "control": []}
    for number in range(rounds + 1):
        prefix, control = (fresh_prefix(client, model, chance) for _ in range(2))
        times = {
            "cold": ask(client, model, prefix, "What is this?", marked=True, expect="write"),
            "warm": ask(client, model, prefix, "Name one word.", marked=True, expect="read"),
            "control": ask(client, model, control, "What is this?", marked=False, expect="plain"),
        }
        if number > 0:
            for arm, milliseconds in times.items():
                arms[arm].append(milliseconds)
    return arms


def fresh_prefix(client: httpx.Client, model: str, chance: random.Random) -> str:
    """A text of about PREFIX_TOKENS tokens that was never sent before."""
    words = [f"{chance.getrandbits(64):x}", *(chance.choice(WORDS) for _ in range(PREFIX_TOKENS))]
    tokens = count(client, model, " ".join(words))
    keep = round(len(words) * PREFIX_TOKENS / tokens)
    return " ".join(words[:keep])


def count(client: httpx.Client, model: str, system: str) -> int:
    """Tokens of a prompt with this system text."""
    body = {"model": model, "system": system, "messages": [{"role": "user", "content": "."}]}
    answer = client.post("/v1/messages/count_tokens", json=body).raise_for_status()
    tokens: int = answer.json()["input_tokens"]
    return tokens


def ask(
    client: httpx.Client, model: str, prefix: str, question: str, *, marked: bool, expect: str
) -> float:
    """Milliseconds from sending to the first piece of text, once the books agree."""
    block: dict[str, Any] = {"type": "text", "text": prefix}
    if marked:
        block["cache_control"] = {"type": "ephemeral"}
    body = {
        "model": model,
        "max_tokens": 8,
        "stream": True,
        "system": [block],
        "messages": [{"role": "user", "content": question}],
    }
    first_ms = None
    started = time.perf_counter()
    with client.stream("POST", "/v1/messages", json=body) as response:
        for line in response.iter_lines():
            if first_ms is None and line.startswith("event: content_block_delta"):
                first_ms = (time.perf_counter() - started) * 1000
    if first_ms is None:
        raise BenchError(f"no text came: {response.status_code}")
    check(client, response.headers["request-id"], expect)
    return first_ms


def check(client: httpx.Client, request_id: str, expect: str) -> None:
    """The request was billed as its arm says, and the engine did what was billed."""
    record = client.get(f"/v1/kvmeter/requests/{request_id}").raise_for_status().json()
    usage, engine = record["usage"], record["engine"]
    read, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
    seen = "read" if read and not written else "write" if written and not read else "plain"
    if seen != expect or engine["tokens_reused_promised"] != read:
        raise BenchError(f"a {expect} arm was billed {usage} and computed {engine}")
    if expect != "read" and engine["tokens_reused_gift"]:
        raise BenchError(f"a {expect} arm reused {engine['tokens_reused_gift']} tokens")


def report(arms: dict[str, list[float]], *, seed: int) -> None:
    """A table for people, then one JSON line for machines."""
    medians = {arm: median(times) for arm, times in arms.items()}
    rounds = len(arms["cold"])
    print(f"Time to first token, {PREFIX_TOKENS:,}-token prefix, median of {rounds}")
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores\n")
    for arm, milliseconds in medians.items():
        print(f"{arm:8} {milliseconds:8.0f} ms  {milliseconds / medians['cold']:5.2f} x cold")
    figures = {"bench": "warm_ttft", "prefix_tokens": PREFIX_TOKENS, "seed": seed}
    print(json.dumps(figures | {"median_ms": medians, "times_ms": arms}))


if __name__ == "__main__":
    main()
