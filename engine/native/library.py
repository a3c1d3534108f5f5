"""The kernels as a shared library: compiled once with the machine's C compiler, then loaded."""

import ctypes
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import torch

_FLAGS = ("-std=gnu11", "-O3", "-march=native", "-shared", "-fPIC", "-fopenmp")


class Library:
    def __init__(self, path: Path) -> None:
        self._calls = ctypes.CDLL(os.fspath(path))
        self._calls.kvmeter_scratch_bytes.restype = ctypes.c_int64
        self.has_amx = bool(self._calls.kvmeter_open())

    def scratch_bytes(self, model, batch) -> int:
        return self._calls.kvmeter_scratch_bytes(ctypes.byref(model), ctypes.byref(batch))

    def run(self, model, batch, scratch: int, num_threads: int) -> None:
        self._calls.kvmeter_run(
            ctypes.byref(model), ctypes.byref(batch), ctypes.c_void_p(scratch), num_threads
        )
