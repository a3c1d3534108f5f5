"""A figure whose token counts are not the engine's is no figure."""

import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.counts import check_counts
from bench.engines import Engine, request
from bench.errors import CountsDiffer
from bench.exhibit import Options, present
from bench.exhibit_result import ExhibitResult
from engine.client import EngineRecord, Event, Finished, GenerateRequest, Tokens

TRUE = EngineRecord(
    request_id="req_1",
    engine_boot_id="eng_1",
    prompt_tokens=10,
    read_tokens=4,
    tokens_reused_promised=3,
    tokens_reused_gift=0,
    tokens_read_recomputed=1,
    tokens_computed=6,
    grants=(),
    output_tokens=2,
    overrun_tokens=0,
    finish_reason="max_tokens",
)


@pytest.mark.parametrize(
    "bent",
    [
        {"prompt_tokens": 11},
        {"output_tokens": 3},
        {"output_tokens": 1},
        {"overrun_tokens": 1},
        {"tokens_computed": 7},
        {"tokens_reused_gift": 1},
    ],
    ids=str,
)
def test_a_bent_count_is_seen(bent: dict[str, int]) -> None:
    check_counts(TRUE, prompt_tokens=10, seen_tokens=2)

    with pytest.raises(CountsDiffer):
        check_counts(replace(TRUE, **bent), prompt_tokens=10, seen_tokens=2)


class TellsRecord:
    """An engine client whose every request has two output tokens, and this record."""

    info = None

    def __init__(self, record: EngineRecord) -> None:
        self.record = record

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Event]:
        for token in (7, 8):
            yield Tokens(request.request_id, (token,))
        yield Finished(request.request_id, "max_tokens", self.record)

    async def close(self) -> None: ...


@pytest.mark.parametrize(("output_tokens", "fails"), [(2, False), (3, True)])
def test_an_exhibit_with_bent_counts_fails_and_publishes_nothing(
    output_tokens: int,
    fails: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["sample.py", "--out", str(tmp_path)])

    async def body(options: Options) -> ExhibitResult:
        engine = Engine(options.model)
        client: Any = TellsRecord(replace(TRUE, output_tokens=output_tokens))
        engine.client = client
        try:
            reply = await engine.ask(request(bytes(40), 2))
        finally:
            await engine.close()
        return ExhibitResult(
            "sample", ["fixed"], ("tokens",), [(reply.served_record.output_tokens,)]
        )

    if fails:
        with pytest.raises(SystemExit, match="2 output tokens at the client, 3 in the record"):
            present("Sample (full: 0 s).", body)
    else:
        present("Sample (full: 0 s).", body)
        assert "lengths: fixed" in capsys.readouterr().out

    assert (tmp_path / "sample.json").exists() != fails


def test_a_result_with_a_fault_is_published_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["sample.py", "--out", str(tmp_path)])

    async def body(options: Options) -> ExhibitResult:
        return ExhibitResult("sample", ["fixed"], ("MB",), [(800,)], fault="memory grows")

    with pytest.raises(SystemExit, match="sample: memory grows"):
        present("Sample (full: 0 s).", body)

    assert '"memory grows"' in (tmp_path / "sample.json").read_text()
