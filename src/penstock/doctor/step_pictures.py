"""The picture of a step that stands still: what every rank has done, what it does now, and what is left.

     F3      forward of microbatch 3, done; B its backward, I and W the halves of a split one, U an update
    >F3      it runs
    ?b3      the rank waits before it
     f3      it is still to do

Actions of one column can happen at the same time; each takes one column. The columns follow from the programs in the
records, in which a receive comes after its send.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.doctor.conditions import Condition, Evidence
from penstock.doctor.records import RowRecord
from penstock.scheduling.actions import (
    Action,
    HostCopy,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
    WeightMove,
    parse,
)
from penstock.scheduling.lowering import counterpart

_WIDTH = 100


@dataclass(frozen=True, slots=True)
class _Cell:
    """A computation: its index in the program, its column, and its name."""

    index: int
    column: int
    name: str


def draw_step(evidence: Evidence) -> list[str]:
    """One line for each rank; none if no rank has a program."""
    rows: dict[int, tuple[RowRecord, bool]] = {}
    for found, condition in zip(evidence.processes, evidence.conditions, strict=True):
        for row in found.record.rows if found.record is not None else ():
            # The processes of one rank do the same; the first one is drawn.
            rows.setdefault(row.rank, (row, condition.condition is Condition.WAITING))
    placed = _place({rank: tuple(map(parse, row.program)) for rank, (row, _) in rows.items()})
    cells = [cell for own in placed.values() for cell in own]
    if not cells:
        return []
    size = 2 + max(len(cell.name) for cell in cells)
    columns = 1 + max(cell.column for cell in cells)
    room = max(1, _WIDTH // size)
    pending = [cell.column for rank, own in placed.items() for cell in own if cell.index >= rows[rank][0].done]
    first = max(0, min(min(pending, default=columns) - room // 2, columns - room))
    lines = []
    for rank in sorted(rows):
        row, waits = rows[rank]
        line = [" " * size] * columns
        for cell in placed[rank]:
            line[cell.column] = _text(cell, row, waits, placed[rank]).ljust(size)
        before = "..." if first else ""
        after = "..." if first + room < columns else ""
        drawn = "".join(line[first : first + room]).rstrip()
        lines.append(f"rank {rank:<{len(str(max(rows)))}} {before}{drawn}{after}".rstrip())
    return lines


def _text(cell: _Cell, row: RowRecord, waits: bool, cells: Sequence[_Cell]) -> str:
    if cell.index < row.done:
        return f" {cell.name}"
    if cell.index == row.done and row.runs:
        return f">{cell.name}"
    following = next(other for other in cells if other.index >= row.done)
    return f"{'?' if waits and cell is following else ' '}{cell.name.lower()}"


def _place(programs: Mapping[int, Sequence[Action]]) -> dict[int, list[_Cell]]:
    """The computations of every rank with their columns."""
    sent: dict[Action, int] = {}
    """By receive, the first column after its send."""
    expected = {
        counterpart(action)
        for program in programs.values()
        for action in program
        if isinstance(action, Send | SendTied | SendNorms)
    }
    placed: dict[int, list[_Cell]] = {rank: [] for rank in programs}
    index, column = dict.fromkeys(programs, 0), dict.fromkeys(programs, 0)
    while any(index[rank] < len(program) for rank, program in programs.items()):
        moved = False
        for rank, program in programs.items():
            while index[rank] < len(program):
                action = program[index[rank]]
                if isinstance(action, Receive | ReceiveTied | ReceiveNorms):
                    if action in expected and action not in sent:
                        break
                    column[rank] = max(column[rank], sent.get(action, 0))
                elif isinstance(action, Send | SendTied | SendNorms):
                    sent.setdefault(counterpart(action), column[rank])
                elif not isinstance(action, Reduce | HostCopy | WeightMove):
                    placed[rank].append(_Cell(index[rank], column[rank], _name(action)))
                    column[rank] += 1
                index[rank] += 1
                moved = True
        if not moved:
            # Programs of different steps may wait for each other; then columns do not matter.
            expected.clear()
    return placed


def _name(action: Action) -> str:
    """``F3``; with the stage, ``2F3``, it would be too wide."""
    if isinstance(action, Update):
        return "U"
    return str(action).lstrip("0123456789").partition("@")[0]
