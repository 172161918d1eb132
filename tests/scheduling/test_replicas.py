"""Replicated stages in schedules: routing, rounds of updates, and the laws that hold them."""

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Backward,
    BackwardWeight,
    Forward,
    Reduce,
    Send,
    Update,
    WeightGradients,
    format_programs,
)
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify, verify_programs
from penstock.values.plans import Plan, Stage, schedule
from support.schedule_strategies import replicated_schedules


def replicated(method: str, replicas: list[int], microbatches: int, split: bool = False) -> Schedule:
    """Stages on these numbers of ranks, numbered in order."""
    ranks = iter(range(sum(replicas)))
    stages = tuple(tuple(next(ranks) for _ in range(count)) for count in replicas)
    return Schedule.placed(method, Placement(stages, split), microbatches)


def test_two_replicas_before_one() -> None:
    """1F1B-RR (thesis, section 2.3): the replicas take turns, and both update with the sum of a round."""
    made = replicated("pipedream", [2, 1], 1)

    assert format_programs(made.program(3)) == (
        "rank 0: 0F0@0 0S0>1 0F2@0 0S2>1 0R0<1 0B0@0 0A1 0U1<0 0R2<1 0B2@0 0A2 0U2<0\n"
        "rank 1: 0F1@0 0S1>1 0R1<1 0B1@0 0A1 0U1<0 0A2 0U2<0\n"
        "rank 2: 1R0<0 1F0@0 1B0@0 1S0>0 1U1<0 1R1<0 1F1@1 1B1@1 1S1>0 1U2<1 1R2<0 1F2@2 1B2@2 1S2>0 1U3<2"
    )


def test_two_pipelines_beside_each_other() -> None:
    made = replicated("1f1b-flush", [2, 2], 3)

    assert format_programs(made.program(1)) == (
        "rank 0: 0F0@0 0S0>1 0F2@0 0S2>1 0R0<1 0B0@0 0R2<1 0B2@0 0A1 0U1<0\n"
        "rank 1: 0F1@0 0S1>1 0R1<1 0B1@0 0A1 0U1<0\n"
        "rank 2: 1R0<0 1F0@0 1B0@0 1S0>0 1R2<0 1F2@0 1B2@0 1S2>0 1A1 1U1<0\n"
        "rank 3: 1R1<0 1F1@0 1B1@0 1S1>0 1A1 1U1<0"
    )


def test_replicas_that_share_every_microbatch_do_the_same() -> None:
    made = replicated("spp", [2, 1], 2, split=True)
    row = "0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 0A1 0U1<0"

    assert format_programs(made.program(1)) == (
        f"rank 0: {row}\nrank 1: {row}\nrank 2: 1R0<0 1F0@0 1B0@0 1S0>0 1R1<0 1F1@0 1B1@0 1S1>0 1U1<0"
    )


@pytest.mark.parametrize(
    ("replicas", "in_flight"),
    [([2, 1], (2, 1)), ([15, 1], (2, 1)), ([2, 1, 1], (2, 2, 1)), ([1, 1, 1, 1], (4, 3, 2, 1)), ([2, 3], (3, 1))],
)
def test_in_flight_on_each_replica(replicas: list[int], in_flight: tuple[int, ...]) -> None:
    """Specs, section 2.3: ceil(workers in and behind the stage / its replicas)."""
    made = replicated("pipedream", replicas, 1)

    assert made.guarantees.in_flight == made.guarantees.versions == in_flight
    assert verify(made, 4 * sum(replicas)).in_flight == in_flight


@pytest.mark.parametrize(("replicas", "microbatches"), [([3, 1], 5), ([2, 2], 8), ([1, 4, 2], 7), ([2], 2)])
def test_two_bw_with_replicas_needs_two_versions(replicas: list[int], microbatches: int) -> None:
    verification = verify(replicated("2bw", replicas, microbatches), 6)

    assert set(verification.versions) == {2}


def _distinct_rows(made: Schedule, minibatches: int):
    programs = made.program(minibatches)
    copies = {rank for ranks in made.placement.stages for rank in ranks[1:]} if made.placement.split else set()
    return [row for rank, row in enumerate(programs) if rank not in copies]


@settings(max_examples=80, deadline=None)
@given(replicated_schedules(4, 3, 9), st.integers(1, 4))
def test_every_microbatch_is_summed_once_at_one_version(made: Schedule, minibatches: int) -> None:
    """By a count that shares nothing with the verifier: what reaches each update, over all replicas."""
    parts: dict[tuple[int, int], list[int]] = defaultdict(list)
    versions: dict[tuple[int, int], set[int]] = defaultdict(set)
    for row in _distinct_rows(made, minibatches):
        waiting: dict[int, list[WeightGradients]] = defaultdict(list)
        for action in row:
            match action:
                case Backward(stage=stage) | BackwardWeight(stage=stage):
                    waiting[stage].append(action)
                case Update(stage, version, read):
                    parts[stage, version] += [backward.microbatch for backward in waiting[stage]]
                    versions[stage, version] |= {read, *(backward.version for backward in waiting.pop(stage, []))}
    total = minibatches * made.microbatches
    for stage in range(made.stages):
        updates = max(version for at, version in parts if at == stage)
        sums = [sorted(parts[stage, version]) for version in range(1, updates + 1)]
        assert [microbatch for part in sums for microbatch in part] == list(range(total))
        size = made.guarantees.microbatches_per_update[stage]
        assert [len(part) for part in sums[:-1]] == [size] * (updates - 1)
        assert all(len(versions[stage, version]) == 1 for version in range(1, updates + 1))


def test_a_plan_with_replicas() -> None:
    plan = Plan((Stage(0, 3, (2, 0)), Stage(3, 4, (1,))), "2bw", 4)

    assert schedule(plan).placement == Placement(((2, 0), (1,)))
    assert schedule(plan).placement.ranks_for(0, 5) == (0,)


def test_a_rank_of_the_schedule_is_a_tensor_parallel_group() -> None:
    plan = Plan((Stage(0, 3, (0, 1, 4, 5)), Stage(3, 4, (2, 3, 6, 7))), "gpipe", 4, tensor_parallel=2)

    assert schedule(plan).placement == Placement(((0, 2), (1, 3)))


def test_split_replicas_keep_their_word() -> None:
    made = replicated("gpipe", [2, 1], 2, split=True)
    programs = [list(row) for row in made.program(1)]
    programs[1].pop()

    with pytest.raises(ScheduleError, match=r"replicas that share every microbatch do the same\n  rank 0: .*>>0U1<0<<"):
        verify_programs(tuple(map(tuple, programs)), made, 1)


@settings(max_examples=60, deadline=None)
@given(replicated_schedules(3, 3, 6), st.data())
def test_no_reduction_or_route_can_be_dropped_or_moved(made: Schedule, data: st.DataObject) -> None:
    programs = made.program(2)
    places = [
        (rank, index)
        for rank, row in enumerate(programs)
        for index, action in enumerate(row)
        if isinstance(action, Reduce | Send | Forward)
    ]
    rank, index = data.draw(st.sampled_from(places))
    row = programs[rank]
    others = [other for other in range(made.ranks) if other != rank]
    changed = list(programs)
    changed[rank] = row[:index] + row[index + 1 :]
    if others and data.draw(st.booleans()):
        other = data.draw(st.sampled_from(others))
        changed[other] = (*programs[other], row[index])

    with pytest.raises(ScheduleError):
        verify_programs(tuple(changed), made, 2)
