"""A description of the machine, and the processor time that other processes took of it."""

import os
import platform
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any

_TICKS = os.sysconf("SC_CLK_TCK")
_LISTENING = "0A"  # the state in /proc/net/tcp


def describe() -> dict[str, Any]:
    """Return processor, cores, memory, versions, commit and date."""
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_bytes / 2**30, 1),
        "python": platform.python_version(),
        "commit": _commit(),
    }


class ForeignLoad:
    """Cores used by processes other than this one, the listeners on `ports`, and their children."""

    def __init__(self, *, ports: Sequence[int] = ()) -> None:
        self._ports = ports
        self._start = (perf_counter(), _busy_ticks(), _own_ticks(ports))

    def cores(self) -> float:
        """Return the mean since the start; less than 0.15 on a quiet machine."""
        start_s, busy, own = self._start
        seconds = max(1e-9, perf_counter() - start_s)
        ticks = (_busy_ticks() - busy) - (_own_ticks(self._ports) - own)
        return round(max(0.0, ticks / _TICKS / seconds), 2)


def process_cpu_seconds(pid: int) -> float:
    """Return the processor time of a live process, over all its threads."""
    return sum(_times(_stat(str(pid)))[:2]) / _TICKS


def resident_bytes(pid: int, kind: str) -> int:
    """Return resident memory of a process; `kind` is RssAnon (its own) or RssFile (mapped)."""
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{kind}:"):
            return int(line.split()[1]) * 1024
    return 0


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def _commit() -> str:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(
        command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def _busy_ticks() -> int:
    first = Path("/proc/stat").read_text(encoding="ascii").splitlines()[0].split()[1:]
    values = [int(value) for value in first]
    return sum(values[:3]) + sum(values[5:8])


def listeners(ports: Sequence[int]) -> set[int]:
    """Return the processes that listen on these TCP ports, as far as we may look at them."""
    sockets = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING and int(fields[1].rpartition(":")[2], 16) in ports:
                sockets.add(f"socket:[{fields[9]}]")
    return {pid for pid in _process_ids() if sockets & _open_files(pid)} if sockets else set()


def _open_files(pid: int) -> set[str]:
    """Return what the descriptors of a process point to; nothing if it may not be looked at."""
    found = set()
    with suppress(OSError):
        for descriptor in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                found.add(os.readlink(descriptor))
    return found


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _own_ticks(ports: Sequence[int]) -> int:
    """Return the ticks of this process and of the listeners, with all their descendants."""
    stats = {}
    for pid in _process_ids():
        if stat := _stat(str(pid)):
            stats[pid] = stat
    family = {os.getpid(), *listeners(ports)}
    while more := {pid for pid, s in stats.items() if int(s[1]) in family} - family:
        family |= more
    return sum(sum(_times(stats[pid])) for pid in family if pid in stats)


def _stat(pid: str) -> list[str]:
    """Return the fields of /proc/PID/stat after the name; empty if the process ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    except OSError:
        return []


def _times(stat: list[str]) -> list[int]:
    return [int(value) for value in stat[11:15]] or [0]
