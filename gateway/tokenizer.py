"""Text to token ids and back."""

from collections.abc import Iterable, Sequence
from pathlib import Path


class Tokenizer:
    """A model's tokenizer."""

    @classmethod
    def load(cls, model_dir: Path) -> "Tokenizer":
        """Read `tokenizer.json` of a model folder."""
        raise NotImplementedError

    def encode(self, text: str) -> list[int]:
        """Token ids of plain text: what looks like a special token is text too."""
        raise NotImplementedError

    def decode(self, ids: Sequence[int]) -> str:
        """The text of these tokens, special tokens left out."""
        raise NotImplementedError

    def detokenizer(self) -> "Detokenizer":
        """A fresh incremental decoder."""
        raise NotImplementedError


class Detokenizer:
    """Decodes as tokens arrive; all its pieces joined equal the decoding of all the tokens."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that these tokens complete; a character begun is held back."""
        raise NotImplementedError

    def flush(self) -> str:
        """What was held back, at the end of the output."""
        raise NotImplementedError
