"""What a proof says that programs reach is what they reach, counted action by action."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.actions import BackwardInput, Forward, InputGradients, Update, WeightGradients
from penstock.scheduling.orders import INFERENCE
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.continuations import continue_run
from penstock.scheduling.verification.verifier import Verification, verify
from support.own_schedules import EAGER, LATE
from support.schedule_strategies import replicated_schedules, schedules, waiting_schedules

EXAMPLES = [
    Schedule("gpipe", 4, 20),
    Schedule("1f1b-flush", 4, 20, skips=((0, 2), (1, 3))),
    Schedule("2bw", 3, 20, ties=((0, 2),), norms=True),
    Schedule("zb-h1", 4, 20, norms=True),
    Schedule("zb-v", 3, 20, 2),
    Schedule("spp", 3, 20),
    Schedule("interleaved", 3, 30, 2, ties=((0, 5),)),
    Schedule("pipedream", 4, 20, vertical_sync=True),
    continue_run(Schedule("pipedream", 4, 20)),
    continue_run(Schedule("2bw", 3, 20)),
    Schedule.placed("pipedream", Placement(((0, 1), (2,), (3, 4, 5))), 20),
    Schedule.placed("1f1b-flush", Placement(((0, 1), (2,), (3,))), 20),
    Schedule.placed("1f1b-flush", Placement(((0, 1), (2,)), split=True), 20),
    Schedule(INFERENCE, 3, 20),
    Schedule(EAGER, 3, 20),
    Schedule(LATE, 2, 20),
]


def count(schedule: Schedule, minibatches: int) -> Verification:
    """What the programs of `schedule` reach; replicas that share every microbatch count as one."""
    placement, trains = schedule.placement, schedule.guarantees.trains
    rows = schedule.program(minibatches)
    in_flight, versions, pending = ([least] * schedule.stages for least in (0, 1, 0))
    of_rank = [0] * schedule.ranks
    for rank, row in enumerate(rows):
        flying, halves, newest = Counter[int](), Counter[int](), Counter[int]()
        for action in row:
            stage = action.stage
            flying[stage] += isinstance(action, Forward) - isinstance(action, WeightGradients)
            halves[stage] += isinstance(action, InputGradients) - isinstance(action, WeightGradients)
            newest[stage] += isinstance(action, Update)
            if trains:
                in_flight[stage] = max(in_flight[stage], flying[stage])
                of_rank[rank] = max(of_rank[rank], flying.total())
            if isinstance(action, BackwardInput):
                pending[stage] = max(pending[stage], halves[stage])
            if isinstance(action, WeightGradients):
                versions[stage] = max(versions[stage], newest[stage] - action.version + 1)
    counted = {ranks[0] for ranks in placement.stages} if placement.split else range(schedule.ranks)
    return Verification(
        schedule.name,
        minibatches,
        actions=sum(len(rows[rank]) for rank in counted),
        in_flight=tuple(in_flight),
        versions=tuple(versions),
        in_flight_of_rank=tuple(of_rank),
        pending_weight_backwards=tuple(pending),
    )


@pytest.mark.parametrize("schedule", EXAMPLES, ids=lambda schedule: schedule.name)
def test_a_proof_says_what_programs_reach(schedule: Schedule) -> None:
    assert verify(schedule, 3) == count(schedule, 3)


def many(ranks: int, microbatches: int) -> st.SearchStrategy[Schedule]:
    return st.one_of(
        schedules(ranks, microbatches), waiting_schedules(ranks, microbatches), replicated_schedules(3, 3, microbatches)
    )


@settings(max_examples=100, deadline=None)
@given(many(4, 24), st.integers(1, 3))
def test_every_schedule_is_proved(schedule: Schedule, minibatches: int) -> None:
    assert verify(schedule, minibatches) == count(schedule, minibatches)
