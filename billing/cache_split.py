"""Bills a prompt by the engine's grants: a granted write is a cache write, a refused one input.

The response header, message_start and the bill all take their numbers from `cache_split`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from billing.facts import GrantFact, RefusedWrite
from billing.holds import Hold
from billing.meters import Quantities, WritePoint, split

Moment = Literal["admission", "settlement"]


@dataclass(frozen=True, slots=True)
class CacheSplit:
    """How a prompt is billed.

    quantities  the prompt's tokens by meter; output is 0
    writes      the hold's writes that are billed as cache writes
    refused     the hold's writes that the engine refused: plain input
    """

    quantities: Quantities
    writes: tuple[WritePoint, ...]
    refused: tuple[RefusedWrite, ...]


def cache_split(hold: Hold, grants: Sequence[GrantFact], *, moment: Moment) -> CacheSplit:
    """Split a hold's prompt by the grants that the engine made for its writes.

    At admission the split is the promise in the header and in message_start; at settlement it is
    the bill. They differ only for a write that was granted and never committed (`writes_billed`).
    """
    billed = writes_billed(grants, moment=moment)
    writes = tuple(write for write in hold.writes if write.num_tokens in billed)
    return CacheSplit(
        quantities=split(
            total_tokens=hold.total_tokens, read_tokens=hold.read_tokens, writes=writes
        ),
        writes=writes,
        refused=refused_writes(hold, grants),
    )


def writes_billed(grants: Sequence[GrantFact], *, moment: Moment) -> frozenset[int]:
    """Return the lengths of the prefixes whose write is billed as a cache write.

    | the engine's grant for the write    | at admission | at settlement |
    |-------------------------------------|--------------|---------------|
    | refused, or none                    | no           | no            |
    | granted or refreshed, not committed | yes          | no            |
    | granted or refreshed, and committed | yes          | yes           |
    """
    return frozenset(
        grant.num_tokens
        for grant in grants
        if grant.write and grant.outcome != "refused" and (grant.committed or moment == "admission")
    )


def refused_writes(hold: Hold, grants: Sequence[GrantFact]) -> tuple[RefusedWrite, ...]:
    """Return the hold's writes that the engine refused, with its reasons; final at admission."""
    asked = {write.num_tokens for write in hold.writes}
    return tuple(
        RefusedWrite(grant.num_tokens, grant.reason or "refused")
        for grant in grants
        if grant.write and grant.outcome == "refused" and grant.num_tokens in asked
    )
