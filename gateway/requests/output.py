"""Output tokens to content blocks, with the number of tokens that is billed."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gateway.prompts.tokenizer import Detokenizer
from gateway.requests.stop_strings import StopStrings


@dataclass(frozen=True, slots=True)
class BlockStart:
    """Content block `index` begins: a text block, the only kind there is yet."""

    index: int


@dataclass(frozen=True, slots=True)
class BlockDelta:
    """More text of block `index`; never empty."""

    index: int
    text: str


@dataclass(frozen=True, slots=True)
class BlockStop:
    """Block `index` is complete."""

    index: int


BlockEvent = BlockStart | BlockDelta | BlockStop


class OutputBlocks:
    """Decodes the output of one request, ends it at a stop string, and counts its tokens.

    Each method returns the block events that its call completes, in order. Output without any text
    has no block.

    `num_tokens` counts every token up to the one that completed a stop string. The token that ends
    the model's turn is counted and has no text.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        stop_sequences: Sequence[str],
        stop_token_ids: Iterable[int],
    ) -> None:
        self._detokenizer = detokenizer
        self._stops = StopStrings(stop_sequences)
        self._without_text = frozenset(stop_token_ids)
        self._open_block: int | None = None
        self.num_tokens = 0

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the output, once there is one."""
        return self._stops.matched

    def push(self, token_ids: Iterable[int]) -> list[BlockEvent]:
        """Take the next tokens; after a stop string they are neither shown nor counted."""
        shown = []
        for token_id in token_ids:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            if token_id not in self._without_text:
                shown.append(self._stops.push(self._detokenizer.push([token_id])))
        return self._text("".join(shown))

    def flush(self) -> list[BlockEvent]:
        """Return the text that was held back, when no more tokens will come."""
        return self._text(self._stops.push(self._detokenizer.flush()) + self._stops.flush())

    def close(self) -> list[BlockEvent]:
        """End the open block, once the output counts: after the settlement."""
        if self._open_block is None:
            return []
        stop = BlockStop(self._open_block)
        self._open_block = None
        return [stop]

    def _text(self, text: str) -> list[BlockEvent]:
        if not text:
            return []
        events: list[BlockEvent] = []
        if self._open_block is None:
            self._open_block = 0
            events.append(BlockStart(0))
        return [*events, BlockDelta(self._open_block, text)]
