"""The caching rules of the Messages API said a second time, the other way round."""

from dataclasses import dataclass, field

from billing.meters import Quantities

TTL_MS = {"5m": 300_000, "1h": 3_600_000}


@dataclass
class Oracle:
    """Walks the blocks and says on which meter each of them falls.

    Knows only which content was written when; no keys, no lengths of prefixes, no A, B or C.
    """

    min_tokens: int
    alive: dict[tuple[str, ...], tuple[str, int]] = field(default_factory=dict)

    def bill(self, blocks: list[tuple[str, int]], marks: dict[int, str], now_ms: int) -> Quantities:
        contents = tuple(content for content, _ in blocks)
        length = [sum(tokens for _, tokens in blocks[: i + 1]) for i in range(len(blocks))]
        marks = {i: ttl for i, ttl in marks.items() if length[i] >= self.min_tokens}

        def is_alive(i: int) -> bool:
            return self.alive.get(contents[: i + 1], ("", now_ms))[1] > now_ms

        reach = {i for mark in marks for i in range(max(0, mark - 19), mark + 1) if is_alive(i)}
        # The last mark that reaches anything decides, even if an earlier one reached further.
        deciding = next((m for m in sorted(marks, reverse=True) if reach & _window(m)), None)
        hit = -1 if deciding is None else max(reach & _window(deciding))

        def meter(i: int) -> str:
            if i <= hit:
                return "cache_read"
            if any(mark >= i and ttl == "1h" for mark, ttl in marks.items()):
                return "cache_write_1h"
            return "cache_write_5m" if any(mark >= i for mark in marks) else "input"

        counted: dict[str, int] = {}
        for i, (_, tokens) in enumerate(blocks):
            counted[meter(i)] = counted.get(meter(i), 0) + tokens
        for i in range(hit + 1):
            if is_alive(i):
                ttl = self.alive[contents[: i + 1]][0]
                self.alive[contents[: i + 1]] = (ttl, now_ms + TTL_MS[ttl])
        for mark, ttl in marks.items():
            if mark > hit:
                self.alive[contents[: mark + 1]] = (ttl, now_ms + TTL_MS[ttl])
        return Quantities(**counted)


def _window(mark: int) -> set[int]:
    return set(range(mark - 19, mark + 1))
