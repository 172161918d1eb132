"""Whatever goes wrong in one rank ends every rank, soon, and each says why."""

import re
import signal

import pytest
import torch

from support.fork_server import Child, ForkServer, finish
from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "failure_script.py"
GPU_SECONDS = 90
"""Until a device has started and all ranks have ended."""


def launch(
    fork_server: ForkServer,
    scenario: str,
    failing: int,
    ranks: int,
    schedule: str = "1f1b-flush",
    replicas: str = "",
    device: str = "cpu",
) -> list[Child]:
    """`ranks` processes of the script.

    `replicas` of the stages, such as 2-1; one each by default.
    """
    arguments = [str(SCRIPT), scenario, str(failing), schedule, replicas or "-".join("1" * ranks), device]
    return fork_server.start_ranks(arguments, ranks)


def outlive(living: Child, frozen: Child, seconds: float = 30) -> tuple[int | None, str]:
    """Exit code and standard error of `living`, which must end although `frozen` never does."""
    try:
        (answer,) = finish([living], seconds)
        return answer
    finally:
        frozen.kill()
        frozen.communicate()


@pytest.mark.parametrize(("failing", "schedule"), [(0, "2bw"), (1, "1f1b-flush"), (2, "2bw")])
def test_an_exception_ends_every_rank_with_its_traceback(fork_server: ForkServer, failing: int, schedule: str) -> None:
    for rank, (code, errors) in enumerate(finish(launch(fork_server, "raise", failing, 3, schedule))):
        assert code != 0
        assert "ValueError: the layer is broken" in errors
        assert "self.fail()" in errors
        assert f"this was action {failing}F" in errors
        assert f"of rank {failing}; stage {failing} holds the layers {failing} to {failing}" in errors
        assert (f"rank {failing} failed in a step, so rank {rank} stops too" in errors) == (rank != failing)


def test_a_caught_exception_ends_the_other_ranks(fork_server: ForkServer) -> None:
    living, caught = launch(fork_server, "catch", 1, 2)
    try:
        [(code, errors)] = finish([living], 20)

        assert code != 0
        assert "rank 1 failed in a step, so rank 0 stops too" in errors
        assert caught.poll() is None
    finally:
        caught.kill()
        caught.communicate()


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_the_script_ends_every_rank(fork_server: ForkServer, failing: int) -> None:
    for code, errors in finish(launch(fork_server, "outside", failing, 2)):
        assert code != 0
        assert "OSError: the data set is gone" in errors


@pytest.mark.parametrize(("failing", "schedule"), [(0, "1f1b-flush"), (1, "2bw"), (2, "1f1b-flush")])
def test_an_exception_in_a_with_block_ends_every_rank(fork_server: ForkServer, failing: int, schedule: str) -> None:
    for rank, (code, errors) in enumerate(finish(launch(fork_server, "with outside", failing, 3, schedule))):
        assert code == 1
        assert "OSError: the data set is gone" in errors
        assert (f"rank {failing} failed outside the pipeline, so rank {rank} stops too" in errors) == (rank != failing)


@pytest.mark.parametrize("failing", [0, 2])
def test_an_exception_in_a_step_passes_a_with_block(fork_server: ForkServer, failing: int) -> None:
    for rank, (code, errors) in enumerate(finish(launch(fork_server, "with raise", failing, 3, "2bw"))):
        assert code == 1
        assert "ValueError: the layer is broken" in errors
        assert (f"rank {failing} failed in a step, so rank {rank} stops too" in errors) == (rank != failing)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_killed_rank_is_named_by_those_whose_devices_wait(fork_server: ForkServer, failing: int) -> None:
    """Their communicators say that they are broken; nothing else does, since no host waits."""
    answers = finish(launch(fork_server, "kill", failing, 2, device="tardy"))

    assert answers[failing][0] == -signal.SIGKILL
    code, errors = answers[1 - failing]
    assert code == 1
    assert f"rank {failing} closed its connection to this rank" in errors
    assert "probably killed (out of memory?)" in errors


@pytest.mark.parametrize("failing", [0, 2])
def test_a_killed_rank_is_named(fork_server: ForkServer, failing: int) -> None:
    answers = finish(launch(fork_server, "kill", failing, 3))

    assert answers[failing][0] == -signal.SIGKILL
    # Whichever is seen first: the end of the process, or that of its connection.
    assert re.search(f"rank {failing} (closed its connection to this rank|has ended)", answers[1][1])
    assert "probably killed (out of memory?)" in answers[1][1]
    assert all(code != 0 for code, _ in answers)


def test_a_rank_that_leaves_early_is_named(fork_server: ForkServer) -> None:
    (left, _), (code, errors) = finish(launch(fork_server, "leave", 0, 2))

    assert left == 0
    assert code != 0
    assert "rank 0 closed its connection" in errors
    assert "left the training loop earlier" in errors


@pytest.mark.slow
def test_a_frozen_rank_is_named(fork_server: ForkServer) -> None:
    code, errors = outlive(*launch(fork_server, "freeze", 1, 2))

    assert code != 0
    assert "nothing came from rank 1 for 4 s" in errors
    assert "Diagnosis: rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger): process" in errors


def test_a_replica_that_fails_ends_those_that_wait_for_its_gradients(fork_server: ForkServer) -> None:
    answers = finish(launch(fork_server, "raise", 1, 3, "pipedream", "2-1"))
    for rank, (code, errors) in enumerate(answers):
        assert code != 0
        assert "ValueError: the layer is broken" in errors
        assert (f"rank 1 failed in a step, so rank {rank} stops too" in errors) == (rank != 1)

    # The other replica of the stage had nothing left to do but to add.
    assert re.search(r"this was action 0A\d+ of rank 0; stage 0 holds the layers 0 to 0", answers[0][1])


def test_a_killed_replica_is_among_those_named(fork_server: ForkServer) -> None:
    (killed, _), *others = finish(launch(fork_server, "kill", 0, 3, "gpipe", "3"))
    living = [errors for _, errors in others]

    assert killed == -signal.SIGKILL
    assert all(code != 0 for code, _ in others)
    # The first rank that notices reports it, in the sum or while it reads the loss; the other may get its report.
    reported = [
        line for errors in living for line in errors.splitlines() if "closed its connection to this rank" in line
    ]
    assert reported
    assert all(re.search(r"(: rank 0|one of the ranks \d, \d) closed its", line) for line in reported), reported


@pytest.mark.slow
def test_a_frozen_replica_is_named(fork_server: ForkServer) -> None:
    code, errors = outlive(*launch(fork_server, "freeze", 1, 2, "2bw", "2"))

    assert code != 0
    assert "nothing came from rank 1 for 4 s (the sum over ranks [0, 1])" in errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("scenario", ["raise", "outside"])
@pytest.mark.parametrize("failing", [0, 1])
def test_on_a_gpu_an_exception_ends_every_rank(fork_server: ForkServer, failing: int, scenario: str) -> None:
    cause = {"raise": "ValueError: the layer is broken", "outside": "OSError: the data set is gone"}[scenario]
    for code, errors in finish(launch(fork_server, scenario, failing, 2, "2bw", device="cuda:0"), GPU_SECONDS):
        assert code != 0
        assert cause in errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_frozen_rank_is_named(fork_server: ForkServer) -> None:
    code, errors = outlive(*launch(fork_server, "freeze", 1, 2, device="cuda:0"), GPU_SECONDS)  # type: ignore[call-arg]

    assert code != 0
    assert "nothing came from rank 1 for 4 s" in errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("scenario", ["raise", "kill", "freeze"])
def test_between_gpus_every_rank_ends_and_the_culprit_is_named(
    fork_server: ForkServer, scenario: str, failing: int
) -> None:
    """Several receives and sends are pending over NCCL when it happens, all of which must be aborted."""
    both = launch(fork_server, scenario, failing, 2, "2bw", device="own")
    code, errors = outlive(both[1 - failing], both[failing], GPU_SECONDS)
    reported = {
        "raise": f"rank {failing} failed in a step",
        "kill": f"rank {failing} closed its connection to this rank",
        "freeze": f"nothing came from rank {failing} for 4 s",
    }

    assert code == 1
    assert reported[scenario] in errors
