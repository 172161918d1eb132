"""Writes the flight records of this process: on request, at a signal, at a failure, and every few seconds.

A thread of its own does it, so that neither a main thread that is blocked in a library nor a disk that does not answer
keeps the other from going on.

`faulthandler` writes the Python stacks, in C. At SIGUSR2 its handler does so at once, even if a library holds the
interpreter's lock; Python's own handlers would run only when the main thread executes Python again. For a record it
does so under Python 3.11, where walking the frame objects of a thread that runs ends the process now and then
(segmentation fault in `frame.f_back`). Under later versions frames are walked: there `faulthandler` ends it (3.13.0).
"""

import atexit
import faulthandler
import linecache
import logging
import os
import queue
import re
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from traceback import walk_stack

import torch

from penstock.doctor.diagnosis import diagnose
from penstock.doctor.records import Frame, JobRecord, Memory, RankRecord, ThreadRecord, WaitRecord
from penstock.doctor.run_directories import RunDirectory, catches, examine
from penstock.errors import PenstockError
from penstock.runtime.assembly.guarded_calls import FailureGuard
from penstock.runtime.collectives.failures import WaitObserver
from penstock.runtime.devices.process_hooks import hooks_allowed
from penstock.runtime.engine.flight_recorder import FlightRecorder, Position
from penstock.runtime.transport.worlds import World
from penstock.values.plans import Plan

RUN_DIR = "PENSTOCK_RUN_DIR"
"""The environment variable with the run directory. It is kept when the run ends; a temporary one is removed."""
_PREFIX = "penstock-run-"
"""How the names of temporary directories begin."""
_KEPT_SECONDS = 24 * 3600.0
"""How long the records of a run that failed are kept at least."""
_POLL_SECONDS = 0.2
_HEARTBEAT_SECONDS = 5.0
"""A process that is killed leaves a record that is no older than this."""
_PRESENT_SECONDS = 1.5
"""A wait that was last seen longer ago is over."""
_ANSWER_SECONDS = 3.0
"""How long a diagnosis waits for the records of the other processes."""
_log = logging.getLogger("penstock")
_FRAMES = 40
_LIBRARIES = (str(Path(__file__).parents[2]), str(Path(os.__file__).parent), "<frozen")
"""Where files lie that are not the user's own. Installed packages lie below the second."""
_WRITTEN = sys.version_info < (3, 12)
"""Whether `faulthandler` writes the stacks for a record, in place of a walk over frames."""
_THREAD = re.compile(r"(?:Thread|Current thread) (0x[0-9a-f]+) .*")
_CALL = re.compile(r'  File "(.*)", line (\d+|\?\?\?) in (.*)')


class FlightWatch(WaitObserver):
    """Watches over one pipeline of this process, and writes its records to `directory`."""

    def __init__(
        self,
        directory: RunDirectory,
        job: JobRecord,
        process: int,
        *,
        recorder: FlightRecorder,
        guard: FailureGuard,
        device: torch.device,
        temporary: bool,
    ) -> None:
        """`temporary`: the directory is removed after a run without a failure."""
        self._directory, self._job, self._process = directory, job, process
        machine = job.processes[process].machine
        self._neighbours = [number for number, one in enumerate(job.processes) if one.machine == machine]
        """The processes on this host."""
        self._recorder = weakref.ref(recorder)
        """It is gone when the pipeline was dropped without being closed."""
        self._guard, self._device, self._temporary = guard, device, temporary
        self._wait: tuple[str, Sequence[int], float, float] | None = None
        """The context and the peers of the last long wait, and when it was first and last seen."""
        self._failure, self._left, self._warned = "", False, False
        self._requested, self._stacks_size, self._written = "", 0, float("-inf")
        self._stacks: SignalStacks | None = None
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="penstock flight watch", daemon=True)
        self._thread.start()
        if hooks_allowed():
            atexit.register(self.close)

    def waiting(self, context: str, peers: Sequence[int]) -> None:
        if threading.get_ident() != self._guard.call[2]:
            # The watchdog of a device looks at messages that no rank need wait for yet.
            return
        now, seen = time.perf_counter(), self._wait
        same = seen is not None and seen[0] == context and now - seen[3] < _PRESENT_SECONDS
        self._wait = context, peers, seen[2] if same and seen is not None else now, now

    def failing(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._have_done(self._write)

    def explain(self) -> str:
        found: list[str] = []
        self._have_done(lambda: found.append(self._diagnose()))
        return found[0] if found else ""

    def close(self) -> None:
        """Ends the thread, and removes the records of a run without a failure. A second call does nothing."""
        atexit.unregister(self.close)
        if self._thread.is_alive():
            self._left = not (self._failure or self._guard.failed)
            self._have_done(self._leave)
            self._jobs.put(None)
            self._thread.join(_ANSWER_SECONDS)

    def _have_done(self, job: Callable[[], None]) -> None:
        """Has the thread do `job`, and waits for it, but not for a disk that does not answer."""
        done = threading.Event()

        def do() -> None:
            try:
                job()
            finally:
                done.set()

        self._jobs.put(do)
        done.wait(2 * _ANSWER_SECONDS)

    def _run(self) -> None:
        try:
            self._begin()
        except OSError as error:
            self._warn(error)
        while self._recorder() is not None:
            try:
                job = self._jobs.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                job = self._look
            if job is None:
                return
            job()
        atexit.unregister(self.close)
        self._left = not (self._failure or self._guard.failed)
        self._leave()

    def _begin(self) -> None:
        self._directory.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._neighbours[0] == self._process:
            self._directory.write(self._job)
            if self._temporary:
                _remove_old(self._directory.path.parent)
        self._stacks = SignalStacks(self._directory.stacks_file(self._process))
        self._write()

    def _look(self) -> None:
        """Writes a record if one was requested, at a signal, or if the last one is old."""
        word, size = self._directory.requested(), self._stacks.size() if self._stacks else 0
        due = time.monotonic() - self._written > _HEARTBEAT_SECONDS
        if word != self._requested or size != self._stacks_size or due:
            self._requested, self._stacks_size = word, size
            self._write()

    def _write(self) -> None:
        self._written = time.monotonic()
        try:
            self._directory.write(self._record())
        except OSError as error:
            self._warn(error)

    def _warn(self, error: OSError) -> None:
        """A run does not end because a disk is full."""
        if not self._warned:
            self._warned = True
            _log.warning(
                "flight records cannot be written to %s: %s. `penstock doctor` will know nothing of process %d. Set %s "
                "to another directory",
                self._directory.path,
                error.strerror,
                self._process,
                RUN_DIR,
            )

    def _diagnose(self) -> str:
        self._write()
        try:
            found = diagnose(examine(self._directory, _ANSWER_SECONDS, answer=self._look))
        except (PenstockError, OSError) as error:
            _log.debug("no diagnosis: %s", error)
            return ""
        return f". Diagnosis: {found.sentence}. `penstock doctor {self._directory.path}` shows all ranks"

    def _leave(self) -> None:
        if self._stacks is not None:
            self._stacks.close()
        if self._left and self._temporary:
            # A temporary directory is that of one host.
            self._directory.remove(self._process, len(self._neighbours))
        else:
            self._write()

    def _record(self) -> RankRecord:
        recorder, now = self._recorder(), time.perf_counter()
        position = Position(0) if recorder is None else recorder.position()
        place, since, thread = self._guard.call
        return RankRecord(
            job=self._job.job,
            process=self._process,
            identity=self._job.processes[self._process],
            written_unix=time.time(),
            request=self._directory.requested(),
            failure=self._failure,
            left=self._left,
            call=place,
            call_seconds=max(0.0, now - since),
            steps=position.steps,
            segment=position.segment,
            stages=position.stages,
            split=position.split,
            rows=position.rows,
            last=position.last,
            usual=dict(position.usual),
            wait=self._present_wait(now),
            memory=_memory(self._device),
            threads=stacks_of_threads(thread),
        )

    def _present_wait(self, now: float) -> WaitRecord | None:
        if self._wait is None or now - self._wait[3] > _PRESENT_SECONDS:
            return None
        context, peers, since, _ = self._wait
        return WaitRecord(context, tuple(peers), now - since)


def watch_flight(
    world: World, plan: Plan, recorder: FlightRecorder, guard: FailureGuard, device: torch.device
) -> Callable[[], None]:
    """Begins to watch, and returns what ends it.

    A single process is watched only if `RUN_DIR` is set: no rank waits for it.
    """
    given = os.environ.get(RUN_DIR, "")
    if world.processes == 1 and not given:
        return lambda: None
    path = Path(given) if given else Path(tempfile.gettempdir()) / f"{_PREFIX}{world.name}"
    schedule = plan.schedule if isinstance(plan.schedule, str) else plan.schedule.name
    ranks = world.processes // plan.tensor_parallel
    job = JobRecord(world.name, schedule, ranks, plan.tensor_parallel, plan=str(plan), processes=world.identities)
    watch = FlightWatch(
        RunDirectory(path.absolute()),
        job,
        world.rank,
        recorder=recorder,
        guard=guard,
        device=device,
        temporary=not given,
    )
    world.observe(watch)
    _log.debug("flight records of this run: %s", path)
    return watch.close


def _remove_old(parent: Path) -> None:
    """Removes the records of this user's runs that ended long ago. Those of a run that goes on are never that old."""
    for path in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):
            found = path.lstat()
            old = time.time() - found.st_mtime > _KEPT_SECONDS
            if old and found.st_uid == os.getuid() and stat.S_ISDIR(found.st_mode) and (path / "job.json").is_file():
                shutil.rmtree(path)


def _memory(device: torch.device) -> Memory:
    host = None
    with suppress(OSError):
        host = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * os.sysconf("SC_PAGE_SIZE")
    if device.type != "cuda":
        return Memory(host)
    return Memory(host, torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device))


class SignalStacks:
    """Makes SIGUSR2 write all stacks to the file `path`, unless the signal has a handler or the process may not be
    changed.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8") if _is_free() else None
        if self._file is not None:
            faulthandler.register(signal.SIGUSR2, file=self._file, all_threads=True, chain=False)

    def size(self) -> int:
        """The size of the file, which grows at every signal."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Gives the signal back. A handler that the user has set since then stays."""
        if self._file is not None:
            if signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL:
                faulthandler.unregister(signal.SIGUSR2)
            with suppress(OSError):
                self._file.close()
            self._file = None


def stacks_of_threads(training: int) -> tuple[ThreadRecord, ...]:
    """The stacks of all threads but the present one. `training`: the identifier of the thread that called the pipeline
    last.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return tuple(
        ThreadRecord(names.get(ident, f"thread {ident}"), ident == training, frames)
        for ident, frames in (_read_stacks(_written_stacks()) if _WRITTEN else _walked_stacks()).items()
        if ident != threading.get_ident()
    )


def _walked_stacks() -> dict[int, tuple[Frame, ...]]:
    """As `_read_stacks`."""
    walked = ((ident, islice(walk_stack(frame), _FRAMES)) for ident, frame in sys._current_frames().items())
    return {
        ident: tuple(reversed([_call(f.f_code.co_filename, line or 0, f.f_code.co_name) for f, line in frames]))
        for ident, frames in walked
    }


def _written_stacks() -> str:
    in_memory = sys.platform == "linux"
    with os.fdopen(os.memfd_create("stacks"), "w+b") if in_memory else tempfile.TemporaryFile() as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read().decode(errors="replace")


def _read_stacks(text: str) -> dict[int, tuple[Frame, ...]]:
    """The frames of each thread, by its identifier, outermost call first: at most the last `_FRAMES` calls."""
    stacks: dict[int, list[Frame]] = {}
    for line in text.splitlines():
        if thread := _THREAD.fullmatch(line):
            calls = stacks.setdefault(int(thread[1], 16), [])
        elif (call := _CALL.fullmatch(line)) and len(calls) < _FRAMES:
            calls.append(_call(call[1], int(call[2]) if call[2].isdigit() else 0, call[3]))
    return {ident: tuple(reversed(calls)) for ident, calls in stacks.items()}


def _call(file: str, line: int, function: str) -> Frame:
    return Frame(file, line, function, linecache.getline(file, line).strip(), file.startswith(_LIBRARIES))


def _is_free() -> bool:
    if not hooks_allowed() or sys.platform == "win32" or signal.getsignal(signal.SIGUSR2) is not signal.SIG_DFL:
        return False
    # Python does not know of handlers that were set in C.
    return not catches(os.getpid(), signal.SIGUSR2)
