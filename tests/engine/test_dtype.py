"""Which number format fits which processor."""

import pytest
import torch

from engine.compute.dtype import choose_dtype, read_cpuinfo

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def cpuinfo(flags: str) -> str:
    processor = f"processor\t: 0\nmodel name\t: some amx_bf16 lookalike\nflags\t\t: {flags}\n"
    return processor + processor


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("fpu sse2 avx2", torch.float32),
        ("fpu avx2 avx512f", torch.float32),
        ("fpu avx512f avx512_bf16", torch.bfloat16),
        ("fpu amx_bf16 amx_tile", torch.bfloat16),
    ],
)
def test_auto_takes_bfloat16_where_the_processor_computes_it(
    flags: str, expected: torch.dtype
) -> None:
    assert choose_dtype("auto", device=CPU, cpuinfo=cpuinfo(flags)) == expected


def test_auto_takes_float32_where_the_processor_is_unknown() -> None:
    assert choose_dtype("auto", device=CPU, cpuinfo="") == torch.float32


def test_auto_takes_bfloat16_on_a_gpu() -> None:
    assert choose_dtype("auto", device=CUDA, cpuinfo="") == torch.bfloat16


@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", torch.float32), ("bfloat16", torch.bfloat16)]
)
def test_a_named_type_is_taken_at_its_word(name: str, dtype: torch.dtype) -> None:
    for flags in ("", "amx_bf16"):
        assert choose_dtype(name, device=CPU, cpuinfo=cpuinfo(flags)) == dtype


def test_this_machines_processor_is_described() -> None:
    assert "processor" in read_cpuinfo()
