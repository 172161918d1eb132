"""A plan whose order was found under a limit in bytes trains as the oracle does, in one process and in several."""

from dataclasses import replace
from pathlib import Path

import pytest

import penstock
from penstock import Cluster, LayerProfile, Plan, Profile
from penstock.planning import find_order, limit_order
from support.processes import Pool
from support.training import LAYERS, Case, Outcome, assert_equal, run_pipeline, run_reference

MICROBATCHES = 6
PROFILE = Profile(
    tuple(LayerProfile(str(index), (1 + index) * 1e-3, (2 + index) * 1e-3, 1e3, 1e6, 1e3) for index in range(LAYERS)), 2
)
"""Stages are unequal, so that the orders that are found differ from the named ones."""


def found(ranks: int, schedule: str, times: float, *, limited: bool = False, moved: bool = False) -> Plan:
    """The order of `ranks` ranks in `times` the bytes that `schedule` takes, whose places the stages have, or whose
    order is delayed (`limited`). `moved`: stages take layers of each other, and recompute.
    """
    per_rank = 1 if schedule == "1f1b-flush" else 2
    plan = Plan.uniform(LAYERS, ranks * per_rank, schedule, MICROBATCHES, stages_per_rank=per_rank)
    cluster = Cluster.uniform(ranks, 1e9)
    most = max(memory.peak_bytes for memory in penstock.simulate(plan, PROFILE, cluster).memory)
    if limited:
        return replace(limit_order(plan, PROFILE, cluster, memory_bytes=times * most), predicted=None)
    best = find_order(plan, PROFILE, cluster, memory_bytes=times * most, move_cuts=moved, choose_recompute=moved)
    return replace(best.plan, predicted=None)


def run_plan(plan: Plan) -> Outcome:
    return run_pipeline(Case("layered", "gpipe", plan.ranks, MICROBATCHES, "adamw"), plan=plan)


CASES = [
    (2, "1f1b-flush", 1.0),
    (3, "1f1b-flush", 1.5),
    (2, "zb-v", 0.7),
    (3, "zb-v", 0.8),
    (2, "interleaved", 0.9),
    (3, "interleaved", 0.8),
    (3, "v-half", 0.7),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("ranks", "schedule", "times"), CASES)
def test_found_orders_equal_the_oracle(pool: Pool, ranks: int, schedule: str, times: float) -> None:
    limited = schedule == "v-half"
    plan = found(ranks, schedule, times, limited=limited)
    expected = run_reference(Case("layered", "gpipe", ranks, MICROBATCHES, "adamw"), plan=plan)

    assert str(plan.schedule) == ("v-half-limited" if limited else "found"), "the named orders are slower or do not fit"
    assert_equal(expected, run_plan(plan))
    for part in pool.run(ranks, run_plan, plan):
        assert_equal(expected, part)


def test_moved_stages_of_which_some_recompute_equal_the_oracle(tmp_path: Path) -> None:
    plan = found(3, "1f1b-flush", 0.5, moved=True)
    penstock.verify(penstock.schedule(plan))
    plan.save(tmp_path / "plan.yaml")
    loaded = Plan.load(tmp_path / "plan.yaml")

    assert loaded == plan and plan.recompute == (0,) and str(plan.schedule) == "found"
    assert [stage.stop for stage in plan.stages] != [stage.stop for stage in Plan.uniform(LAYERS, 3).stages]
    assert_equal(run_reference(Case("layered", "gpipe", 3, MICROBATCHES, "adamw"), plan=plan), run_plan(loaded))
