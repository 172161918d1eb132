"""A save that ends at any moment, by a kill or a full disk: the checkpoint before is whole and the next save works."""

import os
import resource
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import CheckpointError
from support.checkpointed import SUBJECT, make, same, weights

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def in_child(work: Callable[[], object]) -> int:
    """The status of a forked process that does `work`."""
    child = os.fork()
    if child == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitpid(child, 0)[1]


def kill_at(number: int, below: Path) -> None:
    """Kills this process before its operation `number` on a file below a directory. Other processes are not changed."""
    left = [number]

    def count(event: str, arguments: Any) -> None:
        if event in OPERATIONS and str(arguments[0]).startswith(str(below)):
            left[0] -= 1
            if left[0] < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["a new step", "a step again", "the only step again", "an older one is removed"])
def test_a_kill_at_every_operation(tmp_path: Path, kind: str) -> None:
    pipe = make()
    begun, run = tmp_path / "begun", tmp_path / "run"
    for number, batch in enumerate(SUBJECT.batches[: 1 if kind == "the only step again" else 2], start=1):
        pipe.step(*batch)
        pipe.save(begun, number)
    before, last = weights(pipe), pipe.steps
    pipe.step(*SUBJECT.batches[2])
    after = weights(pipe)
    step = {"a new step": 3, "an older one is removed": 3}.get(kind, last)
    keep = 2 if kind == "an older one is removed" else None
    loaded, kills = make(), 0
    seen = set()
    while True:
        shutil.copytree(begun, run)

        def save() -> None:
            kill_at(kills, run)  # noqa: B023
            pipe.save(run, step, keep=keep)

        status = in_child(save)
        loaded.load(run)
        seen.add(loaded.steps)
        assert same(weights(loaded), after if loaded.steps == last + 1 else before), kills
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        # The next save works, and removes what is left.
        pipe.save(run, step, keep=keep)
        loaded.load(run)
        assert same(weights(loaded), after), kills
        kept = {"a new step": 3, "a step again": 2, "the only step again": 1, "an older one is removed": 2}[kind]
        left = [path.name for path in run.iterdir() if path.name != ".penstock-lock"]
        assert len(left) == kept
        assert all(name.startswith("step-") for name in left)
        shutil.rmtree(run)
        kills += 1

    assert kills > 12
    assert seen == {last, last + 1}


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Fails writes as a full disk or a quota does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("size", [0, 100, 1000, 4000])
def test_a_full_disk_leaves_all_as_it_was(tmp_path: Path, size: int) -> None:
    pipe, run = make(), tmp_path / "run"
    pipe.step(*SUBJECT.batches[0])
    path = pipe.save(run)
    before = weights(pipe)
    pipe.step(*SUBJECT.batches[1])
    with files_of_at_most(size), pytest.raises(CheckpointError, match=r"saving-.*(safetensors|json).*Free space"):
        pipe.save(run)

    assert sorted(run.iterdir()) == [run / ".penstock-lock", path]
    loaded = make()
    loaded.load(run)
    assert same(weights(loaded), before)
    # The training goes on, and so does saving.
    pipe.step(*SUBJECT.batches[2])
    assert pipe.save(run) == run / "step-000003"
    loaded.load(run)
    assert same(weights(loaded), weights(pipe))
