"""A rendered prompt, and the protocol of chat templates: content blocks in, token ids out."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.prompts.conversation import Block


@dataclass(frozen=True, slots=True)
class RenderedPrompt:
    """A prompt in token ids.

    token_ids   packed little-endian u32
    block_ends  for each block, the number of tokens up to and including it; the rest of the prompt,
                the tail, opens the assistant's turn and belongs to no block
    """

    token_ids: bytes
    block_ends: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """The length of the whole prompt."""
        return len(self.token_ids) // 4


class ChatTemplate(Protocol):
    """Renders blocks as token ids, append-only.

    The tokens of a block depend on that block and the ones before it, never on later ones. So up to
    the end of its last block, a conversation is a prefix of every conversation that continues it.
    """

    def render(self, blocks: Sequence[Block]) -> RenderedPrompt:
        """Render the conversation, and open the assistant's turn. Pure; safe in any thread."""
        ...


def pack_token_ids(ids: Sequence[int]) -> bytes:
    """Pack token ids as little-endian u32."""
    return struct.pack(f"<{len(ids)}I", *ids)
