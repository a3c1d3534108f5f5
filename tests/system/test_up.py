"""`kvmeter up` as an operator meets it: start, second start, signals, deaths, bad starts."""

import json
import os
import signal
import socket
import subprocess
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.engine.tiny_model import write_tiny_model
from tests.system.installation import (
    KVMETER,
    ROOT,
    Installation,
    environment,
    free_port,
    is_alive,
    wait_until,
)

BODY = {"model": "tiny", "max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}]}


def run(*arguments: str, **settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*KVMETER, *arguments], env=environment(**settings), cwd=ROOT, text=True,
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip


def assert_one_sentence(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode != 0
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


def test_a_first_start_makes_keys_and_a_second_start_keeps_them(installation: Installation) -> None:
    with installation:
        keys = installation.keys
        mode = (installation.data_dir / "first-keys.json").stat().st_mode & 0o777
        with installation.client() as client:
            answer = client.post("/v1/messages", json=BODY)

    assert mode == 0o600
    assert sorted(keys) == ["admin_key", "api_key", "organization_id", "workspace_id"]
    assert answer.status_code == httpx.codes.OK, answer.text
    said = "".join(installation.output)
    assert f"Your first keys are in {installation.data_dir / 'first-keys.json'}" in said
    assert keys["api_key"] not in said, "what is no terminal is a log"
    assert keys["admin_key"] not in said

    with installation:
        assert installation.keys == keys
        with installation.client() as client:
            assert client.get("/v1/models").status_code == httpx.codes.OK
    assert not any(keys["api_key"] in line for line in installation.output)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("group", [False, True], ids=["alone", "group"])
def test_a_signal_lets_a_running_request_end(
    installation: Installation, number: int, group: bool
) -> None:
    installation.start()
    children = [installation.pid_of("gateway"), installation.pid_of("engine")]
    begun = threading.Event()
    stop_reasons: list[str] = []

    def converse() -> None:
        body = {**BODY, "max_tokens": 300, "stream": True}
        with (
            installation.client() as client,
            client.stream("POST", "/v1/messages", json=body) as answer,
        ):
            for line in answer.iter_lines():
                begun.set()
                if "stop_reason" in line and "message_delta" in line:
                    stop_reasons.append(line)

    conversation = threading.Thread(target=converse)
    conversation.start()
    assert begun.wait(20)
    os.kill(installation.pid, signal.SIGWINCH)  # a signal that means nothing changes nothing

    code = installation.stop(number, group=group)

    conversation.join(5)
    assert code == 0, "".join(installation.output)
    assert len(stop_reasons) == 1
    assert not [pid for pid in children if is_alive(pid)]
    assert not list((installation.data_dir / "run").glob("*.pid"))


def test_an_answer_that_never_ends_is_cut_short_in_time(
    tmp_path: Path, smollm2: Path, tiny_cards: Path
) -> None:
    window_tokens = 100_000  # minutes of answer
    installation = Installation(
        tmp_path / "data",
        model=write_tiny_model(
            tmp_path / "tiny", tokenizer_from=smollm2, max_position_embeddings=window_tokens
        ),
        flags=["--kv-cache-memory", str(128 << 20)],
        KVMETER_PRICE_CARDS=str(tiny_cards),
        KVMETER_DTYPE="float32",
    )
    installation.start()
    children = [installation.pid_of("gateway"), installation.pid_of("engine")]

    with (
        installation.client() as client,
        client.stream(
            "POST", "/v1/messages", json={**BODY, "max_tokens": window_tokens, "stream": True}
        ) as answer,
    ):
        lines = answer.iter_lines()
        while "content_block_delta" not in next(lines):
            pass
        with ThreadPoolExecutor(1) as threads:
            rest = threads.submit(list, lines)
            code = installation.stop(signal.SIGTERM)  # within what `up` promises
        last = [line for line in rest.result() if line.startswith("data: ")][-1]

    assert code == 0, "".join(installation.output)
    assert not [line for line in installation.output if "killing it" in line]
    assert json.loads(last.removeprefix("data: "))["error"]["type"] == "overloaded_error"
    assert not [pid for pid in children if is_alive(pid)]
    books = json.loads(installation.run("ledger", "verify", "--json"))
    assert (books["problems"], books["open_holds"]) == ([], [])


def test_a_second_signal_does_not_break_the_drain(installation: Installation) -> None:
    installation.start()

    os.kill(installation.pid, signal.SIGTERM)
    os.kill(installation.pid, signal.SIGINT)

    assert installation.stop(signal.SIGTERM) == 0, "".join(installation.output)


@pytest.mark.parametrize("name", ["gateway", "engine"])
def test_a_child_that_dies_is_started_again(installation: Installation, name: str) -> None:
    with installation:
        old = installation.kill(name)

        installation.wait_restarted(name, old)

        with installation.client() as client:
            assert client.post("/v1/messages", json=BODY).status_code == httpx.codes.OK
    assert any(f"The {name} ended with SIGKILL" in line for line in installation.output)


def test_no_child_outlives_a_killed_up(installation: Installation) -> None:
    installation.start()
    children = [installation.pid_of("gateway"), installation.pid_of("engine")]

    installation.kill("up")

    wait_until(lambda: not any(is_alive(pid) for pid in children), 20)
    with installation:
        assert installation.is_ready()


def test_two_on_one_data_folder_are_refused(installation: Installation) -> None:
    with installation:
        second = run("up", "--port", str(free_port()), DATA_DIR=str(installation.data_dir))

        assert_one_sentence(second, "Another kvmeter up", str(installation.data_dir))
        assert installation.is_ready()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        done = run("up", DATA_DIR=str(tmp_path), PORT=str(port))

    assert_one_sentence(done, f"127.0.0.1:{port}", "in use")


def test_a_damaged_model_stops_the_start(tmp_path: Path, tiny_model: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for file in tiny_model.iterdir():
        (damaged / file.name).write_bytes(file.read_bytes())
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])

    done = run("up", "--model", str(damaged), "--port", str(free_port()), DATA_DIR=str(tmp_path))

    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert "model.safetensors" in done.stderr


def test_a_gateway_without_migrations_says_what_to_do(tmp_path: Path, tiny_model: Path) -> None:
    port = str(free_port())

    done = run("gateway", "--model", str(tiny_model), "--port", port, DATA_DIR=str(tmp_path))

    assert_one_sentence(done, "kvmeter migrate")


def test_redis_is_refused_until_it_is_needed(tmp_path: Path) -> None:
    done = run("up", DATA_DIR=str(tmp_path), KVMETER_REDIS_URL="redis://localhost")

    assert_one_sentence(done, "KVMETER_REDIS_URL")
