"""Stop strings: finds them in text that arrives in pieces."""

from collections.abc import Sequence


class StopStrings:
    """Watches a growing text and holds back what may still become a stop string.

    The match that ends first wins, and of those the one that starts first, so the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""  # the longest end of the text so far that some stop string begins with
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Take the next piece and return the text that is now safe to show.

        After a match (`matched` is set) that is the text before it; the rest is dropped.
        """
        if self.matched is not None:
            return ""
        text = self._held + piece
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            _, start, self.matched = min(found)
            self._held = ""
            return text[:start]
        held = self._length_to_hold(text)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]

    def flush(self) -> str:
        """Return what was held back: the text has ended and no stop string came of it."""
        held, self._held = self._held, ""
        return held

    def _length_to_hold(self, text: str) -> int:
        longest = max((len(stop) - 1 for stop in self._stops), default=0)
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
