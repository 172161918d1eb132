"""The loads of a minibatch: how long it occupies ranks, links and all-reduces.

They are measured on one simulated run, or on the difference between a longer run and a shorter one.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.simulating.instructions import RECEIVE, SEND, MessagePath
from penstock.simulating.simulator import SimulatedRun
from penstock.simulating.transfer_times import Link

RankPair: TypeAlias = frozenset[int]
"""The two ranks (or servers) of a link, in either direction."""

_Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loads:
    """The seconds for which one minibatch occupies each resource."""

    wall: float
    computing: Mapping[int, float]
    """By rank that was simulated."""
    blocking_messages: Mapping[int, float]
    """By rank: messages during which it cannot compute."""
    links: Mapping[Link, float]
    """By link: one direction."""
    pairs: Mapping[RankPair, float]
    """By link: while there is a message on it in either direction."""
    reduces: Mapping[int, float]
    """By stage: all-reduces."""
    exposed_reduces: Mapping[int, float]
    """By stage: the time of all-reduces that nothing hides, after the last replica has arrived."""

    @property
    def occupied(self) -> dict[int, float]:
        """By rank: computation, and messages during which it cannot compute."""
        return {rank: seconds + self.blocking_messages[rank] for rank, seconds in self.computing.items()}


def measure_loads(run: SimulatedRun, minibatches: int, shorter: SimulatedRun | None = None) -> Loads:
    """The loads of `run`, less those of the `shorter` run if there is one, per minibatch of `minibatches`."""
    whole = _measure(run)
    before = None if shorter is None else _measure(shorter)
    per_minibatch: dict[str, Any] = {}
    for field in fields(Loads):
        more, less = getattr(whole, field.name), None if before is None else getattr(before, field.name)
        if isinstance(more, Mapping):
            per_minibatch[field.name] = {
                key: (value - (less or {}).get(key, 0.0)) / minibatches for key, value in more.items()
            }
        else:
            per_minibatch[field.name] = (more - (less or 0.0)) / minibatches
    return Loads(**per_minibatch)


def _measure(run: SimulatedRun) -> Loads:
    """The loads of a whole run."""
    events = run.events
    return Loads(
        wall=run.seconds,
        computing={rank: track.busy_seconds for rank, track in run.tracks.items()},
        blocking_messages={rank: track.message_seconds for rank, track in run.tracks.items()},
        links={link: events.link_seconds[number] for link, number in run.writer.links.items()},
        pairs=_pair_seconds(run),
        reduces={stage: whole for stage, (whole, _) in events.reduce_seconds.items()},
        exposed_reduces={stage: exposed for stage, (_, exposed) in events.reduce_seconds.items()},
    )


def _pair_seconds(run: SimulatedRun) -> dict[RankPair, float]:
    pair_of = {number: frozenset(link) for link, number in run.writer.links.items()}
    intervals: defaultdict[RankPair, list[tuple[_Numbers, _Numbers]]] = defaultdict(list)
    for track in run.tracks.values():
        kinds = np.array(track.instructions.kinds)
        messages = kinds[(kinds == SEND) | (kinds == RECEIVE)]
        sends = np.flatnonzero(kinds == SEND)
        begun, left = np.array(track.starts)[sends], np.array(track.messages)[messages == SEND]
        paths: list[MessagePath] = [track.instructions.details[index] for index in sends.tolist()]
        edges = np.array([path.edge for path in paths])
        for edge in np.unique(edges):
            members = np.flatnonzero(edges == edge)
            pairs = {pair_of[link] for link, _ in paths[members[0]].legs}
            for pair in pairs:
                intervals[pair].append((begun[members], left[members]))
    return {pair: _union_seconds(found) for pair, found in intervals.items()}


def _union_seconds(intervals: list[tuple[_Numbers, _Numbers]]) -> float:
    """The length of the union of intervals, given as arrays of (starts, stops)."""
    starts, stops = (np.concatenate(side) for side in zip(*intervals, strict=True))
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reached = np.concatenate([starts[:1], np.maximum.accumulate(stops)[:-1]])
    return float(np.maximum(stops - np.maximum(starts, reached), 0.0).sum())
