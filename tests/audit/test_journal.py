from __future__ import annotations

import errno
import json
import math
import os
import random
import signal
import subprocess
import sys
import threading
from typing import TYPE_CHECKING

import pytest
from sample_runs import RUN, repaired

from autoprec.audit import journal as journal_module
from autoprec.audit.events import EVENTS, Event, LegFinished, Note
from autoprec.audit.journal import Journal, new_run_id, read_audit
from autoprec.errors import AuditError, InputError
from autoprec.evidence import Leg, LegSpec, Step

if TYPE_CHECKING:
    from pathlib import Path


def write(path: Path, *texts: str, run_id: str = RUN) -> None:
    with Journal(path, run_id) as journal:
        for text in texts:
            journal.write("note", Note(text=text))


def texts(path: Path) -> list[str]:
    return [e.payload["text"] for e in read_audit(path).events]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folders" / "audit.jsonl"
    with Journal(path, RUN) as journal:
        sent = [journal.write(e.event, EVENTS[e.event].model_validate(e.payload)) for e in repaired()]
        assert journal.problem is None
    audit = read_audit(path)
    assert audit.events == tuple(sent)
    assert [e.sequence for e in audit.events] == list(range(len(sent)))
    assert [e.payload for e in audit.events] == [e.payload for e in repaired()]
    assert (audit.runs, audit.torn, audit.unknown, audit.missing) == ((RUN,), False, 0, 0)


def test_nan_and_infinity_survive_in_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    step = Step(step=0, loss=math.nan, lr=0.1, grad_norm=math.inf)
    sent = LegFinished.of("main", Leg(spec=LegSpec(precision="fp16"), steps=(step,), metrics={"m": -math.inf}))
    with Journal(path, RUN) as journal:
        journal.write("leg_finished", sent)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    json.loads(path.read_text(encoding="ascii"), parse_constant=refuse)
    body = read_audit(path).events[0].body()
    assert isinstance(body, LegFinished)
    assert math.isnan(body.leg.steps[0].loss)
    assert body.leg.steps[0].grad_norm == math.inf
    assert body.leg.metrics["m"] == -math.inf


def test_every_line_is_on_the_disk_before_write_returns(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "audit.jsonl", RUN)
    for i in range(3):
        journal.write("note", Note(text="x"))
        assert len((tmp_path / "audit.jsonl").read_bytes().splitlines()) == i + 1
    journal.close()
    journal.close()


def test_runs_in_one_file_are_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "a", run_id="one")
    write(path, "b", "c", run_id="two")
    assert read_audit(path).runs == ("one", "two")
    assert [e.payload["text"] for e in read_audit(path, "two").events] == ["b", "c"]
    assert len(read_audit(path).of("one")) == 1
    with pytest.raises(AuditError, match=r"no run 'three'; its runs are one, two"):
        read_audit(path, "three")


def test_a_last_line_cut_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "first", "second")
    content = path.read_bytes()
    begin = content.index(b"\n") + 1
    for end in range(begin, len(content) + 1):
        path.write_bytes(content[:end])
        audit = read_audit(path)
        whole = end >= len(content) - 1  # only the newline is missing
        assert len(audit.events) == 1 + whole, end
        assert audit.torn == (not whole and end > begin), end
        # A later run may append to it, and both stay readable.
        write(path, "later", run_id="later")
        again = read_audit(path)
        assert len(again.events) == 2 + whole, end
        assert again.torn == audit.torn, end


def test_a_single_line_cut_at_every_byte(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "only")
    content = path.read_bytes()
    for end in range(len(content) - 1):
        path.write_bytes(content[:end])
        audit = read_audit(path)
        assert (audit.events, audit.torn) == ((), end > 0)


@pytest.mark.parametrize(
    ("find", "put", "says"),
    [
        (b'"text":"b"', b'"text:"b"', "no JSON from column"),
        (b'"text":"b"', b'"tent":"b"', "text: Field required"),
        (b'"text":"b"', b'"text":"\xff"', "no text"),
        (b'"sequence":1', b'"sequence":-1', "sequence: Input should be greater than or equal to 0"),
        (b'{"schema_version":1,"run_id"', b'{"schema_version":1,"run_ix"', "run_id: Field required"),
    ],
)
def test_damage_in_the_middle_is_named(tmp_path: Path, find: bytes, put: bytes, says: str) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "a", "b", "c")
    lines = path.read_bytes().split(b"\n")
    lines[1] = lines[1].replace(find, put)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(AuditError) as raised:
        read_audit(path)
    assert f"{path}, line 2: damaged ({says}" in str(raised.value)
    assert "delete this line in a copy" in str(raised.value)


def test_a_later_schema_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "a")
    path.write_bytes(path.read_bytes().replace(b'"schema_version":1', b'"schema_version":2'))
    with pytest.raises(AuditError, match=r"line 1: written in schema version 2, .* reads up to 1"):
        read_audit(path)


def test_unknown_events_are_kept_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "a", "b")
    path.write_bytes(path.read_bytes().replace(b'"event":"note"', b'"event":"verse"', 1))
    audit = read_audit(path)
    assert audit.unknown == 1
    assert not audit.events[0].known
    assert audit.events[0].body() is None
    assert audit.events[0].payload == {"text": "a"}


def test_missing_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    write(path, "a", "b", "c", "d")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[3])
    assert read_audit(path).missing == 2


def test_a_killed_run_leaves_what_it_wrote(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    code = (
        "import os, signal, sys\n"
        "from autoprec.audit.events import Note\n"
        "from autoprec.audit.journal import Journal\n"
        "journal = Journal(sys.argv[1], 'killed')\n"
        "for i in range(5):\n"
        "    journal.write('note', Note(text=str(i)))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert texts(path) == ["0", "1", "2", "3", "4"]
    write(path, "after", run_id="next")  # the lock died with the process
    assert read_audit(path).runs == ("killed", "next")


def test_two_journals_at_once_do_not_mix(tmp_path: Path) -> None:
    def run(name: str) -> None:
        write(tmp_path / name, *(f"{name}{i}" for i in range(30)), run_id=name)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name in "ab":
        assert texts(tmp_path / name) == [f"{name}{i}" for i in range(30)]


def test_one_file_is_not_shared_by_two_runs_at_a_time(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with Journal(path, "one"), pytest.raises(AuditError, match=r"being written by another run.*of its own"):
        Journal(path, "two")
    Journal(path, "two").close()


@pytest.mark.parametrize("where", ["folder", "file/audit.jsonl", "file/deep/audit.jsonl"])
def test_a_path_that_cannot_be_written_is_refused_at_once(tmp_path: Path, where: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AuditError) as raised:
        Journal(tmp_path / where, RUN)
    assert str(tmp_path / where) in str(raised.value)
    assert "Give a file in a folder that you can write to" in str(raised.value)
    assert isinstance(raised.value, OSError)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_file_of_another_kind_is_never_appended_to(tmp_path: Path) -> None:
    path = tmp_path / "model.pkl"
    path.write_bytes(b"\x80\x04 weights")
    with pytest.raises(AuditError, match=r"is not an audit file.*Nothing was written"):
        Journal(path, RUN)
    assert path.read_bytes() == b"\x80\x04 weights"


@pytest.mark.parametrize("content", [b"\x80\x04 weights", b"hello\nworld\n", b"{}\n", b"[1]\n"])
def test_a_file_of_another_kind_is_not_read(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "other"
    path.write_bytes(content)
    with pytest.raises(AuditError, match=r"line 1: .*Is this an audit file\?"):
        read_audit(path)


@pytest.mark.parametrize("where", [".", "nothing.jsonl"])
def test_an_unreadable_file_is_an_audit_error(tmp_path: Path, where: str) -> None:
    with pytest.raises(AuditError, match="cannot be read"):
        read_audit(tmp_path / where)


def test_a_full_disk_never_stops_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "audit.jsonl"
    real = os.write
    full = False

    def write_some(fd: int, data: bytes) -> int:
        if not full:
            return real(fd, data)
        if len(data) > 10:
            return real(fd, data[:10])  # a part fits, as it does on a disk that fills up
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(journal_module.os, "write", write_some)
    with Journal(path, RUN) as journal:
        journal.write("note", Note(text="a"))
        full = True
        # Ten bytes at a time fit until less than ten are left: the line is torn within its last ten bytes.
        journal.write("note", Note(text="lost"))
        full = False
        event = journal.write("note", Note(text="c"))
        assert event.sequence == 2
        assert journal.problem == f"1 of 3 events are not in {path}: No space left on device"
    assert texts(path) == ["a", "c"]
    assert read_audit(path).torn
    assert read_audit(path).missing == 1


def test_a_deleted_file_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    with Journal(path, RUN) as journal:
        journal.write("note", Note(text="a"))
        path.unlink()
    assert journal.problem == f"1 of 1 events are not in {path}: the file was deleted during the run"


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "audit.jsonl", RUN)
    journal.close()
    journal.write("note", Note(text="a"))
    assert journal.problem is not None
    assert "the journal is closed" in journal.problem


def test_a_device_can_be_written_to() -> None:
    with Journal("/dev/null", RUN) as journal:
        journal.write("note", Note(text="a"))
    assert journal.problem is None


def test_a_wrong_payload_is_a_mistake_of_ours(tmp_path: Path) -> None:
    with Journal(tmp_path / "audit.jsonl", RUN) as journal:
        with pytest.raises(InputError, match="allowed is Diagnosis"):
            journal.write("diagnosed", Note(text="a"))
        with pytest.raises(InputError, match="allowed is none: the events are run_started"):
            journal.write("dreamt", Note(text="a"))
    assert (tmp_path / "audit.jsonl").read_bytes() == b""


def test_run_ids_sort_and_leave_the_generator_alone() -> None:
    state = random.getstate()
    ids = [new_run_id() for _ in range(50)]
    assert random.getstate() == state
    assert len(set(ids)) == 50
    times = [i.split("-")[0] for i in ids]
    assert times == sorted(times)


def test_reading_a_large_file_is_quick(tmp_path: Path) -> None:
    path = tmp_path / "audit.jsonl"
    line = Event(run_id=RUN, sequence=0, time="2026-03-14T15:09:26.535897Z", event="note", payload={"text": "x"})
    text = line.model_dump_json()
    path.write_text("".join(text.replace('"sequence":0', f'"sequence":{i}') + "\n" for i in range(10_000)))
    assert len(read_audit(path).events) == 10_000
