"""The values that cross cuts: one layer makes them, later ones read them, and each has a way from stage to stage.

A value is sent from reader to reader: from the stage that makes it to the first later stage that reads it, from there
to the next reader, and so on. These stages are its stops. If two stops are not adjacent, the stages between them relay
the value, or the value skips them and is sent directly. Its gradient returns the same way.

Rules of this file:
  1. A stage receives a value from one stage and sends it to at most one, whether directly or not. Each stop adds its
     own gradients to the sum from the later stops, in the order of autograd on one device. So it changes no bit whether
     a value is relayed or sent directly. (If the maker sent to every reader, it would add in another order.)
  2. The model's output is read after the last layer, by the last stage.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf

from penstock.scheduling.placements import Skip


@dataclass(frozen=True, slots=True)
class Crossing:
    """A value that layer `made` makes for each microbatch, and that the later layers `read` (ascending) read."""

    name: str
    made: int
    read: tuple[int, ...]
    size_bytes: float = inf
    """Infinite if the size is not known."""
    wire_bytes: float | None = None
    """What a link carries of it under ``wire_dtype=``; None: all of it."""


def find_stops(crossing: Crossing, starts: Sequence[int]) -> tuple[int, ...]:
    """The stages that make or read the value, ascending. `starts`: the first layer of each stage."""
    return tuple(dict.fromkeys(bisect_right(starts, layer) - 1 for layer in (crossing.made, *crossing.read)))


def find_way(stops: Sequence[int], skips: Iterable[Skip]) -> tuple[int, ...]:
    """The stages that a value passes, ascending: its `stops`, and those that relay it because no skip avoids them."""
    direct = frozenset(skips)
    way = list(stops[:1])
    for hop in pairwise(stops):
        way += hop[1:] if hop in direct else range(hop[0] + 1, hop[1] + 1)
    return tuple(way)


def find_hops(crossings: Iterable[Crossing], starts: Sequence[int]) -> dict[Skip, float]:
    """All possible skips, ascending, with the bytes that each would carry per microbatch."""
    hops: dict[Skip, float] = {}
    for crossing in crossings:
        for here, there in pairwise(find_stops(crossing, starts)):
            if there > here + 1:
                hops[here, there] = hops.get((here, there), 0.0) + crossing.size_bytes
    return dict(sorted(hops.items()))


@dataclass(slots=True)
class Traffic:
    """Holds bytes per microbatch in one direction.

    `direct`: the bytes over each skip. `past`: by cut (the stage before it), the bytes that skips carry past it.
    `relayed`: by stage, the bytes that it only relays.
    """

    direct: dict[Skip, float] = field(default_factory=dict)
    past: dict[int, float] = field(default_factory=dict)
    relayed: dict[int, float] = field(default_factory=dict)


def find_traffic(crossings: Iterable[Crossing], starts: Sequence[int], skips: Iterable[Skip]) -> Traffic:
    """The traffic of `crossings` with the chosen `skips`. `starts`: the first layer of each stage."""
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
