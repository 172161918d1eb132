"""The rows of a schedule as the player reads them: what each action costs and which way its message takes.

Costs and ways are looked up here, once for every action, so that the player's loop has none of that to do.
"""

from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum
from operator import add
from typing import Any, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.lowering import peer, peers
from penstock.scheduling.placements import Placement
from penstock.scheduling.recomputation import find_direct
from penstock.simulating.costs import Costs
from penstock.simulating.routes import Link, Route, find_route

__all__ = [
    "COMPUTE",
    "RECEIVE",
    "REDUCE",
    "SEND",
    "SHARED",
    "SPREAD",
    "Instructions",
    "Mark",
    "Meeting",
    "Way",
    "Writer",
    "content_stages",
    "content_text",
]

COMPUTE, SEND, RECEIVE, REDUCE, SHARED, SPREAD = range(6)

NORM_BYTES = 8.0
"""What a message of norms holds of every stage."""

_Numbers: TypeAlias = npt.NDArray[np.int64]
Way: TypeAlias = tuple[int, int, float, float, tuple[tuple[int, float], ...]]
"""Edge (the queue between two ranks), link, seconds on the link, latency seconds; all legs if there are several, and
the link is then -1."""


_TOPICS = ("", "tied gradients for version ", "norms for version ")
_TIED, _NORMS = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Instructions:
    """The instructions of one rank, in flat lists, which cost the least time and memory.

    `kinds` and `details` have an entry for each: seconds of a COMPUTE, or of a SHARED one where ranks share a host, the
    `Way` of a SEND or RECEIVE, the `Meeting` of a REDUCE; for a SPREAD, a message to any number of ranks, what it is
    and all its ways. `marks`, too: a `Mark` times the number of stages, plus the stage. `contents`: what each message
    of a SEND or RECEIVE is, in the order of the row, as a number that `content_text` explains.
    """

    kinds: list[int]
    details: list[Any]
    marks: list[int]
    contents: list[int]


class Mark(IntEnum):
    """What an action is to the memory of its rank. Kept: a backward that directly follows the forward of the same."""

    FORWARD = 0
    FORWARD_KEPT = 1
    BACKWARD = 2
    BACKWARD_KEPT = 3
    INPUT_PART = 4
    INPUT_PART_KEPT = 5
    WEIGHT_PART = 6
    SEND_ON = 7
    SEND_BACK = 8
    RECEIVE_ON = 9
    RECEIVE_BACK = 10
    REDUCE = 11
    UPDATE = 12
    OTHER = 13


@dataclass(frozen=True, slots=True)
class Meeting:
    """An all-reduce of `stage` for the update to `version`; `backward`: the place in the row of the last backward (or
    weight part) of the stage before it, or -1."""

    stage: int
    version: int
    seconds: float
    backward: int


class Writer:
    """Writes the instructions of the ranks of one simulation, and numbers its edges and links."""

    def __init__(self, placement: Placement, costs: Costs) -> None:
        self.edges: dict[tuple[int, int], int] = {}
        """Number of each directed pair of ranks."""
        self.links: dict[Link, int] = {}
        """Number of each link."""
        self.cuts: dict[tuple[int, tuple[int, int]], float] = {}
        """(link, stages before and behind a cut, or those of a skip): seconds that one message occupies the link."""
        self._placement = placement
        self._costs = costs
        self._skips = dict(costs.skips)
        self._stages = len(placement.stages)
        self._compute = SHARED if costs.assumptions.slowdowns else COMPUTE
        self._routes: dict[tuple[int, int, int, int], Way] = {}
        self._kinds = len(_TOPICS) * self._stages**2
        """Of messages: from each stage to each other one, on each topic; the number of one is below it."""
        more = costs.forward_seconds if costs.recompute else (0.0,) * self._stages
        self._seconds = (
            costs.forward_seconds,
            # Of what directly follows its forward, and what does not.
            (costs.backward_seconds, tuple(map(add, costs.backward_seconds, more))),
            (costs.input_seconds, tuple(map(add, costs.input_seconds, more))),
            [seconds + costs.split_seconds for seconds in costs.weight_seconds],
            costs.update_seconds,
        )

    def write(self, rank: int, row: Collection[Action]) -> Instructions:
        """The instructions of `rank` for `row`."""
        costs, stages, compute = self._costs, self._stages, self._compute
        forwards, (backwards, again), (inputs, inputs_again), weights, updates = self._seconds
        forward, kept, backward, direct, input_part, input_direct, weight_part, *rest = (mark * stages for mark in Mark)
        send_on, send_back, receive_on, receive_back, reduce, update, other = rest
        ways: dict[int, list[Way]] = {}
        last: dict[int, int] = {}
        at_once = find_direct(row)
        written = Instructions([], [], [], [])
        kinds, details, marks, contents = written.kinds, written.details, written.marks, written.contents
        for action in row:
            match action:
                case Forward(stage=stage, microbatch=number):
                    kinds.append(compute)
                    details.append(forwards[stage])
                    marks.append((kept if (stage, number) in at_once else forward) + stage)
                case Backward(stage=stage, microbatch=number):
                    last[stage] = len(kinds)
                    kinds.append(compute)
                    kept_before = (stage, number) in at_once
                    details.append((backwards if kept_before else again)[stage])
                    marks.append((direct if kept_before else backward) + stage)
                case BackwardInput(stage=stage, microbatch=number):
                    kinds.append(compute)
                    kept_before = (stage, number) in at_once
                    details.append((inputs if kept_before else inputs_again)[stage])
                    marks.append((input_direct if kept_before else input_part) + stage)
                case BackwardWeight(stage=stage):
                    last[stage] = len(kinds)
                    kinds.append(compute)
                    details.append(weights[stage])
                    marks.append(weight_part + stage)
                case Send(stage=stage, microbatch=number, target=target):
                    key = stage * stages + target
                    choice = ways.get(key) or ways.setdefault(key, self._choose(rank, stage, target, sends=True))
                    kinds.append(SEND)
                    details.append(choice[number % len(choice)])
                    marks.append((send_on if target > stage else send_back) + stage)
                    contents.append(number * self._kinds + key)
                case Receive(stage=stage, microbatch=number, source=source):
                    key = source * stages + stage
                    choice = ways.get(-key) or ways.setdefault(-key, self._choose(rank, stage, source, sends=False))
                    kinds.append(RECEIVE)
                    details.append(choice[number % len(choice)])
                    marks.append((receive_on if source < stage else receive_back) + stage)
                    contents.append(number * self._kinds + key)
                case Update(stage=stage):
                    kinds.append(compute)
                    details.append(updates[stage])
                    marks.append(update + stage)
                case Reduce(stage=stage, version=number):
                    kinds.append(REDUCE)
                    details.append(Meeting(stage, number, costs.reduce_seconds[stage], last.get(stage, -1)))
                    marks.append(reduce + stage)
                case SendTied() | ReceiveTied() | SendNorms() | ReceiveNorms():
                    self._write_exchange(written, rank, action)
                    marks.append(other + action.stage)
                case _:
                    assert_never(action)
        return written

    def _write_exchange(
        self, written: Instructions, rank: int, action: SendTied | ReceiveTied | SendNorms | ReceiveNorms
    ) -> None:
        """A message that an update waits for."""
        there = peer(action, rank, self._placement)
        match action:
            case SendTied(stage, version, target):
                kind, detail = SEND, self._direct(rank, there, 0.0)
                content = self._content(_TIED, version, stage, target)
            case ReceiveTied(stage, version, source):
                kind, detail = RECEIVE, self._direct(there, rank, 0.0)
                content = self._content(_TIED, version, source, stage)
            case SendNorms(stage, version, target):
                # Of replicas that do the same one is played.
                others = (there,) if self._placement.split else peers(action, rank, self._placement)
                ways = [self._direct(rank, other, NORM_BYTES * self._stages) for other in others]
                written.kinds.append(SPREAD)
                written.details.append((self._content(_NORMS, version, stage, target), ways))
                return
            case ReceiveNorms(stage, version, source):
                kind, detail = RECEIVE, self._direct(there, rank, NORM_BYTES * self._stages)
                content = self._content(_NORMS, version, source, stage)
            case _:
                assert_never(action)
        written.kinds.append(kind)
        written.details.append(detail)
        written.contents.append(content)

    def _content(self, topic: int, number: int, source: int, target: int) -> int:
        return number * self._kinds + topic * self._stages**2 + source * self._stages + target

    def _choose(self, rank: int, stage: int, other: int, *, sends: bool) -> list[Way]:
        """The ways between `rank`, for `stage`, and each replica of `other` in the order of the microbatches."""
        placement = self._placement
        peers = [placement.rank_of(other, turn) for turn in range(1 if placement.split else placement.replicas(other))]
        return [self._way(stage, rank, other, peer) if sends else self._way(other, peer, stage, rank) for peer in peers]

    def _way(self, stage: int, rank: int, target: int, peer: int) -> Way:
        key = stage, rank, target, peer
        if key not in self._routes:
            split, stages = self._placement.split, self._placement.stages
            senders = stages[stage] if split else (rank,)
            receivers = stages[target] if split else (peer,)
            low, high = sorted((stage, target))
            size = self._costs.cut_bytes[low] if high == low + 1 else self._skips.get((low, high), 0.0)
            self._routes[key] = self._number(rank, peer, self._route(size, senders, receivers), (low, high))
        return self._routes[key]

    def _route(self, size_bytes: float, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Route:
        """With tensor parallelism rank i of a group passes everything to rank i of the other group, side by side."""
        costs, width = self._costs, self._costs.tensor_parallel
        shared = costs.assumptions.shared_nic
        if width == 1:
            return find_route(costs.cluster, size_bytes, senders, receivers, shared=shared)
        lanes = [
            find_route(
                costs.cluster,
                size_bytes,
                [rank * width + lane for rank in senders],
                [rank * width + lane for rank in receivers],
                shared=shared,
            )
            for lane in range(width)
        ]
        return _join(lanes, (senders[0] * width, receivers[0] * width))

    def _number(self, rank: int, peer: int, route: Route, cut: tuple[int, int] | None) -> Way:
        edge = self.edges.setdefault((rank, peer), len(self.edges))
        legs = tuple((self.links.setdefault(link, len(self.links)), seconds) for link, seconds in route.legs)
        for link, seconds in legs:
            if cut is not None:
                self.cuts[link, cut] = seconds
        if len(legs) == 1:
            ((link, seconds),) = legs
            return edge, link, seconds, route.latency_seconds, legs
        return edge, -1, max(seconds for _, seconds in legs), route.latency_seconds, legs

    def _direct(self, rank: int, peer: int, size_bytes: float) -> Way:
        """Of a message that belongs to no cut. A profile does not know what is tied: such gradients have no bytes."""
        key = -1, rank, int(size_bytes), peer
        if key not in self._routes:
            route = self._route(size_bytes, (rank,), (peer,))
            self._routes[key] = self._number(rank, peer, route, None)
        return self._routes[key]


def _join(lanes: list[Route], link: Link) -> Route:
    """Transfers side by side as one message: on links of their own the slowest decides, on shared ones they add up."""
    loads: dict[Link, float] = {}
    for lane in lanes:
        for leg, seconds in lane.legs:
            if leg[0] < 0:
                loads[leg] = loads.get(leg, 0.0) + seconds
            else:
                loads[link] = max(loads.get(link, 0.0), seconds)
    return Route(tuple(loads.items()), max(lane.latency_seconds for lane in lanes))


def content_stages(contents: npt.NDArray[np.int64], stages: int) -> tuple[_Numbers, _Numbers]:
    """The sending and the receiving stage of each message that carries an activation or gradient; else 0 and 0."""
    keys = contents % (len(_TOPICS) * stages**2)
    keys = np.where(keys < stages**2, keys, 0)
    return keys // stages, keys % stages


def content_text(content: int, stages: int) -> str:
    """What a message carries, for an error."""
    number, key = divmod(content, len(_TOPICS) * stages**2)
    topic, pair = divmod(key, stages**2)
    source, target = divmod(pair, stages)
    return f"{_TOPICS[topic]}{number} from stage {source} to stage {target}"
