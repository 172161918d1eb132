"""A stage that others send past dies: those on both sides end, soon, and say which rank it was."""

import signal

from support.fork_server import ForkServer
from support.paths import SCRIPTS

SCRIPT = SCRIPTS / "skip_failure_script.py"


def test_a_killed_rank_ends_the_ends_of_a_skip_past_it(fork_server: ForkServer) -> None:
    ranks = fork_server.start_ranks([str(SCRIPT)], 3)
    try:
        answers = [child.communicate(timeout=60) for child in ranks]
    finally:
        for child in ranks:
            child.kill()

    assert ranks[1].returncode == -signal.SIGKILL
    for rank in (0, 2):
        printed, errors = answers[rank]
        assert printed.splitlines()[0] == "((0, 2),)"
        assert len(printed.splitlines()) == 2, "it made no second step"
        assert ranks[rank].returncode not in (0, None)
        assert "rank 1 closed its connection" in errors
