"""The flight recorder: keeps how far this process is in its programs, for a record that any thread may take.

A worker notes the time when an action begins and when it ends, which takes a fraction of a microsecond. Everything else
is worked out when a record is taken. The times are those of the host: a record must not wait for a device that hangs.
"""

import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from statistics import median

from penstock.doctor.conditions import kind_of
from penstock.doctor.records import ActionRecord, RowRecord
from penstock.scheduling.actions import Action
from penstock.scheduling.placements import Placement

_KEPT_SEGMENTS = 8
_KEPT_ACTIONS = 64


@dataclass(slots=True, eq=False)
class FlightRow:
    """One rank's way through a program. The worker appends to `starts` and `stops`, in ``time.perf_counter``."""

    rank: int
    program: Sequence[Action]
    starts: list[float] = field(default_factory=list)
    stops: list[float] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    name: str
    placement: Placement
    began: float
    rows: tuple[FlightRow, ...]


@dataclass(frozen=True, slots=True)
class Position:
    """What a record says of the programs of this process; see `RankRecord`."""

    steps: int
    segment: str = ""
    stages: tuple[tuple[int, ...], ...] = ()
    split: bool = False
    rows: tuple[RowRecord, ...] = ()
    last: tuple[ActionRecord, ...] = ()
    usual: Mapping[str, float] = field(default_factory=dict)


class FlightRecorder:
    def __init__(self) -> None:
        self._flights: deque[_Flight] = deque(maxlen=_KEPT_SEGMENTS)
        self._steps = 0
        self._entered = False
        """Whether the last step was called and its segment has not begun."""

    def enter_step(self) -> None:
        """Counts a step that is called. Its segment begins when the ranks have compared their calls."""
        if not self._entered:
            self._entered, self._steps = True, self._steps + 1

    def begin(self, kind: str, placement: Placement, rows: Sequence[FlightRow]) -> None:
        """Begins a segment of `kind`: ``step``, ``drain`` or ``evaluation``."""
        name = kind
        if kind == "step":
            self.enter_step()
            name, self._entered = f"step {self._steps - 1}", False
        self._flights.append(_Flight(name, placement, time.perf_counter(), tuple(rows)))

    def position(self) -> Position:
        """What a record says now. May be called by any thread."""
        now, flights = time.perf_counter(), list(self._flights)
        if not flights:
            return Position(self._steps)
        present = flights[-1]
        return Position(
            self._steps,
            segment=present.name,
            stages=present.placement.stages,
            split=present.placement.split,
            rows=tuple(_record_of(row, present.began, now) for row in present.rows),
            last=tuple(_last_actions(flights, now)),
            usual=_usual_seconds(flights),
        )


def _record_of(row: FlightRow, began: float, now: float) -> RowRecord:
    # In this order, since the worker appends to both meanwhile.
    done, started = len(row.stops), len(row.starts)
    runs = started > done
    since = row.starts[done] if runs else (row.stops[done - 1] if done else began)
    return RowRecord(row.rank, tuple(map(str, row.program)), done, runs, max(0.0, now - since))


def _done(row: FlightRow) -> list[tuple[str, float, float]]:
    done = zip(row.program, row.starts, row.stops, strict=False)
    return [(str(action), start, stop) for action, start, stop in islice(done, len(row.stops))]


def _last_actions(flights: Sequence[_Flight], now: float) -> list[ActionRecord]:
    done = [entry for flight in flights for row in flight.rows for entry in _done(row)]
    done.sort(key=lambda entry: entry[1])
    return [ActionRecord(action, now - start, stop - start) for action, start, stop in done[-_KEPT_ACTIONS:]]


def _usual_seconds(flights: Sequence[_Flight]) -> dict[str, float]:
    """The median seconds of the actions that are done, by stage and kind."""
    seconds: defaultdict[str, list[float]] = defaultdict(list)
    for flight in flights:
        for row in flight.rows:
            for action, start, stop in _done(row):
                seconds[kind_of(action)].append(stop - start)
    return {kind: median(found) for kind, found in seconds.items()}
