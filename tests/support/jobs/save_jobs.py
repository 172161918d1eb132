"""Trainings whose saves meet: sequences of operations on directories, in the process of a test, in processes of the
pool, or in those of a script, which may be killed:

    save_jobs.py FAULTS FOLDER OPERATION...

An operation has a name of `OPERATIONS` and a directory: ``save:run``. What is written is slowed down, so that what is
begun is under way when the next operation comes.
"""

import json
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

import penstock
from penstock.runtime.files.step_directories import steps_in
from penstock.testing.faults import FAULTS

WIDTH, MICROBATCHES = 8, 2
PLAN = penstock.Plan((penstock.Stage(0, 1, (0,)), penstock.Stage(1, 4, (1,))), "1f1b-flush", MICROBATCHES)
"""A cut that `replan` moves."""
SLOW = "slow rank=0 path=.penstock-saving seconds=0.01"


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).double()


def make(resume: Path | None = None, **options: Any) -> penstock.Pipeline:
    return penstock.Pipeline(
        build(),
        (torch.zeros(2, WIDTH, dtype=torch.float64),),
        resume=resume,
        check="off",
        timeout_seconds=60.0,
        **{
            "loss_fn": F.mse_loss,
            "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
            "plan": PLAN,
            **options,
        },
    )


def step(pipe: penstock.Pipeline) -> None:
    """One step, whose batch depends on its number."""
    x = torch.full((4, WIDTH), 0.1 * (1 + pipe.steps % 7), dtype=torch.float64)
    pipe.step(x, x.roll(1, 1))


class Undisturbed:
    """A training that nothing happens to. It goes as far as it is asked: a job makes steps until it sees a signal."""

    def __init__(self) -> None:
        self._pipe = make()
        self._found: list[dict[str, Tensor]] = []

    def after(self, steps: int) -> dict[str, Tensor]:
        """The weights after this number of steps."""
        while len(self._found) <= steps:
            model = self._pipe.state_dict()["model"]
            self._found.append({name: tensor.clone() for name, tensor in model.items()})
            step(self._pipe)
        return self._found[steps]


def checked_steps(run: Path, expected: Undisturbed) -> list[int]:
    """The steps of the checkpoints in `run`, which are all whole and hold the numbers of their steps; also of one that
    a process which was killed has begun to replace.
    """
    found = []
    for number, path in reversed(steps_in(run)):
        stored = dict[str, Tensor]()
        content = json.loads((path / "manifest.json").read_text())["content"]
        for file in content["files"]:
            stored |= load_file(path / file) if file.startswith("model-") else {}
        assert same(stored, expected.after(number)), f"{path} is a mixture"
        found.append(number)
    return found


def same(stored: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return stored.keys() == expected.keys() and all(
        torch.equal(tensor, expected[name]) for name, tensor in stored.items()
    )


class Trainings:
    """The trainings of a process, of which `pipe` is the last, and the operations on them in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.open = [(folder / "run", make(folder / "run"))]
        """With the directories that they resume from."""
        self.saves: list[Any] = []
        self.refused: list[str] = []

    @property
    def pipe(self) -> penstock.Pipeline:
        return self.open[-1][1]

    def do(self, operation: str) -> None:
        """Does `operation`. A refusal is noted."""
        name, _, place = operation.partition(":")
        try:
            OPERATIONS[name](self, self.folder / place)
        except penstock.CheckpointError as error:
            self.refused.append(f"{operation}: {error}")

    def save(self, directory: Path) -> None:
        self.note(self.pipe.save(directory))

    def begin(self, directory: Path) -> None:
        self.saves.append(self.pipe.save(directory, wait=False))

    def begin_alone(self, directory: Path) -> None:
        self.saves.append(self.pipe.save(directory, keep=1, wait=False))

    def weights(self, directory: Path) -> None:
        self.pipe.save_weights(directory / "weights", max_shard_size=700)

    def load(self, directory: Path) -> None:
        self.pipe.load(directory)

    def replan(self, directory: Path) -> None:
        """By what a step has taken, at least."""
        step(self.pipe)
        self.pipe.replan(apply=directory)

    def close(self, directory: Path) -> None:
        """Closes the training. Another one goes on from what it has saved."""
        home, pipe = self.open.pop()
        pipe.close()
        self.open.append((home, make(home)))

    def second(self, directory: Path) -> None:
        """A second training resumes, while the first one lives on beside it."""
        self.open.append((directory, make(directory)))

    def read(self, directory: Path) -> None:
        """As `shutil.copytree` does."""
        if self.pipe.rank == 0:
            for path in directory.glob(".penstock-lock"):
                path.read_bytes()

    def term(self, directory: Path) -> None:
        self.ask(signal.SIGTERM)

    def usr1(self, directory: Path) -> None:
        self.ask(signal.SIGUSR1)

    def ask(self, number: int) -> None:
        """A signal to the last rank; steps until all leave."""
        if self.pipe.rank == self.pipe.schedule.ranks - 1 or not torch.distributed.is_initialized():
            os.kill(os.getpid(), number)
        for _ in range(1000):
            step(self.pipe)
        raise AssertionError("it does not leave")

    def note(self, path: Path) -> None:
        print(json.dumps({"saved": f"{path.parent.name}/{path.name}"}), flush=True)

    def left(self) -> dict[str, int]:
        """By directory, the steps of the training that resumed from it last."""
        return {directory.name: pipe.steps for directory, pipe in self.open}

    def end(self) -> None:
        for save in self.saves:
            if save.done:
                self.note(save.wait())
        for _, pipe in reversed(self.open):
            pipe.close()
        for save in self.saves:
            self.note(save.wait())


OPERATIONS: dict[str, Callable[[Trainings, Path], None]] = {
    name: getattr(Trainings, name)
    for name in ["save", "begin", "begin_alone", "weights", "load", "replan", "close", "second", "read", "term", "usr1"]
} | {"step": lambda trainings, _: step(trainings.pipe)}


def run(folder: Path, operations: Sequence[str]) -> tuple[int, list[str], dict[str, int]]:
    """What `operations` in `folder` leave: the exit code, what was refused, and the steps that were trained."""
    trainings, code = Trainings(folder), 0
    try:
        for operation in operations:
            trainings.do(operation)
    except SystemExit as error:
        assert isinstance(error.code, int)
        code = error.code
    steps = trainings.left()
    trainings.end()
    return code, trainings.refused, steps


def main() -> None:
    os.environ[FAULTS] = sys.argv[1]
    trainings = Trainings(Path(sys.argv[2]))
    print(json.dumps({"resumed": trainings.pipe.steps}), flush=True)
    try:
        for operation in sys.argv[3:]:
            trainings.do(operation)
        trainings.end()
    finally:
        print(json.dumps({"refused": trainings.refused, "left": trainings.left()}), flush=True)


if __name__ == "warm":
    # What PyTorch does for the first model of a process is done for all that are forked.
    Undisturbed().after(1)
if __name__ == "__main__":
    main()
