"""A child that a rank forks is no rank, and can be ended."""

import signal
from pathlib import Path

import pytest

from support.fork_server import ForkServer, finish
from support.jobs.fork_jobs import call_in_children, terminate_a_child
from support.paths import SCRIPTS
from support.processes import Pool

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


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


@pytest.mark.parametrize("words", ["daemon", "daemon closed"])
def test_a_script_ends_with_a_child_that_waits_for_ever(fork_server: ForkServer, tmp_path: Path, words: str) -> None:
    """`multiprocessing` ends its daemons by SIGTERM at the end of the script, and joins them."""
    script = str(SCRIPTS / "ending_script.py")
    ended = finish(fork_server.start_ranks([script, str(tmp_path / "run"), f"{words} resume", "0"], 2), 90)

    assert [code for code, _ in ended] == [0, 0], ended
