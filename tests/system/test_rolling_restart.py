"""Two gateway processes on one ledger and one engine, stopped and started in turn under load."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from tests.system.installation import KVMETER, ROOT, environment, free_port, wait_until

NUM_CLIENTS = 3


class Cluster:
    """An engine process, gateways with a data folder each, one database."""

    def __init__(self, folder: Path, model: Path, cards: Path) -> None:
        self._folder = folder
        self._model = model
        self._settings = {
            "KVMETER_DATABASE_URL": f"sqlite:///{folder / 'ledger.sqlite3'}",
            "KVMETER_ENGINE_URL": f"unix:{folder / 'engine.sock'}",
            "KVMETER_PRICE_CARDS": str(cards),
            "KVMETER_CACHE_MIN_TOKENS": "32",
            "KVMETER_DTYPE": "float32",
            "KVMETER_GATEWAY_DEAD_AFTER_SECONDS": "2",
        }
        self.run("migrate")
        organization = json.loads(self.run("organizations", "create", "--json"))["id"]
        made = json.loads(self.run("keys", "create", "--organization", organization, "--json"))
        self.key: str = made["secret"]

    def run(self, *arguments: str, check: bool = True, name: str = "one") -> str:
        """Run one command to its end; return what it printed."""
        done = subprocess.run(
            [*KVMETER, *arguments], env=self._environment(name), cwd=ROOT, text=True,
            capture_output=True, check=False, timeout=60,
        )  # fmt: skip
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr

    @contextmanager
    def process(self, *command: str, name: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run a process until the block ends, then stop it in order."""
        process = subprocess.Popen(command, env=self._environment(name), cwd=ROOT)
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                assert process.wait(20) == 0

    def engine(self) -> "ExitStack":
        stack = ExitStack()
        url = self._settings["KVMETER_ENGINE_URL"]
        command = (sys.executable, "-m", "engine", "--model", str(self._model), "--listen", url)
        stack.enter_context(self.process(*command, name="engine"))
        return stack

    def gateway(self, name: str, port: int) -> "ExitStack":
        """Start a gateway and wait until it is ready; closing the stack stops it in order."""
        stack = ExitStack()
        command = (*KVMETER, "gateway", "--port", str(port), "--model", str(self._model))
        stack.enter_context(self.process(*command, name=name))
        wait_until(lambda: is_ready(port), 60)
        return stack

    def _environment(self, name: str) -> dict[str, str]:
        return environment(DATA_DIR=str(self._folder / name), **self._settings)


def is_ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def cluster(tmp_path: Path, tiny_model: Path, tiny_cards: Path) -> Cluster:
    return Cluster(tmp_path, tiny_model, tiny_cards)


def send(
    cluster: Cluster, ports: list[int], seed: int, stopped: threading.Event
) -> Counter[int | str]:
    """Send requests to a gateway that is in rotation, as a load balancer would."""
    random, outcomes = Random(seed), Counter[int | str]()
    headers = {"x-api-key": cluster.key, "anthropic-version": "2023-06-01"}
    while not stopped.is_set():
        url = f"http://127.0.0.1:{random.choice(ports)}/v1/messages"
        body = {
            "model": "tiny",
            "max_tokens": random.choice([1, 30, 100]),
            "messages": [{"role": "user", "content": "What is a lease? " * 20}],
        }
        try:
            response = httpx.post(url, json=body, headers=headers, timeout=30, trust_env=False)
            outcomes[response.status_code] += 1
        except httpx.ConnectError:
            outcomes["not connected"] += 1  # stopped meanwhile: nothing was sent, try another
    return outcomes


def test_a_rolling_restart_under_load_loses_no_request(cluster: Cluster):
    ports = {"one": free_port(), "two": free_port()}
    with cluster.engine(), ExitStack() as gateways:
        running = {name: cluster.gateway(name, port) for name, port in ports.items()}
        for stack in running.values():
            gateways.push(stack)
        rotation = list(ports.values())
        stopped = threading.Event()
        with ThreadPoolExecutor(NUM_CLIENTS) as pool:
            clients = [
                pool.submit(send, cluster, rotation, seed, stopped) for seed in range(NUM_CLIENTS)
            ]
            try:
                for name, port in ports.items():
                    rotation.remove(port)  # first out of the rotation, then drained
                    time.sleep(0.1)  # what was chosen a moment ago is on its way
                    running[name].close()
                    running[name] = cluster.gateway(name, port)
                    gateways.push(running[name])
                    rotation.append(port)
            finally:
                stopped.set()
            outcomes = sum((client.result() for client in clients), Counter[int | str]())

        assert outcomes[200] > 10, outcomes
        assert set(outcomes) <= {200, "not connected"}, outcomes
        assert "The ledger has no problems." in cluster.run("ledger", "verify")


def test_a_gateway_with_another_engine_is_refused_in_one_sentence(
    cluster: Cluster, tmp_path: Path, tiny_model: Path
):
    with cluster.engine(), cluster.gateway("one", free_port()):
        other_url = f"unix:{tmp_path / 'other.sock'}"
        engine = (
            sys.executable, "-m", "engine", "--model", str(tiny_model), "--listen", other_url,
        )  # fmt: skip
        with cluster.process(*engine, name="other"):
            cluster._settings["KVMETER_ENGINE_URL"] = other_url
            said = cluster.run(
                "gateway", "--port", str(free_port()), "--model", str(tiny_model),
                check=False, name="other",
            )  # fmt: skip

    assert "uses another engine" in said
    assert "Traceback" not in said
