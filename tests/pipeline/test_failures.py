"""Whatever goes wrong in one rank ends every rank, soon, and each says why."""

import re
import signal
from pathlib import Path

import pytest
import torch

from support.fork_server import ForkServer, finish, outlive

GPU_SECONDS = 90
"""Until a device has started and all ranks have ended."""
GONE = "ValueError: the data set is gone"
KILLED = r"(closed its connection to this rank|has ended)"
"""Of a killed rank: its connection breaks, and its process ends. Whichever is seen first."""
FREEZES = ("forward", "stop", "--seconds", "4")


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("failing", "schedule"), [(0, "2bw"), (1, "1f1b-flush"), (2, "2bw")])
def test_an_exception_ends_every_rank_with_what_happened(fork_server: ForkServer, failing: int, schedule: str) -> None:
    ended = finish(fork_server.start_faulty(3, failing, "forward", "raise", "--schedule", schedule))
    for rank, (code, errors) in enumerate(ended):
        assert code != 0
        assert GONE in errors
        lines = [line for line in errors.splitlines() if line.startswith((f"rank {rank}", "  "))]
        assert (": do()" in errors and len(lines) > 1) == (rank == failing), "the others print a line"
        assert (f"this was action {failing}F" in errors) == (rank == failing)
        assert (f"of rank {failing}; stage {failing} holds the layers {failing} to {failing}" in errors) == (
            rank == failing
        )
        assert (f"rank {failing} failed in a step, so rank {rank} stops too" in errors) == (rank != failing)


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_of_the_script_ends_every_rank(fork_server: ForkServer, failing: int) -> None:
    for code, errors in finish(fork_server.start_faulty(2, failing, "between", "raise")):
        assert code != 0
        assert GONE in errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("when", "failing", "schedule"),
    [
        *(("between", 0, "1f1b-flush"), ("between", 1, "2bw"), ("between", 2, "1f1b-flush")),
        *(("forward", 0, "2bw"), ("forward", 2, "2bw")),
    ],
)
def test_an_exception_in_a_with_block_ends_every_rank(
    fork_server: ForkServer, when: str, failing: int, schedule: str
) -> None:
    where = {"between": "outside the pipeline", "forward": "in a step"}[when]
    ended = finish(fork_server.start_faulty(3, failing, when, "raise", "--with", "--schedule", schedule))
    for rank, (code, errors) in enumerate(ended):
        assert code == 1
        assert GONE in errors
        assert (f"rank {failing} failed {where}, so rank {rank} stops too" in errors) == (rank != failing)


@pytest.mark.parametrize("failing", [0, 1])
def test_a_killed_rank_is_named_by_those_whose_devices_wait(fork_server: ForkServer, failing: int) -> None:
    """Their communicators say that they are broken; nothing else does, since no host waits."""
    answers = finish(fork_server.start_faulty(2, failing, "forward", "kill", "--device", "tardy"))

    assert answers[failing][0] == -signal.SIGKILL
    code, errors = answers[1 - failing]
    assert code == 1
    assert re.search(f"rank {failing} {KILLED}", errors)
    assert "probably killed (out of memory?)" in errors


@pytest.mark.parametrize("failing", [0, 2])
def test_a_killed_rank_is_named(fork_server: ForkServer, failing: int) -> None:
    answers = finish(fork_server.start_faulty(3, failing, "forward", "kill"))

    assert answers[failing][0] == -signal.SIGKILL
    assert re.search(f"rank {failing} {KILLED}", answers[1][1])
    assert "probably killed (out of memory?)" in answers[1][1]
    assert all(code != 0 for code, _ in answers)


def test_a_rank_that_leaves_early_is_named(fork_server: ForkServer) -> None:
    (left, _), (code, errors) = finish(fork_server.start_faulty(2, 0, "between", "leave"))

    assert left == 0
    assert code != 0
    assert "rank 0 closed its connection" in errors
    assert "left the training loop earlier" in errors


@pytest.mark.slow
def test_a_frozen_rank_is_named(fork_server: ForkServer) -> None:
    [(code, errors)] = outlive(fork_server.start_faulty(2, 1, *FREEZES), 1, 30)

    assert code != 0
    assert "nothing came from rank 1 for 4 s" in errors
    assert "Diagnosis: rank 1 is stopped (SIGSTOP, Ctrl-Z or a debugger): process" in errors


def test_a_replica_that_fails_ends_those_that_wait_for_its_gradients(fork_server: ForkServer) -> None:
    replicated = ("--schedule", "pipedream", "--stages", "2-1")
    answers = finish(fork_server.start_faulty(3, 1, "forward", "raise", *replicated))
    for rank, (code, errors) in enumerate(answers):
        assert code != 0
        assert GONE in errors
        assert (f"rank 1 failed in a step, so rank {rank} stops too" in errors) == (rank != 1)

    # The other replica of the stage had nothing left to do but to add.
    traceback = Path(re.findall(r"the whole traceback: (\S+)\)", answers[0][1])[0]).read_text()
    assert re.search(r"this was action 0A\d+ of rank 0; stage 0 holds the layers 0 to 0", traceback)


def test_a_killed_replica_is_among_those_named(fork_server: ForkServer) -> None:
    replicated = ("--schedule", "gpipe", "--stages", "3")
    (killed, _), *others = finish(fork_server.start_faulty(3, 0, "forward", "kill", *replicated))
    living = [errors for _, errors in others]

    assert killed == -signal.SIGKILL
    assert all(code != 0 for code, _ in others)
    # The first rank that notices reports it, in the sum or while it reads the loss; the other may get its report.
    reported = [line for errors in living for line in errors.splitlines() if re.search(rf"\d {KILLED}", line)]
    assert reported
    assert all(re.search(rf"(: rank 0|one of the ranks \d, \d) {KILLED}", line) for line in reported), reported


@pytest.mark.parametrize(("action", "schedule"), [("0A", "1f1b-flush"), ("0U", "1f1b-flush"), ("0U", "2bw")])
def test_a_replica_that_is_killed_before_it_sends_its_share_is_named(
    fork_server: ForkServer, action: str, schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradients that the others own, or the weights that it owns."""
    monkeypatch.setenv("PENSTOCK_FAULTS", f"kill rank=1 step=2 action={action}")
    options = ("--schedule", schedule, "--stages", "3", "--shard")
    _, (killed, _), *_ = ended = finish(fork_server.start_faulty(3, 1, "never", "kill", *options))

    assert killed == -signal.SIGKILL
    for code, errors in (ended[0], ended[2]):
        assert code == 1
        assert re.search(rf"(rank 1|one of the ranks \d, \d) {KILLED}", errors)
        # The sum may be whole by then: it begins in the backward.
        assert re.search(r"this was action 0[AU]\d|rank \d failed in a step", errors)


@pytest.mark.parametrize("action", ["3G", "1Q"])
def test_a_rank_that_is_killed_while_weights_come_or_go_is_named_and_leaves_nothing(
    fork_server: ForkServer, action: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PENSTOCK_FAULTS", f"kill rank=1 step=2 action={action}")
    options = ("--streamed", "--directory", str(tmp_path))
    (code, errors), (killed, _) = finish(fork_server.start_faulty(2, 1, "never", "kill", *options))

    assert killed == -signal.SIGKILL
    assert code == 1
    assert re.search("rank 1 (closed its connection to this rank|has ended)", errors)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_frozen_replica_is_named(fork_server: ForkServer) -> None:
    replicated = ("--schedule", "2bw", "--stages", "2")
    [(code, errors)] = outlive(fork_server.start_faulty(2, 1, *FREEZES, *replicated), 1, 30)

    assert code != 0
    assert "nothing came from rank 1 for 4 s (the sum over ranks [0, 1])" in errors


def test_a_killed_rank_ends_the_ends_of_a_skip_past_it(fork_server: ForkServer) -> None:
    ranks = fork_server.start_faulty(3, 1, "between", "kill", "--skips")
    (_, (killed, _), _) = answers = finish(ranks)

    assert killed == -signal.SIGKILL
    for rank in (0, 2):
        printed, errors = ranks[rank].communicate()
        assert printed.splitlines()[0] == "((0, 2),)"
        assert len(printed.splitlines()) == 2, "it made no second step"
        assert answers[rank][0] not in (0, None)
        assert re.search(f"rank 1 {KILLED}", errors)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("when", ["forward", "between"])
@pytest.mark.parametrize("failing", [0, 1])
def test_on_a_gpu_an_exception_ends_every_rank(fork_server: ForkServer, failing: int, when: str) -> None:
    on_a_gpu = ("--schedule", "2bw", "--device", "cuda:0")
    for code, errors in finish(fork_server.start_faulty(2, failing, when, "raise", *on_a_gpu), GPU_SECONDS):
        assert code != 0
        assert GONE in errors


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_a_frozen_rank_is_named(fork_server: ForkServer) -> None:
    [(code, errors)] = outlive(fork_server.start_faulty(2, 1, *FREEZES, "--device", "cuda:0"), 1, GPU_SECONDS)

    assert code != 0
    assert "nothing came from rank 1 for 4 s" in errors


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize(
    ("deed", "reported"),
    [
        ("raise", "rank {} failed in a step"),
        ("kill", f"rank {{}} {KILLED}"),
        ("stop", "nothing came from rank {} for 4 s"),
    ],
)
def test_between_gpus_every_rank_ends_and_the_culprit_is_named(
    fork_server: ForkServer, deed: str, reported: str, failing: int
) -> None:
    """Several receives and sends are pending over NCCL when it happens, all of which must be aborted."""
    options = ("--schedule", "2bw", "--device", "own", "--seconds", "4" if deed == "stop" else "60")
    both = fork_server.start_faulty(2, failing, "forward", deed, *options)
    [(code, errors)] = outlive(both, failing, GPU_SECONDS)

    assert code == 1
    assert re.search(reported.format(failing), errors)
