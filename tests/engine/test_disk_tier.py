import resource
import stat
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from engine.lease_types import StoredPrefix, owner_of
from engine.tiers import disk_tier
from engine.tiers.disk_tier import RETRY_MS, DiskTier
from engine.tiers.lease_files import Origin
from tests.engine.harness import Clock

ORIGIN = Origin(weights_digest="w" * 64, dtype="float32", layout="layers, heads")
PAYLOAD = np.arange(5_000, dtype=np.uint8)


def prefix(number: int = 1) -> StoredPrefix:
    key = bytes([number]) * 32
    return StoredPrefix(
        f"lease:{number}", f"req_{number}", owner_of(b"tenant"), key, b"p" * 32, b"tokn" * 9
    )


class Disk:
    """A tier's folder, through any number of engines, and both of their clocks."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.clock, self.wall_clock = Clock(10_000), Clock(1_700_000_000_000)
        self.origin = ORIGIN

    @contextmanager
    def engine(self, budget_bytes: int = 1 << 20):
        tier = DiskTier(
            self.folder,
            self.origin,
            budget_bytes=budget_bytes,
            clock=self.clock,
            wall_clock=self.wall_clock,
        )
        try:
            yield tier, tier.recover()
        finally:
            tier.close()

    def advance(self, ms: int) -> None:
        self.clock.advance(ms)
        self.wall_clock.advance(ms)

    def files(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir())

    def save(self, stored: StoredPrefix | None = None, ttl_ms: int = 60_000) -> None:
        """Keep one lease, by an engine that ends."""
        with self.engine() as (tier, _):
            keep(tier, stored or prefix(), self.clock() + ttl_ms)


def keep(tier: DiskTier, stored: StoredPrefix, deadline_ms: int):
    tier.save(stored, PAYLOAD, num_bytes=PAYLOAD.nbytes, deadline_ms=deadline_ms)
    tier.settle()
    return tier.poll()


@pytest.fixture
def disk(tmp_path):
    return Disk(tmp_path / "leases")


def test_the_next_engine_finds_the_lease_and_its_payload(disk):
    disk.save(ttl_ms=60_000)
    disk.advance(1_000)

    with disk.engine() as (tier, recovered):
        (found,) = recovered
        assert found.stored == prefix()
        assert (found.num_bytes, found.deadline_ms) == (5_000, disk.clock() + 59_000)
        assert np.array_equal(tier.load(prefix().key), PAYLOAD)


def test_only_the_engines_user_can_read_a_lease(disk):
    disk.save()

    (path,) = disk.folder.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(disk.folder.stat().st_mode) == 0o700


def test_a_lease_that_is_read_again_lives_longer_on_disk_too(disk):
    with disk.engine() as (tier, _):
        keep(tier, prefix(), disk.clock() + 1_000)
        tier.extend(prefix().key, disk.clock() + 50_000)
        tier.extend(prefix().key, disk.clock() + 60_000)
        tier.settle()
    disk.advance(59_000)

    with disk.engine() as (_, recovered):
        assert [each.deadline_ms for each in recovered] == [disk.clock() + 1_000]


def test_what_is_over_is_removed_at_the_start(disk):
    disk.save(ttl_ms=1_000)
    disk.advance(1_000)

    with disk.engine() as (_, recovered):
        assert recovered == []
    assert disk.files() == []


@pytest.mark.parametrize("step_ms", [-86_400_000, -1, 30_000])
def test_a_wall_clock_that_steps_never_lengthens_a_lease(disk, step_ms):
    disk.save(ttl_ms=60_000)
    disk.wall_clock.advance(step_ms)

    with disk.engine() as (_, recovered):
        (found,) = recovered
        assert found.deadline_ms - disk.clock() == min(60_000, 60_000 - step_ms)


def test_a_drop_removes_the_file_and_one_that_is_not_written_yet_never_appears(disk):
    with disk.engine() as (tier, _):
        keep(tier, prefix(1), disk.clock() + 1_000)
        tier.drop(prefix(1).key)
        tier.drop(prefix(1).key)
        assert disk.files() == []
        tier.save(prefix(2), PAYLOAD, num_bytes=5_000, deadline_ms=disk.clock() + 1_000)
        tier.drop(prefix(2).key)
        tier.settle()

        assert tier.poll() == []
        assert (disk.files(), tier.free_bytes) == ([], 1 << 20)


def truncate(data: bytearray) -> None:
    del data[-1:]


def flip_payload(data: bytearray) -> None:
    data[-7] ^= 1


def flip_token(data: bytearray) -> None:
    data[data.index(b"tokn")] ^= 1


def flip_header(data: bytearray) -> None:
    data[data.index(b"num_tokens") + 13] = ord("7")


def empty(data: bytearray) -> None:
    data.clear()


def garble(data: bytearray) -> None:
    data[16:] = b"\xff" * 40


def retitle(data: bytearray) -> None:
    data[:16] = b"kvmeter lease 9\n"


@pytest.mark.parametrize(
    ("damage", "counter"),
    [
        (truncate, "corrupt"),
        (flip_payload, "corrupt"),
        (flip_token, "corrupt"),
        (flip_header, "corrupt"),
        (garble, "corrupt"),
        (empty, "foreign"),
        (retitle, "foreign"),
    ],
)
def test_a_damaged_file_is_never_taken_and_is_counted(disk, damage, counter):
    disk.save()
    (path,) = disk.folder.iterdir()
    data = bytearray(path.read_bytes())
    damage(data)
    path.write_bytes(data)

    with disk.engine() as (tier, recovered):
        for each in recovered:  # only the payload is damaged: found out when it is read
            assert tier.load(each.stored.key) is None
            tier.drop(each.stored.key)
        assert tier.stats()[f"lease_files_{counter}_total"] == 1
    assert disk.files() == []


@pytest.mark.parametrize("field", ["weights_digest", "dtype", "layout"])
def test_a_file_of_another_model_format_or_layout_is_dropped_and_counted(disk, field):
    disk.save()
    disk.origin = replace(ORIGIN, **{field: "other"})

    with disk.engine() as (tier, recovered):
        assert recovered == []
        assert tier.stats()["lease_files_foreign_total"] == 1
    assert disk.files() == []


def test_a_file_that_a_kill_left_half_written_is_removed(disk):
    disk.save()
    (disk.folder / f"{prefix(2).key.hex()}.tmp").write_bytes(b"kvmeter lease 1\n")

    with disk.engine() as (_, recovered):
        assert [each.stored for each in recovered] == [prefix(1)]
    assert len(disk.files()) == 1


def test_a_full_disk_costs_nothing_but_the_copy_and_is_tried_again_later(disk):
    with disk.engine() as (tier, _):
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, limits[1]))
        try:
            ended = keep(tier, prefix(), disk.clock() + 60_000)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert ended == [(prefix().key, False)]
        assert tier.stats()["lease_files_failed_total"] == 1
        assert (disk.files(), tier.free_bytes) == ([], 1 << 20)
        assert not tier.accepts(5_000)

        disk.advance(RETRY_MS)

        assert tier.accepts(5_000)
        assert keep(tier, prefix(), disk.clock() + 60_000) == [(prefix().key, True)]


def test_what_was_unpinned_stays_so_after_a_power_cut(disk, monkeypatch):
    synced = []
    monkeypatch.setattr(disk_tier, "sync_folder", synced.append)
    with disk.engine() as (tier, _):
        keep(tier, prefix(), disk.clock() + 60_000)
        synced.clear()

        tier.drop(prefix().key)
        tier.sync()

        assert (disk.files(), synced) == ([], [disk.folder])


def test_a_folder_that_cannot_be_is_a_failed_save_and_no_error(disk):
    disk.folder.write_text("not a folder")

    with disk.engine() as (tier, recovered):
        assert recovered == []
        assert keep(tier, prefix(), disk.clock() + 60_000) == [(prefix().key, False)]


def test_a_file_that_cannot_be_read_is_not_taken_and_is_counted(disk):
    with disk.engine() as (tier, _):
        keep(tier, prefix(), disk.clock() + 60_000)
        (path,) = disk.folder.iterdir()
        path.unlink()

        assert tier.load(prefix().key) is None
        assert tier.stats()["lease_files_corrupt_total"] == 1


def test_a_file_that_was_cut_short_while_the_engine_runs_is_not_taken(disk):
    with disk.engine() as (tier, _):
        keep(tier, prefix(), disk.clock() + 60_000)
        (path,) = disk.folder.iterdir()
        path.write_bytes(path.read_bytes()[:4_000])

        assert tier.load(prefix().key) is None
        assert tier.stats()["lease_files_corrupt_total"] == 1


def test_a_file_of_another_name_is_counted_as_foreign(disk):
    disk.save()
    (path,) = disk.folder.iterdir()
    path.rename(path.with_name("copy.lease"))

    with disk.engine() as (tier, recovered):
        assert recovered == []
        assert tier.stats()["lease_files_foreign_total"] == 1


def test_what_is_not_there_is_extended_and_dropped_without_effect(disk):
    with disk.engine() as (tier, _):
        tier.extend(prefix().key, disk.clock() + 60_000)
        tier.drop(prefix().key)

        assert tier.free_bytes == 1 << 20


def test_a_file_that_cannot_be_renamed_keeps_its_shorter_life(disk):
    with disk.engine() as (tier, _):
        keep(tier, prefix(), disk.clock() + 60_000)
        (path,) = disk.folder.iterdir()
        kept = path.read_bytes()
        path.unlink()
        tier.extend(prefix().key, disk.clock() + 90_000)
        tier.settle()
    path.write_bytes(kept)

    with disk.engine() as (_, recovered):
        assert [each.deadline_ms for each in recovered] == [disk.clock() + 60_000]


def test_a_file_that_cannot_be_removed_costs_nothing_but_its_place(disk):
    with disk.engine() as (tier, _):
        keep(tier, prefix(), disk.clock() + 60_000)
        (path,) = disk.folder.iterdir()
        path.unlink()
        path.mkdir()  # a folder cannot be unlinked
        tier.drop(prefix().key)

        assert tier.free_bytes == 1 << 20
        path.rmdir()
