"""`python -m engine`: here the environment and the clock are read, and signals are met."""

import os
import signal
import sys
import time

from engine.arguments import parse_arguments
from engine.errors import EngineError


def main() -> int:
    """Run one engine; an operating error is one sentence and exit code 1."""
    arguments = parse_arguments(sys.argv[1:], os.environ)
    for number in (signal.SIGTERM, signal.SIGINT):
        if arguments.until_stdin_closes:  # a terminal signals the whole group; the parent decides
            signal.signal(number, signal.SIG_IGN)
        else:  # until there is a server to stop
            signal.signal(number, lambda *_: sys.exit(0))
    # Idle OpenMP threads must sleep, not spin; torch reads this when it is imported.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from engine.process import serve

    try:
        serve(
            arguments,
            clock_ns=time.monotonic_ns,
            wall_clock=lambda: time.time_ns() // 1_000_000,
        )
    except EngineError as error:
        sys.stderr.write(f"kvmeter engine: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
