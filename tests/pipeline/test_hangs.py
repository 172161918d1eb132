"""Runs of real processes that hang, and what the doctor says of them from outside."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.doctor.conditions import Evidence
from penstock.doctor.diagnosis import Diagnosis, Verdict, diagnose
from penstock.doctor.run_directories import RunDirectory, examine
from penstock.errors import PenstockError
from support.fork_server import Child, ForkServer, finish


class HungRun:
    """Processes of `faulty_training.py`, whose records are in `directory`."""

    def __init__(self, processes: list[Child], directory: RunDirectory) -> None:
        self.processes, self.directory = processes, directory

    def wait_for(self, verdict: Verdict, *, edge: bool = False) -> tuple[Evidence, Diagnosis]:
        """The first diagnosis with `verdict`; the last one if there is none for a long time.

        With `edge`, one that names the blocked edge: on a busy machine the other rank may begin to wait later.
        """
        deadline = time.monotonic() + 90
        while True:
            try:
                evidence = examine(self.directory, signals=True)
                found = diagnose(evidence)
                if (found.verdict is verdict and (found.edge or not edge)) or time.monotonic() > deadline:
                    return evidence, found
            except PenstockError:
                assert time.monotonic() < deadline, [process.errors() for process in self.processes]
            time.sleep(0.2)


Hang = Callable[..., HungRun]


@pytest.fixture
def hang(fork_server: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    """Starts a run in which a rank does something in the third step, or before it."""
    processes: list[Child] = []

    def start(ranks: int, rank: int, when: str, deed: str, *options: str) -> HungRun:
        monkeypatch.setenv("PENSTOCK_RUN_DIR", str(tmp_path / "run"))
        given = ("--step", "2", "--seconds", "600", *options)
        processes.extend(fork_server.start_faulty(ranks, rank, when, deed, *given))
        return HungRun(processes, RunDirectory(tmp_path / "run"))

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def test_a_rank_asleep_in_a_forward_is_slow(hang: Hang, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = hang(2, 1, "forward", "sleep", "--schedule", "interleaved", "--stages", "1-1-1-1")
    evidence, found = run.wait_for(Verdict.SLOW, edge=True)

    assert (found.verdict, found.rank) == (Verdict.SLOW, 1), found
    assert "in do: time.sleep(600)" in found.sentence
    assert found.edge is not None
    assert (found.edge.source, found.edge.target) == (1, 0)
    records = [process.record for process in evidence.processes]
    assert [record.steps for record in records if record is not None] == [3, 3]

    page = tmp_path / "page.html"
    assert main(["doctor", str(run.directory.path), "--html", str(page)]) == 0
    printed = capsys.readouterr().out
    assert "SLOW: rank 1 is slow" in printed
    assert "\nrank 1 " in printed
    assert "<svg" in page.read_text()
    assert main(["doctor", str(run.directory.path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rank"] == 1


def test_a_rank_asleep_between_steps_is_in_the_users_code(hang: Hang) -> None:
    _, found = hang(3, 2, "between", "sleep", "--schedule", "pipedream").wait_for(Verdict.USER_CODE)

    assert (found.verdict, found.rank) == (Verdict.USER_CODE, 2), found
    assert "after 2 steps; others are in step 2" in found.sentence
    assert "in do: time.sleep(600)" in found.sentence


def test_a_rank_that_never_calls_step_is_named(hang: Hang) -> None:
    _, found = hang(2, 0, "between", "sleep", "--step", "0").wait_for(Verdict.USER_CODE)

    assert (found.verdict, found.rank) == (Verdict.USER_CODE, 0), found
    # The other rank waits for it in the comparison of the first batch.
    assert "in the user's code, outside of the pipeline" in found.sentence


def test_a_stopped_rank_is_named(hang: Hang) -> None:
    _, found = hang(4, 0, "forward", "stop", "--schedule", "pipedream").wait_for(Verdict.STOPPED)

    assert (found.verdict, found.rank) == (Verdict.STOPPED, 0), found


def test_a_rank_whose_interpreter_is_blocked_writes_its_stacks_at_a_signal(hang: Hang) -> None:
    evidence, found = hang(2, 1, "forward", "hold the interpreter").wait_for(Verdict.SILENT, edge=True)

    assert (found.verdict, found.rank) == (Verdict.SILENT, 1), found
    assert "in do" in evidence.processes[1].stacks
    assert found.edge is not None
    assert (found.edge.source, found.edge.target) == (1, 0)


def test_a_killed_rank_is_named_after_the_others_have_ended(hang: Hang) -> None:
    run = hang(3, 1, "forward", "kill", "--schedule", "2bw")
    finish(run.processes)
    _, found = run.wait_for(Verdict.DEAD)

    assert (found.verdict, found.rank) == (Verdict.DEAD, 1), found
