"""Key guessing is slowed: an address that sends wrong keys may soon use known ones only."""

from hashlib import sha256
from typing import Any, TypeVar

from gateway.errors import TooManyFailedKeys

T = TypeVar("T")

FAILURES_ALLOWED = 20  # at once: a fleet that was deployed with a wrong key is told so
FORGOTTEN_AFTER_MS = 2_000  # one failure; so an address may guess 30 times a minute
MAX_ADDRESSES = 10_000
MAX_KNOWN_KEYS = 10_000


class FailedKeys:
    """Wrong keys by client network, and the keys that have worked.

    Past the allowed failures a key is not looked up, unless it has worked before: its owner, who
    may share the address with the client that guesses, is still served.
    """

    def __init__(self) -> None:
        # When the last failure of each network will be forgotten; the oldest entries come first.
        self._clear_at_ms: dict[str, int] = {}
        self._known: dict[bytes, None] = {}  # digests; the ones used longest ago come first

    def begin(self, network: str, secret: str, *, now_ms: int) -> None:
        """Count an attempt before its key is looked up, as failed. Raises TooManyFailedKeys."""
        if _digest(secret) in self._known:
            return
        clear_at_ms = max(now_ms, self._clear_at_ms.pop(network, 0))
        wait_ms = clear_at_ms - now_ms - (FAILURES_ALLOWED - 1) * FORGOTTEN_AFTER_MS
        if wait_ms <= 0:
            clear_at_ms += FORGOTTEN_AFTER_MS
        self._clear_at_ms[network] = clear_at_ms
        _drop_oldest(self._clear_at_ms, most=MAX_ADDRESSES)
        if wait_ms > 0:
            raise TooManyFailedKeys(
                "Too many invalid API keys from this address: keys that have not worked before "
                "are not looked up now",
                headers={"retry-after": str(-(-wait_ms // 1000))},
            )

    def succeeded(self, network: str, secret: str) -> None:
        """The key is valid: its attempt was no failure, and later ones need no look at this."""
        digest = _digest(secret)
        if digest not in self._known and network in self._clear_at_ms:
            self._clear_at_ms[network] -= FORGOTTEN_AFTER_MS
        self._known.pop(digest, None)
        self._known[digest] = None
        _drop_oldest(self._known, most=MAX_KNOWN_KEYS)

    def failed(self, secret: str) -> None:
        """The key is not valid, or no longer."""
        self._known.pop(_digest(secret), None)


def _drop_oldest(entries: dict[T, Any], *, most: int) -> None:
    if len(entries) > most:
        del entries[next(iter(entries))]


def _digest(secret: str) -> bytes:
    return sha256(secret.encode()).digest()
