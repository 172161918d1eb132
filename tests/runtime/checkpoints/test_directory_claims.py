"""A directory of checkpoints belongs to one run, and one job at a time saves there."""

import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import read_manifest
from penstock.runtime.files.file_locks import FileLock

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def make(**options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    sample = (torch.zeros(2, 4).double(),)
    return penstock.Pipeline(model, sample, F.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), **options)


def trained(steps: int, **options: Any) -> penstock.Pipeline:
    pipe = make(**options)
    for number in range(steps):
        x = torch.full((2, 4), 1.0 + number).double()
        pipe.step(x, x)
    return pipe


def files(run: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in run.rglob("*") if path.is_file() and path.parent != run}


def run_of(path: Path) -> str:
    return read_manifest(path).run


@contextmanager
def job(work: Callable[[], object]) -> Iterator[int]:
    """Another process that does `work`, and then stands still until it is killed."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            held = work()
            os.write(writer, b"done")
            time.sleep(600)
            del held
        finally:
            os._exit(1)
    os.close(writer)
    try:
        assert os.read(reader, 4) == b"done"
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(reader)


def _refused(run: Path) -> None:
    with pytest.raises(CheckpointError, match="found process"):
        make(resume=run)


def assert_held(run: Path) -> None:
    """Another job cannot save there."""
    with job(lambda: _refused(run)):
        pass


def assert_free(run: Path) -> None:
    with job(lambda: make(resume=run)):
        pass


@pytest.mark.parametrize(
    "options",
    [{"keep": 1}, {"step": 2}, {"step": 50}, {"keep": 3, "wait": False}],
    ids=["it would remove", "it would replace", "beside", "while the training goes on"],
)
def test_a_training_begun_anew_harms_no_checkpoint_of_the_one_before(tmp_path: Path, options: dict[str, Any]) -> None:
    first = trained(0)
    for step in (1, 2, 3, 4):
        first.save(tmp_path / "run", step)
    first.close()
    before, second = files(tmp_path / "run"), trained(1)

    refused = r"found step-000004, step-000003, step-000002 and 1 more of another run.*resume=.*another directory"
    with pytest.raises(CheckpointError, match=refused):
        second.save(tmp_path / "run", **options)
    assert files(tmp_path / "run") == before
    # The training goes on, and so do saves elsewhere.
    second.step(torch.ones(2, 4).double(), torch.ones(2, 4).double())
    assert second.save(tmp_path / "other").name == "step-000002"


def test_what_goes_on_from_a_checkpoint_has_the_name_of_its_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    names = set()
    with trained(1) as first:
        names.add(run_of(first.save(run)))
    with trained(1, resume=run) as resumed:
        names.add(run_of(resumed.save(run, keep=1)))
    loaded = trained(3)
    loaded.load(run)
    names.add(run_of(loaded.save(run, keep=1)))
    names.add(run_of(loaded.save(tmp_path / "copy")))
    other = trained(0)

    assert len(names) == 1
    assert run_of(other.save(tmp_path / "another")) not in names
    assert [path.name for path in run.glob("step-*")] == ["step-000002"]


@pytest.mark.parametrize("wait", [True, False])
def test_two_trainings_of_one_process_do_not_begin_in_one_directory(tmp_path: Path, wait: bool) -> None:
    """The checkpoint of the first one is not there yet."""
    first, second, going_on = trained(1), trained(2), Event()
    first._engine.snapshots.copier.submit(going_on.wait, 60)
    save = first.save(tmp_path / "run", wait=False)
    with pytest.raises(CheckpointError, match="found another one in this process that saves there"):
        second.save(tmp_path / "run", **({} if wait else {"wait": False}))
    with pytest.raises(CheckpointError, match="found another one in this process that saves there"):
        make(resume=tmp_path / "run")
    going_on.set()
    assert run_of(save.wait()) != run_of(second.save(tmp_path / "other"))
    first.close()
    # It belongs to its run for all that.
    with pytest.raises(CheckpointError, match="step-000001 of another run"):
        second.save(tmp_path / "run")
    with make(resume=tmp_path / "run") as third:
        assert third.steps == 1


def test_a_directory_stays_that_of_its_run_when_another_checkpoint_is_loaded(tmp_path: Path) -> None:
    with trained(1) as pretrained:
        pretrained.save(tmp_path / "pretrained")
    with trained(2) as pipe:
        name = run_of(pipe.save(tmp_path / "run"))
        pipe.load(tmp_path / "pretrained")
        assert run_of(pipe.save(tmp_path / "run")) == name
    with trained(0, resume=tmp_path / "run") as resumed:
        resumed.save(tmp_path / "run", keep=1)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """The manifest of `path` with another content, as if it had been written so."""
    document = json.loads((path / "manifest.json").read_text())
    change(document["content"])
    text = json.dumps(document["content"], separators=(",", ":"))
    document["sha256"] = hashlib.sha256(text.encode()).hexdigest()
    (path / "manifest.json").write_text(json.dumps(document))


def test_checkpoints_that_were_written_before_runs_had_names_go_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with trained(1) as pipe:
        for step in (1, 2):
            rewrite(pipe.save(run, step), lambda content: content.pop("run"))
    with trained(1, resume=run) as resumed:
        assert resumed.steps == 2
        resumed.save(run)
    with trained(0, resume=run) as again:
        again.save(run, 3, keep=1)
    anew = trained(1)
    with pytest.raises(CheckpointError, match="step-000003 of another run"):
        anew.save(run)


@pytest.mark.parametrize("content", ["{", "[]", '{"format": "penstock-checkpoint-1"}'])
def test_a_damaged_checkpoint_belongs_to_the_run_beside_it(tmp_path: Path, content: str) -> None:
    run = tmp_path / "run"
    with trained(1) as pipe:
        pipe.save(run, 1)
        (pipe.save(run, 2) / "manifest.json").write_text(content)
    anew = trained(1)
    with pytest.raises(CheckpointError, match="of another run"):
        anew.save(run)
    with trained(1, resume=run) as resumed:
        assert resumed.save(run).name == "step-000002"


def test_a_damaged_checkpoint_alone_is_of_another_run(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with trained(1) as pipe:
        (pipe.save(run, 1) / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="step-000001 of another run"):
        trained(1).save(run)


def test_a_second_job_is_refused_until_the_first_one_ends(tmp_path: Path) -> None:
    run, waiting = tmp_path / "run", trained(1)

    def save() -> penstock.Pipeline:
        pipe = trained(1)
        pipe.save(run)
        return pipe

    with job(save) as other:
        before = files(run)
        refused = rf"expected no other job that saves to this directory, found process {other} on host .*End that job"
        with pytest.raises(CheckpointError, match=refused):
            waiting.save(run)
        # A start that resumes would remove what the job is writing.
        (run / ".penstock-saving-0123456789abcdef").mkdir()
        with pytest.raises(CheckpointError, match=refused):
            make(resume=run)
        assert (run / ".penstock-saving-0123456789abcdef").is_dir()
        assert files(run) == before
        # Reading needs no lock.
        waiting.load(run)
    # It was killed.
    assert trained(1, resume=run).save(run).name == "step-000002"


def test_a_job_that_has_only_begun_holds_its_directory(tmp_path: Path) -> None:
    with job(lambda: make(resume=tmp_path / "run")), pytest.raises(CheckpointError, match="found process"):
        make(resume=tmp_path / "run")
    make(resume=tmp_path / "run").close()

    assert [path.name for path in (tmp_path / "run").iterdir()] == [".penstock-lock"]


def test_children_that_outlive_a_killed_job_hold_nothing(tmp_path: Path) -> None:
    reader, writer = os.pipe()

    def leave_a_child() -> penstock.Pipeline:
        pipe = trained(1)
        pipe.save(tmp_path / "run")
        child = os.fork()
        if child == 0:
            time.sleep(600)
        os.write(writer, child.to_bytes(8, "little"))
        return pipe

    with job(leave_a_child):
        child = int.from_bytes(os.read(reader, 8), "little")
    try:
        with trained(1, resume=tmp_path / "run") as pipe:
            assert pipe.save(tmp_path / "run").name == "step-000002"
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reader)
        os.close(writer)


def test_a_child_that_ends_gives_back_nothing_of_its_parents(tmp_path: Path) -> None:
    pipe = trained(1)
    pipe.save(tmp_path / "run")
    child = os.fork()
    if child == 0:
        pipe.close()
        os._exit(0)
    os.waitpid(child, 0)

    assert_held(tmp_path / "run")


def test_pipelines_of_one_process_share_the_lock(tmp_path: Path) -> None:
    first, run = trained(1), tmp_path / "run"
    first.save(run)
    second = make(resume=run)
    first.close()
    assert_held(run)
    second.close()
    assert_free(run)


def test_a_file_system_without_locks_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING, "penstock"), trained(1) as pipe:
        pipe.save(tmp_path / "run")
        pipe.save(tmp_path / "run", 2)

    assert caplog.text.count("this file system has no locks (No locks available)") == 1


READS: list[Callable[[Path], object]] = [
    lambda run: (run / ".penstock-lock").read_bytes(),
    lambda run: shutil.copytree(run, run.with_name("backup")),
    lambda run: hashlib.file_digest((run / ".penstock-lock").open("rb", buffering=0), "sha256"),
    lambda run: subprocess.run(["cat", str(run / ".penstock-lock")], check=True, stdout=-3),
]


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_job_that_reads_its_lock_file_keeps_the_lock(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with trained(1) as pipe:
        pipe.save(run)
        for read in READS:
            read(run)
            assert_held(run)
        pipe.save(run, 2, keep=1)


CHANGES: dict[str, Callable[[Path, Path], object]] = {
    "removed": lambda run, old: shutil.rmtree(run),
    "moved": lambda run, old: run.rename(old),
    "lock removed": lambda run, old: (run / ".penstock-lock").unlink(),
    "parent moved": lambda run, old: run.parent.rename(old),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_save_locks_the_directory_that_is_there_now(
    tmp_path: Path, change: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps are kept, and checkpoints that were moved stay."""
    run = tmp_path / "parent" / "run"
    with trained(1, resume=run) as pipe:
        pipe.save(run)
        CHANGES[change](run, tmp_path / "old")
        assert pipe.save(run, 2) == run / "step-000002"
        assert f"{run} was removed or moved since the last save" in caplog.text
        assert_held(run)
        pipe.save(run, 3, wait=False).wait()
        assert caplog.text.count("was removed or moved") == 1
    if change in ("moved", "parent moved"):
        (moved,) = (tmp_path / "old").rglob("step-000001")
        assert run_of(moved) == run_of(run / "step-000002")


def test_a_save_that_comes_after_another_job_took_the_place_is_refused(tmp_path: Path) -> None:
    """Also one that only its thread finds out."""
    run = tmp_path / "run"
    with trained(1) as pipe:
        pipe.save(run)
        run.rename(tmp_path / "old")

        def save() -> penstock.Pipeline:
            other = trained(2)
            other.save(run)
            return other

        with job(save) as other:
            before = files(run)
            with pytest.raises(CheckpointError, match=rf"found process {other} on host"):
                pipe.save(run, keep=1)
            with pytest.raises(CheckpointError, match=rf"found process {other} on host"):
                pipe.save(run, keep=1, wait=False).wait()
        with pytest.raises(CheckpointError, match="step-000002 of another run"):
            pipe.save(run, keep=1)
        assert files(run) == before
        # It has not kept the lock.
        assert_free(run)


def test_a_pipeline_whose_save_was_refused_keeps_no_lock(tmp_path: Path) -> None:
    run, second = tmp_path / "run", trained(1)
    with trained(2) as first:
        first.save(run)
        with pytest.raises(CheckpointError, match="of another run") as shared:
            second.save(run)
    with pytest.raises(CheckpointError, match="of another run") as alone:
        second.save(run, wait=False)
    (run / "step-000002" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointError, match="manifest") as resuming:
        make(resume=run)
    # Errors that are kept, with all their frames, keep no lock.
    assert shared.tb is not None and alone.tb is not None and resuming.tb is not None
    with job(lambda: FileLock(run / ".penstock-lock").take()):
        pass


@pytest.mark.parametrize(
    "place",
    [
        lambda lock: lock.symlink_to(lock.parents[1] / "mine"),
        lambda lock: lock.symlink_to(lock.parents[1] / "never"),
        Path.mkdir,
        os.mkfifo,
    ],
    ids=["link", "dangling link", "directory", "pipe"],
)
def test_a_lock_file_that_is_none_is_named(tmp_path: Path, place: Callable[[Path], object]) -> None:
    run, lock = tmp_path / "run", tmp_path / "run" / ".penstock-lock"
    run.mkdir()
    (tmp_path / "mine").write_text("mine")
    place(lock)
    pipe = trained(1)
    for attempt in (lambda: pipe.save(run), lambda: pipe.save(run, wait=False), lambda: make(resume=run)):
        with pytest.raises(
            CheckpointError, match=r"\.penstock-lock: expected a file of Penstock's or nothing.*Remove it"
        ):
            attempt()

    assert (tmp_path / "mine").read_text() == "mine"
    assert not (tmp_path / "never").exists()


def test_a_child_does_not_save_where_its_parent_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with trained(1) as pipe:
        pipe.save(run)
        before = files(run)

        def save() -> None:
            with pytest.raises(CheckpointError, match=rf"found process {os.getppid()} on host"):
                pipe.save(run, 2, keep=1)

        with job(save):
            pass
        assert files(run) == before
        pipe.save(run, 2)


def test_relative_directories_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those of the moment in which a thread writes, or a signal comes."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with trained(1, resume="run") as pipe:
        pipe._engine.snapshots.copier.submit(time.sleep, 0.2)
        save = pipe.save("beside", wait=False)
        monkeypatch.chdir(tmp_path / "elsewhere")
        assert save.wait() == tmp_path / "beside" / "step-000001"
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(SystemExit):
            pipe.step(torch.ones(2, 4).double(), torch.ones(2, 4).double())
    signal.signal(signal.SIGTERM, before)

    assert (tmp_path / "run" / "step-000002").is_dir()
    assert list((tmp_path / "elsewhere").iterdir()) == []
