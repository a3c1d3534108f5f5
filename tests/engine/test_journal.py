import os
from contextlib import closing
from dataclasses import replace

import pytest

from engine.errors import JournalError
from engine.journal.journal import Journal
from engine.journal.segments import read_segment, segment_numbers, segment_path
from engine.protocol import EngineRecord, Grant, LeaseReport


def record(request_id, **changes):
    return replace(
        EngineRecord(
            request_id=request_id,
            engine_boot_id="eng_1",
            prompt_tokens=40,
            read_tokens=16,
            tokens_reused_promised=16,
            tokens_reused_gift=0,
            tokens_read_recomputed=0,
            tokens_computed=24,
            grants=(
                Grant(num_tokens=32, write=True, outcome="granted"),
                Grant(num_tokens=40, write=True, outcome="granted"),
            ),
            output_tokens=0,
            overrun_tokens=0,
            finish_reason="error",
        ),
        **changes,
    )


def killed(journal):
    """What is left of a journal whose process was killed: the files, and no lock."""
    os.close(journal._lock)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "journal"


def test_a_finished_request_is_found_by_the_next_engine(folder):
    journal = Journal(folder)
    journal.admitted(record("req_1"))
    end = record("req_1", output_tokens=5, finish_reason="max_tokens")
    journal.finished(end)
    journal.close()

    journal = Journal(folder)

    assert journal.lookup(["req_1", "req_2"]) == {"req_1": end}
    journal.close()


def test_a_request_left_open_is_closed_as_lost_with_its_last_facts(folder):
    journal = Journal(folder)
    journal.admitted(record("req_1"))
    journal.committed("req_1", 32)
    journal.produced("req_1", 1)
    journal.flush()
    journal.produced("req_1", 3)
    journal.flush()
    journal.produced("req_1", 9)  # never flushed, so never told
    killed(journal)

    journal = Journal(folder)

    lost = journal.lookup(["req_1"])["req_1"]
    assert (lost.finish_reason, lost.output_tokens) == ("engine_lost", 3)
    assert [grant.committed for grant in lost.grants] == [True, False]
    assert lost.engine_boot_id == "eng_1"
    journal.close()


def test_the_bytes_of_every_journal_line_are_pinned(folder):
    journal = Journal(folder)
    journal.admitted(record("req_1"))
    journal.committed("req_1", 32)
    journal.produced("req_1", 3)
    journal.finished(record("req_1", output_tokens=3, finish_reason="max_tokens"))
    journal.reported(LeaseReport("lse_1", "req_1", 32, "expired", "device", 64, 10, 11))
    journal.close()

    facts = (
        '"request_id":"req_1","engine_boot_id":"eng_1","prompt_tokens":40,"read_tokens":16,'
        '"tokens_reused_promised":16,"tokens_reused_gift":0,"tokens_read_recomputed":0,'
        '"tokens_computed":24,"grants":['
        '{"tokens":32,"write":true,"outcome":"granted","reason":null,"committed":false,'
        '"lease_id":null},'
        '{"tokens":40,"write":true,"outcome":"granted","reason":null,"committed":false,'
        '"lease_id":null}],'
    )
    later = '"tokens_recomputed_preemption":0,"num_preemptions":0,"reads_by_tier":{},"queued_ms":0'
    ended = '"output_tokens":3,"overrun_tokens":0,"finish_reason":"max_tokens",'
    began = '"output_tokens":0,"overrun_tokens":0,"finish_reason":"error",'
    lines = {
        kind: [
            line.partition(" ")[2]
            for number in segment_numbers(folder, kind)
            for line in segment_path(folder, kind, number).read_text().splitlines()
        ]
        for kind in ("open", "closed", "lease")
    }
    assert lines == {
        "open": [
            f'{{"admitted":{{{facts}{began}{later}}}}}',
            '{"committed":"req_1","tokens":32}',
            '{"produced":{"req_1":3}}',
        ],
        "closed": [f"{{{facts}{ended}{later}}}"],
        "lease": [
            '{"lease_id":"lse_1","request_id":"req_1","tokens":32,"reason":"expired",'
            '"tier":"device","num_bytes":64,"idle_block_ms":10,"contended_block_ms":11}'
        ],
    }


def test_a_torn_last_line_is_no_line(folder):
    journal = Journal(folder)
    journal.admitted(record("req_1"))
    journal.produced("req_1", 1)
    journal.flush()
    whole_bytes = journal._open.size
    journal.produced("req_1", 2)
    journal.flush()
    killed(journal)
    path = segment_path(folder, "open", journal._open.number)
    torn = path.read_bytes()

    for end in range(whole_bytes, len(torn)):
        path.write_bytes(torn[:end])
        assert [data for _, data in read_segment(path)][-1] == {"produced": {"req_1": 1}}

    journal = Journal(folder)
    assert journal.lookup(["req_1"])["req_1"].output_tokens == 1
    journal.close()


def test_a_line_lost_in_the_middle_costs_only_itself(folder):
    journal = Journal(folder)
    for number in range(3):
        journal.finished(record(f"req_{number}"))
    journal.close()
    path = segment_path(folder, "closed", 1)
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = b"\0" * (len(lines[1]) - 1) + b"\n"
    path.write_bytes(b"".join(lines))

    journal = Journal(folder)

    assert list(journal.lookup(["req_0", "req_1", "req_2"])) == ["req_0", "req_2"]
    journal.close()


def test_what_is_in_flight_outlives_the_segment_it_began_in(folder):
    journal = Journal(folder, segment_bytes=2_000)
    journal.admitted(record("req_1"))
    journal.committed("req_1", 32)
    for output_tokens in range(1, 500):
        journal.produced("req_1", output_tokens)
        journal.flush()
    killed(journal)

    assert len(segment_numbers(folder, "open")) == 1
    journal = Journal(folder)
    lost = journal.lookup(["req_1"])["req_1"]
    assert lost.output_tokens == 499
    assert [grant.committed for grant in lost.grants] == [True, False]
    journal.close()


def test_the_oldest_records_go_first_when_the_journal_is_full(folder):
    journal = Journal(folder, segment_bytes=2_000, kept_bytes=6_000)
    ids = [f"req_{number}" for number in range(50)]
    for request_id in ids:
        journal.finished(record(request_id))
        journal.flush()

    kept = list(journal.lookup(ids))

    assert 5 < len(kept) < 30
    assert kept == ids[-len(kept) :]
    assert [request_id in journal for request_id in ids] == [id_ in kept for id_ in ids]
    journal.close()
    journal = Journal(folder, segment_bytes=2_000, kept_bytes=6_000)
    assert list(journal.lookup(ids)) == kept
    journal.close()


def test_starts_that_serve_nothing_leave_no_files_behind(folder):
    for _ in range(5):
        Journal(folder).close()

    assert len(list(folder.iterdir())) == 4  # the lock, one segment of each kind


def test_a_folder_is_one_engine_for_ever_and_another_folder_another(folder, tmp_path):
    ids = set()
    for _ in range(3):
        with closing(Journal(folder)) as journal:
            ids.add(journal.engine_id)

    assert len(ids) == 1
    with closing(Journal(tmp_path / "other")) as other:
        assert other.engine_id not in ids


@pytest.mark.parametrize("content", [b"", b"engine_", b"engine_" + 33 * b"0", b"\xff" * 39])
def test_a_damaged_engine_id_is_replaced(folder, content: bytes):
    Journal(folder).close()
    (folder / "lock").write_bytes(content)

    with closing(Journal(folder)) as journal:
        made = journal.engine_id

    assert made.startswith("engine_")
    assert len(made) == 39
    with closing(Journal(folder)) as again:
        assert again.engine_id == made


def test_a_sync_that_fails_stops_the_next_write(folder):
    journal = Journal(folder)
    unsyncable, other_end = os.pipe()
    os.dup2(other_end, journal._open._fd)  # writing works, syncing does not
    journal.admitted(record("req_1"))
    journal.flush()
    journal._syncer._thread.join(timeout=10)

    journal.produced("req_1", 1)
    with pytest.raises(JournalError, match="Cannot sync the journal"):
        journal.flush()

    killed(journal)
    os.close(unsyncable)
    os.close(other_end)


def test_two_engines_cannot_share_a_journal(folder):
    journal = Journal(folder)

    with pytest.raises(JournalError, match="Another engine is using the journal"):
        Journal(folder)

    journal.close()
    Journal(folder).close()


def test_a_journal_that_cannot_be_written_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")

    with pytest.raises(JournalError, match="Cannot write the journal"):
        Journal(tmp_path / "file" / "journal")


def test_a_full_disk_is_an_error_not_a_lost_fact(folder):
    journal = Journal(folder)
    journal.admitted(record("req_1"))
    full = os.open("/dev/full", os.O_WRONLY)
    os.dup2(full, journal._open._fd)
    os.close(full)

    with pytest.raises(JournalError, match="No space left on device"):
        journal.flush()

    killed(journal)


def test_lease_reports_are_kept_and_the_oldest_go_first(folder):
    journal = Journal(folder, segment_bytes=2_000, kept_bytes=6_000)
    for number in range(200):
        journal.reported(LeaseReport(f"lease:{number}", "req_1", 16, "expired", "device", 1, 5, 2))
        journal.flush()
    journal.close()
    Journal(folder, segment_bytes=2_000, kept_bytes=6_000).close()

    paths = [segment_path(folder, "lease", number) for number in segment_numbers(folder, "lease")]
    lines = [line for path in paths for _, line in read_segment(path)]

    assert lines[-1]["lease_id"] == "lease:199"
    assert lines[0]["lease_id"] != "lease:0"
    assert sum(path.stat().st_size for path in paths) <= 8_000


def test_the_newest_report_of_each_lease_is_read_back_across_files(folder):
    def report(lease_id, idle_block_ms):
        return LeaseReport(lease_id, "req_1", 16, "refreshed", "device", 1, idle_block_ms, 0)

    journal = Journal(folder, segment_bytes=400)
    for number in range(12):
        journal.reported(report(f"lease {number % 4}", number))
        journal.flush()
    journal.close()
    assert len(segment_numbers(folder, "lease")) > 2
    with segment_path(folder, "lease", 1).open("ab") as file:
        file.write(b"torn")

    journal = Journal(folder)

    assert journal.last_reports(3) == [report(f"lease {n % 4}", n) for n in (9, 10, 11)]
    assert journal.last_reports(9) == [report(f"lease {n % 4}", n) for n in (8, 9, 10, 11)]
    journal.close()
