"""Whatever goes wrong in one rank ends every rank, soon, and each says why."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent / "failure_script.py"


def launch(scenario: str, failing: int, ranks: int, schedule: str = "1f1b-flush") -> list[subprocess.Popen[str]]:
    """`ranks` processes of the script, started as torchrun would but with nobody to end them for us."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    return [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), scenario, str(failing), schedule],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]


def finish(processes: list[subprocess.Popen[str]], seconds: float = 60) -> list[tuple[int, str]]:
    """Exit code and standard error of each process; it is an error of the test if one hangs."""
    try:
        return [(process.wait(seconds), process.stderr.read()) for process in processes if process.stderr]
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_an_exception_ends_every_rank_with_its_traceback(failing: int, schedule: str) -> None:
    for rank, (code, errors) in enumerate(finish(launch("raise", failing, 3, schedule))):
        assert code != 0
        assert "ValueError: the layer is broken" in errors
        assert "self.fail()" in errors
        assert f"this was action {failing}F" in errors
        assert f"of rank {failing}; stage {failing} holds the layers {failing} to {failing}" in errors
        assert (f"rank {failing} failed in a step, so rank {rank} stops too" in errors) == (rank != failing)


def test_a_caught_exception_ends_the_other_ranks() -> None:
    processes = launch("catch", 1, 2)
    try:
        code, errors = processes[0].wait(20), processes[0].stderr.read() if processes[0].stderr else ""

        assert code != 0
        assert "rank 1 failed in a step, so rank 0 stops too" in errors
        assert processes[1].poll() is None
    finally:
        finish(processes, 0.1) if all(p.poll() is not None for p in processes) else [p.kill() for p in processes]
        for process in processes:
            process.communicate()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_the_script_ends_every_rank(failing: int) -> None:
    for code, errors in finish(launch("outside", failing, 2)):
        assert code != 0
        assert "OSError: the data set is gone" in errors


@pytest.mark.parametrize("failing", [0, 2])
def test_a_killed_rank_is_named(failing: int) -> None:
    answers = finish(launch("kill", failing, 3))

    assert answers[failing][0] == -signal.SIGKILL
    for rank, (code, errors) in enumerate(answers):
        if rank != failing:
            assert code != 0
            assert f"rank {failing} closed its connection" in errors
            assert "probably killed" in errors


def test_a_rank_that_leaves_early_is_named() -> None:
    (left, _), (code, errors) = finish(launch("leave", 0, 2))

    assert left == 0
    assert code != 0
    assert "rank 0 closed its connection" in errors
    assert "left the training loop earlier" in errors


def test_a_frozen_rank_is_named() -> None:
    processes = launch("freeze", 1, 2)
    try:
        code, errors = processes[0].wait(30), processes[0].stderr.read() if processes[0].stderr else ""

        assert code != 0
        assert "nothing came from rank 1 for 4 s" in errors
    finally:
        for process in processes:
            process.kill()
            process.communicate()
