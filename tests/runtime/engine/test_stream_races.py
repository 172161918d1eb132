"""Whole pipelines, whose ranks share a device, on streams: no stream reads or writes what another may be still at.

The numbers are the oracle's in any case, since this device computes at once; what counts is what it could have done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from support import models
from support.jobs.device_jobs import count_streams, fail_directly, run_on_device, stall_directly
from support.processes import Pool
from support.simulated.stream_races import RacingDevice, RacingEvent, RacingStream, Watching, on_streams
from support.training import assert_equal
from support.trainings import Training, expected_of, run_training

T = TypeVar("T")
SCHEDULES = ("gpipe", "1f1b-flush", "interleaved", "zb-h1", "zb-v", "pipedream", "vertical", "2bw")


@contextmanager
def racing(device: RacingDevice) -> Iterator[None]:
    """The CPU is `device`, which sees all that this thread does."""
    with on_streams(device), Watching(device):
        yield


def raced(work: Callable[[], T]) -> T:
    """What `work` returns on such a device, on which nothing was out of order."""
    device = RacingDevice()
    with racing(device):
        found = work()
    assert device.finish() == []
    return found


def made(schedule: str, ranks: int = 2, **options: Any) -> Training:
    """Layers with buffers, which need no tracing, if the options allow it."""
    training = Training(schedule, ranks, **{"subject": "layered", "optimizer": "adamw", **options}).fitted()
    assert all(getattr(training, name) == value for name, value in options.items()), training
    return training


TRAININGS = [
    *(Training(schedule) for schedule in ("gpipe", "2bw")),
    *(made(schedule) for schedule in SCHEDULES),
    *(made(schedule, 1) for schedule in ("gpipe", "pipedream", "2bw")),
    made("pipedream", 4),
    made("pipedream", placement="turned", drains=(1,)),
    *(made(schedule, 4, subject="skipping") for schedule in ("1f1b-flush", "2bw")),
    *(made(schedule, placement=(2, 1)) for schedule in ("1f1b-flush", "pipedream", "2bw")),
    *(made(schedule, placement=(2, 1), split=True) for schedule in ("1f1b-flush", "2bw")),
    # The ranks share slots of host memory.
    *(made(schedule, offloads="host") for schedule in ("1f1b-flush", "zb-v", "pipedream")),
    *(made(schedule, state="host") for schedule in ("1f1b-flush", "zb-v", "pipedream", "2bw")),
    *(made(schedule, state="host", placement=(2, 1)) for schedule in ("pipedream", "2bw")),
    *(made("2bw", **options) for options in ({"clips": True}, {"scales": True}, {"recompute": True})),
    *(made(schedule, hooks=hooks) for schedule, hooks in (("2bw", "average"), ("2bw", "own"), ("pipedream", "own"))),
    *(made("2bw", hooks="prediction", **{option: True}) for option in ("clips", "scales")),
    # The copies to the host are in a stream of their own, and an update waits for them there, not on the host.
    *(made(schedule, saves=3, late=True) for schedule in ("1f1b-flush", "pipedream")),
    made("2bw", saves=3, late=True, hooks="average"),
    *(made(schedule, 3, subject="tied ends") for schedule in ("1f1b-flush", "2bw")),
    made("2bw", 3, subject="tied ends", clips=True, scales=True),
    made("2bw", subject="tied ends", placement=(2, 2)),
    made("1f1b-flush", subject="tied ends", placement=(2, 2), clips=True),
]


def name_of(training: Training) -> str:
    on = sorted(f"{name}={value}" for name, value in training.on)
    return " ".join([training.schedule, str(training.ranks), *on])


@pytest.mark.sampled(9)
@pytest.mark.parametrize("training", TRAININGS, ids=name_of)
def test_trainings(training: Training, tmp_path: Path) -> None:
    for expected, found in zip(
        expected_of(training), raced(lambda: run_training(training, str(tmp_path))), strict=True
    ):
        assert_equal(expected, found)


OVER_GLOO = [
    *(made(schedule) for schedule in ("1f1b-flush", "interleaved", "zb-v", "pipedream", "2bw")),
    *(made(schedule, placement=(2, 1)) for schedule in ("1f1b-flush", "2bw")),
]
DIRECTLY = [
    *(made(schedule) for schedule in ("gpipe", "1f1b-flush", "interleaved", "zb-h1", "pipedream", "2bw")),
    *(made(name, placement=each) for name in ("1f1b-flush", "pipedream", "2bw") for each in ((2, 1), (3, 1))),
]
"""Over the ends of NCCL, and a backend that does as NCCL does."""


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("training", "directly"),
    [*((training, False) for training in OVER_GLOO), *((training, True) for training in DIRECTLY)],
    ids=lambda value: name_of(value) if isinstance(value, Training) else ("gloo", "directly")[value],
)
def test_several_processes(pool: Pool, training: Training, directly: bool) -> None:
    for (found,), messages in pool.run(training.processes, run_on_device, training, directly):
        assert_equal(expected_of(training)[0], found)
        assert (messages > 0) is directly


@pytest.mark.parametrize("tardy", [False, True], ids=["gloo", "device to device"])
def test_a_rank_takes_few_streams_however_many_it_speaks_to(pool: Pool, tardy: bool) -> None:
    """A GPU has 32, and the 33rd is the first one again. Here: the computing one, one for copies to the host, and one
    for copies from it, or, from device to device, one for receives and one for each group that sums; communicators have
    others.
    """
    groups = 5
    assert pool.run(5, count_streams, tardy) == [2 + (1 + groups if tardy else 1)] * 5


@pytest.mark.parametrize("failing", [0, 1])
def test_an_error_reaches_a_rank_whose_device_waits(pool: Pool, failing: int) -> None:
    answers = pool.run(2, fail_directly, failing)

    assert answers[failing] == "ValueError: the layer is broken"
    assert answers[1 - failing].startswith(f"TransportError: rank {failing} failed in a step")
    assert "ValueError: the layer is broken" in answers[1 - failing]


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_though_only_the_device_waits(pool: Pool) -> None:
    waiting, still = pool.run(2, stall_directly, 1)

    assert waiting.startswith("TransportError: nothing came from rank 1 for 12 s")
    assert still.startswith("TransportError: ")


@pytest.mark.parametrize("schedule", ["1f1b-flush", "2bw"])
def test_what_a_user_does_between_steps(schedule: str) -> None:
    """Reads the weights and the loss, writes the weights, evaluates, predicts, saves, drops its batches."""
    device = RacingDevice()
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    with racing(device):
        options: dict[str, Any] = {"loss_fn": F.mse_loss, "optimizer": models.adamw, "stages": 2, "microbatches": 4}
        pipe = penstock.Pipeline(model, (torch.randn(2, 4),), schedule=schedule, **options)
        for _ in range(3):
            result = pipe.step(torch.randn(8, 4), torch.randn(8, 4))
            averages = [p.detach() * 0.5 for p in pipe.parameters()]
            with torch.no_grad():
                for parameter, average in zip(pipe.parameters(), averages, strict=True):
                    parameter.copy_(average)
            assert float(result.loss) > 0
        pipe.evaluate(torch.randn(3, 4), torch.randn(3, 4))
        pipe.predict(torch.randn(3, 4)).sum().item()
        pipe.load_state_dict(pipe.state_dict())
        pipe.step(torch.randn(8, 4), torch.randn(8, 4))
        timeline = pipe.timeline()
        pipe.close()

    assert device.finish() == []
    assert all(span.start_seconds <= span.stop_seconds for span in timeline.spans)


class Hasty(RacingDevice):
    """Waits for no event."""

    def wait(self, stream: RacingStream, event: RacingEvent) -> None:
        pass


class Forgetful(RacingDevice):
    """Forgets what memory is kept for."""

    def record_stream(self, tensor: torch.Tensor, stream: RacingStream) -> None:
        pass


@pytest.mark.parametrize("kind", [Hasty, Forgetful])
def test_what_is_out_of_order_is_found(kind: type[RacingDevice]) -> None:
    device = kind()
    with racing(device):
        run_training(made("pipedream"), "")

    assert device.finish()
