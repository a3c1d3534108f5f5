"""Compare the client's token counts with the engine's record; a figure needs both to agree."""

from bench.errors import CountsDiffer
from engine.client import EngineRecord


def check_counts(record: EngineRecord, *, prompt_tokens: int, seen_tokens: int) -> None:
    """Check a record's sums and the client's counts against it. Raises CountsDiffer."""
    facts = (
        record.tokens_reused_promised
        + record.tokens_reused_gift
        + record.tokens_read_recomputed
        + record.tokens_computed
    )
    expect(record.request_id, "prompt tokens", sent=prompt_tokens, recorded=record.prompt_tokens)
    expect(record.request_id, "tokens of the four facts", sent=prompt_tokens, recorded=facts)
    produced = record.output_tokens + record.overrun_tokens
    expect(record.request_id, "output tokens", sent=seen_tokens, recorded=produced)


def expect(request_id: str, what: str, *, sent: int, recorded: int) -> None:
    """Check that two counts of one thing are equal. Raises CountsDiffer."""
    if sent != recorded:
        raise CountsDiffer(f"{request_id}: {sent} {what} at the client, {recorded} in the record")
