"""Windows: the operations of a part of a step are put anew, all at once, so that the step becomes shorter.

What starts in a window of time may change its order: all of it, or that of one rank, or of two stages, while the rest
keeps its order. What comes before stands, and what comes behind counts as the longest path from the end of an operation
to the end of the step. The orders in the window are made operation by operation, on the rank that can end one first
[Giffler 1960]; of all orders of as many operations the best few go on (a beam search). One of two orders of the
same operations is left out if it has nothing earlier. A step of few operations is one window, of which all orders go
on, also those in which a rank that could do a forward waits for something that takes no memory: that is exact.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from operator import le
from random import Random
from typing import TypeAlias

from penstock.planning.orders.bounds import bound_of
from penstock.planning.orders.rows import BACKWARD, FORWARD, ROUNDING, WEIGHT, Op, OrderCosts, TimedRows, time_rows

_BEAM, _OPERATIONS = 20, 8
"""How many orders go on, and about how many operations of each rank a window has in which all are free."""
_LONGER = 1.0, 2.5, 2.0
"""How much longer windows are in which all is free, one rank, or two stages."""
_EXACT, _ALL = 24, 20_000
"""A step of at most 24 operations is sought exactly, unless more orders than the second number would go on."""
_IDLE = 0.5
"""What the mean end of the ranks counts beside the end of the step in the choice of what goes on."""
_WORSE = 5e-4
"""By how much of a step rows may be worse that are taken now and then."""

Free: TypeAlias = Callable[[Op], bool]
Message: TypeAlias = tuple[int, float, float, int]
"""To what operation, by its number; its seconds; those for which it keeps its link; the number of the link."""
Ready: TypeAlias = tuple[float, float, list[tuple[float, int]]]
"""The earliest end and start of what can come next on a rank, and the start of each such operation."""
Child: TypeAlias = tuple[float, int, "_State", int, float, float, int]
"""What comes next to a state: the less the better, a number, the state, the operation and its start, and the longest
path and what is blocked then.
"""


def rearrange(costs: OrderCosts, timed: TimedRows, effort: int, variant: int = 0) -> TimedRows:
    """The best rows that windows of `timed` lead to, within the limits; the same for the same `variant`.

    `effort`: how many operations are put in all windows together. Where the bound is reached nothing is left to do.
    """
    draw, best, count = Random(variant), timed, costs.operations
    least = bound_of(costs).seconds * ROUNDING
    if count <= _EXACT and best.seconds > least:
        found, _ = _Window(costs, timed, _behind(costs, timed), (0.0, inf), None).put_anew(_ALL)
        return timed if found is None or found.score > timed.score else found
    current, behind, turn = timed, _behind(costs, timed), 0
    while effort > 0 and best.seconds > least:
        kind, turn = turn % len(_LONGER), turn + 1
        length = current.seconds * _OPERATIONS * costs.length * _LONGER[kind] * draw.uniform(0.6, 1.6) / count
        begin = draw.uniform(-length / 2, current.seconds - length / 2)
        window = _Window(costs, current, behind, (begin, begin + length), _free(costs, draw, kind))
        found, taken = window.put_anew(_BEAM)
        effort -= taken + count // 4
        worse = draw.choice((0.0, 0.0, 0.0, _WORSE)) * current.seconds
        if found is not None and found.rows != current.rows and found.score <= current.score + worse:
            current, behind = found, _behind(costs, found)
            best = min(best, found, key=lambda each: each.score)
    return best


def _free(costs: OrderCosts, draw: Random, kind: int) -> Free:
    if kind == 1:
        rank = draw.randrange(costs.length)
        return lambda op: costs.ranks[op[1]] == rank
    stages = draw.sample(range(costs.stages), min(2, costs.stages))
    return lambda op: not kind or op[1] in stages


def _messages(costs: OrderCosts, op: Op) -> Iterator[tuple[Op, float, float, int]]:
    """What waits for the end of `op`, on its own rank or another: see `Message`."""
    kind, stage, microbatch = op
    if kind == BACKWARD and stage not in costs.whole:
        yield (WEIGHT, stage, microbatch), 0.0, 0.0, 0
    if kind == FORWARD or (kind == BACKWARD and stage):
        waits, there, _, late, occupied, link = costs.routes[kind][stage]
        yield (waits, there, microbatch), late, occupied, link


def _behind(costs: OrderCosts, timed: TimedRows) -> dict[Op, float]:
    """By operation: the longest path from its start to the end of the step."""
    found, seconds, follows = dict[Op, float](), costs.seconds, dict[Op, Op]()
    places: list[tuple[float, int, Op]] = []
    for row, starts in zip(timed.rows, timed.starts, strict=True):
        follows.update(pairwise(row))
        places += [(start, place, op) for place, (op, start) in enumerate(zip(row, starts, strict=True))]
    ends = _ends(costs, timed)
    left = [op for _, _, op in sorted(places)]
    while left:
        op = left.pop()
        messages = {to: late for to, late, _, _ in _messages(costs, op)}
        # A backward may start before that which it waits for: it recomputes until its gradient comes.
        missing = [to for to in (*messages, follows.get(op, op)) if to not in found and to != op]
        if missing:
            left += [op, *missing]
        elif op not in found:
            longest = max((late + found[to] for to, late in messages.items()), default=-inf)
            own = found[follows[op]] if op in follows else ends[costs.ranks[op[1]]]
            found[op] = seconds[op[0]][op[1]] + max(own, longest)
    return found


def _ends(costs: OrderCosts, timed: TimedRows) -> list[float]:
    """By rank: what comes behind its last operation. Where it goes on alone, its end counts from its own beginning."""
    return [0.0 if costs.barrier or not starts else -starts[0] for starts in timed.starts]


@dataclass(slots=True)
class _State:
    """Some operations of a window in an order."""

    done: int
    """The operations, as bits."""
    free: list[float]
    """By rank: when it can go on."""
    held: list[float]
    """By rank: its bytes."""
    left: list[float]
    """By rank: the seconds of the operations of the window that are to come, and of what then follows."""
    arrived: list[float]
    """By operation, 0 once it is done; and by link, when it is free again."""
    opened: list[tuple[int, ...]]
    """By rank: the operations that wait for no other."""
    ready: list[Ready]
    """By rank."""
    longest: float = -inf
    """The longest path through what is done and what is not in the window."""
    blocked: int = 0
    """The operations that must not come next on their rank, as bits."""
    before: "tuple[_State, int] | None" = None
    """What this one was made of, by which operation."""

    def is_as_good(self, other: "_State") -> bool:
        """Whether nothing is later than in `other`, which has the same operations."""
        early = self.longest <= other.longest and not self.blocked & ~other.blocked
        return early and all(map(le, self.free, other.free)) and all(map(le, self.arrived, other.arrived))


class _Window:
    """The operations that start in a part of a step, each by a number."""

    def __init__(
        self, costs: OrderCosts, timed: TimedRows, behind: dict[Op, float], span: tuple[float, float], free: Free | None
    ) -> None:
        """`behind`: of `timed`. `free`: what may change its order; without it all of it, and all orders are sought."""
        self.costs, self.exact, self.upper = costs, free is None, timed.seconds * ROUNDING
        parts = [(bisect_left(starts, span[0]), bisect_left(starts, span[1])) for starts in timed.starts]
        self.rows = [(row[:first], row[last:]) for row, (first, last) in zip(timed.rows, parts, strict=True)]
        self.ops = ops = [op for row, (first, last) in zip(timed.rows, parts, strict=True) for op in row[first:last]]
        self.ranks = [costs.ranks[stage] for _, stage, _ in ops]
        self.took = [costs.seconds[kind][stage] for kind, stage, _ in ops]
        self.more = [costs.bytes_after[kind][stage] for kind, stage, _ in ops]
        takes = costs.saved, costs.again, (0.0,) * costs.stages
        self.takes = [takes[kind][stage] for kind, stage, _ in ops]
        self.active = [rank for rank, (first, last) in enumerate(parts) if first < last]
        self.messages: list[list[Message]] = [[] for _ in ops]
        self.behind, self.needs = [-inf] * len(ops), [0] * len(ops)
        self.forwards, self.forwarded = [0] * costs.stages, [0] * costs.stages
        number = {op: place for place, op in enumerate(ops)}
        before: dict[tuple[int, ...], int] = {}
        for place, op in enumerate(ops):
            kind, stage, _ = op
            self.forwards[stage] |= (kind == FORWARD) << place
            for to, late, occupied, link in _messages(costs, op):
                if to in number:
                    self.messages[place].append((number[to], late, occupied, len(ops) + link))
                    self.needs[number[to]] |= 1 << place
                else:
                    self.behind[place] = max(self.behind[place], late + behind[to])
            # Microbatches ascend, and what is not free keeps its order.
            for chain in ((kind, stage),) if free is None or free(op) else ((kind, stage), (self.ranks[place],)):
                if chain in before:
                    self.messages[before[chain]].append((place, -inf, 0.0, 0))
                    self.needs[place] |= 1 << before[chain]
                before[chain] = place
        free_at, held, left = [0.0] * costs.length, [0.0] * costs.length, _ends(costs, timed)
        arrived = [0.0] * (len(ops) + (costs.length**2 if costs.occupied else 0))
        for rank, ((row, rest), starts) in enumerate(zip(self.rows, timed.starts, strict=True)):
            left[rank] = sum(map(self.took.__getitem__, self._of(rank))) + (behind[rest[0]] if rest else left[rank])
            for op, start in zip(row, starts, strict=False):
                held[rank] += costs.bytes_after[op[0]][op[1]]
                self.forwarded[op[1]] += op[0] == FORWARD
                free_at[rank] = sent = start + costs.seconds[op[0]][op[1]]
                for to, late, occupied, link in _messages(costs, op):
                    if occupied:
                        sent = max(sent, arrived[len(ops) + link])
                        arrived[len(ops) + link] = sent + occupied
                    if to in number:
                        arrived[number[to]] = sent + late
        opened = [tuple(op for op in self._of(rank) if not self.needs[op]) for rank in range(costs.length)]
        self.first = _State(done=0, free=free_at, held=held, left=left, arrived=arrived, opened=opened, ready=[])
        self.first.ready = [self._ready(self.first, rank, 0) for rank in range(costs.length)]

    def _of(self, rank: int) -> Iterator[int]:
        return (op for op, own in enumerate(self.ranks) if own == rank)

    def put_anew(self, beam: int) -> tuple[TimedRows | None, int]:
        """The best rows that are not worse, if no more than `beam` orders go on; and how many operations were put."""
        states, taken = [self.first], 0
        for _ in self.ops:
            children: list[Child] = []
            for state in states:
                self._go_on(state, children)
            taken += len(children)
            kept: dict[int, list[_State]] = {}
            states = []
            for child in sorted(children):
                made = self._done(child)
                alike = kept.setdefault(made.done, [])
                for other in alike:
                    if other.is_as_good(made):
                        break
                else:
                    alike.append(made)
                    states.append(made)
                    for rank in {self.ranks[child[3]], *(self.ranks[to] for to, _, _, _ in self.messages[child[3]])}:
                        made.ready[rank] = self._ready(made, rank, made.blocked)
                    if len(states) == beam:
                        break
        if not states:
            return None, taken
        middle: list[list[Op]] = [[] for _ in self.rows]
        at = states[0].before
        while at is not None:
            middle[self.ranks[at[1]]].append(self.ops[at[1]])
            at = at[0].before
        rows = zip(self.rows, middle, strict=True)
        return time_rows(self.costs, [before + row[::-1] + behind for (before, behind), row in rows]), taken

    def _go_on(self, state: _State, children: list[Child]) -> None:
        """Adds what can come next, where the step can be short enough."""
        ready, blocked = state.ready, state.blocked
        while True:
            rank = min(self.active, key=lambda each: ready[each][0])
            soonest, _, able = ready[rank]
            if soonest == inf:
                return
            last, every = -inf, 0.0
            for other in self.active:
                if other != rank:
                    start = ready[other][1]
                    end = state.left[other] + (state.free[other] if start == inf else start)
                    every += end
                    last = max(last, end)
            # A forward that could be done at once may have to leave its memory to another.
            first = [each for each in able if each[0] + self.took[each[1]] == soonest and self.takes[each[1]] > 0]
            able = first[:1] if self.exact and first else able
            for start, op in able:
                if start < soonest or start + self.took[op] <= soonest:
                    own = start + state.left[rank]
                    longest = max(state.longest, start + self.took[op] + self.behind[op])
                    least = max(longest, own, last)
                    if least <= self.upper:
                        guide = least + _IDLE * (every + own) / len(self.active)
                        children.append((guide, len(children), state, op, start, longest, blocked))
            if not (self.exact and first):
                return
            blocked |= 1 << able[0][1]
            ready = list(ready)
            ready[rank] = self._ready(state, rank, blocked)

    def _done(self, child: Child) -> _State:
        """The state of a child. What is ready there on the ranks of its operation and its messages is not known yet."""
        _, _, old, op, start, longest, blocked = child
        rank, end, done = self.ranks[op], start + self.took[op], old.done | 1 << op
        free, held, left, arrived, opened = old.free[:], old.held[:], old.left[:], old.arrived[:], old.opened[:]
        free[rank], arrived[op] = end, 0.0
        held[rank] += self.more[op]
        left[rank] -= self.took[op]
        opened[rank] = tuple(other for other in opened[rank] if other != op)
        for to, late, occupied, link in self.messages[op]:
            sent = end
            if occupied:
                sent = max(end, arrived[link])
                arrived[link] = sent + occupied
            if sent + late > arrived[to]:
                arrived[to] = sent + late
            if not self.needs[to] & ~done:
                opened[self.ranks[to]] += (to,)
        for other in old.opened[rank] if blocked else ():
            blocked &= ~(1 << other)
        return _State(
            done=done,
            free=free,
            held=held,
            left=left,
            arrived=arrived,
            opened=opened,
            ready=old.ready[:],
            longest=longest,
            blocked=blocked,
            before=(old, op),
        )

    def _ready(self, state: _State, rank: int, blocked: int) -> Ready:
        able, soonest, first, free = [], inf, inf, state.free[rank]
        for op in state.opened[rank]:
            if (self.takes[op] > 0 and not self._fits(state, rank, op)) or blocked >> op & 1:
                continue
            start = max(free, state.arrived[op])
            able.append((start, op))
            soonest, first = min(soonest, start + self.took[op]), min(first, start)
        return soonest, first, able

    def _fits(self, state: _State, rank: int, op: int) -> bool:
        """Whether there is memory for a forward, and then for the oldest microbatch on the later stages of the rank."""
        limit, done, saved = self.costs.limits[rank] * ROUNDING, state.done | 1 << op, self.costs.saved
        if state.held[rank] + self.takes[op] > limit:
            return False
        held = self.costs.held[rank]
        ahead = [self.forwarded[stage] + (done & self.forwards[stage]).bit_count() for stage in held]
        if len(held) == 1 or ahead[-1] == self.costs.microbatches:
            return True
        return sum(saved[stage] * max(count - ahead[-1], 1) for stage, count in zip(held, ahead, strict=True)) <= limit
