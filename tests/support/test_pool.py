"""The pool of processes: whatever a job does, the next job gets working processes. And the end of a run that hangs."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from support.paths import ROOT
from support.processes import Pool

pytestmark = [pytest.mark.processes, pytest.mark.slow]

HANGING = """
import time

import pytest

def test_that_is_well(): ...

@pytest.mark.gpu
def test_that_fails():
    assert 6 * 9 == 42

@pytest.mark.gpu
def test_that_hangs():
    time.sleep(600)

def test_after_it(): ...
"""


class FragileArgument:
    """Cannot be made again where it is read."""

    def __reduce__(self) -> tuple[object, ...]:
        return _fail, ()


def _fail() -> None:
    raise ValueError("cannot be read here")


def _meet() -> int:
    """The rank. Who leaves a process group at once may leave while others still join it."""
    dist.barrier()
    return dist.get_rank()


def find_process(_: object = None) -> int:
    _meet()
    return os.getpid()


def raise_error(failing: int) -> None:
    if _meet() == failing:
        raise ValueError("the job is broken")


def end(code: int) -> None:
    """Ends the process without a word."""
    _meet()
    os._exit(code)


def hang(seconds: float) -> None:
    _meet()
    time.sleep(seconds)


def return_what_cannot_be_read() -> FragileArgument:
    """An answer that its reader cannot make again."""
    _meet()
    return FragileArgument()


@pytest.fixture(scope="module")
def impatient() -> Iterator[Pool]:
    """A pool whose jobs may take no longer than a busy machine needs to fork processes."""
    # The fork server of this process is the same for all pools. The first one waits for its imports.
    first = Pool(1)
    first.run(1, find_process)
    first.close()
    pool = Pool(3, seconds=60.0)
    yield pool
    pool.close()


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("job", "argument", "words"),
    [
        (raise_error, (1,), r"rank 1:\nTraceback[^$]*ValueError: the job is broken"),
        (end, (7,), "rank 0:\nits process ended, with exit code 7\nrank 1:\nits process ended, with exit code 7"),
        (hang, (600.0,), r"rank 0:\ndid not answer within 60 s[^$]*in hang[^$]*rank 1:[^$]*in hang"),
        (find_process, (FragileArgument(),), r"rank 1:\nTraceback[^$]*ValueError: cannot be read here"),
        (return_what_cannot_be_read, (), r"rank 1:\nwhat it answered cannot be read[^$]*ValueError: cannot be read"),
    ],
    ids=["raises", "ends", "hangs", "cannot be read", "answers what cannot be read"],
)
def test_a_job_that_goes_wrong_leaves_nothing_behind(
    impatient: Pool, job: Callable[..., Any], argument: tuple[Any, ...], words: str
) -> None:
    before = impatient.run(3, find_process)
    with pytest.raises(AssertionError, match=words):
        impatient.run(2, job, *argument)
    after = impatient.run(3, find_process)

    assert not set(before[:2]) & set(after)
    assert before[2] == after[2]
    assert not any(map(is_alive, before[:2]))


def test_processes_are_the_same_as_long_as_all_is_well(impatient: Pool) -> None:
    assert impatient.run(2, find_process) == impatient.run(2, find_process)


OWNER = """
import sys
import time
from support.processes import Pool
from support.test_pool import find_process, hang

if __name__ == "__main__":
    pool = Pool(2, imported=["torch"])
    print(*pool.run(2, find_process), flush=True)
    pool.run(2, hang, 600.0)
"""


def test_processes_end_with_the_one_that_started_them(tmp_path: Path) -> None:
    """Even if it is killed, and they are at work."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    owner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment)
    assert owner.stdout is not None
    members = [int(number) for number in owner.stdout.readline().split()]
    assert len(members) == 2
    assert all(map(is_alive, members))
    owner.kill()
    owner.communicate()
    while any(map(is_alive, members)):
        time.sleep(0.01)


def test_a_run_whose_device_hangs_ends_and_says_what_it_knows(tmp_path: Path) -> None:
    script = tmp_path / "test_hanging.py"
    script.write_text(HANGING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests")}
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "support.deadlines",
        "-p",
        "no:cacheprovider",
        "--gpu-seconds",
        "2",
    ]
    options = ["-o", "markers=gpu", "--rootdir", str(tmp_path), str(script)]
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, env=environment)

    assert done.returncode == 1
    assert "failed: test_hanging.py::test_that_fails" in done.stderr
    assert "assert (6 * 9) == 42" in done.stderr
    assert "test_hanging.py::test_that_hangs took longer than 2 s, and ends the run here:" in done.stderr
    assert "in test_that_hangs" in done.stderr
    assert "test_after_it" not in done.stderr
