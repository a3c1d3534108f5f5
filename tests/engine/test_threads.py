"""How many threads compute, by what the machine and the container say."""

import pytest

from engine.compute.dtype import read_cpuinfo
from engine.compute.threads import cpu_quota, default_threads, processors


def cpuinfo(*cores: tuple[int, int]) -> str:
    return "".join(
        f"processor\t: {number}\nphysical id\t: {socket}\ncore id\t\t: {core}\n\n"
        for number, (socket, core) in enumerate(cores)
    )


@pytest.mark.parametrize(
    ("text", "allowed", "quota", "expected"),
    [
        (cpuinfo((0, 0), (0, 0), (0, 1), (0, 1)), range(4), None, 2),  # two threads a core
        (cpuinfo((0, 0), (0, 1), (1, 0), (1, 1)), range(4), None, 4),  # two sockets
        (cpuinfo((0, 0), (0, 1), (0, 2), (0, 3)), [1, 2], None, 2),  # pinned to two cores
        (cpuinfo((0, 0), (0, 1), (0, 2), (0, 3)), range(4), 2.5, 2),  # a container's limit
        (cpuinfo((0, 0), (0, 1)), range(2), 0.5, 1),
        ("", range(6), None, 6),  # a processor that names no cores, as on ARM
    ],
)
def test_a_thread_computes_on_each_physical_core(text, allowed, quota, expected) -> None:
    assert default_threads(text, allowed, quota) == expected


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, None),
        ({"cpu.max": "max 100000\n"}, None),
        ({"cpu.max": "150000 100000\n"}, 1.5),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, None),
        ({"cpu/cpu.cfs_quota_us": "400000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 4.0),
    ],
)
def test_the_containers_limit_is_read(tmp_path, files, expected) -> None:
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    assert cpu_quota(tmp_path) == expected


def test_this_machine_gets_at_least_one_thread() -> None:
    assert 1 <= default_threads(read_cpuinfo(), processors(), cpu_quota()) <= len(processors())
