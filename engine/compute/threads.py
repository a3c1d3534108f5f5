"""Chooses how many threads compute on the CPU: one for each physical core that this process has."""

import os
from collections.abc import Collection
from pathlib import Path

import torch


def default_threads(cpuinfo: str, processors: Collection[int], quota: float | None) -> int:
    """Return the number of physical cores among `processors`, at most what `quota` pays for.

    cpuinfo     the text of /proc/cpuinfo; where it names no cores, each processor counts as one
    processors  those that this process may run on
    quota       processors' worth of time that its control group grants; None: no limit

    A second thread of the same core only competes with the first one for its arithmetic.
    """
    cores = {core for number, core in _cores(cpuinfo).items() if number in processors}
    num_cores = len(cores) or len(processors)
    return max(1, num_cores if quota is None else min(num_cores, int(quota)))


def configure_threads(num_threads: int) -> None:
    """Set torch's threads. Call it once, before the first operation.

    OMP_WAIT_POLICY=PASSIVE must be in the environment before torch is imported, or idle threads
    spin and starve other processes.
    """
    torch.set_num_threads(num_threads)
    torch.set_num_interop_threads(1)


def processors() -> set[int]:
    """Return the numbers of the processors that this process may run on."""
    return os.sched_getaffinity(0)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the processors' worth of time that the container grants (control groups 2 or 1)."""
    newer = root / "sys/fs/cgroup/cpu.max"
    older = root / "sys/fs/cgroup/cpu"
    if newer.is_file():
        quota, period = newer.read_text(encoding="utf-8").split()
    elif (older / "cpu.cfs_quota_us").is_file():
        quota = (older / "cpu.cfs_quota_us").read_text(encoding="utf-8").strip()
        period = (older / "cpu.cfs_period_us").read_text(encoding="utf-8").strip()
    else:
        return None
    return None if quota in ("max", "-1") else int(quota) / int(period)


def _cores(cpuinfo: str) -> dict[int, tuple[str, str]]:
    """Return the socket and core of each processor that /proc/cpuinfo describes."""
    cores: dict[int, tuple[str, str]] = {}
    for paragraph in cpuinfo.split("\n\n"):
        fields = {}
        for line in paragraph.splitlines():
            key, _, value = line.partition(":")
            fields[key.strip()] = value.strip()
        if {"processor", "core id"} <= fields.keys():
            place = (fields.get("physical id", "0"), fields["core id"])
            cores[int(fields["processor"])] = place
    return cores
