"""The prefix index: finds the cached blocks of a prompt's longest known prefix.

A prefix is a chain of nodes, one for each block, under a root that holds its namespace:

    root(namespace) <- tokens 0..15 <- tokens 16..31 <- tokens 32..36     a prefix of 37 tokens

A node's key is the SHA-256 of its parent's key and its own packed token ids, so a key identifies a
whole prefix. An entry means: this block holds this node's tokens in its first slots. It may be full
or a tail. A search compares the token ids and the chain down to the namespace, so even a hash
collision never serves KV of another prompt or namespace.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKEN_DTYPE = np.dtype("<i4")  # packed like the link's u32: ids stay far below 2**31
TOKEN_BYTES = TOKEN_DTYPE.itemsize
_ROOT_FIELD = b"kvmeter/prefix/1"

Digest = Callable[[bytes], bytes]


def sha256(data: bytes) -> bytes:
    """Return the SHA-256 digest."""
    return hashlib.sha256(data).digest()


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """One node of a chain: the packed token ids of its last block, after those of its parent.

    A root has no parent, and holds the namespace instead of token ids.
    """

    parent: "Prefix | None"
    token_ids: bytes
    key: bytes


def is_same_prefix(left: Prefix | None, right: Prefix | None) -> bool:
    """Return whether two chains hold the same tokens under the same namespace."""
    # A sequence adopts the nodes that it matched, so chains soon meet in one object.
    while left is not right:
        if left is None or right is None or left.token_ids != right.token_ids:
            return False
        left, right = left.parent, right.parent
    return True


class PrefixChain:
    """The prefixes of one growing sequence of token ids; each full block is hashed once."""

    def __init__(
        self, namespace: bytes, token_ids: np.ndarray, block_size: int, digest: Digest = sha256
    ) -> None:
        """Start a chain over `token_ids`, an int32 buffer that its owner fills in order."""
        self.namespace = namespace
        fields = (_ROOT_FIELD, namespace)
        framed = b"".join(len(field).to_bytes(4, "little") + field for field in fields)
        self._full = [Prefix(None, namespace, digest(framed))]
        self._token_ids = token_ids
        self._block_size = block_size
        self._digest = digest

    def at(self, num_tokens: int) -> Prefix:
        """Return the prefix of exactly `num_tokens` tokens."""
        num_full, num_tail = divmod(num_tokens, self._block_size)
        while len(self._full) <= num_full:
            start = (len(self._full) - 1) * self._block_size
            self._full.append(self._extend(start, start + self._block_size))
        if num_tail == 0:
            return self._full[num_full]
        return self._extend(num_tokens - num_tail, num_tokens)

    def adopt(self, prefixes: Sequence[Prefix], start_block: int) -> None:
        """Use the index's own nodes, equal to ours, from block `start_block` on."""
        self._full[start_block + 1 : start_block + 1 + len(prefixes)] = prefixes

    def packed(self, start: int, stop: int) -> bytes:
        """Return the token ids at positions start .. stop - 1, packed."""
        return self._token_ids[start:stop].tobytes()

    def _extend(self, start: int, stop: int) -> Prefix:
        parent = self._full[start // self._block_size]
        token_ids = self.packed(start, stop)
        return Prefix(parent, token_ids, self._digest(parent.key + token_ids))


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    prefix: Prefix
    block: int


@dataclass(frozen=True, slots=True, eq=False)
class Restored:
    """A stored lease that was read back: `num_tokens` tokens of a match come from it."""

    payload: Any
    tier: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The longest prefix of a sequence that need not be computed.

    blocks       full blocks to attach, from the sequence's first one on
    num_tokens   tokens with valid KV once the tail is copied, or the rest restored
    tail_source  block whose first slots, up to `num_tokens`, are to be copied; None: no copy
    prefixes     the index's nodes of the blocks that it found
    restored     the stored lease that fills the blocks after `blocks`, if there is one
    """

    blocks: list[int]
    num_tokens: int
    tail_source: int | None = None
    prefixes: tuple[Prefix, ...] = ()
    restored: Restored | None = None

    def tokens_by_tier(self) -> dict[str, int]:
        """Return how many of the matched tokens come from each tier."""
        if self.restored is None:
            return {"device": self.num_tokens} if self.num_tokens else {}
        device = {"device": self.num_tokens - self.restored.num_tokens}
        return (device if self.num_tokens > self.restored.num_tokens else {}) | {
            self.restored.tier: self.restored.num_tokens
        }


class PrefixIndex:
    """Committed blocks by prefix. If several blocks hold one prefix, the first one serves."""

    def __init__(self, block_size: int, *, enabled: bool = True) -> None:
        """Start empty; when not enabled, publish nothing."""
        self._block_size = block_size
        self._enabled = enabled
        self._entries: dict[tuple[bytes, bytes], list[_Entry]] = {}
        self._entries_of_block: dict[int, list[_Entry]] = {}

    def match(self, chain: PrefixChain, num_tokens: int, known: Sequence[int] = ()) -> Match:
        """Find the longest indexed prefix of the chain's first `num_tokens` tokens.

        At least one token is left to compute, because its logits are needed. `known` are blocks
        that the caller already has for the start of the sequence. Changes nothing.
        """
        size = self._block_size
        blocks, prefixes = list(known), []
        parent = chain.at(len(blocks) * size)
        while (end := (len(blocks) + 1) * size) < num_tokens:
            entry = self._find(parent, chain.packed(end - size, end))
            if entry is None:
                break
            blocks.append(entry.block)
            prefixes.append(entry.prefix)
            parent = entry.prefix
        start = len(blocks) * size
        source, num_slots = self._longest_tail(
            parent, chain.packed(start, min(start + size, num_tokens)), num_tokens - 1 - start
        )
        return Match(blocks, start + num_slots, source, tuple(prefixes))

    def publish(self, chain: PrefixChain, num_tokens: int, block: int) -> None:
        """Index `block` as the last block, full or not, of the first `num_tokens` tokens.

        To be called only after the step that wrote them has been executed.
        """
        if not self._enabled:
            return
        prefix = chain.at(num_tokens)
        own = self._entries_of_block.setdefault(block, [])
        if any(len(entry.prefix.token_ids) == len(prefix.token_ids) for entry in own):
            return
        entry = _Entry(prefix, block)
        own.append(entry)
        self._entries.setdefault(_slot(prefix), []).append(entry)

    def drop(self, block: int) -> list[int]:
        """Remove all entries of a block; another block with the same prefix serves instead.

        Returns the blocks that serve now and did not before.
        """
        heirs = []
        for entry in self._entries_of_block.pop(block, ()):
            slot = _slot(entry.prefix)
            rivals = self._entries[slot]
            if rivals[0] is entry and len(rivals) > 1 and not self.is_serving(rivals[1].block):
                heirs.append(rivals[1].block)
            rivals.remove(entry)
            if not rivals:
                del self._entries[slot]
        return heirs

    def is_serving(self, block: int) -> bool:
        """Return whether a search can return this block, and not an equal one instead."""
        return any(
            self._entries[_slot(entry.prefix)][0] is entry
            for entry in self._entries_of_block.get(block, ())
        )

    def is_full(self, block: int) -> bool:
        """Return whether the block has an entry for all of its slots."""
        full_bytes = self._block_size * TOKEN_BYTES
        return any(
            len(entry.prefix.token_ids) == full_bytes
            for entry in self._entries_of_block.get(block, ())
        )

    def check_integrity(self) -> None:
        """Assert that both maps hold the same entries and none is empty."""
        by_prefix = {id(entry) for entries in self._entries.values() for entry in entries}
        by_block = {id(entry) for entries in self._entries_of_block.values() for entry in entries}
        assert by_prefix == by_block, "index maps disagree"
        assert all(self._entries.values()), "an empty entry list was kept"
        for block, entries in self._entries_of_block.items():
            assert all(entry.block == block for entry in entries), f"foreign entry: {block}"

    def _find(self, parent: Prefix, token_ids: bytes) -> _Entry | None:
        for entry in self._entries.get((parent.key, token_ids), ()):
            if is_same_prefix(entry.prefix.parent, parent):
                return entry
        return None

    def _longest_tail(self, parent: Prefix, rest: bytes, max_slots: int) -> tuple[int | None, int]:
        """Return the block that holds the longest start of `rest`, and how many slots to use."""
        # A full block serves as a tail if its last token is the one left to compute.
        for num_slots in range(len(rest) // TOKEN_BYTES if max_slots else 0, 0, -1):
            entry = self._find(parent, rest[: num_slots * TOKEN_BYTES])
            if entry is not None:
                return entry.block, min(num_slots, max_slots)
        return None, 0


def _slot(prefix: Prefix) -> tuple[bytes, bytes]:
    assert prefix.parent is not None, "a root has no block"
    return prefix.parent.key, prefix.token_ids
