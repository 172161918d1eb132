"""An error, or Ctrl-C, in a call ends the pipeline, and a new one goes on from a checkpoint."""

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


EVENTS = (1, PASSES // 3, PASSES, PASSES + 1, 3 * PASSES // 2)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("events", EVENTS)
@pytest.mark.parametrize("schedule", [*FLUSHING, *LASTING])
def test_a_step_that_failed_ends_the_pipeline_and_resume_goes_on(schedule: str, events: int, tmp_path: Path) -> None:
    """Errors and Ctrl-C take turns: each comes under every schedule, and at every event."""
    turn = (*FLUSHING, *LASTING).index(schedule) + EVENTS.index(events)
    error = ValueError("the layer is broken") if turn % 2 else KeyboardInterrupt()
    failing, plain = make(schedule), make(schedule)
    losses = [train(pipe, range(2)) for pipe in (failing, plain)]
    failing.save(tmp_path)
    plain.drain()
    before = {name: parameter.clone() for name, parameter in failing.named_parameters()}
    Trap.left, Trap.error = events, error
    with pytest.raises(type(error)) as caught:
        failing.step(*batch(9))

    assert any("the pipeline has failed" in note and "resume=" in note for note in caught.value.__notes__)
    for call in (failing.drain, failing.state_dict, lambda: failing.step(*batch(9)), lambda: failing.load(tmp_path)):
        with pytest.raises(penstock.PenstockError, match=r"failed before \(.* in a step\).* with resume="):
            call()
    if schedule != "pipedream":
        # No update of the step was made.
        assert_same(dict(failing.named_parameters()), before)
    failing.close()
    resumed = make(schedule, resume=tmp_path)
    losses = [losses[0] + train(resumed, range(2, STEPS)), losses[1] + train(plain, range(2, STEPS))]

    assert losses[0] == losses[1]
    assert_same(weights(resumed), weights(plain))


@pytest.mark.parametrize("call", ["predict", "evaluate"])
def test_an_evaluation_that_failed_ends_the_pipeline(call: str) -> None:
    pipe, (x, y) = make("1f1b-flush"), batch(9)
    pipe.predict(x)
    Trap.left = PASSES
    with pytest.raises(ValueError, match="the layer is broken"):
        pipe.predict(x) if call == "predict" else pipe.evaluate(x, y)
    with pytest.raises(penstock.PenstockError, match="build a new Pipeline with resume="):
        pipe.step(x, y)


def test_what_is_refused_before_anything_runs_ends_nothing() -> None:
    refusing, plain = make("2bw"), make("2bw")
    losses = [train(pipe, range(2)) for pipe in (refusing, plain)]
    x, y = batch(9)
    for call in (
        lambda: refusing.step(x[:3], y[:3]),
        lambda: refusing.step("no batch", y),
        lambda: refusing.load_state_dict({}),
        lambda: refusing.timeline(0),
    ):
        with pytest.raises((penstock.PenstockError, TypeError)):
            call()
    plain.drain()

    assert losses[0] + train(refusing, range(2, STEPS)) == losses[1] + train(plain, range(2, STEPS))
    assert_same(weights(refusing), weights(plain))


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
        assert "Close it, and build a new Pipeline with resume= or load a checkpoint" in refusal
