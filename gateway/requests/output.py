"""Output tokens to shown text, with the count that is billed."""

from collections.abc import Iterable, Sequence

from gateway.prompts.tokenizer import Detokenizer
from gateway.requests.stop_strings import StopStrings


class OutputText:
    """Decodes one answer, ends it at a stop string, and counts its tokens.

    `num_tokens` counts every token up to the one that completed a stop string; the token that ends
    the model's turn counts and shows nothing.
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
        self._silent = frozenset(stop_token_ids)
        self.num_tokens = 0

    @property
    def stop_sequence(self) -> str | None:
        """The stop string that ended the answer, once there is one."""
        return self._stops.matched

    def push(self, ids: Iterable[int]) -> str:
        """Take the next tokens and return the text to show; after a stop string nothing counts."""
        shown = []
        for token_id in ids:
            if self._stops.matched is not None:
                break
            self.num_tokens += 1
            if token_id not in self._silent:
                shown.append(self._stops.push(self._detokenizer.push([token_id])))
        return "".join(shown)

    def flush(self) -> str:
        """The text that was held back, when no more tokens will come."""
        return self._stops.push(self._detokenizer.flush()) + self._stops.flush()
