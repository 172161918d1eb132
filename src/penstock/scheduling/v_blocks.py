"""Building blocks in a V: the times of one microbatch, repeated every six units for each further one.

Rank r of p holds the stages r and 2p - 1 - r. A forward, an input backward and a weight backward of a stage take one
unit each, so that six units of a rank serve a microbatch. A microbatch goes down the ranks, up again, and its gradients
take the same way back. A block says how many units lie between neighbouring ranks on each of the four ways, and how
many a microbatch waits where it turns. The larger these are, the more microbatches are in flight. Every rank must have
its operations at six different times modulo six. The times give an order; ranks follow the order and not the times.
Source: [V 2024, section 3].
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import TypeAlias

_PERIOD = 6
"""The units of a rank for one microbatch: forward, input backward and weight backward of two stages."""

Times: TypeAlias = tuple[tuple[str, int, int], ...]
"""Each operation of a rank for microbatch 0: its letter (F, I or W), 0 for the first stage or 1, and its unit."""


@dataclass(frozen=True, slots=True)
class VBlock:
    """A building block: `offsets` between neighbouring ranks on the four ways, `waits` at the three turns between them.

    The ways: forwards down the ranks, forwards up, backwards down, backwards up. Units; see the module.
    """

    offsets: tuple[int, int, int, int]
    waits: tuple[int, int, int]

    def times(self, length: int) -> tuple[Times, ...] | None:
        """The times on each rank of `length`; None if two operations of a rank fall together."""
        rows: list[Times] = []
        for rank in range(length):
            row = _with_weights(self._ways(length, rank))
            if row is None:
                return None
            rows.append(row)
        return tuple(rows)

    def _ways(self, length: int, rank: int) -> tuple[int, int, int, int]:
        """When rank `rank` does the forwards of its two stages and the input backwards of its second and first."""
        down, up, back, home = self.offsets
        last = length - 1
        turned = down * last + 1 + self.waits[0]
        looped = turned + up * last + 1 + self.waits[1]
        returned = looped + back * last + 1 + self.waits[2]
        return down * rank, turned + up * (last - rank), looped + back * rank, returned + home * (last - rank)

    def in_flight(self, length: int) -> int | None:
        """The most stages' microbatches in flight on a rank of `length` in the steady state; None as for `times`."""
        times = self.times(length)
        return None if times is None else max(map(_most_in_flight, times))

    def row(self, length: int, rank: int, microbatches: int) -> Iterator[tuple[str, int, int]]:
        """The letter, the stage (0 or 1) and the microbatch of each operation of `rank`, in order."""
        times = _with_weights(self._ways(length, rank))
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
def find_blocks(length: int, farthest: int = 3) -> tuple[tuple[VBlock, int], ...]:
    """All blocks with offsets of 1 to `farthest` that `length` ranks can follow, each with what it has in flight."""
    steps, units = range(1, farthest + 1), range(_PERIOD)
    blocks = (
        VBlock(offsets, waits)
        for offsets in product(steps, steps, steps, steps)
        for waits in product(units, units, units)
    )
    known = ((block, block.in_flight(length)) for block in blocks)
    found = [(block, count) for block, count in known if count is not None]
    return tuple(sorted(found, key=lambda each: (each[1], sum(each[0].offsets), sum(each[0].waits))))
