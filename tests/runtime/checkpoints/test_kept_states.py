"""What a checkpoint keeps beside the weights: optimizers, schedulers, generators, loaders and the user's objects."""

import errno
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import TensorDataset

import penstock
from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.checkpoints.own_states import OwnStates
from penstock.testing import faults
from support import checkpointed, models
from support.jobs.hook_jobs import Dragging

SUBJECT = models.SUBJECTS["normalized"]


def make(**options: Any) -> penstock.Pipeline:
    return checkpointed.make(SUBJECT, **options)


def losses(pipe: penstock.Pipeline, start: int, stop: int = 5) -> list[float]:
    return [float(pipe.step(x, y).loss) for x, y in SUBJECT.batches[start:stop]]


def check_resuming(directory: Path, **options: Any) -> None:
    """A run that is saved after two steps, and resumed in another pipeline, equals the run that went on."""
    pipe = make(**options)
    losses(pipe, 0, 2)
    path = pipe.save(directory)
    expected = losses(pipe, 2)
    resumed = make(**options)
    resumed.load(path)

    assert losses(resumed, 2) == expected
    for name, tensor in pipe.state_dict()["model"].items():
        assert torch.equal(tensor, resumed.state_dict()["model"][name]), name


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=torch.tensor(0.01), amsgrad=True, foreach=False),
    "groups": lambda p: torch.optim.AdamW([{"params": p[:3], "lr": 0.1}, {"params": p[3:], "betas": (0.5, 0.9)}]),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adamax": torch.optim.Adamax,
    "ASGD": torch.optim.ASGD,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.5, centered=True),
    "Rprop": torch.optim.Rprop,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_pytorch(tmp_path: Path, name: str) -> None:
    check_resuming(tmp_path / "run", optimizer=OPTIMIZERS[name])


class OwnTypes(torch.optim.SGD):
    """Keeps a float32 sum for float64 parameters, a counter and a tuple."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["sum"] = state.get("sum", torch.zeros(parameter.shape)) + parameter.grad.float()
                    state["count"] = (state.get("count", (0,))[0] + 1, "seen")
                    parameter.data -= 0.1 * state["sum"] / state["count"][0]


def test_an_optimizer_with_other_types_keeps_them(tmp_path: Path) -> None:
    check_resuming(tmp_path / "run", optimizer=lambda params: OwnTypes(params, lr=0.1))


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda step: 1 / (step + 1)),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [1, 3]),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o, 0.1), schedulers.ExponentialLR(o, 0.9)], milestones=[3]
    ),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_of_pytorch(tmp_path: Path, name: str) -> None:
    check_resuming(tmp_path / "run", lr_scheduler=SCHEDULERS[name])


def test_averages_hooks_and_scale(tmp_path: Path) -> None:
    hooks = (Dragging(), penstock.WeightAverage(0.9))
    options: dict[str, Any] = {"update_hooks": hooks, "loss_scale": penstock.LossScale(8.0, interval=1)}
    options |= {"schedule": "2bw", "microbatches": 2}
    check_resuming(tmp_path / "run", **options)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", [*SCHEDULERS, "ReduceLROnPlateau"])
def test_schedulers_that_are_stepped_by_hand(tmp_path: Path, name: str) -> None:
    """They are the user's objects, and the learning rates are the optimizer's."""
    build = {**SCHEDULERS, "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=0)}[name]

    def begin() -> tuple[penstock.Pipeline, Any]:
        pipe = make(optimizer=models.plain)
        scheduler = build(pipe.optimizer)
        pipe.track(scheduler=scheduler)
        return pipe, scheduler

    def train(pipe: penstock.Pipeline, scheduler: Any, start: int, stop: int) -> list[float]:
        found = []
        for index in range(start, stop):
            found += losses(pipe, index, index + 1)
            scheduler.step(*((1.0,) if name == "ReduceLROnPlateau" else ()))
        return found

    pipe, scheduler = begin()
    train(pipe, scheduler, 0, 2)
    path = pipe.save(tmp_path / "run")
    expected = train(pipe, scheduler, 2, 5)
    resumed, own = begin()
    resumed.load(path)

    assert train(resumed, own, 2, 5) == expected


class Average:
    """An object of the user's own: an average over some weights, and a count."""

    def __init__(self) -> None:
        self.tensors: dict[int, Any] = {}
        self.counts = np.zeros(2, dtype=np.int16)
        self.best = float("inf")

    def add(self, pipe: penstock.Pipeline) -> None:
        self.tensors = {index: p.detach().clone() for index, p in enumerate(pipe.parameters())}
        self.counts += 1

    def state_dict(self) -> dict[str, Any]:
        return {"tensors": self.tensors, "counts": self.counts, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)


def test_objects_of_the_user(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    pipe, average = make(), Average()
    pipe.track(average=average, linear=torch.nn.Linear(2, 2))
    losses(pipe, 0, 1)
    average.add(pipe)
    path = pipe.save(tmp_path / "run")
    resumed, own = make(), Average()
    resumed.track(average=own)
    resumed.load(path)

    assert own.best == float("inf")
    assert own.counts.tolist() == [1, 1]
    assert own.counts.dtype == np.int16
    assert all(torch.equal(tensor, own.tensors[index]) for index, tensor in average.tensors.items())
    # Tracked later: it gets its state then.
    linear = torch.nn.Linear(2, 2)
    with caplog.at_level(logging.WARNING, logger="penstock"):
        resumed.save(tmp_path / "without")
    assert "state of 'linear'" in caplog.text
    resumed.track(linear=linear)
    resumed.save(tmp_path / "with")
    caplog.clear()
    again = torch.nn.Linear(2, 2)
    resumed.track(again=again)
    with pytest.raises(CheckpointError, match="no state of 'again', which is tracked"):
        resumed.load(tmp_path / "with")


@pytest.mark.parametrize("state", [{"hook": print}, {"nested": [{"x": object()}]}])
def test_states_that_need_code_are_refused_when_they_are_saved(tmp_path: Path, state: Any) -> None:
    class Own(Average):
        def state_dict(self) -> Any:
            return state

    pipe = make()
    pipe.track(own=Own())
    with pytest.raises(CheckpointError, match=r"objects/own/(hook|nested/0/x): expected numbers"):
        pipe.save(tmp_path / "run")

    assert list(tmp_path.iterdir()) == []
    losses(pipe, 0)


def test_generators_of_the_user(tmp_path: Path) -> None:
    pipe, order = make(), torch.Generator().manual_seed(5)
    pipe.track(order=order)
    pipe.track(order=order)
    torch.randperm(10, generator=order)
    path = pipe.save(tmp_path / "run")
    expected = torch.randperm(10, generator=order)
    resumed, own = make(), torch.Generator()
    resumed.track(order=own)
    resumed.load(path)
    later, another = make(), torch.Generator()
    later.load(path)
    later.track(order=another)

    assert torch.equal(torch.randperm(10, generator=own), expected)
    assert torch.equal(torch.randperm(10, generator=another), expected)


@pytest.mark.parametrize("name", ["manifest", "index"])
def test_a_full_disk_is_named_with_the_file(tmp_path: Path, name: str) -> None:
    pipe = make()
    # As a write reports it: without the name of a file.
    full = OSError(errno.ENOSPC, "No space left on device")
    with faults.inject([faults.Raise(rank=0, path=name, error=full)]), pytest.raises(CheckpointError) as caught:
        pipe.save(tmp_path / "run")

    assert str(caught.value).startswith(str(tmp_path / "run")), caught.value
    assert "found: No space left on device" in str(caught.value)


def test_what_cannot_be_tracked_is_refused() -> None:
    pipe = make()
    with pytest.raises(CheckpointError, match=r"track\(ema=\.\.\.\): expected an object with state_dict"):
        pipe.track(ema=5)
    pipe.track(ema=Average())
    with pytest.raises(CheckpointError, match="expected a name of its own"):
        pipe.track(ema=Average())


X, Y = SUBJECT.batches[0]
DATA = TensorDataset(X.repeat(3, 1), Y.repeat(3))


def batches(**options: Any) -> Any:
    return penstock.loader(DATA, **{"batch_size": 10, "shuffle": True, "seed": 3, **options})


def run(pipe: penstock.Pipeline, loader: Any, steps: int, ahead: bool) -> list[float]:
    found: list[float] = []
    while True:
        for x, y in penstock.prefetch(loader, "cpu") if ahead else loader:
            found.append(float(pipe.step(x, y).loss))
            if len(found) == steps:
                return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("steps", [2, 5, 7])
def test_a_tracked_loader_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture, steps: int, ahead: bool) -> None:
    """It is tracked before the load or after it; the epoch has five batches."""
    expected = run(make(), batches(), steps + 4, ahead)
    pipe, loader = make(), batches()
    pipe.track(batches=loader)
    assert run(pipe, loader, steps, ahead) == expected[:steps]
    path = pipe.save(tmp_path / "run")
    for loads_first in (False, True):
        resumed, loader = make(), batches()
        if not loads_first:
            resumed.track(batches=loader)
        resumed.load(path)
        resumed.track(batches=loader)
        assert run(resumed, loader, 4, ahead) == expected[steps:]
        resumed.save(tmp_path / "again")
    assert "tracked" not in caplog.text


def test_a_position_inside_a_prefetched_epoch(tmp_path: Path) -> None:
    pipe, loader = make(), batches()
    pipe.track(batches=loader)
    for number, (x, y) in enumerate(penstock.prefetch(loader, "cpu")):
        pipe.step(x, y)
        if number == 1:
            pipe.save(tmp_path / "run")
    restored = batches()
    resumed = make()
    resumed.load(tmp_path / "run")
    resumed.track(batches=restored)

    assert (restored.epoch, restored.position) == (0, 2)


@pytest.mark.parametrize("options", [{"batch_size": 5}, {"seed": 4}, {"shuffle": False}, {"drop_last": True}])
def test_another_loader_does_not_begin_anew_in_silence(tmp_path: Path, options: dict[str, Any]) -> None:
    pipe, loader = make(), batches()
    pipe.track(batches=loader)
    run(pipe, loader, 2, ahead=False)
    resumed = make()
    resumed.load(pipe.save(tmp_path / "run"))
    with pytest.raises(CheckpointError, match=r"the state is of a loader with .* expected the same"):
        resumed.track(batches=batches(**options))


@pytest.mark.parametrize("ahead", [False, True])
def test_the_first_save_names_a_loader_whose_place_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ahead: bool
) -> None:
    """Not one that was used before the pipeline was built, or that is at the beginning of the only order it has."""
    other = batches()
    next(iter(other))
    validation, second, pipe, loader = batches(shuffle=False), batches(seed=8), make(), batches()
    pipe.track(second=second)
    for batch in [*validation, *second]:
        pipe.evaluate(*batch)
    run(pipe, loader, 2, ahead)
    pipe.save(tmp_path / "run", wait=False).wait()
    pipe.save(tmp_path / "run")

    (message,) = [each for each in caplog.messages if "tracked" in each]
    assert "not tracked ({'seed': 3, 'epoch': 0, 'position': 2, " in message


def test_one_rank_names_a_loader_whose_place_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, loader = make(), batches()
    run(pipe, loader, 2, ahead=False)
    monkeypatch.setenv("RANK", "1")
    pipe.save(tmp_path / "run")

    assert not [each for each in caplog.messages if "tracked" in each]


def test_places_of_an_older_checkpoint_are_said(caplog: pytest.LogCaptureFixture) -> None:
    own = [{"loaders": [{"epoch": 2, "position": 7}], "generators": None, "objects": {}}]
    OwnStates(torch.device("cpu")).choose(own, 0, 1)

    assert "set_epoch(epoch, position) with these: [{'epoch': 2, 'position': 7}]" in caplog.text


@pytest.mark.parametrize(
    "change",
    [{"batch_size": 5}, {"samples": 7}, {"position": 99}, {"position": -1}, {"epoch": "a"}, {"drop_last": True}],
)
def test_states_of_other_loaders_are_refused(change: dict[str, Any]) -> None:
    loader = batches()
    with pytest.raises(PenstockError):
        loader.load_state_dict({**loader.state_dict(), **change})
    with pytest.raises(PenstockError, match="expected the state of a loader with seed, epoch"):
        loader.load_state_dict({})


def test_a_loop_does_not_go_on_after_its_loader_was_set() -> None:
    loader = batches()
    loop = iter(loader)
    next(loop)
    loader.set_epoch(0)
    with pytest.raises(PenstockError, match="expected a new loop"):
        next(loop)
