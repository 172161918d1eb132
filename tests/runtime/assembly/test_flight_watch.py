"""The watch writes records at signals and requests, takes no one's signal, and leaves nothing behind."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import penstock
from penstock.doctor.records import JobRecord
from penstock.doctor.run_directories import RunDirectory, catches, examine
from penstock.process_states import ProcessIdentity
from penstock.runtime.assembly.flight_watch import RUN_DIR, FlightWatch, stacks_of_threads
from penstock.runtime.assembly.guarded_calls import FailureGuard
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS
from penstock.runtime.engine.flight_recorder import FlightRecorder
from penstock.runtime.transport.worlds import SingleProcess
from support.training import Case

CASE = Case("layered", "1f1b-flush", 2, 4)
needs_proc = pytest.mark.skipif(catches(os.getpid(), signal.SIGTERM) is None, reason="needs Linux's /proc")


def eventually(condition: Callable[[], object]) -> bool:
    """Whether `condition` becomes true, in a time that is far longer than it takes."""
    deadline = time.monotonic() + 60
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def watch_over(path: Path, recorder: FlightRecorder, *, temporary: bool = True) -> FlightWatch:
    """A watch of its own, without a pipeline."""
    job = JobRecord("job", "gpipe", 1, 1, plan="", processes=(ProcessIdentity.own(),))
    guard = FailureGuard(SingleProcess())
    device = torch.device("cpu")
    return FlightWatch(RunDirectory(path), job, 0, recorder=recorder, guard=guard, device=device, temporary=temporary)


@needs_proc
def test_a_signal_writes_stacks_and_a_record_and_closing_gives_the_signal_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    directory = RunDirectory(tmp_path)
    with penstock.Pipeline(CASE.build(), **CASE.options) as pipe:
        pipe.step(*CASE.batches[0])
        assert eventually(lambda: catches(os.getpid(), signal.SIGUSR2))
        assert eventually(lambda: directory.read(0))
        # A record that only the signal can be the reason for.
        directory.record_file(0).unlink()
        os.kill(os.getpid(), signal.SIGUSR2)
        assert eventually(lambda: directory.read(0))
        record = directory.read(0)

    assert "test_a_signal_writes_stacks" in directory.stacks_file(0).read_text()
    assert record is not None
    assert (record.steps, record.segment, record.call) == (1, "step 0", "")
    (own,) = [thread for thread in record.threads if thread.trains]
    assert "eventually" in {frame.function for frame in own.frames}
    assert not catches(os.getpid(), signal.SIGUSR2)
    left = directory.read(0)
    assert left is not None and left.left


@needs_proc
def test_the_users_handler_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR2, lambda number, frame: seen.append(number))
    monkeypatch.setenv(RUN_DIR, str(tmp_path))
    try:
        with penstock.Pipeline(CASE.build(), **CASE.options):
            assert eventually(lambda: RunDirectory(tmp_path).read(0))
            os.kill(os.getpid(), signal.SIGUSR2)
            assert eventually(lambda: seen)
        os.kill(os.getpid(), signal.SIGUSR2)
        assert eventually(lambda: len(seen) == 2)
    finally:
        signal.signal(signal.SIGUSR2, before)
    assert not RunDirectory(tmp_path).stacks_file(0).exists()


@needs_proc
def test_without_hooks_the_signal_is_left_alone_and_requests_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(PROCESS_HOOKS, "0")
    recorder = FlightRecorder()
    watch = watch_over(tmp_path, recorder, temporary=False)
    assert eventually(lambda: RunDirectory(tmp_path).read(0))
    assert not catches(os.getpid(), signal.SIGUSR2)

    assert examine(RunDirectory(tmp_path), 60.0).processes[0].answered
    watch.close()
    assert recorder.position().steps == 0


def test_a_clean_end_leaves_no_directory_and_no_thread(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    recorder = FlightRecorder()
    watch = watch_over(tmp_path / "run", recorder)
    assert eventually(lambda: RunDirectory(tmp_path / "run").read(0))
    watch.close()
    watch.close()

    assert set(threading.enumerate()) <= threads
    assert list(tmp_path.iterdir()) == []


def test_a_pipeline_that_is_dropped_is_watched_no_more(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    recorder = FlightRecorder()
    watch_over(tmp_path / "run", recorder)
    assert eventually(lambda: RunDirectory(tmp_path / "run").read(0))
    del recorder
    gc.collect()

    assert eventually(lambda: set(threading.enumerate()) <= threads)
    assert list(tmp_path.iterdir()) == []


def test_only_waits_of_the_thread_that_trains_count(tmp_path: Path) -> None:
    watch = watch_over(tmp_path, recorder := FlightRecorder(), temporary=False)
    other = threading.Thread(target=lambda: watch.waiting("a message of a device", (1,)))
    other.start()
    other.join()
    # The watch's own thread describes the run.
    assert eventually((tmp_path / "job.json").exists)
    examine(RunDirectory(tmp_path), 60.0)
    ignored = RunDirectory(tmp_path).read(0)
    watch.waiting("the sum over ranks [0, 1]", (1,))
    examine(RunDirectory(tmp_path), 60.0)
    seen = RunDirectory(tmp_path).read(0)
    watch.close()

    assert recorder.position().steps == 0
    assert ignored is not None and seen is not None and seen.wait is not None
    assert (ignored.wait, seen.wait.context, seen.wait.processes) == (None, "the sum over ranks [0, 1]", (1,))


def test_records_of_a_failure_stay(tmp_path: Path) -> None:
    watch = watch_over(tmp_path / "run", recorder := FlightRecorder())
    watch.failing("ValueError in a step: it is broken")
    watch.failing("TransportError in a drain: it failed before")
    watch.close()
    found = RunDirectory(tmp_path / "run").read(0)

    assert recorder.position().steps == 0
    assert found is not None
    assert (found.failure, found.left) == ("ValueError in a step: it is broken", False)


def test_training_goes_on_where_no_record_can_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(RUN_DIR, str(tmp_path / "file" / "run"))
    with penstock.Pipeline(CASE.build(), **CASE.options) as pipe:
        losses = [float(pipe.step(*batch).loss) for batch in CASE.batches[:2]]
        assert eventually(lambda: "flight records cannot be written" in caplog.text)

    assert len(losses) == 2
    assert caplog.text.count("flight records cannot be written") == 1


def test_the_stacks_of_running_threads_are_those_of_their_calls() -> None:
    """A hundred times while the thread runs: outermost call first, with the line's text and whose code it is."""
    ready, done = threading.Event(), threading.Event()

    def innermost() -> None:
        ready.set()
        while not done.is_set():
            sum(range(100))

    def outermost() -> None:
        innermost()

    thread = threading.Thread(target=outermost, name="busy")
    thread.start()
    try:
        assert ready.wait(60)
        assert thread.ident is not None
        for _ in range(100):
            (record,) = [one for one in stacks_of_threads(thread.ident) if one.name == "busy"]
            own = [frame for frame in record.frames if frame.file == __file__]
            assert record.trains
            assert [frame.function for frame in own[:2]] == ["outermost", "innermost"]
            assert own[0].code == "innermost()"
            assert [frame.library for frame in record.frames[:2]] == [True, True]
            assert not own[0].library
    finally:
        done.set()
        thread.join()


def test_records_of_failed_runs_are_removed_a_day_later(tmp_path: Path) -> None:
    """Not those of runs that may go on, nor what others have put there."""
    day = 24 * 3600
    for name, age, file in (
        ("penstock-run-old", 2 * day, "job.json"),
        ("penstock-run-new", day / 2, "job.json"),
        ("penstock-run-of-mine", 2 * day, "thesis.tex"),
        ("elsewhere", 2 * day, "job.json"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text("{}")
        os.utime(tmp_path / name, (time.time() - age,) * 2)
    (tmp_path / "penstock-run-link").symlink_to(tmp_path / "elsewhere")
    recorder = FlightRecorder()
    watch = watch_over(tmp_path / "penstock-run-present", recorder)
    assert eventually(lambda: not (tmp_path / "penstock-run-old").exists())
    watch.close()

    left = ["elsewhere", "penstock-run-link", "penstock-run-new", "penstock-run-of-mine"]
    assert sorted(path.name for path in tmp_path.iterdir()) == left
    assert (tmp_path / "elsewhere" / "job.json").exists()


def test_a_given_run_directory_has_its_neighbours_left_alone(tmp_path: Path) -> None:
    (tmp_path / "penstock-run-old").mkdir()
    (tmp_path / "penstock-run-old" / "job.json").write_text("{}")
    os.utime(tmp_path / "penstock-run-old", (0, 0))
    recorder = FlightRecorder()
    watch = watch_over(tmp_path / "given", recorder, temporary=False)
    assert eventually((tmp_path / "given" / "job.json").exists)
    watch.close()

    assert (tmp_path / "penstock-run-old").exists()
