"""Each example trains for a few steps, in one process and in two, and prints what it promises."""

import os
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from support.fork_server import ForkServer
from support.paths import ROOT

pytestmark = [pytest.mark.processes, pytest.mark.slow]

GPT = ["examples/train_gpt.py", "--config", "configs/gpt.yaml", "--text-bytes", "100000", "--sampled-bytes", "5"]
GPT += ["--width", "32", "--blocks", "2", "--context", "32"]
DIGITS = ["examples/train_digits.py", "--config", "configs/digits.yaml", "--width", "8"]
PROMISED = ("forward ms", "plan:", "stage 1 on rank 1", "predicted", "measured")
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}

Train = Callable[[int, list[str]], str]


@pytest.fixture(scope="module")
def train(fork_server: ForkServer) -> Train:
    """Runs an example on that many processes, once for each list of arguments, and returns what it prints.

    A single process holds two stages.
    """

    @cache
    def once(processes: int, arguments: tuple[str, ...]) -> str:
        if processes == 1:
            child = fork_server.start([*arguments, "--stages", "2"], ENVIRONMENT, ROOT)
            printed, errors = child.communicate(timeout=300)
            code = child.returncode
        else:
            ranks = fork_server.start_ranks(arguments, processes, ROOT)
            reported = [child.communicate(timeout=300) for child in ranks]
            printed, errors = ("".join(streams) for streams in zip(*reported, strict=True))
            code = max(abs(child.returncode) for child in ranks)

        assert code == 0, errors
        return printed

    return lambda processes, arguments: once(processes, tuple(arguments))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_gpt(train: Train, processes: int) -> None:
    printed = train(processes, [*GPT, "--steps", "20"])

    assert [guarantees for guarantees in PROMISED if printed.count(guarantees) != 1] == []
    before, after = (float(re.search(rf"loss {when}: ([\d.]+)", printed)[1]) for when in ("before", "after"))
    assert after < before
    assert "tokens per second" in printed
    assert "the model continues" in printed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("processes", [1, 2])
def test_digits(train: Train, processes: int) -> None:
    printed = train(processes, [*DIGITS, "--steps", "30"])

    assert [guarantees for guarantees in PROMISED if printed.count(guarantees) != 1] == []
    # Ten digits: one who guesses is right in one of ten.
    assert all(float(share) > 30 for share in re.findall(r"accuracy ([\d.]+)%", printed))
    assert "test set: loss" in printed


@pytest.mark.sampled(1)
@pytest.mark.parametrize("schedule", ["interleaved", "pipedream"])
def test_schedules_by_name(train: Train, schedule: str) -> None:
    stages = ["--stages", "4"] if schedule == "interleaved" else []
    printed = train(1, [*DIGITS, "--steps", "2", "--schedule", schedule, *stages])

    assert f"plan: {schedule}" in printed


def test_both_numbers_of_processes_agree(train: Train) -> None:
    losses = [re.findall(r"set: loss ([\d.]+)", train(processes, [*DIGITS, "--steps", "30"])) for processes in (1, 2)]

    assert losses[0] == losses[1] != []


def test_plan_from_a_file(train: Train, tmp_path: Path) -> None:
    from penstock import Plan

    Plan.uniform(4, 2, schedule="gpipe", microbatches=4).save(tmp_path / "plan.yaml")
    printed = train(1, [*GPT, "--steps", "2", "--plan", str(tmp_path / "plan.yaml")])

    assert "plan: gpipe, 2 stages, 4 microbatches" in printed


def test_unknown_option_in_a_config(fork_server: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("stagse: 2\n")
    child = fork_server.start([DIGITS[0], "--config", str(tmp_path / "config.yaml")], ENVIRONMENT, ROOT)
    _, errors = child.communicate(timeout=120)

    assert child.returncode == 2
    assert "stagse" in errors


@pytest.mark.parametrize("processes", [1, 2])
def test_a_schedule_of_ones_own(train: Train, processes: int) -> None:
    printed = train(processes, ["examples/own_schedule.py", *(["--stages", "2"] if processes > 1 else [])])

    assert "eager: every invariant holds" in printed
    assert printed.count("equal to one device: True") == 1
