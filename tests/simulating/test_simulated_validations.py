"""Updates that are validated later: no wait for norms, and copies of weights and state until then."""

from dataclasses import replace

import pytest

from penstock import Cluster, LayerProfile, Profile, simulate
from penstock.scheduling import Placement, Schedule, define_by_programs
from penstock.simulating.action_costs import Costs
from penstock.simulating.simulator import execute

SHIFTED = define_by_programs(
    "shifted",
    """
    0F0@0 0F1@0 0F2@0 0B0@0 0F3@0 0B1@0 0B2@0 0B3@0 0U1<0
    1F0@0 1I0@0 1F1@0 1I1@0 1F2@0 1I2@0 1F3@0 1I3@0 1W0@0 1W1@0 1W2@0 1W3@0 1U1<0
    """,
)
"""Rank 1 begins and ends later than rank 0."""
MADE = Schedule(SHIFTED, 2, 4, norms=True)
LATER = replace(MADE, post_validation=True)


@pytest.mark.parametrize("steps", [2, 4])
def test_no_rank_waits_for_a_norm(steps: int) -> None:
    def seconds(made: Schedule) -> float:
        return execute(made.program(steps), made.placement, Costs((1.0,) * 2, (2.0,) * 2)).seconds

    # A step takes 12 seconds on each rank, the first one 1 more on rank 1; with the wait, 1 more of each step.
    assert seconds(LATER) == seconds(replace(MADE, norms=False)) == 12 * steps + 1
    assert seconds(MADE) == 13 * steps


def test_copies_are_held_until_the_validation() -> None:
    layers = tuple(LayerProfile(str(index), 1.0, 2.0, 0.0, 1.0, 1000.0) for index in range(2))
    waits, later = (simulate(made, Profile(layers, 1), Cluster.uniform(2, 1e9), 2) for made in (MADE, LATER))

    # Weights, state (two copies) and gradients; from an update to its validation weights and state once more, beside
    # the three microbatches that rank 0 has forwarded by then. Rank 1 has forwarded none.
    assert [memory.peak_bytes for memory in waits.memory] == [4003.0, 4003.0]
    assert [memory.peak_bytes for memory in later.memory] == [7003.0, 7000.0]


def test_replicas_without_a_microbatch_validate() -> None:
    made = Schedule.placed("1f1b-flush", Placement(((0, 1, 2), (3, 4, 5))), 2, norms=True)
    layers = tuple(LayerProfile(str(index), 1.0, 2.0, 0.0, 1.0, 1000.0) for index in range(2))

    assert simulate(replace(made, post_validation=True), Profile(layers, 1), Cluster.uniform(6, 1e9), 3).seconds > 0
