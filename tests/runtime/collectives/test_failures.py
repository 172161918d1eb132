"""A rank that has failed stays until the others know, as long as there is a reason to wait for them."""

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from torch.distributed import HashStore, Store

from penstock.errors import TransportError
from penstock.process_states import ProcessIdentity, ProcessState
from penstock.runtime.collectives import failures
from penstock.runtime.collectives.failures import FailureBoard
from penstock.runtime.collectives.store_watch import READERS


@pytest.fixture
def store() -> Store:
    return HashStore()


@pytest.fixture
def board(store: Store) -> Iterator[FailureBoard]:
    """That of rank 0 of two."""
    board = FailureBoard(store, 0, 2)
    yield board
    board.close()


def test_it_waits_longer_for_a_process_that_runs(
    board: FailureBoard, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a busy machine a rank may read the report later than the others linger for one that they know nothing of."""
    monkeypatch.setattr(failures, "_LONGEST_LINGER", 6000.0)
    board.processes = {1: ProcessIdentity.own()}
    late: list[FailureBoard] = []
    timer = threading.Timer(0.3, lambda: late.append(FailureBoard(store, 1, 2)))
    timer.start()
    board.report("outside the pipeline", "OSError: the data set is gone", linger_seconds=0.01)
    timer.join()

    assert store.add(READERS, 0) == 1
    with pytest.raises(TransportError, match="rank 0 failed outside the pipeline, so rank 1 stops too"):
        late[0].check()
    late[0].close()


@pytest.mark.parametrize("known", [False, True])
def test_it_does_not_wait_for_a_process_that_cannot_read(
    board: FailureBoard, store: Store, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    monkeypatch.setattr(failures, "_LONGEST_LINGER", 1e9)
    ended = replace(ProcessIdentity.own(), pid=2**22 - 1)
    board.processes = {1: ended} if known else {}
    board.report("in a step", "ValueError: the layer is broken", linger_seconds=0.01)

    assert store.add(READERS, 0) == 0


def test_what_the_operating_system_says_of_a_process() -> None:
    own = ProcessIdentity.own()

    assert own.state() is ProcessState.RUNNING
    assert replace(own, machine="another machine").state() is ProcessState.UNKNOWN
    assert replace(own, born=own.born + 1).state() is ProcessState.GONE


def test_it_looks_for_the_cause_of_a_kill_no_longer_than_for_an_answer(
    board: FailureBoard, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that was killed writes nothing. One that has left may report an error of its script after that."""
    monkeypatch.setattr(failures, "_CAUSE_SECONDS", 1e9)
    found = board.find_cause([1], "a message", ConnectionError("reset by peer"))
    assert "rank 1 closed its connection to this rank (a message). It was probably killed" in str(found)

    other = FailureBoard(store, 1, 2)
    other.leave()
    timer = threading.Timer(0.3, lambda: other.report("outside the pipeline", "OSError: the data set is gone"))
    timer.start()
    with pytest.raises(TransportError, match="OSError: the data set is gone"):
        board.find_cause([1], "a message", ConnectionError("reset by peer"))
    timer.join()
    other.close()
