"""Work that makes very many objects at once, and drops them, without the garbage collector.

A conversation of 10,000 blocks is some hundred thousand objects for a moment. A full collection
that meets them holds the interpreter for 100 ms, all threads of the process with it, and finds
nothing: reference counts free them all.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

# One at a time: such work does not run in parallel anyway, and between two of them the collector
# has its turn.
_turn = threading.Lock()


@contextmanager
def uncollected() -> Iterator[None]:
    """Run the block, in whatever thread, while the collector waits."""
    with _turn:
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            yield
        finally:
            if was_enabled:
                gc.enable()
