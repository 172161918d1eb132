"""However a rank ends, also while a save is under way, all others end soon and say why."""

import signal
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from support.fork_server import Child, ForkServer, finish

SECONDS = 90
"""Far less than ``timeout_seconds`` of the script."""
SLOW_SAVE = "; ".join(f"slow rank=0 path=run/ change={change} seconds=0.4" for change in range(4, 12))


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Child]]:
    """Starts a training in two processes; its saves take long, or have other `faults`."""

    def begin(rank: int, when: str, deed: str, *options: str, faults: str = SLOW_SAVE) -> list[Child]:
        monkeypatch.setenv("PENSTOCK_FAULTS", faults)
        given = ("--seconds", "600", "--step", "2", "--directory", str(tmp_path / "run"), *options)
        return fork_server.start_faulty(2, rank, when, deed, *given)

    return begin


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("deed", "failing", "options"),
    [
        *(("raise", 0, ()), ("raise", 1, ()), ("kill", 0, ()), ("kill", 1, ())),
        *(("interrupt", 1, ()), ("raise", 0, ("--hook",)), ("raise", 1, ("--resume",))),
        # With several versions of the weights.
        ("raise", 1, ("--schedule", "pipedream")),
    ],
)
def test_a_save_under_way_keeps_no_rank_alive(
    start: Callable[..., list[Child]], tmp_path: Path, deed: str, failing: int, options: tuple[str, ...]
) -> None:
    ended = finish(start(failing, "between", deed, "--saving", *options), SECONDS)

    (code, errors), (other_code, other) = ended[failing], ended[1 - failing]
    assert code == {"kill": -signal.SIGKILL, "interrupt": -signal.SIGINT}.get(deed, 1), errors
    assert other_code == 1, other
    assert {"interrupt": "KeyboardInterrupt", "kill": "probably killed"}.get(deed, "the data set is gone") in other
    # It may have ended before the other noticed, and is never half there.
    assert penstock.latest_checkpoint(tmp_path / "run") in (None, tmp_path / "run" / "step-000001")


def test_a_kill_at_a_change_of_a_file_ends_the_other_rank(start: Callable[..., list[Child]]) -> None:
    ended = finish(start(0, "never", "nothing", "--saving", faults="kill rank=0 path=run/ change=4"), SECONDS)

    assert ended[0][0] == -signal.SIGKILL
    assert ended[1][0] == 1
    assert "rank 0" in ended[1][1]


def test_processes_end_when_the_files_are_written(start: Callable[..., list[Child]], tmp_path: Path) -> None:
    """The pipeline is not closed."""
    ended = finish(start(0, "save in the background", "nothing"), SECONDS)

    assert [code for code, _ in ended] == [0, 0], ended
    assert penstock.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-000005"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("call", "caller"),
    [
        *(("save", 0), ("save", 1), ("step", 0), ("step", 1)),
        *(("evaluate", 0), ("predict", 1), ("weights", 0), ("timeline", 1)),
    ],
)
def test_a_call_of_one_rank_only_is_named(start: Callable[..., list[Child]], call: str, caller: int) -> None:
    ended = finish(start(caller, "alone", call), SECONDS)

    assert [ended[caller][0], ended[1 - caller][0]] == [1, 0]
    name = "full_state_dict" if call == "weights" else call
    named = f"ank {caller} is in {name}(), which all ranks must call"
    assert named in ended[caller][1]
    # Rank 0 holds the store, which may be gone before rank 1 reads there what rank 0 did.
    assert caller == 1 or "and rank 1 ended after step 5 without it" in ended[caller][1]


def test_a_rank_beside_one_that_failed_ends_by_a_signal(start: Callable[..., list[Child]]) -> None:
    """torchrun sends it SIGTERM, which would be noted for the next step, and kills it half a minute later."""
    sleeping, failed = start(1, "end", "raise", "--resume")
    try:
        ((code, _),) = finish([failed], SECONDS)
        sleeping.kill(signal.SIGTERM)
        ((other_code, _),) = finish([sleeping], SECONDS)
    finally:
        sleeping.kill()

    assert (code, other_code) == (1, -signal.SIGTERM)


@pytest.mark.parametrize("options", [(), ("--with",)], ids=["open", "closed"])
def test_a_script_ends_with_a_child_that_waits_for_ever(
    start: Callable[..., list[Child]], options: tuple[str, ...]
) -> None:
    """`multiprocessing` ends its daemons by SIGTERM at the end of the script, and joins them."""
    ended = finish(start(0, "end", "have a daemon", "--resume", *options), SECONDS)

    assert [code for code, _ in ended] == [0, 0], ended
