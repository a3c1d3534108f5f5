"""`python -m engine`: sets the environment, passes in the clocks, maps errors to exit codes."""

import io
import os
import signal
import sys
import time

from engine.arguments import parse_arguments
from engine.errors import EngineError

# Read by the C library and OpenMP at process start; values set by the operator win.
_ENVIRONMENT = {
    # Idle threads sleep: spinning ones take the CPU from other processes on a small machine.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Weights on huge pages: a decode step reads them all, and is a tenth slower on 4 KiB pages.
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
}


def main() -> int:
    """Run one engine. An EngineError is printed as one sentence; the exit code is then 1."""
    arguments = parse_arguments(sys.argv[1:], os.environ)
    if not os.environ.keys() >= _ENVIRONMENT.keys():
        os.execve(sys.executable, sys.orig_argv, _ENVIRONMENT | dict(os.environ))  # noqa: S606
    for number in (signal.SIGTERM, signal.SIGINT):
        if arguments.until_stdin_closes:  # a terminal signals the whole group; the parent decides
            signal.signal(number, signal.SIG_IGN)
        else:  # until there is a server to stop
            signal.signal(number, lambda *_: sys.exit(0))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a path may have characters that it cannot encode
        sys.stdout.reconfigure(errors="backslashreplace")
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
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is closed; the interpreter's own shutdown with torch takes a second or two.
    os._exit(code)
