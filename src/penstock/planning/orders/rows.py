"""Rows: what the ranks of a pipeline compute in one step, as a search changes it, with its seconds and bytes.

An operation is a triple: its kind (a forward, a backward, or the weight part of one), its stage and its microbatch. A
row is the list of one rank's operations. A backward is an input backward if the weight part of its stage is an
operation of its own, else a whole one.

Time: each rank does its operations in order, each as soon as the rank is free and its data has arrived. A message waits
for those that its rank has sent to the same rank; the simulator, which judges the best rows, knows of shared links.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import inf
from typing import TypeAlias, assert_never

from penstock.scheduling.actions import (
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    HostCopy,
    Message,
    Recompute,
    Reduce,
    Update,
    WeightMove,
)
from penstock.scheduling.schedules import Schedule

FORWARD, BACKWARD, WEIGHT = 0, 1, 2
Op: TypeAlias = tuple[int, int, int]
"""(kind, stage, microbatch)"""
Row: TypeAlias = list[Op]
Rows: TypeAlias = list[Row]


@dataclass(frozen=True)
class OrderCosts:
    """Holds what the order of one pipeline is judged by: seconds and bytes of each stage, limits of each rank.

    `ranks`: the rank of each stage. `forward`, `backward`, `weight`: the seconds of one microbatch on each stage;
    `backward` is that of the input part alone. `activation`, `gradient`: the seconds from the end of stage s until
    stage s + 1 has its activation, and from the end of stage s + 1 until stage s has its gradient. `saved`: the bytes
    that a microbatch keeps from its forward to the end of its backward; `freed`: those of them that the input part
    frees, below 0 where it recomputes what the weight part keeps. `occupied`: by kind, for activations and for
    gradients, the seconds for which a message between stages s and s + 1 keeps its link from the next one; empty where
    none waits. `limits`: the most bytes of microbatches in flight on each rank. `whole`: the stages whose backwards are
    not split. `movable`: the bytes of `saved` that an offload moves, where there is a `host_bandwidth`, in bytes per
    second; rows have no offloads, and bounds hold with them. `barrier`: whether a step ends when all ranks are done;
    else each rank goes on with the next step at once, as without norms, and the longest span of a rank counts
    [ZeroBubble 2024, section 4].
    """

    ranks: tuple[int, ...]
    microbatches: int
    forward: tuple[float, ...]
    backward: tuple[float, ...]
    weight: tuple[float, ...]
    activation: tuple[float, ...]
    gradient: tuple[float, ...]
    saved: tuple[float, ...]
    limits: tuple[float, ...]
    freed: tuple[float, ...] = ()
    occupied: tuple[tuple[float, ...], ...] = ()
    whole: frozenset[int] = frozenset()
    movable: tuple[float, ...] = ()
    host_bandwidth: float = 0.0
    barrier: bool = True

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.ranks)

    @cached_property
    def length(self) -> int:
        """The number of ranks."""
        return max(self.ranks) + 1

    @cached_property
    def held(self) -> tuple[tuple[int, ...], ...]:
        """By rank: its stages, ascending."""
        return tuple(
            tuple(stage for stage in range(self.stages) if self.ranks[stage] == rank) for rank in range(self.length)
        )

    @cached_property
    def links(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """By kind, for activations and for gradients, and cut: the number of the link, below `length` squared."""
        ends = list(pairwise(self.ranks))
        return (
            tuple(here * self.length + there for here, there in ends),
            tuple(there * self.length + here for here, there in ends),
        )

    @cached_property
    def routes(self) -> tuple[list[tuple[int, int, int, float, float, int]], ...]:
        """By kind, for forwards and backwards, and stage: the kind, stage and rank of the operation that waits for the
        result, the seconds of the message and those for which it keeps its link, and the number of the link.
        """
        down, up = self.occupied or ((0.0,) * (self.stages - 1),) * 2
        last, own = self.stages - 1, self.length**2
        forwards = [
            (FORWARD, cut + 1, self.ranks[cut + 1], late, occupied, link)
            for cut, late, occupied, link in zip(range(last), self.activation, down, self.links[0], strict=True)
        ]
        backwards = [
            (BACKWARD, cut, self.ranks[cut], late, occupied, link)
            for cut, late, occupied, link in zip(range(last), self.gradient, up, self.links[1], strict=True)
        ]
        # Nothing waits for the backward of the first stage, whose forward has been.
        first = FORWARD, 0, self.ranks[0], 0.0, 0.0, own + 1
        return [*forwards, (BACKWARD, last, self.ranks[last], 0.0, 0.0, own)], [first, *backwards]

    @cached_property
    def seconds(self) -> tuple[tuple[float, ...], ...]:
        """By kind and stage: the seconds of an operation."""
        pairs = enumerate(zip(self.backward, self.weight, strict=True))
        backward = tuple(own + (weight if stage in self.whole else 0.0) for stage, (own, weight) in pairs)
        return self.forward, backward, self.weight

    @cached_property
    def bytes_after(self) -> tuple[tuple[float, ...], ...]:
        """By kind and stage: how many bytes more are held after an operation."""
        freed = self.freed or (0.0,) * self.stages
        backward = tuple(-saved if stage in self.whole else -freed[stage] for stage, saved in enumerate(self.saved))
        weight = tuple(some - all_ for some, all_ in zip(freed, self.saved, strict=True))
        return self.saved, backward, weight

    @cached_property
    def again(self) -> tuple[float, ...]:
        """By stage: the bytes that a backward adds by a recomputation, until its weight part is over."""
        return tuple(max(0.0, -freed) for freed in self.freed or (0.0,) * self.stages)

    @cached_property
    def least(self) -> tuple[float, ...]:
        """By rank: the bytes of one microbatch in flight on all its stages."""
        return tuple(sum(self.saved[s] for s in held) + max(self.again[s] for s in held) for held in self.held)

    @cached_property
    def work(self) -> tuple[float, ...]:
        """By rank: the seconds of all its operations in a step."""
        each = zip(self.forward, self.backward, self.weight, strict=True)
        seconds = [sum(parts) * self.microbatches for parts in each]
        return tuple(sum(seconds[stage] for stage in held) for held in self.held)

    @cached_property
    def operations(self) -> int:
        """The number of operations of a step."""
        return self.microbatches * (3 * self.stages - len(self.whole))

    def fits(self, row: Row, rank: int) -> bool:
        """Whether `row` keeps within the limit of `rank`."""
        return self.peak(row) <= self.limits[rank] * ROUNDING

    def peak(self, row: Row) -> float:
        """The most bytes that `row` keeps at once."""
        held = most = 0.0
        after, again = self.bytes_after, self.again
        for kind, stage, _ in row:
            if kind == BACKWARD and held + again[stage] > most:
                most = held + again[stage]
            held += after[kind][stage]
            if held > most:
                most = held
        return most

    def source(self, op: Op) -> tuple[Op, float] | None:
        """The operation whose result `op` waits for, and the seconds of the message; None for the first forward.

        A weight part follows its backward on the same rank in any case.
        """
        kind, stage, microbatch = op
        if kind == FORWARD:
            return ((FORWARD, stage - 1, microbatch), self.activation[stage - 1]) if stage else None
        if stage == self.stages - 1:
            return (FORWARD, stage, microbatch), 0.0
        return (BACKWARD, stage + 1, microbatch), self.gradient[stage]


ROUNDING = 1 + 1e-9


@dataclass(frozen=True, slots=True)
class TimedRows:
    """Holds rows and when each operation starts; `seconds` is what a step takes."""

    rows: Rows
    starts: list[list[float]]
    slowest: int
    """The rank that takes longest."""
    seconds: float
    score: float
    """`seconds` and a small share of those of all ranks, so that an order that only relieves some rank is better."""

    def arrivals(self, costs: OrderCosts) -> dict[Op, float]:
        """When the data of each operation arrives."""
        ended = {
            op: start + costs.seconds[op[0]][op[1]]
            for row, starts in zip(self.rows, self.starts, strict=True)
            for op, start in zip(row, starts, strict=True)
            if op[0] != WEIGHT
        }
        found = ((op, costs.source(op)) for op in ended)
        return {op: ended[source[0]] + source[1] for op, source in found if source is not None}


_SHARE = 1e-3


def time_rows(costs: OrderCosts, rows: Rows) -> TimedRows | None:
    """When everything in `rows` happens; None if ranks wait for each other for ever."""
    seconds, weights, routes = costs.seconds, costs.weight, costs.routes
    # By kind, stage and microbatch: when what an operation waits for has arrived.
    arrived = [[[inf] * costs.microbatches for _ in costs.ranks] for _ in (FORWARD, BACKWARD)]
    arrived[FORWARD][0] = [0.0] * costs.microbatches
    free, now = [0.0] * (costs.length**2 + 2), [0.0] * len(rows)
    starts: list[list[float]] = [[] for _ in rows]
    ready, waiting = list(range(len(rows))), [(-1, -1, -1)] * len(rows)
    while ready:
        rank = ready.pop()
        row, begun, time = rows[rank], starts[rank], now[rank]
        for place in range(len(begun), len(row)):
            kind, stage, microbatch = row[place]
            if kind == WEIGHT:
                begun.append(time)
                time += weights[stage]
                continue
            known = arrived[kind][stage][microbatch]
            if known > time:
                if known == inf:
                    waiting[rank] = row[place]
                    break
                time = known
            begun.append(time)
            time += seconds[kind][stage]
            kind, stage, there, late, occupied, link = routes[kind][stage]
            sent = free[link] if free[link] > time else time
            free[link] = sent + occupied
            arrived[kind][stage][microbatch] = sent + late
            if waiting[there] == (kind, stage, microbatch):
                waiting[there] = -1, -1, -1
                ready.append(there)
        now[rank] = time
    if any(len(begun) < len(row) for begun, row in zip(starts, rows, strict=True)):
        return None
    spans = now if costs.barrier else [stop - begun[0] for stop, begun in zip(now, starts, strict=True)]
    slowest = max(range(len(rows)), key=spans.__getitem__)
    longest = spans[slowest]
    return TimedRows(rows, starts, slowest, longest, longest + _SHARE * sum(spans) / len(spans))


def rows_of(schedule: Schedule, whole: frozenset[int]) -> Rows | None:
    """The rows of a step of `schedule`, which flushes and has no replicas.

    Stages of `whole` have whole backwards; None if a row has the two parts of such a backward apart.
    """
    rows = []
    for actions in schedule.step(0):
        row: Row = []
        for action in actions:
            if isinstance(action, Message | Reduce | Update | HostCopy | WeightMove | Recompute):
                continue
            match action:
                case Forward(stage, microbatch):
                    row.append((FORWARD, stage, microbatch))
                case Backward(stage, microbatch):
                    row.append((BACKWARD, stage, microbatch))
                    row += [] if stage in whole else [(WEIGHT, stage, microbatch)]
                case BackwardInput(stage, microbatch):
                    row.append((BACKWARD, stage, microbatch))
                case BackwardWeight(stage, microbatch):
                    if stage not in whole:
                        row.append((WEIGHT, stage, microbatch))
                    elif row[-1] != (BACKWARD, stage, microbatch):
                        return None
                case _:
                    assert_never(action)
        rows.append(row)
    return rows


def text_of_rows(costs: OrderCosts, rows: Rows, *, repeats: bool) -> str:
    """The rows as programs of the first minibatch, with the updates at their ends; see `define_by_programs`.

    A weight part that directly follows its backward becomes one whole backward with it, if no other rank waits for the
    gradient of the backward. `repeats`: a part in the middle of every row serves more microbatches.
    """
    lines = []
    for row in rows:
        begin, stop = _round_of(row) if repeats else (len(row), len(row))
        parts = [_words(costs, part) for part in (row[:begin], row[begin:stop], row[stop:])]
        parts[-1] += [str(Update(stage, 1, 0)) for stage in sorted({stage for _, stage, _ in row})]
        lines.append((" | " if repeats else " ").join(map(" ".join, parts)).strip())
    return "\n".join(lines)


def _words(costs: OrderCosts, row: Sequence[Op]) -> list[str]:
    made: list[Compute] = []
    place = 0
    while place < len(row):
        kind, stage, microbatch = row[place]
        follows = row[place + 1 : place + 2] == [(WEIGHT, stage, microbatch)]
        alone = stage == 0 or costs.ranks[stage - 1] == costs.ranks[stage]
        if kind == FORWARD:
            made.append(Forward(stage, microbatch, 0))
        elif kind == WEIGHT:
            made.append(BackwardWeight(stage, microbatch, 0))
        elif stage in costs.whole or (follows and alone):
            made.append(Backward(stage, microbatch, 0))
            place += stage not in costs.whole
        else:
            made.append(BackwardInput(stage, microbatch, 0))
        place += 1
    return list(map(str, made))


def repeated(rows: Rows, times: int) -> Rows | None:
    """`rows` with the middle of each repeated `times` more often, as `text_of_rows` does; None if one has no such part.

    Each time all numbers behind rise by one, since a part has each kind of its operations once.
    """
    longer = []
    for row in rows:
        if not _rounds(row):
            return None
        begin, stop = _round_of(row)
        more = [(kind, stage, k + turn) for turn in range(times + 1) for kind, stage, k in row[begin:stop]]
        longer.append(row[:begin] + more + [(kind, stage, k + times) for kind, stage, k in row[stop:]])
    return longer


def _round_of(row: Row) -> tuple[int, int]:
    """Where the part of `row` that is repeated begins and stops: the one nearest to its middle."""
    return min(_rounds(row), key=lambda part: abs(sum(part) - len(row)))


def _rounds(row: Row) -> list[tuple[int, int]]:
    """Where parts of `row` begin and stop that have each kind of its operations once."""
    size = len({op[:2] for op in row})
    begins = range(len(row) - size + 1)
    return [(begin, begin + size) for begin in begins if len({op[:2] for op in row[begin : begin + size]}) == size]
