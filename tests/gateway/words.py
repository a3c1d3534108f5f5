"""The model of text in docs/cases/messages-api.md: a word is a token, and there is no template."""

import threading
from collections.abc import Iterable, Sequence

from gateway.prompts.conversation import Block
from gateway.prompts.rendered_prompt import RenderedPrompt, pack_token_ids

VOCAB_SIZE = 1_000_000
END_OF_TURN = 2
_FIRST_WORD = 1_000


class Words:
    """A vocabulary that grows as words are met. Renderer, tokenizer and detokenizer at once."""

    longest_token_bytes = 1_000  # nobody writes a longer word

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._words: dict[int, str] = {}
        self._lock = threading.Lock()

    def ids(self, text: str) -> list[int]:
        with self._lock:
            return [self._id(word) for word in text.split()]

    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        tokens: list[int] = []
        ends = []
        for block in blocks:
            tokens += self.ids(block.text)
            ends.append(len(tokens))
        return RenderedPrompt(pack_token_ids(tokens), tuple(ends))

    def detokenizer(self) -> "Words":
        return self

    def push(self, ids: Iterable[int]) -> str:
        return "".join(f"{self._words.get(token_id, token_id)} " for token_id in ids)

    def flush(self) -> str:
        return ""

    def _id(self, word: str) -> int:
        if word not in self._ids:
            token_id = _FIRST_WORD + len(self._ids)
            self._ids[word] = token_id
            self._words[token_id] = word
        return self._ids[word]


def words(count: int, tag: str = "w") -> str:
    """`count` words that no other tag has."""
    return " ".join(f"{tag}{index}" for index in range(count))
