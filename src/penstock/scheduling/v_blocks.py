"""Building blocks in a V: the times of one microbatch, repeated every six units for each further one.

Rank r of p holds the stages r and 2p - 1 - r. A forward, an input backward and a weight backward of a stage take one
unit each, so that six units of a rank serve a microbatch. A microbatch goes down the ranks, up again, and its gradients
take the same way back. A block says how many units lie between neighbouring ranks on each of the four ways, up to some
rank and behind it, and how many a microbatch waits where it turns. The larger these are, the more microbatches are in
flight. Every rank must have its operations at six different times modulo six. The times give an order; ranks follow
the order and not the times. A schedule squeezes its block: whatever can begin earlier than in the block does so, as
long as no more is in flight.
Source: [V 2024, section 3].
"""

from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import chain, count, product
from math import inf
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Backward, BackwardInput, BackwardWeight, Compute, Forward, Update
from penstock.scheduling.definitions import PipelineShape

_PERIOD = 6
"""The units of a rank for one microbatch: forward, input backward and weight backward of two stages."""

Times: TypeAlias = tuple[tuple[str, int, int], ...]
"""Each operation of a rank for microbatch 0: its letter (F, I or W), 0 for the first stage or 1, and its unit."""


Offsets: TypeAlias = tuple[int, int, int, int]
"""Units on the four ways: forwards down the ranks, forwards up, backwards down, backwards up."""
Waits: TypeAlias = tuple[int, int, int]

_OFFSETS: list[Offsets] = list(product((1, 2, 3), (1, 2, 3), (1, 2, 3), (1, 2, 3)))
_WAITS: list[Waits] = list(product(range(_PERIOD), range(_PERIOD), range(_PERIOD)))
_NEAR: tuple[Offsets, ...] = (1, 1, 1, 1), (1, 2, 1, 2), (2, 1, 2, 1)
_FAR: tuple[Offsets, ...] = (2, 2, 2, 2), (3, 3, 3, 3), (1, 1, 2, 2), (2, 2, 1, 1), (3, 3, 2, 2), (2, 2, 3, 3)
"""The offsets before a switch and behind it: all ranks have about equally many microbatches in flight."""
_SWITCHES = 16
"""About how many ranks are tried as the one behind which offsets change."""


@dataclass(frozen=True, slots=True)
class VBlock:
    """A building block: `offsets` between neighbouring ranks, and `waits` at the three turns between the four ways.

    Behind rank `switch`, if it is given, `farther` are the offsets.
    """

    offsets: Offsets
    waits: Waits
    switch: int | None = None
    farther: Offsets = (0, 0, 0, 0)

    def times(self, length: int) -> tuple[Times, ...] | None:
        """The times on each rank of `length`; None if two operations of a rank fall together."""
        rows: list[Times] = []
        for rank in reversed(range(length)):
            row = _with_weights(self.ways(length, rank))
            if row is None:
                return None
            rows.append(row)
        return tuple(reversed(rows))

    def ways(self, length: int, rank: int) -> tuple[int, int, int, int]:
        """When rank `rank` does the forwards of its two stages and the input backwards of its second and first."""
        last = length - 1
        here, there = self._from_first(rank), self._from_first(last)
        turned = there[0] + 1 + self.waits[0]
        looped = turned + there[1] + 1 + self.waits[1]
        returned = looped + there[2] + 1 + self.waits[2]
        return here[0], turned + there[1] - here[1], looped + here[2], returned + there[3] - here[3]

    def _from_first(self, rank: int) -> tuple[int, ...]:
        """The units between rank 0 and `rank`."""
        near = rank if self.switch is None else min(rank, self.switch)
        pairs = zip(self.offsets, self.farther, strict=True)
        return tuple(own * near + other * (rank - near) for own, other in pairs)

    def row(self, length: int, rank: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
        """The letter, the stage (0 or 1) and the microbatch of each operation of `rank`, in order."""
        times = _with_weights(self.ways(length, rank))
        assert times is not None, "find_blocks gives blocks whose operations fall apart"
        begun = ((at + _PERIOD * k, letter, place, k) for letter, place, at in times for k in range(microbatches))
        return ((letter, place, k) for _, letter, place, k in sorted(begun))


def _with_weights(ways: tuple[int, int, int, int]) -> Times | None:
    """The four times and those of the two weight backwards, each as soon after its input backward as is free."""
    taken = {at % _PERIOD for at in ways}
    if len(taken) < len(ways):
        return None
    one, other = (unit for unit in range(_PERIOD) if unit not in taken)
    first, second, looped, returned = ways

    def after(at: int, unit: int) -> int:
        return at + 1 + (unit - at - 1) % _PERIOD

    pairs = [(after(looped, a), after(returned, b)) for a, b in ((one, other), (other, one))]
    of_second, of_first = min(pairs, key=sum)
    forwards, inputs = (("F", 0, first), ("F", 1, second)), (("I", 1, looped), ("I", 0, returned))
    return (*forwards, *inputs, ("W", 1, of_second), ("W", 0, of_first))


def _most_in_flight(times: Times) -> int:
    """The most microbatches that both stages of a rank keep until a weight backward, at the end of any forward."""
    begun = {place: at for letter, place, at in times if letter == "F"}
    ended = {place: at for letter, place, at in times if letter == "W"}
    return max(
        sum((at - begun[place]) // _PERIOD - (at - ended[place] - 1) // _PERIOD for place in begun)
        for at in begun.values()
    )


@lru_cache(maxsize=64)
def find_blocks(length: int) -> tuple[tuple[VBlock, int], ...]:
    """Blocks that `length` ranks can follow, each with the most stages' microbatches in flight on a rank in the steady
    state: the least of these first, and of those with equally many the shortest.

    All with equal offsets of 1 to 3, and some whose offsets change behind a rank.
    """
    ranks = range(1, length - 1, 1 + length // _SWITCHES)
    equal = (VBlock(offsets, waits) for offsets, waits in product(_OFFSETS, _WAITS))
    switched = (VBlock(*own) for own in product(_NEAR, _WAITS, ranks, _FAR))
    known = ((block, block.times(length)) for block in chain(equal, switched))
    found = [
        (max(map(_most_in_flight, rows)), max(max(at for *_, at in row) - row[0][2] for row in rows), block)
        for block, rows in known
        if rows is not None
    ]
    return tuple((block, count) for count, _, block in sorted(found, key=lambda each: each[:2]))


Turn: TypeAlias = tuple[str, int, int]
"""What a rank does: a letter (F, I, W, or B for I and W), 0 for its first stage or 1, and the microbatch."""


@lru_cache(maxsize=64)
def squeeze(block: VBlock, length: int, microbatches: int, most: int) -> tuple[tuple[Turn, ...], ...] | None:
    """By rank of `length`: its operations for `microbatches` in order, each as early as it can begin; None if `block`
    needs more than `most`.

    A rank does the first operation of the block whose data is there, and if there is none, a weight backward. At most
    `most` microbatches are in flight on its two stages; forwards keep their order, so that none takes the room of
    another that comes before it. The backward of stage 0 is whole: no rank waits for its first half.
    """
    filling = _Filling([block.ways(length, rank) for rank in range(length)], microbatches, most)
    filling.ended[0, -1] = [0] * microbatches
    for now in count():
        if not any([filling.go_on(rank, now) for rank in range(length)]):
            break
    if any(len(ended) < microbatches for ended in filling.ended.values()):
        return None
    return tuple(tuple(filling.turns[rank]) for rank in range(length))


@dataclass(slots=True)
class _Filling:
    """The turns of all ranks, which are filled unit by unit; see `squeeze`."""

    ways: list[tuple[int, int, int, int]]
    """By rank: the times of microbatch 0 in the block."""
    microbatches: int
    most: int
    ended: defaultdict[tuple[int, int], list[int]] = field(default_factory=lambda: defaultdict(list))
    """By rank and way: when the operation of each microbatch has ended."""
    halves: defaultdict[int, list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    """By rank: the stages (0 or 1) and microbatches whose weight backward is to come."""
    turns: defaultdict[int, list[Turn]] = field(default_factory=lambda: defaultdict(list))
    in_flight: Counter[int] = field(default_factory=Counter)

    def go_on(self, rank: int, now: int) -> bool:
        """Whether there is something that `rank` begins at `now`."""
        halves, turns = self.halves[rank], self.turns[rank]
        whole = rank == 0 and bool(halves) and halves[0][0] == 0
        way = None if whole else self._first_ready(rank, now)
        if way is not None:
            place, microbatch = int(way in (1, 2)), len(self.ended[rank, way])
            self.ended[rank, way].append(now + 1)
            turns.append(("FFII"[way], place, microbatch))
            self.in_flight[rank] += way < 2
            if way > 1:
                halves.insert(0 if rank == 0 == place else len(halves), (place, microbatch))
        elif halves:
            place, microbatch = halves.pop(0)
            self.in_flight[rank] -= 1
            # Only their own rank waits for the gradients of stages 0 and p.
            alone = (rank, place) in ((0, 0), (len(self.ways) - 1, 1))
            joined = alone and turns[-1] == ("I", place, microbatch)
            turns[len(turns) - joined :] = [("B" if joined else "W", place, microbatch)]
        else:
            return False
        return True

    def _first_ready(self, rank: int, now: int) -> int | None:
        """The way whose next operation comes first in the block, of those that can begin at `now`."""
        next_of = {way: len(self.ended[rank, way]) for way in range(4)}
        begun = [(self.ways[rank][way] + _PERIOD * k, way) for way, k in next_of.items() if k < self.microbatches]
        forward = min((at, way) for at, way in [*begun, (inf, 0)] if way < 2)[1]
        for _, way in sorted(begun):
            other = rank + (1 if way % 2 else -1)
            data = self.ended[(other, way) if 0 <= other < len(self.ways) else (rank, way - 1)]
            if len(data) <= next_of[way] or data[next_of[way]] > now:
                continue
            if way > 1 or (way == forward and self.in_flight[rank] < self.most):
                return way
        return None


_ACTIONS: dict[str, type[Forward | Backward | BackwardInput | BackwardWeight]] = {
    "F": Forward,
    "I": BackwardInput,
    "W": BackwardWeight,
    "B": Backward,
}


def follow_block(block: VBlock, most: int, shape: PipelineShape, rank: int, minibatch: int) -> Iterator[Compute]:
    """What `rank` computes for `minibatch` if ranks `squeeze` a block.

    Updates come at the end of the step, when gradients of weights that two stages share are all complete.
    """
    stages, microbatches = shape.stages_of(rank), shape.rank_microbatches(rank, minibatch)
    turns = squeeze(block, shape.placement.length, len(microbatches), most)
    assert turns is not None, f"{block} needs more than {most}"
    for letter, place, k in turns[stages[0]]:
        yield _ACTIONS[letter](stages[place], microbatches[k], minibatch)
    for stage in stages:
        yield Update(stage, minibatch + 1, minibatch)


def check_folded(shape: PipelineShape) -> None:
    """Stages s and 2p - 1 - s must be on one rank, and all stages must have the same number of replicas."""
    stages = shape.placement.stages
    if not shape.placement.equal(range(shape.stages)):
        raise ScheduleError(
            f"a schedule in a V: all stages must have equally many replicas, got {shape.placement.text()}; give them "
            "equal numbers, or choose a schedule with one stage on each rank"
        )
    if stages != stages[::-1] or 2 * shape.placement.length != len(stages):
        raise ScheduleError(
            f"a schedule in a V: stage s and stage {len(stages) - 1} - s must be on one rank that holds no other, got "
            f"stages on {', '.join(str(list(ranks)) for ranks in stages)}; place them so, or choose "
            "a schedule with one stage on each rank"
        )
