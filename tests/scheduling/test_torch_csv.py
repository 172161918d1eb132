"""PyTorch reads the CSVs of orders that are written here, and what it writes becomes a schedule."""

import csv
import io

import pytest
from torch.distributed.pipelining.schedules import _Action

import penstock
from penstock.scheduling import define_by_programs, read_torch_csv, torch_csv


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
        "dual", "0F0@0 0F1@0 0F2@0 0B0@0 0B1@0 0B2@0 0U1<0\n1F0@0 1B0@0 1F1@0 1I1@0 1W1@0 1F2@0 1B2@0 1U1<0"
    )

    assert read_torch_csv("dual", text) is by_hand
    assert penstock.verify(penstock.Schedule(by_hand, 2, 3)).in_flight == (3, 1)
