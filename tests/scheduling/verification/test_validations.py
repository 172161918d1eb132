"""Validations of updates: where lowering puts them, what they free, and the laws, each broken once on purpose."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling import Drain, Placement, Step, define_by_programs, parse_programs, verify
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.validations import begun_by, repeated, taken_back
from penstock.scheduling.verification.verifier import prove
from penstock.scheduling.verification.violations import collect
from support.broken_programs import assert_broken, complaint

FIRST = Schedule("1f1b-flush", 2, 2, norms=True, post_validation=True)
LAW = "stage 0 validates each update once, before its next backward, and the last stage before a loss"


def test_norms_pass_before_the_first_activation_and_the_first_gradient() -> None:
    assert [" ".join(map(str, row)) for row in FIRST.step(1)] == [
        "0N1>1 0F2@1 0S2>1 0F3@1 0S3>1 0N1<1 0V1 0R2<1 0B2@1 0R3<1 0B3@1 0U2<1",
        "1N1<0 1N1>0 1V1 1R2<0 1F2@1 1B2@1 1S2>0 1R3<0 1F3@1 1B3@1 1S3>0 1U2<1",
    ]
    assert [" ".join(map(str, row)) for row in FIRST.drain(2)] == ["0N2>1 0N2<1 0V2", "1N2<0 1N2>0 1V2"]
    assert FIRST.step(0) == replace(FIRST, norms=False, post_validation=False).step(0)


def test_what_is_received_and_dropped_and_run_again() -> None:
    made = Schedule("1f1b-flush", 3, 4, norms=True, post_validation=True)
    begun = {rank: begun_by(made.row(rank, Step(1))) for rank in range(3)}

    assert [[str(action) for action in taken_back(begun, rank, made.placement)] for rank in begun] == [
        [],
        ["1R6<0"],
        ["2R4<1", "2R5<1"],
    ]
    assert " ".join(map(str, repeated(begun[1]))) == "1R4<0 1F4@1 1S4>2 1R5<0 1F5@1 1S5>2"
    assert begun_by(made.row(0, Step(0))) == () and begun_by(made.row(0, Drain(1))) == made.row(0, Drain(1))


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "spp", "zb-h1"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 3, 8])
def test_every_schedule_of_one_stage_per_rank_is_proved(method: str, ranks: int, microbatches: int) -> None:
    verify(Schedule(method, ranks, microbatches, norms=True, post_validation=True))


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("microbatches", [2, 5])
def test_replicas_are_proved(split: bool, microbatches: int) -> None:
    placement = Placement(((0, 1, 2), (3, 4, 5)), split=split)
    made = Schedule.placed("zb-h1", placement, microbatches, norms=True)
    verify(replace(made, post_validation=True))


LAWS: dict[str, tuple[Any, str, str, str]] = {
    "left out": (
        (("0V2", ""),),
        "rank 0: ... 0R2<1 0B2@1 0R3<1 0B3@1 0U2<1 0N2>1 0N2<1 >>end<<",
        "2 validations",
        "let lower() derive them",
    ),
    "twice": (
        (("0V1", "0V1 0V1"),),
        "rank 0: ... 0N1>1 0F2@1 0S2>1 0F3@1 0S3>1 0N1<1 0V1 >>0V1<< 0R2<1 0B2@1 0R3<1 0B3@1 0U2<1 0N2>1 0N2<1 ...",
        "that of version 2",
        "order them so",
    ),
    "another version": (
        (("0V1", "0V3"),),
        "rank 0: ... 0U1<0 0N1>1 0F2@1 0S2>1 0F3@1 0S3>1 0N1<1 >>0V3<< 0R2<1 0B2@1 0R3<1 0B3@1 0U2<1 0N2>1 0N2<1 ...",
        "that of version 1",
        "order them so",
    ),
    "after a backward": (
        (("0V1 0R2<1 0B2@1", "0R2<1 0B2@1 0V1"),),
        "rank 0: ... 0F2@1 0S2>1 0F3@1 0S3>1 0N1<1 0R2<1 0B2@1 >>0V1<< 0R3<1 0B3@1 0U2<1 0N2>1 0N2<1 0V2",
        "it between 0U1<0 and what follows from that",
        "order them so",
    ),
    "before its update": (
        (("0U1<0", "0V1 0U1<0"), ("0N1<1 0V1", "0N1<1")),
        "rank 0: ... 0S0>1 0F1@0 0S1>1 0R0<1 0B0@0 0R1<1 0B1@0 >>0V1<< 0U1<0 0N1>1 0F2@1 0S2>1 0F3@1 0S3>1 0N1<1 ...",
        "it between 0U1<0 and what follows from that",
        "order them so",
    ),
}


@pytest.mark.parametrize("broken", LAWS)
def test_each_law_broken_once(broken: str) -> None:
    changes, row, *said = LAWS[broken]
    assert_broken((FIRST, 2, *changes), LAW, row, *said)


def test_the_last_stage_validates_before_a_loss() -> None:
    changes = (("1V1 1R2<0 1F2@1", "1R2<0 1F2@1 1V1"),)
    law = LAW.replace("stage 0", "stage 1")
    row = "rank 1: ... 1B1@0 1S1>0 1U1<0 1N1<0 1N1>0 1R2<0 1F2@1 >>1V1<< 1B2@1 1S2>0 1R3<0 1F3@1 1B3@1 1S3>0 1U2<1 ..."
    assert_broken((FIRST, 2, *changes), law, row, "it between 1U1<0 and what follows from that", "order them so")


def test_a_validation_needs_all_norms() -> None:
    assert_broken(
        (FIRST, 2, ("0N1<1 0V1", "0V1 0N1<1")),
        "an action comes after what it needs",
        "rank 0: ... 0B1@0 0U1<0 0N1>1 0F2@1 0S2>1 0F3@1 0S3>1 >>0V1<< 0N1<1 0R2<1 0B2@1 0R3<1 0B3@1 0U2<1 0N2>1 ...",
        "the norm for version 1 on stage 1 before 0V1",
        "put it before, or let lower() derive the messages",
    )


def test_no_schedule_without_them_has_validations() -> None:
    plain = Schedule("1f1b-flush", 1, 1)
    row = "rank 0: 0F0@0 0B0@0 0U1<0 >>0V1<<"
    assert_broken((plain, 1, ("0U1<0", "0U1<0 0V1")), LAW, row, "0 validations", "let lower() derive them")


def test_ranks_receive_no_more_before_a_validation_than_others_have_sent_before_theirs() -> None:
    made = Schedule("1f1b-flush", 3, 4, norms=True, post_validation=True)
    steps = [made.step(0), made.step(1), made.drain(2)]
    text = [" ".join(map(str, row)) for row in steps[1]]
    for rank, old, new in (
        (0, "0F5@1 0S5>1 0F6@1 0S6>1 0N1<1 0V1", "0N1<1 0V1 0F5@1 0S5>1 0F6@1 0S6>1"),
        (1, "1N1<0 1N1>2", "1N1<0 1N1>2 1N1<2 1N1>0"),
        (1, "1S5>2 1N1<2 1N1>0 1V1", "1S5>2 1V1"),
    ):
        assert old in text[rank]
        text[rank] = text[rank].replace(old, new)
    steps[1] = parse_programs("\n".join(text))

    law, row, *said = complaint(lambda: prove(collect(made, 2, steps)))
    assert law.endswith("ranks validate where the messages before it on every edge are those before it on the other")
    assert ">>1R5<0<<" in row
    assert said == [
        "  expected: 1R4<0",
        "  fix: receive from rank 0 what it sends after its validation behind that of rank 1",
    ]


def test_what_has_no_validations_is_refused() -> None:
    for options, found in (
        ({"norms": False}, "none: no update waits"),
        ({"method": "2bw"}, "'2bw', whose stages update at their own times"),
        ({"method": "zb-v", "stages_per_rank": 2}, "several: one would read"),
        ({"ties": ((0, 1),)}, "weights that stages 0, 1 share"),
        ({"replicated": Placement(((0,), (1, 2))), "ranks": 3}, "different numbers of replicas (1-2)"),
    ):
        given: dict[str, Any] = {"method": "1f1b-flush", "ranks": 2, "microbatches": 4, "norms": True, **options}
        with pytest.raises(ScheduleError, match="post_validation=True: expected norms") as caught:
            Schedule(**given, post_validation=True)
        assert found in str(caught.value)


def test_written_orders_have_validations() -> None:
    written = define_by_programs("mine", "0F0@0 0F1@0 0B0@0 0B1@0 0U1<0\n1F0@0 1B0@0 1F1@0 1B1@0 1U1<0")
    made = Schedule(written, 2, 2, norms=True, post_validation=True)
    assert verify(made).actions == verify(FIRST).actions and made.step(1) == FIRST.step(1)
