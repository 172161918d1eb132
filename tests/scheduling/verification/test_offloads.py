"""The laws of offloads: each broken once on purpose, and caught with the row that breaks it."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from penstock.scheduling.actions import Offload
from penstock.scheduling.definitions import Entry, PipelineShape, Segment, Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verification.verifier import verify
from penstock.scheduling.written_programs import define_by_programs, torch_csv
from support.broken_programs import assert_broken, complaint
from support.own_schedules import EAGER, LATE, offloading

ROW = "0F0@0 0H0 0F1@0 0H1 0D0 0B0@0 0D1 0B1@0 0U1<0"
ALONE = Schedule(define_by_programs("alone", ROW), 1, 2)
TURNS = Schedule.placed(offloading(EAGER), Placement(((0, 1),)), 2)
# rank 0: 0F0@0 0H0 0D0 0B0@0 0A1 0U1<0
# rank 1: 0F1@0 0H1 0D1 0B1@0 0A1 0U1<0
LAW = "stage 0 offloads and reloads a microbatch once, after its forward and before its backward"
LAWS = {
    "offloaded twice": (
        (ALONE, 1, ("0F1@0 0H1 0D0", "0H0 0F1@0 0H1 0D0")),
        "rank 0: 0F0@0 0H0 >>0H0<< 0F1@0 0H1 0D0 0B0@0 0D1 0B1@0 0U1<0",
        "a microbatch for which it was not done yet",
        "drop the second one",
    ),
    "reloaded twice": (
        (ALONE, 1, ("0D0 0B0@0", "0D0 0D0 0B0@0")),
        "rank 0: 0F0@0 0H0 0F1@0 0H1 0D0 >>0D0<< 0B0@0 0D1 0B1@0 0U1<0",
        "a microbatch for which it was not done yet",
        "drop the second one",
    ),
    "never back": (
        (ALONE, 1, ("0D1 ", "")),
        "rank 0: 0F0@0 0H0 0F1@0 >>0H1<< 0D0 0B0@0 0B1@0 0U1<0",
        "a reload of microbatch 1",
        "add it, or drop this one",
    ),
    "never away": (
        (ALONE, 1, ("0H1 ", "")),
        "rank 0: 0F0@0 0H0 0F1@0 0D0 0B0@0 >>0D1<< 0B1@0 0U1<0",
        "an offload of microbatch 1",
        "add it, or drop this one",
    ),
    "before the forward": (
        (ALONE, 1, ("0F0@0 0H0", "0H0 0F0@0")),
        "rank 0: >>0H0<< 0F0@0 0F1@0 0H1 0D0 0B0@0 0D1 0B1@0 ...",
        "its forward before",
        "order them so",
    ),
    "back before it is away": (
        (ALONE, 1, ("0H0 0F1@0 0H1 0D0", "0D0 0F1@0 0H1 0H0")),
        "rank 0: 0F0@0 >>0D0<< 0F1@0 0H1 0H0 0B0@0 0D1 0B1@0 0U1<0",
        "its offload before",
        "order them so",
    ),
    "back too late": (
        (ALONE, 1, ("0D0 0B0@0", "0B0@0 0D0")),
        "rank 0: 0F0@0 0H0 0F1@0 0H1 >>0B0@0<< 0D0 0D1 0B1@0 0U1<0",
        "its reload before",
        "order them so",
    ),
    "of another replica": (
        (TURNS, 1, ("0F0@0 0H0", "0F0@0 0H1")),
        "rank 0: 0F0@0 >>0H1<< 0D0 0B0@0 0A1 0U1<0",
        "a forward of microbatch 1",
        "add it, or drop this one",
    ),
}


@pytest.mark.parametrize("broken", LAWS)
def test_each_law_broken_once(broken: str) -> None:
    made, *said = LAWS[broken]
    assert_broken(made, LAW, *said)


@pytest.mark.parametrize(
    ("word", "expected", "fix"),
    [
        ("1H0", "stages [0] on rank 0", "move the action"),
        ("0H2", "microbatches 0 to 1", "drop the action, or verify more minibatches"),
    ],
)
def test_an_offload_is_of_a_stage_of_its_rank(word: str, expected: str, fix: str) -> None:
    law = "an action is of a stage of its rank and of a microbatch of the program"
    row = f"rank 0: 0F0@0 >>{word}<< 0F1@0 0H1 0D0 0B0@0 0D1 0B1@0 0U1<0"
    assert_broken((ALONE, 1, ("0F0@0 0H0", f"0F0@0 {word}")), law, row, expected, fix)


def test_evaluations_offload_nothing() -> None:
    made = inference(1, 1, 1), 1, ("0F0@0", "0F0@0 0H0")
    law = "an inference has forwards only"
    assert_broken(made, law, "rank 0: 0F0@0 >>0H0<<", "no backward and no update", "drop it, or train")


def test_an_offload_is_in_the_step_of_its_forward() -> None:
    def order(shape: PipelineShape, rank: int, segment: Segment) -> Iterator[Entry]:
        late = segment.minibatch - 1 if isinstance(segment, Step) else segment.minibatches - 1
        if late >= 0:
            yield Offload(0, late)
        yield from (entry for entry in offloading(LATE).order(shape, rank, segment) if not isinstance(entry, Offload))

    assert verify(Schedule(offloading(LATE), 2, 2)).in_flight == (4, 4)
    assert complaint(lambda: verify(Schedule(replace(LATE, order=order), 1, 1), 2)) == [
        "schedule 'late' violates an invariant: a step carries the forwards and offloads of its own minibatch, and a "
        "drain none",
        "  rank 0: 0F0@0 >>0H0<< 0F1@0 0D0 0B0@0 0U1<0 0H1 0D1 0B1@0 ...",
        "  expected: in step(1) only microbatches 1 to 1",
        "  fix: yield it in the step that it belongs to",
    ]


def test_torchs_csv_has_no_offloads() -> None:
    assert torch_csv(ALONE) == "0F0,0F1,0B0,0B1\n"
