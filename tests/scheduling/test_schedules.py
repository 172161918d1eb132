"""The schedule as a value: its fields, its text, its errors, and how it comes from a plan."""

import pickle
from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.scheduling.actions import Backward, BackwardInput, Forward, Offload, Reload
from penstock.scheduling.definitions import Entry, PipelineShape, ScheduleDefinition, Segment, Step
from penstock.scheduling.orders import GPIPE, METHODS, PIPEDREAM, ZB_V, one_f_one_b_flush
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedule_names import SCHEDULES
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.verifier import verify
from penstock.values.plans import Plan, schedule


def test_fields() -> None:
    made = Schedule("interleaved", 4, 8, 2)

    assert (made.method, made.ranks, made.microbatches, made.stages_per_rank) == ("interleaved", 4, 8, 2)
    assert made.stages == 8
    assert [made.rank_of(stage) for stage in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert made.stages_of(1) == (1, 5)
    assert made.flushes
    assert made.microbatches_per_update == 8
    assert [made.versions(stage) for stage in range(8)] == [1] * 8
    assert [made.in_flight(stage) for stage in range(8)] == [8, 8, 7, 5, 4, 4, 3, 1]
    assert not Schedule("pipedream", 4, 8).flushes
    assert Schedule("pipedream", 4, 8).microbatches_per_update == 1
    assert Schedule("2bw", 4, 8).microbatches_per_update == 8


def test_schedules_compare_hash_and_pickle_by_value() -> None:
    one, other = Schedule("pipedream", 4, 1), Schedule("pipedream", 4, 1, vertical_sync=True)

    assert one == Schedule(PIPEDREAM, 4, 1) != Schedule(replace(PIPEDREAM, order=GPIPE.order), 4, 1)
    assert one == Schedule.placed("pipedream", Placement.straight(4), 1)
    assert one != other
    assert len({one, other, Schedule("pipedream", 4, 1)}) == 2
    assert pickle.loads(pickle.dumps(other)) == other


def test_text() -> None:
    made = Schedule("pipedream", 2, 1)

    assert (
        repr(made)
        == "Schedule(method='pipedream', ranks=2, microbatches=1, stages_per_rank=1, vertical_sync=False, ties=(), "
        "replicated=None, norms=False, skips=(), recomputed=frozenset(), streamed=frozenset(), places=2, "
        "continued=False, gathers=False)"
    )
    assert str(made) == (
        "pipedream: 2 ranks, 2 stages, 1 microbatch a minibatch; 3 minibatches:\n"
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0U1<0 0F2@1 0S2>1 0R1<1 0B1@0 0U2<0 0R2<1 0B2@1 0U3<1\n"
        "rank 1: 1R0<0 1F0@0 1B0@0 1S0>0 1U1<0 1R1<0 1F1@1 1B1@1 1S1>0 1U2<1 1R2<0 1F2@2 1B2@2 1S2>0 1U3<2"
    )
    assert str(Schedule("gpipe", 1, 2)) == (
        "gpipe: 1 rank, 1 stage, 2 microbatches a minibatch; 1 minibatch:\nrank 0: 0F0@0 0F1@0 0B0@0 0B1@0 0U1<0"
    )


def test_a_method_of_ones_own() -> None:
    """A new schedule is one function; here GPipe's guarantee with the order of 1F1B, which more than keeps it."""
    mine = ScheduleDefinition("mine", one_f_one_b_flush.order, GPIPE.guarantees)
    made = Schedule(mine, 3, 4)

    assert made.step(0) == Schedule("1f1b-flush", 3, 4).step(0)
    assert verify(made).in_flight == (3, 2, 1)
    assert made.guarantees.in_flight == (4, 4, 4)


def test_inference() -> None:
    made = inference(2, 1, 2)

    assert str(made) == (
        "inference: 2 ranks, 2 stages, 2 microbatches a minibatch; 1 minibatch:\n"
        "rank 0: 0F0@0 0S0>1 0F1@0 0S1>1\n"
        "rank 1: 1R0<0 1F0@0 1R1<0 1F1@0"
    )
    assert made.drain(1) == ((), ())


def test_plans_and_methods_know_the_same_names() -> None:
    assert tuple(method.name for method in METHODS) == SCHEDULES


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        (Plan.uniform(8, 4, "gpipe", 6), Schedule("gpipe", 4, 6)),
        (Plan.uniform(8, 4, "pipedream", 1, vertical_sync=True), Schedule("pipedream", 4, 1, vertical_sync=True)),
        (Plan.uniform(8, 8, "interleaved", 8, stages_per_rank=2), Schedule("interleaved", 4, 8, 2)),
    ],
)
def test_schedule_of_a_plan(plan: Plan, expected: Schedule) -> None:
    assert schedule(plan) == expected


def test_steps_of_a_v_may_differ() -> None:
    def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
        for entry in ZB_V.order(shape, rank, segment):
            first = segment == Step(0) and entry.stage == 0 and getattr(entry, "microbatch", None) == 0
            if first and isinstance(entry, Backward | BackwardInput):
                yield Reload(0, 0)
            yield entry
            if first and isinstance(entry, Forward):
                yield Offload(0, 0)

    made = Schedule(replace(ZB_V, name="offloads once", order=order), 2, 4, 2)
    verify(made)
    steps = [" ".join(map(str, made.row(0, Step(minibatch)))) for minibatch in (0, 1)]

    assert [text.count("0H0") for text in steps] == [1, 0]
    plain = Schedule("zb-v", 2, 4, 2)
    assert steps[1] == " ".join(map(str, plain.row(0, Step(1))))
