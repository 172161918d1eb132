"""Whole pipelines, whose ranks share a device, on streams: no stream reads or writes what another may be still at.

The numbers are the oracle's in any case, since this device computes at once; what counts is what it could have done.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import penstock
from support import models
from support.jobs.device_jobs import count_streams, fail_directly, run_directly, run_over_gloo, stall_directly
from support.jobs.hook_jobs import HOOKED
from support.jobs.snapshot_jobs import Cut, run_cut
from support.jobs.tied_jobs import TiedRun, run_here
from support.jobs.tied_jobs import run_reference as run_tied_reference
from support.own_schedules import offloading
from support.processes import Pool
from support.simulated.stream_races import RacingDevice, RacingEvent, RacingStream, Watching, on_streams
from support.training import (
    Case,
    Outcome,
    assert_equal,
    run_pipeline,
    run_reference,
    share_reference,
    stages_on_a_rank,
)

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


def case(schedule: str, **options: Any) -> Case:
    """Two ranks, and layers with buffers."""
    return replace(Case("normalized", schedule, 2, 4, "adamw", stages_on_a_rank(schedule)), **options)


CASES = {
    **{schedule: case(schedule) for schedule in SCHEDULES},
    **{f"{schedule} alone": case(schedule, ranks=1) for schedule in ("gpipe", "pipedream", "2bw")},
    "pipedream of four": case("pipedream", ranks=4),
    "pipedream, evaluated": case("pipedream", turned=True, drain_after=(1,)),
    **{f"{schedule} with skips": case(schedule, subject="skipping", ranks=4) for schedule in ("1f1b-flush", "2bw")},
    **{f"{schedule} in turn": case(schedule, replicas=(2, 1)) for schedule in ("1f1b-flush", "pipedream", "2bw")},
    **{f"{schedule} split": case(schedule, replicas=(1, 2), split=True) for schedule in ("1f1b-flush", "2bw")},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "clipped": {"clip_grad_norm": 0.1},
    "recomputed": {"recompute": True},
    **HOOKED,
}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", CASES)
def test_schedules(name: str) -> None:
    assert_equal(share_reference(CASES[name]), raced(lambda: run_pipeline(CASES[name])))


@pytest.mark.parametrize("schedule", ["1f1b-flush", "zb-v", "pipedream"])
def test_offloads(schedule: str) -> None:
    """The ranks share slots of host memory."""
    made = case(schedule)
    plan = replace(made.options["plan"], schedule=offloading(made.options["plan"].definition))
    assert_equal(share_reference(made), raced(lambda: run_pipeline(made, plan=plan)))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["1f1b-flush", "zb-v", "pipedream", "2bw", "pipedream in turn", "2bw split"])
def test_state_on_host(name: str) -> None:
    assert_equal(share_reference(CASES[name]), raced(lambda: run_pipeline(CASES[name], state_on_host=True)))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("name", "schedule"), [*((name, "2bw") for name in OPTIONS), ("own", "pipedream")])
def test_options(name: str, schedule: str) -> None:
    found = raced(lambda: run_pipeline(case(schedule), check="off", **OPTIONS[name]))
    options = {key: value for key, value in OPTIONS[name].items() if key != "recompute"}
    assert_equal(run_reference(case(schedule), **options), found)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("schedule", "recipe"), [("1f1b-flush", "plain"), ("pipedream", "plain"), ("2bw", "several")])
def test_saves_beside_the_training(schedule: str, recipe: str, tmp_path: Path) -> None:
    """The copies to the host are in a stream of their own, and an update waits for them there, not on the host."""
    cut = Cut(case(schedule), 2, recipe, late=True)
    expected = penstock.reference_train(cut.case.build(), cut.batches, **cut.options)
    whole, resumed = raced(lambda: run_cut(cut, str(tmp_path / "run")))

    assert whole.losses == expected.losses
    assert_equal(Outcome(expected.losses[2:], expected.state), resumed)


TIED = {
    "2bw": TiedRun(((0, 7),), (1, 1, 1), 6),
    "2bw clipped": TiedRun(((0, 7),), (1, 1, 1), 6, clips=True),
    "2bw in turn": TiedRun(((0, 7),), (2, 1, 2), 6),
    "1f1b-flush": TiedRun(((0, 7),), (1, 1, 1), 6, flushes=True),
    "1f1b-flush in turn, clipped": TiedRun(((0, 7),), (2, 1, 2), 6, clips=True, flushes=True),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", TIED)
def test_weights_that_stages_share(name: str) -> None:
    assert_equal(run_tied_reference(TIED[name]), raced(lambda: run_here(TIED[name])))


OVER_GLOO = [case(schedule) for schedule in ("1f1b-flush", "interleaved", "zb-v", "pipedream", "2bw")]
IN_TURN = [case(schedule, replicas=(2, 1)) for schedule in ("1f1b-flush", "2bw")]
DIRECTLY = [case(schedule) for schedule in ("gpipe", "1f1b-flush", "interleaved", "zb-h1", "pipedream", "2bw")]
SUMMED = [case(name, replicas=each) for name in ("1f1b-flush", "pipedream", "2bw") for each in ((2, 1), (1, 3))]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tried", [*OVER_GLOO, *IN_TURN], ids=lambda tried: f"{tried.schedule} {tried.replicas}")
def test_several_processes(pool: Pool, tried: Case) -> None:
    expected = share_reference(tried)
    for found in pool.run(tried.processes, run_over_gloo, tried):
        assert_equal(expected, found)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("tried", [*DIRECTLY, *SUMMED], ids=lambda tried: f"{tried.schedule} {tried.replicas}")
def test_several_processes_that_send_from_device_to_device(pool: Pool, tried: Case) -> None:
    """Over the ends of NCCL, and a backend that does as NCCL does."""
    expected = share_reference(tried)
    for found, messages in pool.run(tried.processes, run_directly, tried):
        assert_equal(expected, found)
        assert messages > 0


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

    assert waiting.startswith("TransportError: nothing came from rank 1 for 3 s")
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
        run_pipeline(case("pipedream"))

    assert device.finish()
