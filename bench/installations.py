"""A whole installation to measure: a fresh `kvmeter up`, or one that runs already."""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from bench.chat_client import ChatReply, Target
from bench.counts import expect
from bench.errors import BenchError

VERSION = {"anthropic-version": "2023-06-01"}
IGNORE_EOS = {"x-kvmeter-ignore-eos": "1"}


@dataclass(frozen=True, slots=True)
class Installation:
    """The address and a customer key of an installation."""

    url: str
    api_key: str

    def client(self) -> httpx.Client:
        """Return an HTTP client with the key."""
        headers = {"x-api-key": self.api_key, **VERSION}
        return httpx.Client(base_url=self.url, headers=headers, timeout=300, trust_env=False)

    def target(self) -> Target:
        """Return the installation as a target of the chat client."""
        with self.client() as client:
            model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        headers = {"x-api-key": self.api_key, **VERSION, **IGNORE_EOS}
        return Target("kvmeter", self.url, "anthropic", model, headers)

    def check(self, replies: list[ChatReply]) -> None:
        """Check every reply against its record. Raises CountsDiffer."""
        with self.client() as client:
            for reply in replies:
                check_record(client, reply)


def check_record(client: httpx.Client, reply: ChatReply) -> dict[str, Any]:
    """Return a request's record after comparing its counts. Raises CountsDiffer."""
    path = f"/v1/kvmeter/requests/{reply.request_id}"
    record: dict[str, Any] = client.get(path).raise_for_status().json()
    engine = record["engine"]
    told, produced = reply.timing.output_tokens, engine["output_tokens"]
    expect(reply.request_id, "output tokens", sent=told, recorded=produced)
    prompt = engine["prompt_tokens"]
    expect(reply.request_id, "prompt tokens", sent=reply.prompt_tokens, recorded=prompt)
    return record


@contextmanager
def installation(options: argparse.Namespace, **settings: str) -> Iterator[Installation]:
    """Yield the installation that `--url` names, or a fresh one that ends with the run."""
    if options.url:
        yield Installation(options.url, read_key(options.data_dir))
        return
    with tempfile.TemporaryDirectory(prefix="kvmeter-bench-") as folder:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        command = [sys.executable, "-m", "gateway.commands", "up", "--port", str(port)]
        process = subprocess.Popen(
            [*command, "--model", str(options.model)],
            env={"KVMETER_LOG_LEVEL": "warning", **os.environ, "DATA_DIR": folder, **settings},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None, "its output is piped"
        try:
            if not any(line.startswith("kvmeter ready: ") for line in process.stdout):
                raise BenchError("the server did not start")
            yield Installation(f"http://127.0.0.1:{port}", read_key(Path(folder)))
        finally:
            process.terminate()
            process.wait()
            process.stdout.close()


def read_key(data_dir: Path) -> str:
    """Return the first customer's key."""
    keys = json.loads((data_dir / "first-keys.json").read_text(encoding="utf-8"))
    key: str = keys["api_key"]
    return key


def extend(parser: argparse.ArgumentParser) -> None:
    """Add the flags that name a running installation."""
    parser.add_argument("--url", help="a running server; without it one is started")
    parser.add_argument("--data-dir", type=Path, default=Path("var"), help="the server's data")
