import asyncio
import signal
import subprocess
import sys
from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest

from engine.client import Breakpoint, Finished, Tokens, connect_engine
from engine.compute.dtype import read_cpuinfo
from engine.journal.journal import Journal
from tests.engine.harness import generate_request
from tests.engine.tiny_model import write_tiny_model


@pytest.fixture
def anyio_backend():
    return "asyncio"


def command(model, data_dir, *flags):
    small = ["--dtype", "float32", "--kv-cache-memory", "8000000"]
    module = [sys.executable, "-m", "engine"]
    return [*module, "--model", str(model), "--data-dir", str(data_dir), *small, *flags]


@contextmanager
def engine_process(model, data_dir, *flags):
    """A real engine that has said that it is ready; it must say nothing on stderr."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(command(model, data_dir, *flags), text=True, **pipes) as process:
        try:
            first = process.stdout.readline()
            assert first.startswith("engine ready: unix:"), first + process.stderr.read()
            yield process
            assert process.stderr.read() == ""
        finally:
            process.kill()


async def answer(client, request_id, **fields):
    """One greedy request's output and record."""
    events = [event async for event in client.generate(generate_request(request_id, **fields))]
    output = [token for event in events if isinstance(event, Tokens) for token in event.token_ids]
    return output, events[-1].record


async def is_written(client):
    """Whether a lease is whole on disk."""
    return (await client.stats())["lease_files_written_total"] > 0


async def test_a_paid_prefix_is_read_from_disk_after_kill_9(tiny_folder, tmp_path):
    url = f"unix:{tmp_path / 'run' / 'engine.sock'}"
    prompt = np.arange(1_000, 1_300).astype("<u4").tobytes()
    mark = Breakpoint(290, ttl_ms=3_600_000, write=True, persist=True)
    with engine_process(tiny_folder, tmp_path) as process:
        client = connect_engine(url)
        await client.ready(60)
        cold, _ = await answer(client, "req_1", prompt_token_ids=prompt, breakpoints=(mark,))
        async with asyncio.timeout(30):
            while not await is_written(client):
                pass  # each question is a turn of the engine's loop
        process.kill()
        await client.close()
    with engine_process(tiny_folder, tmp_path) as process:
        client = connect_engine(url)
        await client.ready(60)
        mark = replace(mark, write=False)
        warm, record = await answer(
            client, "req_2", prompt_token_ids=prompt, read_tokens=290, breakpoints=(mark,)
        )
        await client.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=15) == 0

    assert record.reads_by_tier == {"disk": 290}
    assert [grant.outcome for grant in record.grants] == ["refreshed"]
    assert warm == cold


async def test_an_engine_runs_until_its_stdin_closes_and_ends_in_order(tiny_folder, tmp_path):
    with engine_process(tiny_folder, tmp_path, "--until-stdin-closes") as process:
        pid_file = tmp_path / "run" / "engine.pid"
        assert pid_file.read_text() == f"{process.pid}\n"
        client = connect_engine(f"unix:{tmp_path / 'run' / 'engine.sock'}")
        info = await client.ready(10)
        assert (info.model_id, info.dtype, info.device) == ("tiny", "float32", "cpu")
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGINT)
        stream = client.generate(generate_request("req_1", max_tokens=4_000))
        events = []

        async for event in stream:
            events.append(event)
            if isinstance(event, Tokens) and not process.stdin.closed:
                process.stdin.close()

        assert isinstance(events[-1], Finished)
        assert events[-1].reason == "aborted"
        await client.close()
        assert process.wait(timeout=15) == 0
        assert not pid_file.exists()
    with closing(Journal(tmp_path / "engine" / "journal")) as journal:
        assert journal.lookup(["req_1"]) == {"req_1": events[-1].record}


async def test_the_flags_reach_the_scheduler(tiny_folder, tmp_path):
    flags = ["--max-num-seqs", "1", "--scheduling", "static", "--kv-layout", "contiguous"]
    flags += ["--max-num-batched-tokens", "8", "--no-enable-prefix-caching"]
    with engine_process(tiny_folder, tmp_path, *flags) as process:
        client = connect_engine(f"unix:{tmp_path / 'run' / 'engine.sock'}")
        info = await client.ready(10)
        breakpoints = (Breakpoint(16, 1_000, write=True),)
        first = client.generate(
            generate_request("req_1", 20, info.max_request_tokens, breakpoints=breakpoints)
        )
        second = client.generate(generate_request("req_2"))
        events = [await anext(first), await anext(first)]

        stats = await client.stats()

        assert events[0].grants[0].reason == "caching_disabled"
        assert (stats["num_requests_running"], stats["num_requests_waiting"]) == (1, 1)
        assert stats["kv_slots_reserved"] >= info.max_request_tokens - info.block_size
        assert stats["tokens_computed_total"] / stats["steps_total"] <= 8
        second.abort()
        await client.close()
        process.send_signal(signal.SIGTERM)


@pytest.mark.parametrize(
    ("flags", "computed_by"),
    [
        (["--dtype", "float32"], "torch kernels: the number format is float32"),
        (["--dtype", "bfloat16", "--no-native-kernels"], "torch kernels: --no-native-kernels"),
        (["--dtype", "bfloat16"], "C kernels"),
    ],
    ids=["float32", "switched off", "C"],
)
async def test_an_engine_says_what_computes_and_answers(tmp_path, flags, computed_by):
    if computed_by == "C kernels" and "avx512_bf16" not in read_cpuinfo():
        computed_by = "torch kernels: the processor has no avx512_bf16"
    model = write_tiny_model(tmp_path / "model", head_dim=32)
    with engine_process(model, tmp_path, *flags, "--num-threads", "1") as process:
        lines = [process.stdout.readline() for _ in range(2)]
        client = connect_engine(f"unix:{tmp_path / 'run' / 'engine.sock'}")
        await client.ready(10)

        output, _ = await answer(client, "req_1", max_tokens=4)

        assert lines[1].startswith(f"  {computed_by}")
        assert lines[1].endswith("; 1 thread: --num-threads\n")
        assert len(output) == 4
        await client.close()
        process.send_signal(signal.SIGTERM)


def test_a_start_warns_if_leases_could_pin_nothing(tiny_folder, tmp_path):
    flags = ["--kv-cache-memory", "500000", "--max-model-len"]
    for max_model_len, is_warned in (("4096", True), ("100", False)):
        with engine_process(tiny_folder, tmp_path, *flags, max_model_len) as process:
            process.send_signal(signal.SIGTERM)
            said = process.stdout.read()

        assert f"up to {max_model_len} tokens" in said
        assert ("  warning: leases can pin nothing" in said) == is_warned


def test_a_second_engine_on_the_same_data_is_refused_and_a_signal_ends_the_first(
    tiny_folder, tmp_path
):
    with engine_process(tiny_folder, tmp_path) as process:
        second = subprocess.run(
            command(tiny_folder, tmp_path), capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1
        assert second.stderr.startswith("kvmeter engine: Another engine is using the journal")
        assert second.stderr.count("\n") == 1
        assert (tmp_path / "run" / "engine.pid").read_text() == f"{process.pid}\n"

        process.send_signal(signal.SIGTERM)

        assert process.wait(timeout=15) == 0


def test_a_terminal_that_has_not_all_letters_does_not_stop_the_start(
    tiny_folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    folder = tmp_path / "d\N{LATIN SMALL LETTER A WITH DIAERESIS}ta"
    with engine_process(tiny_folder, folder) as process:
        process.send_signal(signal.SIGTERM)

        assert process.wait(timeout=15) == 0


def test_a_start_that_cannot_be_is_one_sentence(tiny_folder, tmp_path):
    cannot_be = {
        "the model allows 4096": command(tiny_folder, tmp_path, "--max-model-len", "4097"),
        "config.json": command(tmp_path, tmp_path),
        "smaller --kv-cache-memory": command(
            tiny_folder, tmp_path, "--kv-cache-memory", str(1 << 46)
        ),
        "must be a pipe": command(tiny_folder, tmp_path, "--until-stdin-closes"),
    }
    for words, arguments in cannot_be.items():
        done = subprocess.run(
            arguments,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

        assert done.returncode == 1
        assert done.stderr.startswith("kvmeter engine: ")
        assert done.stderr.count("\n") == 1
        assert words in done.stderr
