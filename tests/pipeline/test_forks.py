"""A child that a rank forks is no rank, and can be ended."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from penstock.errors import PenstockError
from support.processes import Pool

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def _make(**options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    sample = (torch.zeros(2, 4).double(),)
    optimizer = lambda parameters: torch.optim.SGD(parameters, lr=0.1)  # noqa: E731
    return penstock.Pipeline(model, sample, F.mse_loss, optimizer, microbatches=2, **options)


def _in_child(work: Callable[[], object]) -> str:
    """The error that `work` raises in a forked process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except PenstockError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        text = file.read()
    os.waitpid(child, 0)
    return text


def call_in_children() -> tuple[list[str], list[float]]:
    """What children raise that call the pipeline, and the losses of the steps between them."""
    x = torch.ones(4, 4).double()
    texts, losses = [], []
    with _make() as pipe:
        for call in (lambda: pipe.step(x, x), lambda: pipe.evaluate(x, x), pipe.drain, lambda: pipe.save("never")):
            losses.append(float(pipe.step(x, x).loss))
            texts.append(_in_child(call))
        # A child closes nothing of its parent's.
        texts.append(_in_child(pipe.close))
        losses.append(float(pipe.step(x, x).loss))
    return texts, losses


def terminate_a_child(directory: Path) -> tuple[int, bool]:
    """By which signal a child of a training that resumes ends, and whether the training still has its own handler."""
    with _make(resume=directory) as pipe:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writer, b"x")
            while True:
                signal.pause()
        os.read(reader, 1)
        os.kill(child, signal.SIGTERM)
        status = os.waitpid(child, 0)[1]
        os.close(reader)
        os.close(writer)
        handled = signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, signal.SIG_IGN)
        pipe.step(torch.ones(4, 4).double(), torch.ones(4, 4).double())
    return os.WTERMSIG(status), handled


def fail_in_children() -> tuple[list[str], list[float], str]:
    """How the children of rank 1 end that fail outside of the pipeline and in its block, what they report, and
    the losses.
    """
    x, ends, losses = torch.ones(4, 4).double(), [], []
    with _make(timeout_seconds=60.0) as pipe:
        for failure in (ValueError("a"), KeyboardInterrupt(), SystemExit(3), ValueError("in the block")):
            losses.append(float(pipe.step(x, x).loss))
            if pipe.rank == 1 and (child := os.fork()) == 0:
                # As at the end of a script, without what the processes of tests do then.
                if failure.args == ("in the block",):
                    pipe.__exit__(type(failure), failure, None)
                else:
                    sys.excepthook(type(failure), failure, None)
                os._exit(5 + pipe._world._board.failed)
            if pipe.rank == 1:
                ends.append(str(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])))
        reported = str(pipe._world.watch.failure)
    return ends, losses, reported


def test_a_child_calls_nothing_of_its_parents_pipeline(pool: Pool) -> None:
    both = pool.run(2, call_in_children)
    for rank, (texts, losses) in enumerate(both):
        assert [f"was forked by rank {rank}" in text for text in texts] == [True, True, True, True, False], texts
        assert losses == both[0][1]
        assert len(set(losses)) == len(losses)


def test_a_child_of_a_training_that_resumes_ends_by_a_signal(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(2, terminate_a_child, tmp_path / "run") == [(signal.SIGTERM, True)] * 2


def test_a_single_process_too(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        assert terminate_a_child(tmp_path / "run") == (signal.SIGTERM, True)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_child_that_fails_does_not_speak_for_its_rank(pool: Pool) -> None:
    (none, losses, reported), (ends, same, _) = pool.run(2, fail_in_children)

    assert none == []
    assert ends == ["5"] * 4
    assert losses == same
    assert len(set(losses)) == len(losses)
    assert reported == "None"
