"""The bytes of request bodies in memory: bounded in all, and shared fairly among customers."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from gateway.errors import Overloaded

# Eight bodies of the largest size, or thousands of usual ones. Parsed, a body takes some times its
# size, but only as many are parsed at once as there are threads for it.
MAX_BYTES_IN_FLIGHT = 256_000_000

TOO_MANY = "Too many request bodies are being received; try again"


class BodyInFlight:
    """The body of one request, from its first byte until it has been parsed."""

    def __init__(self, owner: "BodyBytes", customer: str) -> None:
        self.customer = customer
        self.num_bytes = 0
        self.is_evicted = False
        self.on_evicted: Callable[[], object] | None = None  # only while it is being received
        self._owner = owner

    def take(self, num_bytes: int) -> None:
        """Account for bytes that have arrived. Raises Overloaded if there is no room for them."""
        self._owner._take(self, num_bytes)


class BodyBytes:
    """All bodies in flight.

    A customer may fill what no other one uses. When a body needs room and another customer holds
    more than its own does, that one's largest unfinished body is given up: so a customer that wants
    its share gets it, however many slow uploads others have open.
    """

    def __init__(self, *, max_bytes: int = MAX_BYTES_IN_FLIGHT) -> None:
        self._max_bytes = max_bytes
        self._bodies: set[BodyInFlight] = set()
        self._by_customer: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """The bytes of all bodies in memory."""
        return self._by_customer.total()

    @contextmanager
    def body(self, customer: str) -> Iterator[BodyInFlight]:
        """A body of this customer; its bytes are given back when the block ends."""
        body = BodyInFlight(self, customer)
        self._bodies.add(body)
        try:
            yield body
        finally:
            self._give_back(body)

    def _take(self, body: BodyInFlight, num_bytes: int) -> None:
        if body.is_evicted:
            raise Overloaded(TOO_MANY)
        while self.num_bytes + num_bytes > self._max_bytes:
            victim = self._largest_of_others(body.customer, num_bytes)
            if victim is None:
                raise Overloaded(TOO_MANY)
            self._evict(victim)
        body.num_bytes += num_bytes
        self._by_customer[body.customer] += num_bytes

    def _largest_of_others(self, customer: str, num_bytes: int) -> BodyInFlight | None:
        """The largest unfinished body of the customer who has most, if that is another one."""
        wanted = self._by_customer[customer] + num_bytes
        unfinished = [
            body
            for body in self._bodies
            if body.on_evicted is not None and self._by_customer[body.customer] > wanted
        ]
        return max(
            unfinished,
            key=lambda body: (self._by_customer[body.customer], body.num_bytes),
            default=None,
        )

    def _evict(self, body: BodyInFlight) -> None:
        assert body.on_evicted is not None, "only unfinished bodies are given up"
        body.is_evicted = True
        self._give_back(body)
        body.on_evicted()

    def _give_back(self, body: BodyInFlight) -> None:
        self._bodies.discard(body)
        self._by_customer[body.customer] -= body.num_bytes
        if self._by_customer[body.customer] == 0:
            del self._by_customer[body.customer]
        body.num_bytes = 0
