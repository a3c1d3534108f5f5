"""The chat template of docs/cases/messages-api.md: none, so that a prompt is its words."""

from collections.abc import Iterable, Sequence
from hashlib import sha256

from gateway.prompts.conversation import Block
from gateway.prompts.rendered_prompt import RenderedPrompt, pack_token_ids

VOCAB_SIZE = 49_152


def word_id(word: str) -> int:
    return int.from_bytes(sha256(word.encode()).digest()[:8], "little") % VOCAB_SIZE


class WordTemplate:
    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        ids: list[int] = []
        block_ends = []
        for block in blocks:
            ids += [word_id(word) for word in block.text.split()]
            block_ends.append(len(ids))
        return RenderedPrompt(pack_token_ids(ids), tuple(block_ends))


class WordTokenizer:
    """The output side: token n is spelled "wn "."""

    longest_token_bytes = 1_000_000

    def detokenizer(self) -> "WordTokenizer":
        return self

    def push(self, ids: Iterable[int]) -> str:
        return "".join(f"w{token_id} " for token_id in ids)

    def flush(self) -> str:
        return ""
