"""The run directory: where every process leaves its flight record, and where a request for new ones is written.

``job.json`` describes the run. ``rank-0003.json`` is the record of process 3, ``stacks-0003.txt`` what it wrote at
signals. A file ``request`` asks every process for a new record: it holds a random word, which the records repeat.

A directory may be shared by several hosts. Only what the operating system says of a process is limited to its own.
"""

import fnmatch
import math
import os
import secrets
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.doctor.conditions import Evidence, ProcessEvidence
from penstock.doctor.records import JobRecord, RankRecord, dump_record, read_record
from penstock.errors import PenstockError
from penstock.process_states import ProcessState
from penstock.values.documents import read_json

_POLL_SECONDS = 0.05
_STACKS_LETTERS = 20_000


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of a run at `path`."""

    path: Path

    @property
    def job_file(self) -> Path:
        """The description of the run."""
        return self.path / "job.json"

    def record_file(self, process: int) -> Path:
        """The record of a process."""
        return self.path / f"rank-{process:04d}.json"

    def stacks_file(self, process: int) -> Path:
        """The stacks that a process wrote at signals."""
        return self.path / f"stacks-{process:04d}.txt"

    def write(self, record: JobRecord | RankRecord) -> None:
        """Writes a record: a reader sees the whole new one or the whole old one. Raises `OSError`."""
        path = self.record_file(record.process) if isinstance(record, RankRecord) else self.job_file
        # Two threads of a process may write at the same time.
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            aside.write_text(dump_record(record), encoding="utf-8")
            aside.replace(path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise

    def read_job(self) -> JobRecord:
        """The description of the run. Raises `PenstockError` if there is none."""
        if not self.job_file.exists():
            raise PenstockError(
                f"{self.path}: expected the directory of a run with a file job.json, found none: give the directory "
                "that the error or the log of the run names, or the one in PENSTOCK_RUN_DIR"
            )
        return read_record(JobRecord, read_json(self.job_file, PenstockError))

    def read(self, process: int) -> RankRecord | None:
        """The record of a process; None if there is none, or none that can be read."""
        try:
            return read_record(RankRecord, read_json(self.record_file(process), PenstockError))
        except PenstockError:
            return None

    def request(self) -> str:
        """Asks all processes for new records. Returns the word that these will repeat. Raises `OSError`."""
        word = secrets.token_hex(8)
        aside = self.path / f".request.{word}"
        aside.write_text(word, encoding="utf-8")
        aside.replace(self.path / "request")
        return word

    def requested(self) -> str:
        """The word of the present request; empty if there is none."""
        with suppress(OSError, UnicodeDecodeError):
            return (self.path / "request").read_text(encoding="utf-8")
        return ""

    def remove(self, process: int, processes: int) -> None:
        """Removes the files of a process that leaves; the directory, too, if all `processes` of the run have left.

        A process without a record may be about to write its first.
        """
        with suppress(OSError):
            self.record_file(process).unlink()
        with suppress(OSError):
            self.stacks_file(process).unlink()
        # Another process may remove the directory at any moment.
        with suppress(FileNotFoundError):
            (self.path / f"left-{process:04d}").touch()
            if len(fnmatch.filter(os.listdir(self.path), "left-*")) >= processes:
                shutil.rmtree(self.path, ignore_errors=True)


def examine(
    directory: RunDirectory,
    wait_seconds: float = 5.0,
    *,
    signals: bool = False,
    answer: Callable[[], None] = lambda: None,
) -> Evidence:
    """Asks all processes of a run for their records, and collects the evidence.

    It waits for at most `wait_seconds`, and not for processes that are gone or stopped. `signals`: processes on this
    host that do not answer are sent SIGUSR2, at which they write their stacks. Meanwhile it calls `answer`, so that a
    process of the run can answer itself. Raises `PenstockError` if the directory is not that of a run, or cannot be
    written.
    """
    if not 0 <= wait_seconds < math.inf:
        raise PenstockError(f"wait: expected seconds, 0 or more, found {wait_seconds!r}: give the seconds to wait")
    job = directory.read_job()
    try:
        word = directory.request()
    except OSError as error:
        raise PenstockError(
            f"{directory.path}: the request for records cannot be written ({error.strerror}): expected a directory "
            "that this user may write to. Run as the user of the run"
        ) from None
    requests = _Requests(directory, job, word)
    deadline = time.monotonic() + wait_seconds
    while awaited := requests.awaited():
        left = deadline - time.monotonic()
        if left < 0:
            break
        if signals and left < wait_seconds / 2:
            requests.signal(awaited)
        answer()
        time.sleep(_POLL_SECONDS)
    return Evidence(job, tuple(requests.evidence(process) for process in range(len(job.processes))))


class _Requests:
    """The answers to a request: `word` asked all processes of `job`."""

    def __init__(self, directory: RunDirectory, job: JobRecord, word: str) -> None:
        self._directory, self._job = directory, job
        self._words = {word}
        """The word, and those of later requests by others: an answer to them is as new."""
        self._states = [ProcessState.UNKNOWN for _ in job.processes]
        self._records: dict[int, RankRecord | None] = {}
        self._signaled: set[int] = set()

    def awaited(self) -> list[int]:
        """Reads the new answers. Returns the processes that may still answer."""
        self._words.add(self._directory.requested())
        self._states = [identity.state() for identity in self._job.processes]
        for process in range(len(self._job.processes)):
            if not self._has_answered(process):
                read = self._directory.read(process)
                self._records[process] = read if read is not None and read.job == self._job.job else None
        alive = (ProcessState.RUNNING, ProcessState.UNKNOWN)
        return [process for process, state in enumerate(self._states) if state in alive and not self._is_final(process)]

    def signal(self, processes: Iterable[int]) -> None:
        """Sends each of `processes` one signal, at which it writes its stacks even if its interpreter is blocked."""
        for process in set(processes) - self._signaled:
            self._signaled.add(process)
            pid = self._job.processes[process].pid
            # Without a handler the signal would end the process.
            if self._states[process] is ProcessState.RUNNING and catches(pid, signal.SIGUSR2):
                with suppress(OSError):
                    os.kill(pid, signal.SIGUSR2)

    def evidence(self, process: int) -> ProcessEvidence:
        """Collects what is known of `process`."""
        record, stacks = self._records.get(process), ""
        if process in self._signaled and not self._has_answered(process):
            with suppress(OSError):
                file = self._directory.stacks_file(process)
                stacks = file.read_text(encoding="utf-8", errors="replace")[-_STACKS_LETTERS:]
        return ProcessEvidence(
            self._job.processes[process],
            self._states[process],
            self._has_answered(process),
            record,
            age_seconds=max(0.0, time.time() - record.written_unix) if record is not None else 0.0,
            stacks=stacks,
        )

    def _has_answered(self, process: int) -> bool:
        record = self._records.get(process)
        return record is not None and record.request in self._words

    def _is_final(self, process: int) -> bool:
        """Whether the process has answered, or has ended its pipeline and need not answer any more."""
        record = self._records.get(process)
        return record is not None and (record.request in self._words or bool(record.failure) or record.left)


def catches(pid: int, number: int) -> bool | None:
    """Whether the process has a handler of signal `number`; None if the operating system does not say."""
    with suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return None
