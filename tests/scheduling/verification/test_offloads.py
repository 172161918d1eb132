"""The laws of offloads: each broken once on purpose, and caught with the row that breaks it."""

from collections.abc import Iterator
from dataclasses import replace

from penstock.scheduling.actions import Offload
from penstock.scheduling.definitions import Entry, PipelineShape, Segment, Step
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify
from penstock.scheduling.written_programs import define_by_programs, torch_csv
from support.broken_programs import complaint
from support.own_schedules import LATE, offloading

ROW = "0F0@0 0H0 0F1@0 0H1 0D0 0B0@0 0D1 0B1@0 0U1<0"
ALONE = Schedule(define_by_programs("alone", ROW), 1, 2)


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
