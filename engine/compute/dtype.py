"""Chooses the number format that the engine computes with."""

from pathlib import Path

import torch

_NAMES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BF16_FLAGS = {"amx_bf16", "avx512_bf16"}


def choose_dtype(name: str, *, device: torch.device, cpuinfo: str) -> torch.dtype:
    """Return the number format that `name` asks for; `auto` is the faster one on this machine.

    On a CPU bfloat16 is faster only with AMX or AVX512-BF16 (prefill 3.5 x), slower without.
    `cpuinfo` is the text of /proc/cpuinfo.
    """
    if name != "auto":
        return _NAMES[name]
    if device.type != "cpu" or _BF16_FLAGS & cpu_flags(cpuinfo):
        return torch.bfloat16
    return torch.float32


def read_cpuinfo() -> str:
    """Return the text of /proc/cpuinfo, or nothing where there is none."""
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


def cpu_flags(cpuinfo: str) -> set[str]:
    """Return the first processor's flags from the text of /proc/cpuinfo."""
    for line in cpuinfo.splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "flags":
            return set(value.split())
    return set()
