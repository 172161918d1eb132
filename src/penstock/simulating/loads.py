"""The loads of a minibatch: how long it keeps ranks, links and all-reduces occupied.

They are measured on what was played: on one run, or as what a longer run has more than a shorter one.
"""

from collections import defaultdict
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.simulating.instructions import RECEIVE, SEND
from penstock.simulating.routes import Link
from penstock.simulating.simulator import Played

__all__ = ["Loads", "Pair", "measure_loads"]

Pair: TypeAlias = frozenset[int]
"""The two ends of a link, in whichever direction."""

_Key = TypeVar("_Key", bound=Hashable)
_Numbers: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Loads:
    """Seconds, of one minibatch."""

    wall: float
    computing: Mapping[int, float]
    """By rank that was played."""
    passing: Mapping[int, float]
    """By rank: messages that keep it from computing."""
    links: Mapping[Link, float]
    """By link: one direction."""
    pairs: Mapping[Pair, float]
    """By link: whenever there is a message on it in one direction or the other."""
    reduces: Mapping[int, float]
    """By stage: all-reduces."""
    exposed: Mapping[int, float]
    """By stage: what of them nothing hides, the time after the last replica has come."""

    @property
    def occupied(self) -> dict[int, float]:
        """By rank: computing, and messages that keep it from that."""
        return {rank: seconds + self.passing[rank] for rank, seconds in self.computing.items()}


def measure_loads(run: Played, minibatches: int, shorter: Played | None = None) -> Loads:
    """The loads of `run`, or of what it does more than the `shorter` one, spread over so many minibatches."""
    whole = _measure(run)
    part = None if shorter is None else _measure(shorter)
    spread: dict[str, Any] = {}
    for field in fields(Loads):
        mine, other = getattr(whole, field.name), None if part is None else getattr(part, field.name)
        if isinstance(mine, Mapping):
            spread[field.name] = {
                key: (value - (other or {}).get(key, 0.0)) / minibatches for key, value in mine.items()
            }
        else:
            spread[field.name] = (mine - (other or 0.0)) / minibatches
    return Loads(**spread)


def _measure(run: Played) -> Loads:
    """Of a whole run."""
    player = run.player
    return Loads(
        wall=run.seconds,
        computing={rank: track.busy_seconds for rank, track in run.tracks.items()},
        passing={rank: track.talking_seconds for rank, track in run.tracks.items()},
        links={link: player.link_seconds[number] for link, number in run.writer.links.items()},
        pairs=_use(run),
        reduces={stage: whole for stage, (whole, _) in player.reduce_seconds.items()},
        exposed={stage: alone for stage, (_, alone) in player.reduce_seconds.items()},
    )


def _use(run: Played) -> dict[Pair, float]:
    ends = {number: frozenset(link) for link, number in run.writer.links.items()}
    stretches: defaultdict[Pair, list[tuple[_Numbers, _Numbers]]] = defaultdict(list)
    for track in run.tracks.values():
        kinds = np.array(track.instructions.kinds)
        messages = kinds[(kinds == SEND) | (kinds == RECEIVE)]
        places = np.flatnonzero(kinds == SEND)
        begun, left = np.array(track.starts)[places], np.array(track.messages)[messages == SEND]
        details: list[Any] = track.instructions.details
        ways = [details[place] for place in places.tolist()]
        edges = np.array([way[0] for way in ways])
        for edge in np.unique(edges):
            members = np.flatnonzero(edges == edge)
            pairs = {ends[link] for link, _ in ways[members[0]][4]}
            for pair in pairs:
                stretches[pair].append((begun[members], left[members]))
    return {pair: _covered(parts) for pair, parts in stretches.items()}


def _covered(parts: list[tuple[_Numbers, _Numbers]]) -> float:
    """The length of the union of stretches of (starts, stops)."""
    starts, stops = (np.concatenate(side) for side in zip(*parts, strict=True))
    order = np.argsort(starts, kind="stable")
    starts, stops = starts[order], stops[order]
    reached = np.concatenate([starts[:1], np.maximum.accumulate(stops)[:-1]])
    return float(np.maximum(stops - np.maximum(starts, reached), 0.0).sum())
