"""Values that go directly past stages: the bits of one device, whatever the schedule, and nothing held on the way."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import penstock
from penstock.capturing import capture
from penstock.capturing.chain import crossings_of
from penstock.runtime.assembly.scheduled_plans import make_schedule
from penstock.runtime.assembly.started_engines import edges_of
from penstock.runtime.transport.transport import Edge
from support.processes import Pool
from support.skip_models import Run, build_web, count_tensors, run_pipeline, run_reference
from support.training import assert_equal, stages_on_a_rank

REACHING = ((), (0,), (), (0,), (2,), (0, 0), (1, 3))
"""Of a web of eight blocks: that of the first goes from reader to reader, 0, 1, 2, 4, 6; that of the second 1, 2, 7."""


def plan_of(layers: int, stages: int, schedule: str, **more: Any) -> penstock.Plan:
    per_rank = stages_on_a_rank(schedule)
    microbatches = 2 * stages if schedule in ("2bw", "interleaved") else 3
    plan = penstock.Plan.uniform(layers, stages, schedule=schedule, microbatches=microbatches, stages_per_rank=per_rank)
    return replace(plan, **more)


@pytest.mark.parametrize("schedule", ["1f1b-flush", "pipedream", "2bw", "zb-h1"])
def test_a_u_net_has_the_bits_of_one_device(schedule: str) -> None:
    run = Run(plan_of(8, 4, schedule))

    assert_equal(run_reference(run), run_pipeline(run))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("schedule", "more"),
    [("pipedream", {"recompute": True}), ("pipedream", {"compile": True}), ("zb-h1", {"recompute": True})],
)
def test_stages_that_recompute_or_are_compiled_send_past_others(schedule: str, more: dict[str, bool]) -> None:
    run = Run(plan_of(8, 8, schedule), REACHING, **more)

    assert_equal(run_reference(run), run_pipeline(run))


def test_stages_hold_nothing_of_what_passes_them() -> None:
    pipe = Run(plan_of(8, 4, "gpipe")).pipeline()
    modules = [pipe._engine.stages[rank][rank].weights.stage for rank in range(4)]
    pipe.close()

    assert pipe.schedule.skips == ((0, 3),)
    # The picture of the stem goes to the last level up; stage 1 reads that of the first level down, and passes it on.
    assert [(module.received, module.sources) for module in modules] == [
        ((), ()),
        (("down.0",), (1,)),
        (("down.0", "down.1", "down.2"), (1, 1, 1)),
        (("stem", "cat_1"), (3, 1)),
    ]
    assert [(module.sent, module.targets) for module in modules] == [
        (("stem", "down.0"), (3, 1)),
        (("down.0", "down.1", "down.2"), (1, 1, 1)),
        (("cat_1",), (1,)),
        (("movedim",), (1,)),
    ]


def test_tensors_do_not_pile_up(pool: Pool) -> None:
    run = Run(plan_of(4, 4, "pipedream"), ((), (), (0, 0)))
    for counts in pool.run(4, count_tensors, run):
        assert counts[-1] <= counts[2], counts


def test_crossings_of_a_model_name_makers_readers_and_outputs() -> None:
    chain = capture(build_web(((), (0,), ())), (torch.zeros(3, 6, dtype=torch.float64),))
    found = [(crossing.made, crossing.read) for crossing in crossings_of(chain)]

    # What the first block makes; what the second makes, and the mask; the third's. The model's output crosses no cut.
    assert found == [(0, (1, 2)), (1, (2,)), (1, (2,)), (2, (3,))]


def test_only_large_values_go_directly() -> None:
    for samples, skips in ((30, ()), (3000, ((2, 4), (2, 7), (3, 5), (4, 6), (4, 7)))):
        chain = capture(build_web(REACHING), (torch.zeros(samples, 6, dtype=torch.float64),))
        assert make_schedule(plan_of(8, 8, "gpipe"), chain).skips == skips


def test_there_are_edges_for_what_passes_stages() -> None:
    chain = capture(build_web(((), (), (0,))), (torch.zeros(3000, 6, dtype=torch.float64),))
    schedule = make_schedule(plan_of(4, 4, "gpipe"), chain)
    more = set(edges_of(schedule, ())) - set(edges_of(replace(schedule, skips=()), ()))

    assert schedule.skips
    assert more == {edge for a, b in schedule.skips for edge in (Edge(a, b), Edge(b, a))}
