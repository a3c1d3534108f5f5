"""Random requests that create, read, nest and refuse leases, from a seed.

Each of a few tenants has a few documents, which its requests share and which are replaced now and
then. Breakpoints nest, end anywhere in a block, persist or not, and live from a second to an hour.
"""

import random
from dataclasses import replace
from itertools import count

from bench.workloads import token_ids
from engine.blocks.prefix_index import TOKEN_BYTES
from engine.client import Breakpoint, GenerateRequest, Sampling

NAMESPACES = tuple(f"tenant {number}".encode() for number in range(5))
NUM_DOCUMENTS = 2
CUTS = (48, 100, 160, 250, 333)  # 100, 250 and 333 end inside a block
HOUR_MS = 3_600_000


class Mix:
    """A source of requests for a model with a context of `context_tokens`."""

    def __init__(self, chance: random.Random, *, context_tokens: int) -> None:
        """Draw the first documents of each tenant."""
        self._chance, self._context_tokens = chance, context_tokens
        self._numbers = count()
        self._cuts = [cut for cut in CUTS if cut < context_tokens * 3 // 4]
        self._documents = {name: [self._document() for _ in range(NUM_DOCUMENTS)]
                           for name in NAMESPACES}  # fmt: skip
        self._previous: GenerateRequest | None = None

    def next(self) -> GenerateRequest:
        """Return the next request, with a new id."""
        chance = self._chance
        request_id = f"soak_{next(self._numbers)}"
        if (
            self._previous is not None and chance.random() < 0.15
        ):  # the same request several times at once
            return replace(self._previous, request_id=request_id)
        namespace = chance.choice(NAMESPACES)
        num_shared = chance.choice([0, *self._cuts])
        num_own = chance.randint(1, 60)
        if chance.random() < 0.01:
            num_own += self._context_tokens  # longer than the context: rejected at once
        prompt = self._document_of(namespace)[: num_shared * TOKEN_BYTES]
        prompt += token_ids(chance, num_own)
        marks = self._marks(num_shared, len(prompt) // TOKEN_BYTES)
        self._previous = GenerateRequest(
            request_id=request_id,
            namespace=namespace,
            prompt_token_ids=prompt,
            max_tokens=chance.choice([0, 1, 8, 8, 24, 64, 200]),
            read_tokens=max((mark.num_tokens for mark in marks if not mark.write), default=0),
            sampling=Sampling(temperature=chance.choice([0.0, 1.0]), seed=chance.choice([None, 7])),
            breakpoints=marks,
            ignore_eos=True,
        )
        return self._previous

    def _document(self) -> bytes:
        return token_ids(self._chance, max(self._cuts, default=0))

    def _document_of(self, namespace: bytes) -> bytes:
        """Return one of a tenant's documents; one in ten times it is replaced first."""
        number = self._chance.randrange(NUM_DOCUMENTS)
        if self._chance.random() < 0.1:
            self._documents[namespace][number] = self._document()
        return self._documents[namespace][number]

    def _marks(self, num_shared: int, num_tokens: int) -> tuple[Breakpoint, ...]:
        cuts = [cut for cut in self._cuts if cut <= num_shared] + [num_tokens]
        chosen = self._chance.sample(cuts, min(len(cuts), self._chance.randint(1, 4)))
        return tuple(self._mark(tokens) for tokens in sorted(set(chosen)))

    def _mark(self, tokens: int) -> Breakpoint:
        """Draw a breakpoint: short-lived in memory, longer-lived on disk, or an hour on disk."""
        kind = self._chance.random()
        if kind < 0.55:
            ttl_ms, persist = self._chance.randint(1_000, 60_000), False
        elif kind < 0.75:
            ttl_ms, persist = self._chance.randint(10_000, 120_000), True
        else:
            ttl_ms, persist = HOUR_MS, True
        return Breakpoint(tokens, ttl_ms, write=self._chance.random() < 0.75, persist=persist)
