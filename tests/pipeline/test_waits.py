"""No wait for another rank outlives ``timeout_seconds``, and the error names that rank."""

import signal

import pytest

from support.fork_server import ForkServer, finish, outlive

ENOUGH_SECONDS = 120.0
"""Much longer than any timeout here, and much shorter than those of PyTorch."""
LIMIT_SECONDS = 12
"""The timeout of the ranks that wait: enough for a busy machine to start several runs at once."""
LIMITED = ("--seconds", str(LIMIT_SECONDS))
HANDLER = "the user's exit handler"


def outlive_both(fork_server: ForkServer, when: str, deed: str, ranks: int = 2) -> list[tuple[int, list[str]]]:
    """A run in which rank 0 fails, and one in which the last rank does, at the same time: that rank, and the
    standard errors of the others, which end with code 1.
    """
    runs = [(failing, fork_server.start_faulty(ranks, failing, when, deed, *LIMITED)) for failing in (0, ranks - 1)]
    ended = [(failing, outlive(children, failing, ENOUGH_SECONDS)) for failing, children in runs]
    assert all(code == 1 for _, answers in ended for code, _ in answers), ended
    return [(failing, [errors for _, errors in answers]) for failing, answers in ended]


def test_a_rank_that_stands_still_in_a_step_is_named_by_all(fork_server: ForkServer) -> None:
    """Rank 0 holds the store, which then answers no call."""
    for failing, errors in outlive_both(fork_server, "forward", "stop", 3):
        assert len(errors) == 2
        reported = [error for error in errors if f"nothing came from rank {failing} for {LIMIT_SECONDS} s" in error]
        assert reported
        assert all("in a step" in error or "nothing came from" in error for error in errors)
        if failing == 0:
            assert all("The store at which the processes have met has not answered for" in error for error in reported)
        else:
            assert all(f"Rank {failing} stands still: its process is stopped (SIGSTOP" in error for error in reported)
            assert all("its last sign of life came" in error for error in reported)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_stands_still_before_a_call_ends_it_elsewhere(fork_server: ForkServer, failing: int) -> None:
    # At the same time, since nearly all of it is waiting.
    calls = ("save", "load", "timeline", "weights")
    runs = {call: fork_server.start_faulty(2, failing, call, "stop", *LIMITED) for call in calls}
    for call, children in runs.items():
        [(code, errors)] = outlive(children, failing, ENOUGH_SECONDS)

        assert code == 1, (call, errors)
        assert f"nothing came from rank {failing} for {LIMIT_SECONDS} s" in errors, call
        assert HANDLER in errors, call


def test_a_rank_that_never_builds_is_named(fork_server: ForkServer) -> None:
    for failing, [errors] in outlive_both(fork_server, "start", "sleep"):
        assert f"expected rank {failing}" in errors
        assert f"within {LIMIT_SECONDS} s, and it did not come" in errors


@pytest.mark.parametrize(("when", "deed"), [("start", "leave"), ("probe", "stop")])
def test_a_rank_that_does_not_come_is_named(fork_server: ForkServer, when: str, deed: str) -> None:
    for failing, [errors] in outlive_both(fork_server, when, deed):
        assert f"expected rank {failing}" in errors


def test_a_killed_rank_is_noticed_though_its_child_lives(
    fork_server: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The child has the connections of its parent, so they do not break."""
    runs = []
    for memory in ("0", "1"):
        monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", memory)
        runs.append(fork_server.start_faulty(2, 0, "forward", "kill beside a child", "--seconds", "300"))
    for children in runs:
        (killed, _), (code, errors) = finish(children, ENOUGH_SECONDS)

        assert killed == -signal.SIGKILL
        assert code == 1
        assert "rank 0" in errors
        assert "was probably killed (out of memory?)" in errors


@pytest.mark.parametrize("memory", ["0", "1"])
def test_a_process_that_may_open_no_more_files_says_so_on_every_rank(
    fork_server: ForkServer, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The timeout is longer than the test may take."""
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", memory)
    started = fork_server.start_faulty(2, 1, "build", "open few files", "--seconds", "300")
    answers = finish(started, ENOUGH_SECONDS)

    for code, errors in answers:
        assert code == 1
        assert "this process may open no more files" in errors
        assert "Raise the limit (ulimit -n" in errors
        assert "out of memory" not in errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize(("failing", "deed"), [(0, "raise"), (1, "raise"), (0, "interrupt")])
def test_an_error_is_reported_where_the_hook_for_errors_is_replaced(
    fork_server: ForkServer, failing: int, deed: str, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", memory)
    ended = finish(fork_server.start_faulty(2, failing, "save", deed, "--hook"), ENOUGH_SECONDS)

    assert "my own hook" in ended[failing][1]
    assert all(code != 0 and HANDLER in errors for code, errors in ended if code != -signal.SIGINT)
    code, errors = ended[1 - failing]
    assert code == 1
    assert ("KeyboardInterrupt" if deed == "interrupt" else "ValueError: the data set is gone") in errors
    assert f"rank {failing} failed outside the pipeline, so rank {1 - failing} stops too" in errors


@pytest.mark.sampled(2)
@pytest.mark.parametrize("memory", ["0", "1"])
@pytest.mark.parametrize("failing", [0, 1])
def test_exit_handlers_run_where_a_rank_ends_whose_peer_lives_on(
    fork_server: ForkServer, failing: int, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads wait for messages of the peer, over Gloo for ever."""
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", memory)
    children = fork_server.start_faulty(2, failing, "forward", "catch")
    [(code, errors)] = outlive(children, failing, ENOUGH_SECONDS)

    assert code == 1
    assert f"rank {failing} failed in a step, so rank {1 - failing} stops too" in errors
    assert HANDLER in errors
    assert children[failing].returncode == -signal.SIGKILL, "it had ended by itself"
