"""The audit file: one JSON line per event, appended and on disk before the run goes on.

A run that is killed leaves every line it had written, and at most one torn line at the end, which reading
tolerates. Anything else that cannot be read is damage, and is named by its line. A run is never stopped by its
journal: what could not be written in the middle of a run is remembered in `Journal.problem`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from autoprec import logs
from autoprec.audit.events import EVENTS, SCHEMA_VERSION, Event, plain, utc_now
from autoprec.errors import AuditError, InputError

if TYPE_CHECKING:
    from autoprec.noun import Noun

try:
    import fcntl
except ImportError:  # Windows has no flock: there, two runs are kept apart by their run ids alone
    fcntl = None  # type: ignore[assignment]

__all__ = ["Audit", "Journal", "new_run_id", "read_audit"]

_START = b'{"schema_version":'
# Written behind a line that a killed run left unfinished, by the next run that appends to the file: so a torn line
# in the middle can be told from damage.
_TORN = b" #torn"


def new_run_id() -> str:
    """A fresh run id: UTC time to the millisecond, so that ids sort by time, and a random suffix.

    The randomness is the operating system's: no generator that a training run depends on is touched.
    """
    now = datetime.now(timezone.utc)
    return f"{now:%Y%m%dT%H%M%S}{now.microsecond // 1000:03d}Z-{secrets.token_hex(3)}"


class Journal:
    """An audit file, open for one run.

    Each event is written, flushed and synced to the disk before `write` returns: 0.1 to 10 ms, depending on the
    disk, for the few dozen events of a run. An existing audit file is appended to.

    Args:
        path: the file; missing folders are made.
        run_id: tells this run's lines from those of other runs in the file (see `new_run_id`).

    Raises:
        AuditError: the file cannot be written, is no audit file, or another run is writing it. Never raised later.
    """

    def __init__(self, path: str | os.PathLike[str], run_id: str) -> None:
        self.path = Path(path).expanduser()
        self.run_id = run_id
        self._sequence = 0
        self._lost = 0
        self._reason: str | None = None
        self._unfinished = False
        self._regular = True
        self._fd: int | None = self._open()

    @property
    def problem(self) -> str | None:
        """What the file lacks, and why, in a sentence; None if every event is in it."""
        if self._reason is None:
            return None
        what = f"{self._lost} of {self._sequence} events are" if self._lost else "The audit file is"
        return f"{what} not in {self.path}: {self._reason}"

    def write(self, event_name: str, payload: Noun) -> Event:
        """Write one event down and pass it on to the log.

        Args:
            event_name: one of `EVENTS`.
            payload: an instance of the class that `EVENTS` names for it.

        Returns:
            The event, also where it could not be written (see `problem`).
        """
        model = EVENTS.get(event_name)
        if model is None or not isinstance(payload, model):
            allowed = model.__name__ if model else f"none: the events are {', '.join(EVENTS)}"
            raise InputError(f"event {event_name!r} with a payload {type(payload).__name__}; allowed is {allowed}")
        event = Event(
            run_id=self.run_id,
            sequence=self._sequence,
            time=utc_now(),
            event=event_name,
            payload=plain(payload.model_dump()),
        )
        self._sequence += 1
        self._append(json.dumps(event.model_dump(), allow_nan=False, separators=(",", ":")).encode("ascii"))
        logs.say(event)
        return event

    def close(self) -> None:
        """Close the file; may be called again."""
        if self._fd is None:
            return
        self._notice_removal()
        with contextlib.suppress(OSError):
            if fcntl is not None and self._regular:
                # Explicitly, as a forked data-loading worker may still hold the same open file.
                fcntl.flock(self._fd, fcntl.LOCK_UN)
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = None

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open(self) -> int:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o666)
        except OSError as e:
            raise AuditError(_cannot("written", self.path, e)) from e
        try:
            self._regular = stat.S_ISREG(os.fstat(fd).st_mode)
            if self._regular:
                self._claim(fd)
        except BaseException:
            os.close(fd)
            raise
        return fd

    def _claim(self, fd: int) -> None:
        if fcntl is not None:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as e:
                raise AuditError(
                    f"audit file {self.path} is being written by another run. "
                    "Give this run a file of its own (audit=...)."
                ) from e
            except OSError:  # some network file systems cannot lock; run ids still keep the runs apart
                pass
        head = os.read(fd, len(_START))
        if not (head.startswith(_START) or _START.startswith(head)):
            raise AuditError(
                f"{self.path} exists and is not an audit file (its first line is none). "
                "Nothing was written to it. Give another path (audit=...)."
            )
        if head:
            os.lseek(fd, -1, os.SEEK_END)
            self._unfinished = os.read(fd, 1) != b"\n"

    def _append(self, line: bytes) -> None:
        try:
            if self._fd is None:
                raise OSError(errno.EBADF, "the journal is closed")  # noqa: TRY301 - one place counts what is lost
            if self._unfinished:
                line = self._ending(self._fd) + line
            _write_all(self._fd, line + b"\n")
            self._unfinished = False
            if self._regular:
                os.fsync(self._fd)
        except OSError as e:
            self._lost += 1
            self._unfinished = self._regular
            if self._reason is None:
                self._reason = e.strerror or str(e)
                logs.warn(f"The audit is incomplete: {self.problem}. The run goes on.")
        self._notice_removal()

    @staticmethod
    def _ending(fd: int) -> bytes:
        """What must follow the unfinished last line so that a new one can begin."""
        size = os.lseek(fd, 0, os.SEEK_END)
        os.lseek(fd, 0, os.SEEK_SET)
        last = os.read(fd, size).rpartition(b"\n")[2]
        if not last:
            return b""
        return b"\n" if _parses(last) else _TORN + b"\n"

    def _notice_removal(self) -> None:
        """A deleted file takes writes without complaint and is gone when it is closed."""
        if self._fd is None or not self._regular:
            return
        with contextlib.suppress(OSError):
            if os.fstat(self._fd).st_nlink == 0:
                self._lost = self._sequence
                self._reason = "the file was deleted during the run"


@dataclass(frozen=True)
class Audit:
    """The content of an audit file.

    Attributes:
        path: the file.
        events: in the order of the file, those of unknown names included.
        torn: whether a line was cut off, as by a kill in the middle of a write.
        unknown: how many events have a name that this version does not know.
        missing: how many events were never written (gaps in a run's sequence).
    """

    path: Path
    events: tuple[Event, ...]
    torn: bool = False
    unknown: int = 0
    missing: int = 0

    @property
    def runs(self) -> tuple[str, ...]:
        """The run ids, in the order of their first event."""
        return tuple(dict.fromkeys(e.run_id for e in self.events))

    def of(self, run_id: str) -> tuple[Event, ...]:
        """The events of one run."""
        return tuple(e for e in self.events if e.run_id == run_id)


def read_audit(path: str | os.PathLike[str], run_id: str | None = None) -> Audit:
    """Read an audit file.

    Args:
        path: the file.
        run_id: only the events of this run; None: of all.

    Raises:
        AuditError: there is no such file or run, it is not an audit file, a later version wrote it, or a line is
            damaged; the text names the line. A line that a kill left unfinished is not damage (`Audit.torn`).
    """
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
    except OSError as e:
        raise AuditError(_cannot("read", file, e)) from e
    *lines, rest = content.split(b"\n")
    if rest and _parses(rest):  # complete but for the newline
        lines.append(rest)
        rest = b""
    if rest and not lines and not (rest.startswith(_START) or _START.startswith(rest)):
        raise AuditError(_damaged(file, 1, "not an event"))
    events = [event for number, line in enumerate(lines, 1) if (event := _event(file, number, line)) is not None]
    torn = bool(rest) or len(events) < len(lines)
    if run_id is not None:
        known = tuple(dict.fromkeys(e.run_id for e in events))
        events = [e for e in events if e.run_id == run_id]
        if not events:
            raise AuditError(f"{file} has no run {run_id!r}; its runs are {', '.join(known) or 'none'}.")
    return Audit(file, tuple(events), torn, sum(not e.known for e in events), _missing(events))


def _event(file: Path, number: int, line: bytes) -> Event | None:
    """The event of a line; None for one that is marked as torn."""
    if line.endswith(_TORN):
        return None
    try:
        record = json.loads(line)
        version = record.get("schema_version") if isinstance(record, dict) else None
        if isinstance(version, int) and version > SCHEMA_VERSION:
            raise AuditError(
                f"{file}, line {number}: written in schema version {version}, and this autoprec reads up to "
                f"{SCHEMA_VERSION}. Read it with a later autoprec."
            )
        event = Event.model_validate(record)
        event.body()
    except ValidationError as e:
        first = e.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise AuditError(_damaged(file, number, f"{where}: {first['msg']}" if where else first["msg"])) from e
    except json.JSONDecodeError as e:
        raise AuditError(_damaged(file, number, f"no JSON from column {e.colno} on")) from e
    except ValueError as e:
        raise AuditError(_damaged(file, number, "no text")) from e
    return event


def _damaged(file: Path, number: int, why: str) -> str:
    if number == 1:
        return f"{file}, line 1: {why}. Is this an audit file? Those end in .jsonl and a run prints where its file is."
    return f"{file}, line {number}: damaged ({why}). To read the rest, delete this line in a copy of the file."


def _missing(events: list[Event]) -> int:
    last: dict[str, int] = {}
    missing = 0
    for event in events:
        missing += max(0, event.sequence - last.get(event.run_id, -1) - 1)
        last[event.run_id] = event.sequence
    return missing


def _parses(line: bytes) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _cannot(verb: str, path: Path, error: OSError) -> str:
    todo: dict[Any, str] = {
        "written": "Give a file in a folder that you can write to (audit=...).",
        "read": "`learn.autoprec.audit_path` and the last line that a run prints say where its file is.",
    }
    return f"audit file {path} cannot be {verb}: {error.strerror or error}. {todo[verb]}"
