"""An error, or Ctrl-C, in a call of a single process: the pipeline goes on as if the call had not been made, or says
what it has lost.
"""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from support import models
from support.processes import Pool

LAYERS, MICROBATCHES, STEPS = 8, 4, 4
FLUSHING = ("gpipe", "1f1b-flush", "interleaved", "spp", "zb-h1", "zb-v")
LASTING = ("2bw", "pipedream")
REPLICATED = penstock.Plan(
    (penstock.Stage(0, 4, (0, 1)), penstock.Stage(4, 8, (2,))), schedule="gpipe", microbatches=MICROBATCHES
)
PASSES = LAYERS * MICROBATCHES
"""The forwards of the layers in a step; as many backwards follow."""


class _Fragile(nn.Module):
    """A layer that fails in evaluations of one rank, if that is asked for."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        if _Fragile.fails and not torch.is_grad_enabled():
            raise ValueError("the layer is broken")
        return torch.tanh(self.linear(x))


def build() -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(_Fragile() for _ in range(4)))
    x = torch.randn(2, 6, dtype=torch.float64)
    return penstock.Pipeline(
        model, sample=(x,), loss_fn=F.mse_loss, optimizer=models.momentum, stages=2, microbatches=2, schedule="2bw"
    )


def steps_of(pipe: penstock.Pipeline, steps: range) -> list[float]:
    losses = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(2, 4, 6, dtype=torch.float64, generator=generator)
        losses.append(float(pipe.step(x, y).loss))
    return losses


def fail_and_build_anew(directory: Path, failing: int) -> tuple[list[float], str, str]:
    """Trains, fails in a prediction of one rank, and goes on with a new pipeline in the same processes. Returns the
    losses, the first error of this rank, and what the failed pipeline says then.
    """
    pipe = build()
    x = torch.zeros(4, 6, dtype=torch.float64)
    losses = steps_of(pipe, range(2))
    pipe.predict(x)
    pipe.save(directory)
    _Fragile.fails = pipe.rank == failing
    first = refusal = ""
    try:
        pipe.predict(x)
    except (ValueError, penstock.TransportError) as error:
        first = f"{type(error).__name__}: {error}"
    try:
        pipe.predict(x)
    except penstock.PenstockError as error:
        refusal = str(error)
    _Fragile.fails = False
    pipe.close()
    pipe = build()
    pipe.load(directory)
    losses += steps_of(pipe, range(2, 4))
    pipe.close()
    return losses, first, refusal


class _Watched(torch.autograd.Function):
    """Its backward counts as an event."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        Trap.count()
        return gradient


class Trap(nn.Module):
    """A layer that raises `error` when `left` forwards and backwards of all such layers have passed."""

    left: ClassVar[int] = -1
    error: ClassVar[BaseException] = ValueError("the layer is broken")

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6, dtype=torch.float64)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        Trap.count()
        return torch.tanh(self.linear(self.drop(_Watched.apply(x))))

    @staticmethod
    def count() -> None:
        """Notes a forward or a backward."""
        Trap.left -= 1
        if Trap.left == 0:
            raise Trap.error


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    Trap.left, Trap.error = -1, ValueError("the layer is broken")
    yield
    Trap.left = -1


def make(schedule: str, **options: Any) -> penstock.Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*(Trap() for _ in range(LAYERS)))
    arguments = {"sample": (batch(0)[0][:2],), "loss_fn": F.mse_loss, "optimizer": models.momentum, "stages": 4}
    return penstock.Pipeline(model, **{**arguments, "schedule": schedule, "microbatches": MICROBATCHES, **options})


def batch(number: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(number)
    x, y = torch.randn(2, 8, 6, dtype=torch.float64, generator=generator)
    return x, y


def weights(pipe: penstock.Pipeline) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in pipe.state_dict()["model"].items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def train(pipe: penstock.Pipeline, steps: range) -> list[float]:
    return [float(pipe.step(*batch(step)).loss) for step in steps]


@pytest.mark.sampled(8)
@pytest.mark.parametrize("events", [1, PASSES // 2, PASSES])
@pytest.mark.parametrize("schedule", [*FLUSHING, *LASTING])
def test_an_error_in_a_prediction_or_evaluation_changes_nothing(schedule: str, events: int) -> None:
    failing, plain = make(schedule), make(schedule)
    x, y = batch(9)
    # The first evaluation captures the model, and an error in that one says so.
    failing.predict(x)
    losses = [train(pipe, range(2)) for pipe in (failing, plain)]
    for pipe in (failing, plain):
        pipe.drain()
    for call in (lambda: failing.predict(x), lambda: failing.evaluate(x, y)):
        Trap.left = events
        with pytest.raises(ValueError, match="the layer is broken") as caught:
            call()

        assert "penstock: this call has changed no weight, and the pipeline can go on" in caught.value.__notes__
    assert torch.equal(failing.predict(x), plain.predict(x))
    losses = [losses[number] + train(pipe, range(2, STEPS)) for number, pipe in enumerate((failing, plain))]

    assert losses[0] == losses[1]
    assert_same(weights(failing), weights(plain))


EVENTS = (1, PASSES // 3, PASSES, PASSES + 1, 3 * PASSES // 2)


@pytest.mark.sampled(10)
@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("schedule", FLUSHING)
def test_a_flushing_step_that_failed_before_an_update_was_not_made(schedule: str, events: int) -> None:
    """Errors and Ctrl-C take turns: each comes under every schedule, and at every event."""
    turn = FLUSHING.index(schedule) + EVENTS.index(events)
    error = ValueError("the layer is broken") if turn % 2 else KeyboardInterrupt()
    failing, plain = make(schedule, clip_grad_norm=0.1), make(schedule, clip_grad_norm=0.1)
    losses = [train(pipe, range(2)) for pipe in (failing, plain)]
    before = weights(failing)
    Trap.left, Trap.error = events, error
    with pytest.raises(type(error)):
        failing.step(*batch(9))

    assert_same(weights(failing), before)
    losses = [losses[number] + train(pipe, range(2, STEPS)) for number, pipe in enumerate((failing, plain))]
    assert losses[0] == losses[1]
    assert_same(weights(failing), weights(plain))
    assert failing.state_dict()["pipeline"] == plain.state_dict()["pipeline"]


@pytest.mark.parametrize(
    "options",
    [
        {"plan": REPLICATED, "stages": None, "microbatches": None},
        {"recompute": True},
        {"loss_scale": "dynamic"},
    ],
    ids=["replicas", "recompute", "loss scale"],
)
def test_a_step_that_failed_leaves_nothing_behind(options: dict[str, Any]) -> None:
    failing, plain = (make("gpipe", check="off", **options) for _ in range(2))
    for events in (5, PASSES + 9):
        Trap.left = events
        with pytest.raises(ValueError, match="the layer is broken"):
            failing.step(*batch(9))

    assert train(failing, range(STEPS)) == train(plain, range(STEPS))
    assert_same(weights(failing), weights(plain))


@pytest.mark.parametrize("schedule", LASTING)
def test_an_asynchronous_step_that_failed_says_what_is_lost_and_a_load_repairs_it(schedule: str) -> None:
    failing, plain = make(schedule), make(schedule)
    for pipe in (failing, plain):
        train(pipe, range(2))
        pipe.drain()
    state = plain.state_dict()
    kept = {"model": weights(plain), **{name: part for name, part in state.items() if name != "model"}}
    train(failing, range(2, 3))
    Trap.left = PASSES
    with pytest.raises(ValueError, match="the layer is broken") as caught:
        failing.step(*batch(3))

    assert not any("can go on" in note for note in caught.value.__notes__)
    for call in (
        failing.state_dict,
        failing.drain,
        lambda: failing.step(*batch(3)),
        lambda: failing.predict(batch(3)[0]),
    ):
        with pytest.raises(penstock.PenstockError, match=r"its weights are those of no step. Call load\(...\) or"):
            call()
    with pytest.raises(penstock.CheckpointError):
        failing.load_state_dict({"model": {}, "optimizer": {}, "pipeline": {}})
    with pytest.raises(penstock.PenstockError, match="those of no step"):
        failing.drain()
    failing.load_state_dict(kept)

    assert train(failing, range(2, STEPS)) == train(plain, range(2, STEPS))
    assert_same(weights(failing), weights(plain))


class _Interrupted(torch.optim.SGD):
    """Its user presses Ctrl-C in its second step."""

    steps = 0

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        if self.steps == 2:
            signal.raise_signal(signal.SIGINT)
        return super().step(closure)


@pytest.mark.parametrize("schedule", FLUSHING)
def test_ctrl_c_in_an_update_waits_for_the_end_of_the_step(schedule: str) -> None:
    interrupted = make(schedule, optimizer=lambda p: _Interrupted(p, lr=0.1))
    plain = make(schedule, optimizer=lambda p: torch.optim.SGD(p, lr=0.1))
    train(interrupted, range(1))
    with pytest.raises(KeyboardInterrupt):
        train(interrupted, range(1, 2))
    assert interrupted.steps == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    assert train(interrupted, range(2, STEPS)) == train(plain, range(STEPS))[2:]
    assert_same(weights(interrupted), weights(plain))


def test_a_second_ctrl_c_has_its_effect_at_once() -> None:
    class Impatient(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            raise AssertionError("the second one had no effect")

    with pytest.raises(KeyboardInterrupt):
        train(make("gpipe", optimizer=lambda p: Impatient(p, lr=0.1)), range(1))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


class _Failing(torch.optim.SGD):
    """Fails when `left` steps have been made."""

    left: ClassVar[int] = -1

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        _Failing.left -= 1
        if _Failing.left == 0:
            raise ValueError("the optimizer is broken")
        return super().step(closure)


def test_a_flushing_step_that_failed_between_updates_says_so(tmp_path: Any) -> None:
    halves = lambda p: [_Failing(p[:4], lr=0.1), _Failing(p[4:], lr=0.1)]  # noqa: E731
    failing, plain = (make("gpipe", optimizer=halves) for _ in range(2))
    losses = train(failing, range(2))
    failing.save(tmp_path / "saved")
    _Failing.left = 2
    with pytest.raises(ValueError, match="the optimizer is broken"):
        failing.step(*batch(2))
    with pytest.raises(penstock.PenstockError, match="some stages had made an update that others had not"):
        failing.step(*batch(2))
    failing.load(tmp_path / "saved")

    assert losses + train(failing, range(2, STEPS)) == train(plain, range(STEPS))
    assert_same(weights(failing), weights(plain))


@pytest.mark.parametrize("failing", [0, 1])
def test_several_processes_go_on_with_a_new_pipeline(pool: Pool, tmp_path: Path, failing: int) -> None:
    results = pool.run(2, fail_and_build_anew, tmp_path / "saved", failing)
    plain = build()
    losses = steps_of(plain, range(2))
    plain.drain()
    losses += steps_of(plain, range(2, 4))

    for rank, (found, error, refusal) in enumerate(results):
        assert found == losses
        if rank == failing:
            assert error.startswith("ValueError: the layer is broken")
        else:
            assert f"rank {failing} failed in a prediction, so rank {rank} stops too" in error
        assert "in a prediction" in refusal
        assert "Close it, build a new Pipeline and load a checkpoint" in refusal
