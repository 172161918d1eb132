"""A plan whose order was found under a limit in bytes trains as the oracle does, in one process and in several."""

from dataclasses import replace

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


def found(ranks: int, schedule: str, times: float, *, limited: bool = False) -> Plan:
    """The order of `ranks` ranks in `times` the bytes that `schedule` takes, whose places the stages have, or whose
    order is delayed (`limited`).
    """
    per_rank = 1 if schedule == "1f1b-flush" else 2
    plan = Plan.uniform(LAYERS, ranks * per_rank, schedule, MICROBATCHES, stages_per_rank=per_rank)
    cluster = Cluster.uniform(ranks, 1e9)
    most = max(memory.peak_bytes for memory in penstock.simulate(plan, PROFILE, cluster).memory)
    if limited:
        return replace(limit_order(plan, PROFILE, cluster, memory_bytes=times * most), predicted=None)
    return replace(find_order(plan, PROFILE, cluster, memory_bytes=times * most).plan, predicted=None)


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
