"""Stop strings: finds them in text that arrives in pieces, in time linear in the text.

Source: Aho and Corasick 1975, "Efficient string matching: an aid to bibliographic search".
"""

from collections import deque
from collections.abc import Sequence

ROOT = 0


class StopStrings:
    """Watches a growing text and holds back what may still become a stop string.

    The match that ends first wins, and of those the one that starts first, so the result does not
    depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._automaton = _Automaton(stops) if stops else None
        self._state = ROOT
        self._held = ""  # the longest end of the text so far that some stop string begins with
        self.matched: str | None = None

    def push(self, piece: str) -> str:
        """Take the next piece and return the text that is now safe to show.

        After a match (`matched` is set) that is the text before it; the rest is dropped.
        """
        if self.matched is not None:
            return ""
        if self._automaton is None:
            return piece
        text = self._held + piece
        for end, character in enumerate(piece, start=len(self._held) + 1):
            self._state = self._automaton.next(self._state, character)
            if (stop := self._automaton.match[self._state]) is not None:
                self.matched, self._held = stop, ""
                return text[: end - len(stop)]
        shown = len(text) - self._automaton.depth[self._state]
        self._held = text[shown:]
        return text[:shown]

    def flush(self) -> str:
        """Return what was held back: the text has ended and no stop string came of it."""
        held, self._held = self._held, ""
        return held


class _Automaton:
    """All stop strings at once: a state is the longest end of the text that some stop begins with.

    depth     for each state, the length of that end
    match     for each state, the longest stop string that the text ends with, if any
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.depth = [0]
        self.match: list[str | None] = [None]
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [ROOT]  # the state of the next shorter end
        for stop in stops:
            self._add(stop)
        self._link()

    def next(self, state: int, character: str) -> int:
        """The state after one more character. A text of n characters follows n links at most."""
        while (following := self._next[state].get(character)) is None:
            if state == ROOT:
                return ROOT
            state = self._shorter[state]
        return following

    def _add(self, stop: str) -> None:
        state = ROOT
        for depth, character in enumerate(stop, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self.depth)
                self.depth.append(depth)
                self.match.append(None)
                self._next.append({})
                self._shorter.append(ROOT)
            state = self._next[state][character]
        self.match[state] = stop

    def _link(self) -> None:
        """Find each state's next shorter end, the shallow states first."""
        states = deque(self._next[ROOT].values())
        while states:
            state = states.popleft()
            shorter = self._shorter[state]
            self.match[state] = self.match[state] or self.match[shorter]
            for character, deeper in self._next[state].items():
                self._shorter[deeper] = self.next(shorter, character)
                states.append(deeper)
