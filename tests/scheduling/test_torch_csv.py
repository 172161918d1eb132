"""PyTorch reads the CSVs of orders that are written here, and what it writes becomes a schedule."""

import csv
import io

import pytest
from torch.distributed.pipelining.schedules import _Action

import penstock
from penstock.errors import ScheduleError
from penstock.scheduling import define_by_programs, format_programs, read_torch_csv, torch_csv


@pytest.mark.parametrize(
    ("name", "ranks", "per_rank"),
    [("gpipe", 3, 1), ("1f1b-flush", 4, 1), ("interleaved", 2, 2), ("zb-h1", 3, 1), ("zb-v", 2, 2)],
)
def test_an_order_goes_there_and_back(name: str, ranks: int, per_rank: int) -> None:
    made = penstock.Schedule(name, ranks, 4, per_rank)
    text = torch_csv(made)

    assert penstock.Schedule(read_torch_csv("again", text), ranks, 4, per_rank).step(2) == made.step(2)
    cells = list(csv.reader(io.StringIO(text)))
    assert len(cells) == ranks
    for row in cells:
        assert [str(_Action.from_str(cell)) for cell in row] == row
        assert all(_Action.from_str(cell).is_compute_op for cell in row)


def test_waits_messages_and_overlapped_halves_are_read() -> None:
    text = "0F0,0F1,,(0F2;0B0)OVERLAP_F_B,0B1,0B2\n,1RECV_F0,1F0,1B0,1SEND_B0,1F1,1I1,1W1,1F2,1B2\n"
    by_hand = define_by_programs(
        "dual",
        "0F0@0 0F1@0 0F2@0 0B0@0 0B1@0 0B2@0 0U1<0\n1F0@0 1B0@0 1F1@0 1I1@0 1W1@0 1F2@0 1B2@0 1U1<0",
    )

    assert read_torch_csv("dual", text) is by_hand
    assert penstock.verify(penstock.Schedule(by_hand, 2, 3)).in_flight == (3, 1)


def test_a_cell_that_is_none_is_named() -> None:
    with pytest.raises(ScheduleError, match=r"schedule 'x': rank 1: cannot read '1G0' of the CSV: expected actions"):
        read_torch_csv("x", "0F0,0B0\n1F0,1G0")
    for word in ("0" * 5000 + "F0", "1000000000F0", "0F1000000000", "\N{ARABIC-INDIC DIGIT THREE}F0"):
        with pytest.raises(ScheduleError, match="rank 0: cannot read"):
            read_torch_csv("x", f"{word},0B0")
    with pytest.raises(ScheduleError, match="the stages from 0 to 7, found none of 0"):
        read_torch_csv("x", "7F0,7B0")


@pytest.mark.parametrize("schedule", [penstock.Schedule("2bw", 2, 4), penstock.Schedule("pipedream", 2, 4)], ids=str)
def test_what_never_flushes_has_no_csv(schedule: penstock.Schedule) -> None:
    with pytest.raises(ScheduleError, match="expected one that flushes, without replicas"):
        torch_csv(schedule)
    assert format_programs(schedule.step(0))
