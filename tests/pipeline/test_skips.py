"""Values that go directly past stages: compiled stages too, and nothing is held on the way."""

from dataclasses import replace

import torch
import torch.nn.functional as F

import penstock
from penstock.capturing import capture
from penstock.capturing.chain import crossings_of
from penstock.runtime.assembly.scheduled_plans import make_schedule
from penstock.runtime.assembly.started_engines import edges_of
from penstock.runtime.transport.transport import Edge
from support import models
from support.live_tensors import count_at_rest, forget_what_is_there
from support.processes import Pool
from support.skip_models import REACHING, build_web
from support.training import assert_equal, train
from support.trainings import Training, ask_oracle


def plan_of(layers: int, stages: int, schedule: str) -> penstock.Plan:
    return penstock.Plan.uniform(layers, stages, schedule=schedule, microbatches=3)


def test_stages_that_are_compiled_send_past_others() -> None:
    training = Training("pipedream", 4, 3, "web", optimizer="adamw")
    options = {"sample": (torch.zeros(20_000, 6, dtype=torch.float64),), "compile": {"backend": "eager"}}
    pipe = penstock.Pipeline(training.build(), **{**training.options, **options})

    assert pipe.schedule.skips
    assert_equal(ask_oracle(training), train(pipe, training.batches))


def test_stages_hold_nothing_of_what_passes_them() -> None:
    sample = (torch.zeros(64, 3, 8, 8, dtype=torch.float64),)
    pipe = penstock.Pipeline(models.UNet().double(), sample, F.mse_loss, models.adamw, plan=plan_of(8, 4, "gpipe"))
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


def count_tensors() -> list[int]:
    """After each step."""
    sample, plan = (torch.zeros(3000, 6, dtype=torch.float64),), plan_of(4, 4, "pipedream")
    pipe = penstock.Pipeline(build_web(((), (), (0, 0))), sample, F.mse_loss, models.adamw, plan=plan)
    assert pipe.schedule.skips
    batches = [torch.randn(6, 6, dtype=torch.float64) for _ in range(3)]
    counts: list[int] = []
    forget_what_is_there()
    for step in range(5):
        float(pipe.step(batches[step % 3], batches[step % 3]).loss)
        counts.append(count_at_rest(counts[2:]))
    pipe.close()
    return counts


def test_tensors_do_not_pile_up(pool: Pool) -> None:
    for counts in pool.run(4, count_tensors):
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
