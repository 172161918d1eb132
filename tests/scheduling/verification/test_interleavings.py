"""Every interleaving of small proved programs, over two transports: none is stuck, and every receive gets its message.

States are enumerated one by one: how far each rank is, and which messages have passed each edge. Computations are left
out, since no other rank sees them. Both transports have a queue for each edge, and a send returns at once.

- Eagerly, as through shared memory: a message has passed when it is sent.
- By rendezvous, as over Gloo: a message passes when its receive is posted. A rank posts the receives of a segment when
  it begins the segment, at most `WINDOW` on each edge before they are needed, and waits at the end until all that it
  has sent has passed.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random
from typing import NamedTuple

import pytest

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Message, Receive, Receiving, Reduce, Send, Sending, Update, parse_programs
from penstock.scheduling.lowering import counterpart, peers
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Programs, Schedule
from penstock.scheduling.verification.verifier import verify, verify_programs
from support.own_schedules import OWN, offloading
from support.random_orders import found_order

Edge = tuple[int, int]
State = tuple[int, ...]
"""The place of each rank in its row, and how many messages have passed each edge."""
WINDOW = 2


class Stop(NamedTuple):
    """What a rank does with others: sends on all `edges`, receives from `edges`, or meets the ranks of `group`."""

    action: Message | Reduce | Update | None
    edges: tuple[Edge, ...] = ()
    group: tuple[int, ...] = ()
    begun: int = 0
    """If there is no action: how many segments have begun behind it; -1 at the end."""


def others(action: Message, rank: int, placement: Placement) -> tuple[int, ...]:
    """The other ranks of a message; where replicas share a microbatch, those with some of the same samples."""
    if not placement.split or not isinstance(action, Send | Receive):
        return peers(action, rank, placement)
    here, there = placement.stages[action.stage], placement.stages[counterpart(action).stage]
    index, own, far = here.index(rank), len(here), len(there)
    return tuple(to for at, to in enumerate(there) if index * far < (at + 1) * own and at * own < (index + 1) * far)


def stops_of(schedule: Schedule, segments: list[Programs]) -> list[list[Stop]]:
    placement = schedule.placement
    rows: list[list[Stop]] = [[] for _ in range(schedule.ranks)]
    for number, programs in enumerate(segments, 1):
        for rank, row in enumerate(programs):
            rows[rank].append(Stop(None, begun=number))
            for action in row:
                if isinstance(action, Sending):
                    rows[rank].append(Stop(action, tuple((rank, to) for to in others(action, rank, placement))))
                elif isinstance(action, Receiving):
                    rows[rank].append(Stop(action, tuple((to, rank) for to in others(action, rank, placement))))
                elif isinstance(action, Reduce) or (schedule.gathers and isinstance(action, Update)):
                    rows[rank].append(Stop(action, group=placement.stages[action.stage]))
    return [[*row, Stop(None, begun=-1)] for row in rows]


class Stuck(Exception):
    """A state from which no rank goes on."""


class Wrong(Exception):
    """A receive that gets another message."""


@dataclass
class Network:
    """The states that `rows` can be in; `window`: the receives that are posted, 0 where messages pass at once."""

    rows: list[list[Stop]]
    window: int

    def __post_init__(self) -> None:
        self.edges = sorted({edge for row in self.rows for stop in row for edge in stop.edges})
        self.number = {edge: len(self.rows) + index for index, edge in enumerate(self.edges)}
        self.sent: dict[Edge, list[int]] = {}
        self.got: dict[Edge, list[int]] = {}
        self.posted: dict[Edge, list[int]] = {}
        """By edge and place of its receiver: the receives of the segments that have begun."""
        self.messages: defaultdict[Edge, list[Message]] = defaultdict(list)
        for edge in self.edges:
            self.sent[edge] = self._counts(edge[0], edge)
            self.got[edge] = self._counts(edge[1], edge)
            self.messages[edge] = [stop.action for stop in self.rows[edge[0]] if edge in stop.edges]  # type: ignore[misc]
            ends = [place for place, stop in enumerate(self.rows[edge[1]]) if stop.action is None][1:]
            coming = [min((end for end in ends if end >= place), default=0) for place in range(len(self.got[edge]))]
            self.posted[edge] = [self.got[edge][end] if end else 0 for end in coming]
            self.posted[edge][0] = 0

    def _counts(self, rank: int, edge: Edge) -> list[int]:
        counts = [0]
        for stop in self.rows[rank]:
            counts.append(counts[-1] + (edge in stop.edges))
        return counts

    def explore(self) -> int:
        """How many states there are. Raises `Stuck` or `Wrong`."""
        start = (0,) * (len(self.rows) + (len(self.edges) if self.window else 0))
        seen, waiting = {start}, [start]
        while waiting:
            state = waiting.pop()
            found = list(self._next(state))
            if not found and any(place < len(row) for place, row in zip(state, self.rows, strict=False)):
                raise Stuck(
                    [row[place].action for place, row in zip(state, self.rows, strict=False) if place < len(row)]
                )
            for then in found:
                if then not in seen:
                    seen.add(then)
                    waiting.append(then)
        return len(seen)

    def _next(self, state: State) -> Iterator[State]:
        for rank, row in enumerate(self.rows):
            place = state[rank]
            if place < len(row) and self._may_go(state, rank, row[place]):
                group = row[place].group or (rank,)
                if rank == group[0]:
                    yield tuple(at + (index in group) for index, at in enumerate(state))
        for edge in self.edges if self.window else ():
            index, (source, target) = self.number[edge], edge
            at, got = state[index], self.got[edge][state[target]]
            if at < self.sent[edge][state[source]] and at < min(self.posted[edge][state[target]], got + self.window):
                yield (*state[:index], at + 1, *state[index + 1 :])

    def _may_go(self, state: State, rank: int, stop: Stop) -> bool:
        if stop.group:
            here = [self.rows[other][state[other]] for other in stop.group if state[other] < len(self.rows[other])]
            return here == [stop] * len(stop.group)
        if isinstance(stop.action, Receiving):
            for edge in stop.edges:
                got = self.got[edge][state[rank]]
                passed = state[self.number[edge]] if self.window else self.sent[edge][state[edge[0]]]
                if passed <= got:
                    return False
                if counterpart(self.messages[edge][got]) != stop.action:
                    raise Wrong(stop.action)
            return True
        own = [edge for edge in self.edges if edge[0] == rank] if self.window and stop.begun < 0 else ()
        return all(state[self.number[edge]] == self.sent[edge][state[rank]] for edge in own)


def explore(schedule: Schedule, segments: list[Programs]) -> int:
    rows = stops_of(schedule, segments)
    return sum(Network(rows, window).explore() for window in (0, WINDOW))


def segments_of(schedule: Schedule, minibatches: int) -> list[Programs]:
    return [*(schedule.step(number) for number in range(minibatches)), schedule.drain(minibatches)]


NAMED = {
    **{name: Schedule(name, 3, 3) for name in ("gpipe", "1f1b-flush", "spp", "zb-h1")},
    "interleaved": Schedule("interleaved", 2, 2, 2),
    "interleaved of three": Schedule("interleaved", 3, 3, 2),
    **{name: Schedule(name, 3, 3, 2) for name in ("zb-v", "v-half", "v-min")},
    "pipedream": Schedule("pipedream", 3, 1),
    "vertical": Schedule("pipedream", 3, 1, vertical_sync=True),
    "norms": Schedule("2bw", 2, 2, norms=True),
    "2bw": Schedule("2bw", 2, 2),
    "ties": Schedule("2bw", 3, 3, ties=((0, 2),), norms=True),
    "skips": Schedule("1f1b-flush", 3, 3, skips=((0, 2),)),
    "turns": Schedule.placed("1f1b-flush", Placement(((0, 1), (2,))), 3),
    "updates in parts": replace(Schedule.placed("2bw", Placement(((0, 1), (2,))), 4, norms=True), gathers=True),
    "shares": Schedule.placed("zb-h1", Placement(((0,), (1, 2)), split=True), 2),
    "offloads": Schedule(offloading(OWN["late"]), 2, 1),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", NAMED)
def test_no_interleaving_of_a_named_schedule_is_stuck(name: str) -> None:
    made = NAMED[name]
    minibatches = 2 if made.flushes else 3
    verify(made, minibatches)

    assert explore(made, segments_of(made, minibatches)) > 20


@pytest.mark.sampled(1)
@pytest.mark.parametrize("block", range(20))
def test_no_interleaving_of_a_found_order_is_stuck(block: int) -> None:
    for number in range(5):
        made = found_order(Random(5 * block + number), 3, 3, 6)
        verify(made, 1)
        explore(made, segments_of(made, 1))


SMALL = [Schedule("1f1b-flush", 2, 2), Schedule("zb-v", 2, 1, 2)]


@pytest.mark.parametrize("made", SMALL, ids=lambda made: made.name)
def test_whatever_is_stuck_or_wrong_is_refused(made: Schedule) -> None:
    """Each action of a row moved to each other place."""
    programs, caught = made.program(1), set()
    for rank, row in enumerate(programs):
        for place, action in enumerate(row):
            rest = row[:place] + row[place + 1 :]
            for to in range(len(row)):
                moved = (*programs[:rank], (*rest[:to], action, *rest[to:]), *programs[rank + 1 :])
                try:
                    explore(made, [moved])
                except (Stuck, Wrong) as found:
                    caught.add(type(found))
                    with pytest.raises(ScheduleError):
                        verify_programs(moved, made, 1)
    assert caught == {Stuck, Wrong}


def test_a_message_of_a_later_step_cannot_be_received() -> None:
    """Planted: rank 1 receives in its first step what rank 0 sends in its second one, after an answer."""
    made = Schedule("pipedream", 2, 1)
    first, second = made.step(0), made.step(1)
    early = parse_programs("rank 0: 0F0@0 0S0>1 0R1<1\nrank 1: 1R0<0 1R1<0 1F0@0 1S1>0")
    late = parse_programs("rank 0: 0S1>1\nrank 1: 1F1@0")

    assert explore(made, [first, second, made.drain(2)]) > 20
    with pytest.raises(Stuck):
        explore(made, [early, late])
