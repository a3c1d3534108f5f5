"""The seam between a conversation and its tokens."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.prompts.conversation import Block


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt as the engine takes it.

    tokens      token ids, packed little-endian u32
    block_ends  for each block, the tokens of the prompt up to and including it; the rest of the
                prompt, the tail, opens the answer and belongs to no block
    """

    tokens: bytes
    block_ends: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens in the whole prompt."""
        return len(self.tokens) // 4


class Renderer(Protocol):
    """Turns blocks into tokens, append-only.

    What it writes for a block depends on that block and the ones before it, never on what follows:
    up to its last block's end, a conversation is a prefix of every conversation that continues it.
    """

    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        """Render the conversation, and open the answer. Pure; may be called from any thread."""
        ...


def pack_tokens(ids: Sequence[int]) -> bytes:
    """Token ids as packed little-endian u32."""
    return struct.pack(f"<{len(ids)}I", *ids)
