"""What crosses cuts: the values that one layer makes and later ones read, and the way of each from stage to stage.

A value goes from reader to reader: from the stage that makes it to the first later one that reads it, from there to the
next, and so on. Where two such stops are not neighbours, the stages between them relay the value, or it skips them and
goes directly. Its gradient comes back the same way.

Rules of this file:
  1. A stage gets a value from one stage and passes it on to one stage at most, whichever ways are direct. So each stop
     adds its own gradients to the sum of those behind it, in the order of autograd on one device: what is relayed and
     what is direct decides no bit. (If the maker sent to each reader, its sum of their sums would be another one.)
  2. The model's output is read behind the last layer, by the last stage.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from penstock.scheduling.placements import Skip

__all__ = ["Crossing", "Traffic", "find_hops", "find_stops", "find_traffic", "find_way"]


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that layer `made` makes and the later layers `read` read, ascending; of each microbatch."""

    name: str
    made: int
    read: tuple[int, ...]
    size_bytes: float = inf
    """Infinite if it is not known."""


def find_stops(crossing: Crossing, starts: Sequence[int]) -> tuple[int, ...]:
    """The stages that make or read it, ascending. `starts`: the first layer of each stage."""
    return tuple(dict.fromkeys(bisect_right(starts, layer) - 1 for layer in (crossing.made, *crossing.read)))


def find_way(stops: Sequence[int], skips: Iterable[Skip]) -> tuple[int, ...]:
    """The stages that a value is at, ascending: its `stops`, and those that relay it, since `skips` leave them."""
    direct = frozenset(skips)
    way = list(stops[:1])
    for hop in pairwise(stops):
        way += hop[1:] if hop in direct else range(hop[0] + 1, hop[1] + 1)
    return tuple(way)


def find_hops(crossings: Iterable[Crossing], starts: Sequence[int]) -> dict[Skip, float]:
    """The skips that there could be, with the bytes that each would carry of a microbatch, ascending."""
    hops: dict[Skip, float] = {}
    for crossing in crossings:
        for here, there in pairwise(find_stops(crossing, starts)):
            if there > here + 1:
                hops[here, there] = hops.get((here, there), 0.0) + crossing.size_bytes
    return dict(sorted(hops.items()))


@dataclass(slots=True)
class Traffic:
    """Bytes of a microbatch, one way: `direct`: over each skip; `past`: by cut (the stage before it), what skips take
    past it; `relayed`: by stage, what it gets only to pass it on.
    """

    direct: dict[Skip, float] = field(default_factory=dict)
    past: dict[int, float] = field(default_factory=dict)
    relayed: dict[int, float] = field(default_factory=dict)


def find_traffic(crossings: Iterable[Crossing], starts: Sequence[int], skips: Iterable[Skip]) -> Traffic:
    """What takes which way, as far as `crossings` tell. `starts`: the first layer of each stage."""
    chosen = tuple(skips)
    traffic = Traffic(direct=dict.fromkeys(chosen, 0.0))
    for crossing in crossings:
        stops = find_stops(crossing, starts)
        way = find_way(stops, chosen)
        for stage in set(way) - set(stops):
            traffic.relayed[stage] = traffic.relayed.get(stage, 0.0) + crossing.size_bytes
        for here, there in pairwise(way):
            if there > here + 1:
                traffic.direct[here, there] += crossing.size_bytes
                for cut in range(here, there):
                    traffic.past[cut] = traffic.past.get(cut, 0.0) + crossing.size_bytes
    return traffic
