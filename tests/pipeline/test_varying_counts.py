"""Steps of other numbers of microbatches than the plan's. Their numbers are those of the oracle: `test_equality`."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock
from penstock.scheduling import define_by_programs
from penstock.scheduling.verification.continuations import resize_run
from support.processes import Pool

WIDTH = 4


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))).double()


def batch(count: int) -> penstock.Microbatches:
    """Microbatches of one to three samples."""
    generator = torch.Generator().manual_seed(count)
    sizes = [1 + place % 3 for place in range(count)]
    draw = [torch.randn(2, size, WIDTH, dtype=torch.float64, generator=generator) for size in sizes]
    return penstock.Microbatches([x for x, _ in draw], [y for _, y in draw])


def options(schedule: Any = "1f1b-flush", microbatches: int | None = 4, **more: Any) -> dict[str, Any]:
    return {
        "sample": (torch.zeros(2, WIDTH, dtype=torch.float64),),
        "loss_fn": F.mse_loss,
        "optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        **{"schedule": schedule, "microbatches": microbatches, "stages": 2, **more},
    }


def trained(counts: list[int], **given: Any) -> dict[str, Tensor]:
    model = build()
    with penstock.Pipeline(model, **given) as pipe:
        for count in counts:
            pipe.step(batch(count))
    return model.state_dict()


def test_from_one_to_256() -> None:
    """As in a loop without a pipeline, where a microbatch weighs its samples."""
    counts = [1, 256, 2, 4, 17, 1]
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for count in counts:
        optimizer.zero_grad()
        xs, ys = batch(count)
        assert ys is not None
        F.mse_loss(model(torch.cat(list(xs))), torch.cat(list(ys))).backward()
        optimizer.step()

    found = trained(counts, **options(check="off"))
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-12, atol=1e-14)


def test_the_part_of_an_order_between_bars_is_repeated() -> None:
    schedule = define_by_programs(
        "repeated",
        """
        rank 0: 0F0@0 | 0F1@0 0B0@0 | 0B1@0 0U1<0
        rank 1: 1F0@0 | 1B0@0 1F1@0 | 1B1@0 1U1<0
        """,
    )
    given = options(schedule, 2)
    counts = [2, 5, 3, 3, 2, 9]
    expected = penstock.reference_train(build(), [(batch(count), None) for count in counts], **given).state
    found = trained(counts, **given)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())

    with penstock.Pipeline(build(), **given) as pipe, pytest.raises(penstock.ScheduleError, match="or 1 more"):
        pipe.step(batch(1))


@pytest.mark.parametrize(
    ("schedule", "stages", "count", "said"),
    [
        ("2bw", 2, 1, "2 stages need at least 2 microbatches, got microbatches=1"),
        ("interleaved", 4, 3, "a multiple of the number of ranks, 2, got microbatches=3"),
    ],
)
def test_a_number_that_the_schedule_cannot_have_is_refused(schedule: str, stages: int, count: int, said: str) -> None:
    """And the pipeline goes on as if nothing had been."""
    plan = penstock.Plan.uniform(8, stages, schedule, 4, stages_per_rank=stages // 2)
    given = options(None, None, stages=None, plan=plan)
    model = build()
    with penstock.Pipeline(model, **given) as pipe:
        pipe.step(batch(4))
        with pytest.raises(penstock.ScheduleError, match=said):
            pipe.step(batch(count))
        pipe.step(batch(4))
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in trained([4, 4], **given).items())


def test_each_number_is_proved_once() -> None:
    schedule = penstock.schedule(penstock.Plan.uniform(4, 2, "1f1b-flush", 4))
    assert resize_run(schedule, 3) is resize_run(copy.copy(schedule), 3)
    assert resize_run(schedule, 3).microbatches == 3


def different(count: int) -> str:
    """How a step ends on this rank for which rank 1 has other microbatches than the others."""
    with penstock.Pipeline(build(), check="off", timeout_seconds=60.0, **options()) as pipe:
        pipe.step(batch(4))
        with pytest.raises(penstock.TransportError) as error:
            pipe.step(batch(count + (pipe.rank == 1)))
    return str(error.value)


def test_ranks_with_other_numbers_end_at_once(pool: Pool) -> None:
    for count in (3, 4):
        for error in pool.run(2, different, count):
            assert "rank 1" in error and "step after 4 microbatches of training" in error, error
