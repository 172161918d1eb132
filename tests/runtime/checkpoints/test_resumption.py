"""`resume=` starts a training or goes on with it, and says what keeps it from doing either."""

import logging
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS
from support import models


def make_pipeline(directory: Any, **options: Any) -> penstock.Pipeline:
    """Two stages of two layers."""
    torch.manual_seed(0)
    model, sample = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).double(), (torch.zeros(2, 4).double(),)
    options = {"stages": 2, "resume": directory, **options}
    return penstock.Pipeline(model, sample, nn.functional.mse_loss, models.momentum, **options)


def step(pipe: penstock.Pipeline) -> float:
    """One step, whose batch depends on its number."""
    x = torch.full((4, 4), 1.0 + pipe.steps).double()
    return float(pipe.step(x, x).loss)


def test_a_training_starts_where_there_is_nothing_and_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    whole = make_pipeline(None)
    expected = [step(whole) for _ in range(5)]
    with make_pipeline(tmp_path / "run") as pipe:
        assert pipe.steps == 0
        found = [step(pipe) for _ in range(3)]
        pipe.save(tmp_path / "run")
        step(pipe)
    with make_pipeline(tmp_path / "run", stages=4) as again:
        assert again.steps == 3
        found += [step(again) for _ in range(2)]

    assert found == expected


def test_what_a_killed_save_has_left_is_removed_before_the_training_goes_on(tmp_path: Path) -> None:
    """The kill may have come in the last save of a training, which no other one follows."""
    run = tmp_path / "run"
    with make_pipeline(run) as pipe:
        step(pipe)
        saved = pipe.save(run)
    for kind in ("saving", "removed"):
        shutil.copytree(saved, run / f".penstock-{kind}-0123456789abcdef")
    with make_pipeline(run) as again:
        assert again.steps == 1

    assert sorted(run.iterdir()) == [run / ".penstock-lock", saved]


def test_a_plan_is_made_for_the_processes_that_are_there(tmp_path: Path) -> None:
    asked: list[int] = []

    def plan(processes: int) -> penstock.Plan:
        asked.append(processes)
        return penstock.Plan.uniform(4, 4, schedule="gpipe", microbatches=2)

    with make_pipeline(tmp_path / "run", plan=plan, stages=None) as pipe:
        assert pipe.plan == plan(1)
    assert asked[0] == 1


def test_a_function_that_makes_no_plan_is_refused() -> None:
    with pytest.raises(penstock.PlanError, match=r"returns a penstock\.Plan for 1 process\(es\), found 3"):
        make_pipeline(None, plan=lambda processes: 3, stages=None)


def test_a_training_whose_checkpoints_are_all_damaged_does_not_begin_anew(tmp_path: Path) -> None:
    with make_pipeline(tmp_path / "run") as pipe:
        step(pipe)
        saved = pipe.save(tmp_path / "run")
    (saved / "manifest.json").write_text("{")

    with pytest.raises(penstock.CheckpointError, match="manifest"):
        make_pipeline(tmp_path / "run")


@pytest.mark.parametrize("directory", [5, "", "no\0path"])
def test_what_is_no_directory_is_refused(directory: Any) -> None:
    with pytest.raises(penstock.PenstockError, match=r"Pipeline\(resume=\): expected a directory, found (5|''|'no)"):
        make_pipeline(directory)


def test_a_directory_of_other_files_is_refused_before_a_step(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("all of it")

    with pytest.raises(penstock.CheckpointError, match=r"thesis\.tex"):
        make_pipeline(tmp_path)


@pytest.fixture(params=[signal.SIGTERM, signal.SIGUSR1])
def number(request: pytest.FixtureRequest) -> Iterator[signal.Signals]:
    """A signal, whose handler is Python's own, as in a process that torchrun has started."""
    before = signal.signal(request.param, signal.SIG_DFL)
    yield request.param
    signal.signal(request.param, before)


def test_a_signal_saves_and_leaves_at_the_end_of_the_step(
    number: signal.Signals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    pipe = make_pipeline(tmp_path / "run")
    step(pipe)
    os.kill(os.getpid(), number)
    with caplog.at_level(logging.WARNING, "penstock"), pytest.raises(SystemExit) as left:
        step(pipe)
    pipe.close()

    assert left.value.code == 128 + number
    assert f"{number.name}: all ranks have saved step 2" in caplog.text
    with make_pipeline(tmp_path / "run") as again:
        assert again.steps == 2


def test_a_closed_pipeline_gives_the_signals_back(number: signal.Signals, tmp_path: Path) -> None:
    with make_pipeline(tmp_path / "run"):
        assert signal.getsignal(number) is not signal.SIG_DFL
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_handler_of_the_users_own_stays(number: signal.Signals, tmp_path: Path) -> None:
    taken: list[int] = []
    signal.signal(number, lambda taken_number, frame: taken.append(taken_number))
    with make_pipeline(tmp_path / "run") as pipe:
        os.kill(os.getpid(), number)
        step(pipe)

    assert taken == [number]
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".penstock-lock"]


def test_no_signal_is_taken_without_a_directory_or_where_hooks_are_forbidden(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make_pipeline(None):
        assert signal.getsignal(number) is signal.SIG_DFL
    monkeypatch.setenv(PROCESS_HOOKS, "0")
    with make_pipeline(tmp_path / "run"):
        assert signal.getsignal(number) is signal.SIG_DFL
