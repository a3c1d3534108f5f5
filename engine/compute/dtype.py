"""Which number format the engine computes in, and on how many threads."""

import os
from pathlib import Path

import torch

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BF16_FLAGS = {"amx_bf16", "avx512_bf16"}
# A second thread pays at SmolLM2's size; more only fight over memory bandwidth.
MAX_CPU_THREADS = 2


def choose_dtype(name: str, *, device: torch.device, cpuinfo: str) -> torch.dtype:
    """`float32` and `bfloat16` are taken at their word; `auto` is the faster one here.

    On a CPU bfloat16 is faster only with AMX or AVX512-BF16 (prefill 3.5 x), slower without.
    `cpuinfo` is the text of /proc/cpuinfo.
    """
    if name != "auto":
        return _NAMES[name]
    if device.type != "cpu" or _BF16_FLAGS & cpu_flags(cpuinfo):
        return torch.bfloat16
    return torch.float32


def read_cpuinfo() -> str:
    """The text of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def configure_threads(num_threads: int | None = None) -> int:
    """Set torch's threads (default: two, or one on a single core) and return how many.

    Call it once, before the first operation. OMP_WAIT_POLICY=PASSIVE must be in the environment
    before torch is imported, or idle threads spin and starve other processes.
    """
    chosen = num_threads or min(MAX_CPU_THREADS, len(os.sched_getaffinity(0)))
    torch.set_num_threads(chosen)
    torch.set_num_interop_threads(1)
    return chosen


def cpu_flags(cpuinfo: str) -> set[str]:
    """The first processor's flags in the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return set(value.split())
    return set()
