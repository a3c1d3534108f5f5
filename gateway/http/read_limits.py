"""What has arrived of the request that is being read, against the limits of each of its parts."""

from gateway.errors import RequestTooLarge

MAX_HEAD_BYTES = 64 << 10  # the SDK sends one kilobyte; proxies stop at 8 to 32
MAX_HEADERS = 100  # the SDK sends 20; Apache's limit


class ReadLimits:
    """Counts one connection's bytes as they are parsed; what is too much raises RequestTooLarge.

    A head is counted as it comes, byte by byte. Of a head that begins behind another request, in
    the same piece, the names and values are.

    awaits_head  whether a head is awaited or being read, else a body
    """

    def __init__(self) -> None:
        self.awaits_head = True
        self._num_heads = 0
        self._raw_head_bytes = 0
        self._head_bytes = 0
        self._num_headers = 0
        self._trailer_bytes = 0
        self._bare_bytes = 0  # since the last byte of a body: chunk lines, trailers
        self._before = (True, 0)

    def begin_piece(self, available: int) -> int:
        """Return how many of the bytes to parse next; never more of a head than is accepted."""
        num_bytes = available
        if self.awaits_head:
            num_bytes = min(available, MAX_HEAD_BYTES - self._raw_head_bytes)
        self._bare_bytes += num_bytes
        self._before = (self.awaits_head, self._num_heads)
        return num_bytes

    def end_piece(self, num_bytes: int) -> None:
        """The piece has been parsed."""
        if not self.awaits_head and self._bare_bytes > MAX_HEAD_BYTES:
            raise _too_large("What surrounds the body's chunks")
        if self._before == (True, self._num_heads):  # all of it belongs to one head
            self._raw_head_bytes += num_bytes
            if self._raw_head_bytes == MAX_HEAD_BYTES:
                raise _too_large("Request head")

    def begin_head(self) -> None:
        """The first byte of a head has arrived."""
        self._head_bytes = self._num_headers = self._trailer_bytes = 0

    def add_to_head(self, num_bytes: int) -> None:
        """A part of the head has arrived."""
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise _too_large("Request head")

    def add_header(self, num_bytes: int) -> None:
        """A header field has arrived, of the head."""
        self._num_headers += 1
        if self._num_headers > MAX_HEADERS:
            raise RequestTooLarge(f"Request head has more than {MAX_HEADERS} header fields")
        self.add_to_head(num_bytes)

    def end_head(self) -> None:
        """The head is complete; a body follows, perhaps an empty one."""
        self.awaits_head = False
        self._num_heads += 1
        self._raw_head_bytes = self._bare_bytes = 0

    def add_trailer(self, num_bytes: int) -> None:
        """A header field has arrived behind the body."""
        self._trailer_bytes += num_bytes
        if self._trailer_bytes > MAX_HEAD_BYTES:
            raise _too_large("Trailers")

    def add_body(self) -> None:
        """Bytes of the body have arrived; `bodies.py` counts them."""
        self._bare_bytes = 0

    def end_message(self) -> None:
        """The request is complete; the next head is awaited."""
        self.awaits_head = True


def _too_large(what: str) -> RequestTooLarge:
    return RequestTooLarge(f"{what} exceeds the maximum size: {MAX_HEAD_BYTES} bytes")
