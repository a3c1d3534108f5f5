"""The kernels' file: compiled once, whole or not there, never another user's; or a reason."""

import _ctypes
import os
import threading
from pathlib import Path

import pytest

from engine.compute.dtype import read_cpuinfo
from engine.compute.native.library import (
    Library,
    load_library,
    loaded_openmp,
    require_processor,
)
from engine.errors import KernelsUnavailable


@pytest.fixture
def compiler(tmp_path: Path, kernels_file: Path) -> Path:
    """A compiler that keeps a list of its runs and gives out what the real one made."""
    path = tmp_path / "compiler"
    path.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo fake 1.0\necho run >> {tmp_path}/runs\n'
        f'for last; do :; done\ncat {kernels_file} > "$last"\n'
    )
    path.chmod(0o700)
    return path


def load(folder: Path, compiler: Path | str, **options: object) -> Library:
    arguments = {"cpuinfo": read_cpuinfo(), "compiler": os.fspath(compiler)} | options
    return load_library(folder, **arguments)


def reason(folder: Path, compiler: Path | str) -> str:
    with pytest.raises(KernelsUnavailable) as caught:
        load(folder, compiler)
    return caught.value.reason


def num_runs(compiler: Path) -> int:
    return len((compiler.parent / "runs").read_text().splitlines())


def test_what_is_compiled_once_is_loaded_afterwards(tmp_path: Path, compiler: Path) -> None:
    folder = tmp_path / "cache" / "kernels"

    load(folder, compiler)
    load(folder, compiler)

    assert num_runs(compiler) == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(list(folder.iterdir())) == 1, "a partial file is left"


def test_another_compiler_flag_or_processor_makes_its_own_file(
    tmp_path: Path, compiler: Path
) -> None:
    folder = tmp_path / "kernels"
    load(folder, compiler)

    load(folder, compiler, form="portable")
    load(folder, compiler, cpuinfo="flags : fpu other")
    compiler.write_text(compiler.read_text().replace("fake 1.0", "fake 1.1"))
    load(folder, compiler)

    assert num_runs(compiler) == 4
    assert len(list(folder.iterdir())) == 4


def test_engines_that_start_at_once_all_load_it(tmp_path: Path, compiler: Path) -> None:
    folder = tmp_path / "kernels"
    loaded: list[Library] = []
    starts = [
        threading.Thread(target=lambda: loaded.append(load(folder, compiler))) for _ in range(4)
    ]

    for start in starts:
        start.start()
    for start in starts:
        start.join()

    assert len(loaded) == 4
    assert len(list(folder.iterdir())) == 1


@pytest.mark.parametrize("mode", [0o722, 0o702])
def test_a_file_that_another_user_could_have_written_is_not_loaded(
    tmp_path: Path, compiler: Path, mode: int
) -> None:
    folder = tmp_path / "kernels"
    load(folder, compiler)
    [path] = folder.iterdir()
    path.chmod(mode)

    assert reason(folder, compiler) == f"another user could have written {path}"


def test_a_folder_that_another_user_could_write_is_not_used(tmp_path: Path, compiler: Path) -> None:
    folder = tmp_path / "kernels"
    folder.mkdir()
    folder.chmod(0o777)

    assert reason(folder, compiler) == f"another user could have written {folder}"


def test_a_link_is_not_followed(tmp_path: Path, compiler: Path) -> None:
    folder = tmp_path / "kernels"
    load(folder, compiler)
    [path] = folder.iterdir()
    path.rename(tmp_path / "elsewhere.so")
    path.symlink_to(tmp_path / "elsewhere.so")

    assert reason(folder, compiler) == f"another user could have written {path}"


def test_a_file_of_another_owner_is_not_loaded(
    tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kernels"
    load(folder, compiler)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)

    assert reason(folder, compiler) == f"another user could have written {folder}"


def test_no_compiler_is_a_reason(tmp_path: Path) -> None:
    assert reason(tmp_path / "kernels", "no-such-cc") == "no C compiler: no-such-cc"


def test_a_compiler_that_fails_is_a_reason_and_leaves_nothing(
    tmp_path: Path, compiler: Path
) -> None:
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo fake\necho "step.c: too hard" >&2; exit 1\n'
    )

    assert reason(tmp_path / "kernels", compiler) == "the C compiler fails: step.c: too hard"
    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_compiler_whose_product_does_not_load_is_a_reason(tmp_path: Path, compiler: Path) -> None:
    compiler.write_text(compiler.read_text().replace("cat ", "echo no library #"))

    assert reason(tmp_path / "kernels", compiler).startswith("cannot load ")


def test_a_library_without_our_calls_is_a_reason_and_is_not_kept(
    tmp_path: Path, compiler: Path, kernels_file: Path
) -> None:
    works = compiler.read_text()
    compiler.write_text(works.replace(os.fspath(kernels_file), _ctypes.__file__))

    assert reason(tmp_path / "kernels", compiler).startswith("cannot load ")

    assert list((tmp_path / "kernels").iterdir()) == []


def test_a_library_with_another_layout_is_a_reason_and_is_not_kept(
    tmp_path: Path, compiler: Path
) -> None:
    compiler.write_text('#!/bin/sh\nexec cc "$@" -fpack-struct\n')

    found = reason(tmp_path / "kernels", compiler)

    assert found.endswith(": model has offset and size (0, 140) in C and (0, 144) in Python")
    assert list((tmp_path / "kernels").iterdir()) == []


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.99])
def test_a_file_that_was_cut_short_is_compiled_again(
    tmp_path: Path, compiler: Path, share: float
) -> None:
    folder = tmp_path / "kernels"
    load(folder, compiler)
    [path] = folder.iterdir()
    whole = path.read_bytes()
    path.unlink()  # loaded already: another file takes its place
    path.write_bytes(whole[: int(len(whole) * share)])

    load(folder, compiler)

    assert num_runs(compiler) == 2
    assert path.read_bytes() == whole


@pytest.mark.parametrize("leader", ["{child} & wait", "{child} & exit 0"])
def test_a_compiler_that_hangs_is_ended_with_all_that_it_started(
    leader: str, tmp_path: Path, compiler: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    child = f"sleep 600 3> {pipe}"
    compiler.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && exec echo fake\n{leader.format(child=child)}\n'
    )
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    monkeypatch.setattr("engine.compute.native.library._COMPILE_SECONDS_MAX", 0.2)

    found = reason(tmp_path / "kernels", compiler)

    assert found == f"the C compiler takes more than 0.2 s: {compiler}"
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b"", "what it started has the pipe open"
    os.close(reader)


def test_a_compiler_that_never_stops_talking_is_a_reason(tmp_path: Path, compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exec echo fake\nexec yes too much\n')

    assert reason(tmp_path / "kernels", compiler) == "the C compiler fails: too much"


def test_a_compiler_reads_nothing_of_what_is_the_engines(tmp_path: Path, compiler: Path) -> None:
    compiler.write_text(compiler.read_text().replace("for last", "cat >&2\nfor last"))
    ours, ends_last = os.pipe()  # an input that says nothing and does not end
    saved = os.dup(0)
    os.dup2(ours, 0)
    try:
        load(tmp_path / "kernels", compiler)
    finally:
        os.dup2(saved, 0)
        for descriptor in (saved, ours, ends_last):
            os.close(descriptor)


def test_the_complaint_is_the_first_error_in_plain_letters(tmp_path: Path, compiler: Path) -> None:
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exec echo fake\n'
        "printf 'In file included from step.c:6:\\n' >&2\n"
        "printf 'heads.h:1: error: \\342\\200\\230x \\033[31m\\377\\n' >&2; exit 1\n"
    )

    found = reason(tmp_path / "kernels", compiler)

    assert found == r"the C compiler fails: heads.h:1: error: \xe2\x80\x98x \x1b[31m\xff"


def test_a_compiler_that_knows_no_bfloat16_is_a_reason(tmp_path: Path, compiler: Path) -> None:
    compiler.write_text('#!/bin/sh\nexec cc "$@" -U__AVX512BF16__\n')

    with pytest.raises(KernelsUnavailable, match="does not know this processor's avx512_bf16"):
        load(tmp_path / "kernels", compiler, cpuinfo="flags : avx512_bf16")


def test_openmp_is_found_by_its_files_name(tmp_path: Path) -> None:
    maps = tmp_path / "maps"
    maps.write_bytes(
        b"7f00-7f01 r-xp 00000000 08:01 11 /home/libgomp/\xff/libtorch.so\n"
        b"7f02-7f03 r-xp 00000000 08:01 12 /home/libgomp/a \xff b/libgomp-24e.so.1.0.0\n"
    )

    assert os.fsencode(loaded_openmp(maps)) == b"/home/libgomp/a \xff b/libgomp-24e.so.1.0.0"
    maps.write_bytes(b"7f00-7f01 r-xp 00000000 08:01 11 /home/libgomp/libtorch.so\n")
    with pytest.raises(KernelsUnavailable, match="torch brings no libgomp"):
        loaded_openmp(maps)


def test_a_folder_that_cannot_be_made_is_a_reason(tmp_path: Path, compiler: Path) -> None:
    (tmp_path / "file").touch()

    found = reason(tmp_path / "file" / "kernels", compiler)

    assert found == f"cannot use {tmp_path / 'file' / 'kernels'}: Not a directory"


def test_a_processor_without_bfloat16_is_a_reason() -> None:
    require_processor("flags : fpu avx512f avx512_bf16")
    for cpuinfo in ("flags : fpu avx512f", ""):
        with pytest.raises(KernelsUnavailable, match="the processor has no avx512_bf16"):
            require_processor(cpuinfo)


def test_only_the_native_form_has_tiles(kernels: dict[str, Library]) -> None:
    assert not kernels["without tiles"].has_amx
    assert not kernels["portable"].has_amx
