"""Saves that meet other operations on the same directories, in one process and in several, with kills between.

Every pair of operations is enumerated, and longer sequences are drawn. What holds for all: a checkpoint that a save has
returned is there, every checkpoint has the numbers of its step, and a process leaves with the code that is documented.
"""

import fcntl
import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

import penstock
from penstock.capturing.weight_files import read_index
from penstock.testing import faults
from support.fork_server import ForkServer, finish
from support.jobs import save_jobs
from support.jobs.save_jobs import OPERATIONS, SLOW, Undisturbed, checked_steps, make, run, same, step
from support.processes import Pool

SIGNALS = {"term": 143, "usr1": 138}
PAIRS = [name for name in OPERATIONS if name not in ("step", "begin_alone", "read")]
LEADING = [name for name in PAIRS if name not in SIGNALS]
MOST_STEPS = 60
"""More than a job makes after its last save."""

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@cache
def expected() -> Undisturbed:
    return Undisturbed()


@pytest.fixture(autouse=True)
def signals() -> Iterator[None]:
    """Handlers are Python's own, as in a process that torchrun has started."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGUSR1)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def check_folder(folder: Path) -> dict[str, list[int]]:
    """By directory, the steps of its checkpoints, after all that is written there was found to be whole."""
    directories = [path for path in folder.iterdir() if path.is_dir()]
    found = {directory.name: checked_steps(directory, expected()) for directory in directories}
    most = max(chain.from_iterable(found.values()), default=0) + MOST_STEPS
    for directory in directories:
        index = directory / "weights" / "model.safetensors.index.json"
        if index.exists():
            homes = read_index(index)
            stored = {name: load_file(index.parent / home)[name] for name, home in homes.items()}
            states = map(expected().after, range(most))
            assert any(same(stored, state) for state in states), f"{index.parent} is a mixture"
    return found


def check_left(*directories: Path) -> None:
    """That nothing lies about."""
    for directory in directories:
        names = {re.sub(r"\d+", "", path.name) for path in directory.iterdir()}
        assert names <= {"step-", ".penstock-lock", "weights"}, names
        assert not list(directory.glob("weights/.weights.*"))


def operations_of(first: str, second: str, place: str) -> list[str]:
    """Both, under way at the same time where that can be, with a save before that `load` finds."""
    return ["step:", "save:run", "step:", f"{first}:run", "step:", f"{second}:{place}", "step:"]


def check_pair(
    folder: Path, first: str, second: str, place: str, outcome: tuple[int, list[str], dict[str, int]]
) -> None:
    code, refused, steps = outcome
    assert code == SIGNALS.get(second, 0)
    # There is nothing to load, and a training that begins anew there may not save to the directory of the first one.
    assert [text.partition(" ")[0] for text in refused] == (
        ["load:other:"] if (second, place) == ("load", "other") else []
    )
    found = check_folder(folder)
    assert found["run"][:2] == [1, 2] if first in ("save", "begin") else 1 in found["run"]
    assert found[place] if second in ("save", "begin") else True
    if code:
        assert {name: max(found[name]) for name in steps} == steps
    check_left(*folder.iterdir())


@pytest.mark.sampled(5)
@pytest.mark.parametrize("place", ["run", "other"])
@pytest.mark.parametrize("second", PAIRS)
@pytest.mark.parametrize("first", LEADING)
def test_every_pair_in_one_process(tmp_path: Path, first: str, second: str, place: str) -> None:
    with faults.inject(faults.parse_faults(SLOW)):
        outcome = run(tmp_path, operations_of(first, second, place))

    check_pair(tmp_path, first, second, place, outcome)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", ["run", "other"])
@pytest.mark.parametrize("second", [name for name in PAIRS if name != "usr1"])
@pytest.mark.parametrize("first", LEADING)
def test_every_pair_in_two_processes(pool: Pool, tmp_path: Path, first: str, second: str, place: str) -> None:
    outcomes = pool.run(2, run, tmp_path, operations_of(first, second, place))

    assert outcomes[0] == outcomes[1]
    check_pair(tmp_path, first, second, place, outcomes[0])


def draw(number: int) -> tuple[int, str, list[list[str]]]:
    """How many ranks, the faults, and the operations of two jobs, the second of which goes on from the first."""
    chosen = random.Random(number)
    ranks = chosen.choice([1, 2])
    names = [name for name in OPERATIONS if name not in SIGNALS]

    def operations(length: int) -> list[str]:
        found = ["step:"]
        for _ in range(length):
            found += [f"{chosen.choice(names)}:{chosen.choice(['run', 'run', 'other'])}"]
            found += ["step:"] * chosen.choice([0, 0, 1])
        return found

    jobs = [["step:", "save:run", *operations(chosen.randint(3, 6))] for _ in range(2)]
    for job in jobs:
        if chosen.random() < 0.4:
            job.append(f"{chosen.choice(list(SIGNALS))}:")
    path = chosen.choice([".penstock-saving", ".penstock-", "step-", "weights", "model-00001"])
    kill = f"kill rank={chosen.randrange(ranks)} path={path} change={chosen.randrange(24)}"
    return ranks, f"{SLOW}; {kill}" if chosen.random() < 0.7 else SLOW, jobs


@pytest.fixture(scope="module")
def warm_server() -> Iterator[ForkServer]:
    server = ForkServer(save_jobs.__file__)
    yield server
    server.close()


@pytest.mark.processes
@pytest.mark.sampled(1)
@pytest.mark.parametrize("number", range(200))
def test_drawn_sequences_with_kills(tmp_path: Path, warm_server: ForkServer, number: int) -> None:
    ranks, fault, jobs = draw(number)
    saved: list[str] = []
    last = ["step:", "save:run", "weights:run"]
    for job, given in zip([*jobs, last], (fault, fault, ""), strict=True):
        processes = warm_server.start_ranks([save_jobs.__file__, given, str(tmp_path), *job], ranks)
        ended = finish(processes, 120)
        codes = [code for code, _ in ended]
        lines = [json.loads(line) for line in processes[0].communicate()[0].splitlines() if line.startswith("{")]
        report = f"{codes}\n{job}\n{lines}\n" + "\n".join(error for _, error in ended)
        saved += [line["saved"] for line in lines if "saved" in line]
        found = check_folder(tmp_path)
        wanted = SIGNALS.get(job[-1].partition(":")[0], 0)
        if -signal.SIGKILL in codes:
            assert {-signal.SIGKILL, 0, 1, wanted}.issuperset(codes), report
        else:
            assert set(codes) == {wanted}, report
            if wanted:
                (left,) = (line["left"] for line in lines if "left" in line)
                assert all(steps in found[name] for name, steps in left.items()), report
        alone = any(operation.startswith("begin_alone") for job in jobs for operation in job)
        for name in {name.partition("/")[0] for name in saved}:
            have = {f"{name}/step-{step:06d}" for step in found.get(name, ())}
            assert have, report
            assert alone or have.issuperset(each for each in saved if each.startswith(f"{name}/")), report
    # What kills have left is removed.
    check_left(tmp_path / "run")


X = torch.ones(4, save_jobs.WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("reader", ["load", "latest_checkpoint"])
def test_a_reader_finds_the_newest_beside_a_job_that_keeps_one(tmp_path: Path, reader: str) -> None:
    """The one that the reader has seen is removed when it is opened."""
    writer, pipe = make(), make()
    step(writer)
    writer.save(tmp_path / "run")
    waiting = [tmp_path / "run" / "step-000001" / "manifest.json"]

    def replace(event: str, arguments: Any) -> None:
        if event == "open" and waiting and arguments[0] == str(waiting[0]):
            waiting.clear()
            step(writer)
            writer.save(tmp_path / "run", keep=1)

    sys.addaudithook(replace)
    if reader == "load":
        pipe.load(tmp_path / "run")
        assert pipe.steps == 2
    else:
        assert penstock.latest_checkpoint(tmp_path / "run") == tmp_path / "run" / "step-000002"
    assert not waiting


def test_a_signal_saves_all_trainings_of_the_process(tmp_path: Path) -> None:
    """Each in its own directory; of two in one directory the one that was built last, or ends the step."""
    names = ("generator", "discriminator", "critic")
    first, second, third = (make(tmp_path / name) for name in names)
    for pipe, steps in ((first, 1), (second, 2), (third, 3)):
        for _ in range(steps):
            step(pipe)
    third.close()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as left:
        step(first)

    assert left.value.code == 143
    assert check_folder(tmp_path) == {"generator": [2], "discriminator": [2], "critic": []}
    # One that is dropped is closed.
    del left, first, pipe
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize("last", ["first", "second"])
def test_a_signal_reaches_the_trainings_that_are_left(tmp_path: Path, last: str) -> None:
    first, second = make(tmp_path / "first"), make(tmp_path / "second")
    (second if last == "first" else first).close()
    os.kill(os.getpid(), signal.SIGUSR1)
    with pytest.raises(SystemExit) as left:
        step(first if last == "first" else second)

    assert left.value.code == 138
    assert check_folder(tmp_path)[last] == [1]
    (first if last == "first" else second).close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def slow_loss(output: Tensor, target: Tensor) -> Tensor:
    """Makes the last stage the slowest one on every machine, so that `replan` moves the cut."""
    time.sleep(0.02)
    return torch.nn.functional.mse_loss(output, target)


@pytest.mark.parametrize("moment", ["before", "while it is built again"])
def test_a_signal_around_a_replan_is_not_lost(tmp_path: Path, moment: str) -> None:
    built: list[int] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        if built:
            os.kill(os.getpid(), signal.SIGTERM)
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    pipe = make(tmp_path / "run", optimizer=optimizer, loss_fn=slow_loss)
    for _ in range(8):
        step(pipe)
    cut = pipe.plan.stages
    if moment == "before":
        os.kill(os.getpid(), signal.SIGTERM)
    else:
        built.append(1)
    pipe.replan(apply=tmp_path / "cuts")
    assert pipe.plan.stages != cut
    with pytest.raises(SystemExit) as left:
        step(pipe)
    pipe.close()

    assert left.value.code == 143
    assert check_folder(tmp_path) == {"run": [9], "cuts": [8]}


def test_a_pipeline_that_is_built_again_keeps_its_directories(tmp_path: Path) -> None:
    refused: list[str] = []

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        for name in ("run", "cuts"):
            with suppress(FileNotFoundError), (tmp_path / name / ".penstock-lock").open() as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    refused.append(name)
        return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)

    pipe = make(tmp_path / "run", optimizer=optimizer, loss_fn=slow_loss)
    for _ in range(8):
        step(pipe)
    refused.clear()
    pipe.replan(apply=tmp_path / "cuts")
    assert set(refused) == {"run", "cuts"}
    pipe.close()


@pytest.mark.parametrize("follower", ["load", "save", "wait", "close"])
def test_a_save_that_a_failed_step_has_cut_off_is_given_up(tmp_path: Path, follower: str) -> None:
    """Under a schedule without a flush some stages have not made the updates of the save when the step fails."""
    failing: list[int] = []

    def loss_fn(output: Tensor, target: Tensor) -> Tensor:
        if failing:
            raise ValueError("the data set is gone")
        return torch.nn.functional.mse_loss(output, target)

    plan = penstock.Plan.uniform(4, 4, schedule="pipedream", microbatches=1)
    pipe = make(plan=plan, loss_fn=loss_fn)
    for _ in range(6):
        pipe.step(X, X)
    pipe.save(tmp_path / "run")
    for _ in range(4):
        pipe.step(X, X)
    save = pipe.save(tmp_path / "run", wait=False)
    failing.append(1)
    with pytest.raises(ValueError, match="gone"):
        pipe.step(X, X)
    failing.clear()
    if follower in ("save", "load"):
        with pytest.raises(penstock.PenstockError, match="failed before"):
            getattr(pipe, follower)(tmp_path / "run")
    elif follower == "close":
        pipe.close()
    with pytest.raises(penstock.CheckpointError, match="was given up"):
        save.wait()
    pipe.close()
    assert "step-000006" in os.listdir(tmp_path / "run")
