"""However a rank ends, also while a save is under way, all others end soon and say why."""

import signal
from pathlib import Path

import pytest

from support.fork_server import ForkServer, finish
from support.paths import SCRIPTS

SCRIPT = str(SCRIPTS / "ending_script.py")
SECONDS = 90
"""Far less than ``timeout_seconds`` of the script."""


@pytest.mark.parametrize(
    ("words", "failing"),
    [
        *(("raises", 0), ("raises", 1), ("killed", 0), ("killed", 1)),
        *(("interrupted", 1), ("hook raises", 0), ("resume raises", 1)),
    ],
)
def test_a_save_under_way_keeps_no_rank_alive(
    fork_server: ForkServer, tmp_path: Path, words: str, failing: int
) -> None:
    started = fork_server.start_ranks([SCRIPT, str(tmp_path / "run"), f"save {words}", str(failing)], 2)
    ended = finish(started, SECONDS)

    (code, errors), (other_code, other) = ended[failing], ended[1 - failing]
    assert code == (-signal.SIGKILL if words == "killed" else 1 if words != "interrupted" else -signal.SIGINT), errors
    assert other_code == 1, other
    cause = {"interrupted": "KeyboardInterrupt", "killed": "probably killed"}.get(words, "the data set is gone")
    assert cause in other


def test_a_kill_at_a_change_of_a_file_ends_the_other_rank(fork_server: ForkServer, tmp_path: Path) -> None:
    ended = finish(fork_server.start_ranks([SCRIPT, str(tmp_path / "run"), "save files", "0"], 2), SECONDS)

    assert ended[0][0] == -signal.SIGKILL
    assert ended[1][0] == 1
    assert "rank 0" in ended[1][1]


@pytest.mark.parametrize(("words", "failing"), [("hook raises", 1), ("hook interrupted", 0)])
def test_a_hook_of_the_script_hides_no_cause(fork_server: ForkServer, tmp_path: Path, words: str, failing: int) -> None:
    ended = finish(fork_server.start_ranks([SCRIPT, str(tmp_path / "run"), words, str(failing)], 2), SECONDS)

    assert "my own hook" in ended[failing][1]
    cause = "KeyboardInterrupt" if "interrupted" in words else "the data set is gone"
    assert f"rank {failing} failed outside the pipeline, so rank {1 - failing} stops too" in ended[1 - failing][1]
    assert cause in ended[1 - failing][1]


@pytest.mark.parametrize(
    ("call", "caller"),
    [
        *(("save", 0), ("save", 1), ("step", 0), ("step", 1)),
        *(("evaluate", 0), ("predict", 1), ("full_state_dict", 0), ("timeline", 1)),
    ],
)
def test_a_call_of_one_rank_only_is_named(fork_server: ForkServer, tmp_path: Path, call: str, caller: int) -> None:
    started = fork_server.start_ranks([SCRIPT, str(tmp_path / "run"), f"calls {call}", str(caller)], 2)
    ended = finish(started, SECONDS)

    assert [ended[caller][0], ended[1 - caller][0]] == [1, 0]
    named = f"ank {caller} is in {call}(), which all ranks must call"
    assert named in ended[caller][1]
    # Rank 0 holds the store, which may be gone before rank 1 reads there what rank 0 did.
    assert caller == 1 or "and rank 1 ended after step 1 without it" in ended[caller][1]


def test_a_rank_beside_one_that_failed_ends_by_a_signal(fork_server: ForkServer, tmp_path: Path) -> None:
    """torchrun sends it SIGTERM, which would be noted for the next step, and kills it half a minute later."""
    arguments = [SCRIPT, str(tmp_path / "run"), "sleeps resume raises", "1"]
    sleeping, failed = fork_server.start_ranks(arguments, 2)
    try:
        ((code, _),) = finish([failed], SECONDS)
        sleeping.kill(signal.SIGTERM)
        ((other_code, _),) = finish([sleeping], SECONDS)
    finally:
        sleeping.kill()

    assert (code, other_code) == (1, -signal.SIGTERM)
