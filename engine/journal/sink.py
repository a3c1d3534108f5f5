"""The interface through which the engine core writes to the journal."""

from typing import Protocol

from engine.protocol import EngineRecord, LeaseReport


class JournalSink(Protocol):
    """Receives each fact before the core returns the event that carries it."""

    def admitted(self, record: EngineRecord) -> None:
        """A request left the queue; its grants are final, none is committed yet."""
        ...

    def committed(self, request_id: str, num_tokens: int) -> None:
        """The breakpoint at `num_tokens` is committed."""
        ...

    def produced(self, request_id: str, output_tokens: int) -> None:
        """The request has produced `output_tokens` tokens in all."""
        ...

    def finished(self, record: EngineRecord) -> None:
        """An admitted request ended."""
        ...

    def reported(self, report: LeaseReport) -> None:
        """A lease was read or ended; what it has cost so far."""
        ...
