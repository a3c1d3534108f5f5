"""Plans the attention of a step: where its K and V are written, which rows share which context.

A token attends in up to three parts, each a plain attention call without wasted scores:

    |  shared prefix  |  own context  |  own new tokens  |
       one call for       one call        causal, straight from this step's K and V
       all its readers    a sequence

For a sequence with one new token (decode), its own context and the new token are one part instead.
Sequences of similar length are computed together: on CPU one gather and one call for a group cost a
tenth of a call for each sequence. The plan holds numbers only; a backend's attention executes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engine.plan import Row

# A shared prefix becomes a part if that saves reading this many tokens; for fewer, merging the
# results costs more than it saves.
SHARED_TOKENS_MIN = 1_024
# Sequences count as sharing if they agree up to this block at least.
SHARED_BLOCKS_MIN = 8

# Tokens of the batch: a slice where they are neighbours, else their indices.
TokenSelection = slice | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class ContextPart:
    """Queries that all attend to the first `num_tokens` tokens in the blocks of `block_table`."""

    queries: TokenSelection
    block_table: np.ndarray
    num_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class DecodeGroup:
    """Sequences with one new token each, of similar length.

    `block_tables` [s, m] is padded; query i sees the first `num_tokens[i]` tokens of its table.
    """

    queries: TokenSelection
    block_tables: np.ndarray
    num_tokens: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """One step's attention, the same for every layer.

    slot_blocks   [n], the block that each token's K and V are written to
    slot_offsets  [n], the slot in that block
    prefills      the tokens of each sequence with several new ones, causal among themselves
    decodes       parts that start a token's result; together with `prefills` they cover all tokens
    contexts      parts to be merged into the results so far
    """

    slot_blocks: np.ndarray
    slot_offsets: np.ndarray
    prefills: list[slice]
    decodes: list[DecodeGroup]
    contexts: list[ContextPart]


def plan_attention(rows: Sequence[Row], block_size: int) -> AttentionPlan:
    """Plan the attention of a step's `rows`, whose tokens lie one after the other in the batch."""
    ends = np.cumsum([len(row.token_ids) for row in rows]).tolist()
    spans = [slice(end - len(row.token_ids), end) for row, end in zip(rows, ends, strict=True)]
    contexts, shared_blocks = _shared_contexts(rows, spans, block_size)
    groups: dict[int, list[int]] = {}
    for i, (row, span) in enumerate(zip(rows, spans, strict=True)):
        own = row.block_table[shared_blocks[i] :]
        num_own = row.start - shared_blocks[i] * block_size
        if len(row.token_ids) == 1:
            groups.setdefault(len(own).bit_length(), []).append(i)
        elif num_own > 0:
            contexts.append(ContextPart(span, own[: -(-num_own // block_size)], num_own))
    decodes = [
        _decode_group([(rows[i], spans[i], shared_blocks[i]) for i in group], block_size)
        for group in groups.values()
    ]
    positions = [np.arange(row.start, row.start + len(row.token_ids)) for row in rows]
    return AttentionPlan(
        slot_blocks=np.concatenate(
            [row.block_table[at // block_size] for row, at in zip(rows, positions, strict=True)]
        ),
        slot_offsets=np.concatenate(positions) % block_size,
        prefills=[span for span in spans if span.stop - span.start > 1],
        decodes=decodes,
        contexts=contexts,
    )


def _shared_contexts(
    rows: Sequence[Row], spans: Sequence[slice], block_size: int
) -> tuple[list[ContextPart], list[int]]:
    """Return a part for each shared prefix that pays, and how many blocks each row has in one."""
    contexts: list[ContextPart] = []
    shared_blocks = [0] * len(rows)
    readers: dict[int, list[int]] = {}
    for i, row in enumerate(rows):
        if row.start >= SHARED_BLOCKS_MIN * block_size:
            readers.setdefault(int(row.block_table[SHARED_BLOCKS_MIN - 1]), []).append(i)
    for group in readers.values():
        written = [rows[i].block_table[: rows[i].start // block_size] for i in group]
        num_blocks = _num_common_blocks(written)
        if num_blocks * block_size * (len(group) - 1) < SHARED_TOKENS_MIN:
            continue
        queries = _selection([spans[i] for i in group])
        table = rows[group[0]].block_table[:num_blocks]
        contexts.append(ContextPart(queries, table, num_blocks * block_size))
        for i in group:
            shared_blocks[i] = num_blocks
    return contexts, shared_blocks


def _decode_group(group: Sequence[tuple[Row, slice, int]], block_size: int) -> DecodeGroup:
    own = [row.block_table[num_shared:] for row, _, num_shared in group]
    num_blocks = max(len(table) for table in own)
    return DecodeGroup(
        queries=_selection([span for _, span, _ in group]),
        # Short tables repeat their own last block: masked, and never another sequence's memory.
        block_tables=np.stack(
            [np.pad(table, (0, num_blocks - len(table)), "edge") for table in own]
        ),
        num_tokens=np.array(
            [row.start + 1 - num_shared * block_size for row, _, num_shared in group]
        ),
    )


def _selection(spans: Sequence[slice]) -> TokenSelection:
    indices = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    if indices[-1] - indices[0] == len(indices) - 1:  # ascending, so without a gap
        return slice(int(indices[0]), int(indices[-1]) + 1)
    return indices


def _num_common_blocks(tables: Sequence[np.ndarray]) -> int:
    """Return how many leading blocks all tables have in common."""
    num_blocks = min(len(table) for table in tables)
    stacked = np.stack([table[:num_blocks] for table in tables])
    agree = (stacked == stacked[0]).all(axis=0)
    return num_blocks if agree.all() else int(agree.argmin())
