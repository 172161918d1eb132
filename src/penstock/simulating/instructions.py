"""The rows of a schedule as the event simulation reads them: what each action costs and which path its message takes.

Costs and paths are looked up here, once for every action, and not in its loop.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from enum import IntEnum
from math import inf
from typing import Any, NamedTuple, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Fetch,
    Forward,
    HostCopy,
    InputGradients,
    Offload,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Recompute,
    Reduce,
    Release,
    Reload,
    Send,
    SendNorms,
    SendTied,
    Update,
    WeightGradients,
    WeightMove,
)
from penstock.scheduling.direct_backwards import find_direct
from penstock.scheduling.lowering import peer, peers
from penstock.scheduling.placements import Placement
from penstock.simulating.action_costs import Costs, StageTimes
from penstock.simulating.transfer_times import Link, Route, find_route

COMPUTE, SEND, RECEIVE, REDUCE, SHARED_COMPUTE, MULTICAST, HOST_COPY, AWAITING_COMPUTE, HOST_UPDATE = range(9)

_NORM_BYTES = 8.0
"""The bytes of a message of norms for every stage in it."""

_Numbers: TypeAlias = npt.NDArray[np.int64]


class MessagePath(NamedTuple):
    """The path of a message from one rank to another."""

    edge: int
    """The queue between the two ranks."""
    link: int
    """The link that the message occupies; -1 if there are several."""
    seconds: float
    """How long it occupies the link; the longest of several."""
    latency_seconds: float
    handling_seconds: float
    """How long each of the two ranks is busy with it, whatever its size."""
    copying_seconds: float
    """And with its bytes."""
    blocking: float
    """The share of `seconds` in which they do nothing else."""
    legs: tuple[tuple[int, float], ...]
    """All links with their seconds."""


class Multicast(NamedTuple):
    """One message to any number of ranks."""

    content: int
    paths: tuple[MessagePath, ...]


_TOPICS = ("", "tied gradients for version ", "norms for version ")
_TIED, _NORMS = 1, 2


@dataclass(frozen=True, slots=True, eq=False)
class Instructions:
    """The instructions of one rank, in flat lists, which take the least time and memory.

    `kinds`, `details` and `effects` have one entry per instruction. The detail is the seconds of a COMPUTE (of a
    SHARED_COMPUTE where ranks share a host), the `MessagePath` of a SEND or RECEIVE, the `ReduceInstruction` of a
    REDUCE, a `Multicast`, the `Copy` of a HOST_COPY, or the `HostUpdate` of a HOST_UPDATE. That of an AWAITING_COMPUTE
    is its seconds, and the copies that end before it. The effect is a `MemoryEffect` times the number of stages, plus
    the stage. `contents` has the content of each SEND and RECEIVE, in the order of the row, as a number that
    `content_text` explains.
    """

    kinds: list[int]
    details: list[Any]
    effects: list[int]
    contents: list[int]


class MemoryEffect(IntEnum):
    """How an action changes the memory of its rank. KEPT: nothing is recomputed between forward
    and backward, or in the backward."""

    FORWARD = 0
    FORWARD_KEPT = 1
    BACKWARD = 2
    BACKWARD_KEPT = 3
    BACKWARD_INPUT = 4
    BACKWARD_INPUT_KEPT = 5
    BACKWARD_WEIGHT = 6
    SEND_ACTIVATION = 7
    SEND_GRADIENT = 8
    RECEIVE_ACTIVATION = 9
    RECEIVE_GRADIENT = 10
    REDUCE = 11
    UPDATE = 12
    OTHER = 13
    OFFLOAD = 14
    RELOAD = 15
    RECOMPUTE = 16
    FETCH = 17
    RELEASE = 18


@dataclass(frozen=True, slots=True)
class ReduceInstruction:
    """An all-reduce of `stage` for the update to `version`; `backward` is the index in the row of the stage's last
    backward (or weight backward) before it, or -1."""

    stage: int
    version: int
    seconds: float
    handling_seconds: float
    blocking: float
    """The share of it that does not begin before the replica has arrived."""
    backward: int


CopyKey: TypeAlias = tuple[int, int, bool]
"""The stage and the microbatch of a copy, and whether it is one to the host. Weights and gradients have microbatch -1.
"""
_WEIGHTS = -1


class Copy(NamedTuple):
    """A copy between a device and its host."""

    key: CopyKey
    seconds: float
    gradients: bool = False
    """Whether a fetch or a release moves gradients of weights."""


class HostUpdate(NamedTuple):
    """An update of a streamed stage: the seconds of its computation, and of the copies to the device and back."""

    seconds: float
    fetching: float
    returning: float
    gradients: CopyKey
    """The copy that ends before."""


class Writer:
    """Writes the instructions of all ranks of one simulation, and numbers its edges and links."""

    def __init__(self, placement: Placement, costs: Costs) -> None:
        self.edges: dict[tuple[int, int], int] = {}
        """The number of each directed pair of ranks."""
        self.links: dict[Link, int] = {}
        """The number of each link."""
        self.cuts: dict[tuple[int, tuple[int, int]], float] = {}
        """By link and the two stages of a cut or skip: the seconds that one message occupies the link."""
        self._placement = placement
        self._costs = costs
        self._skips = dict(costs.wire_skips)
        self._stages = len(placement.stages)
        self._compute = SHARED_COMPUTE if costs.assumptions.slowdowns else COMPUTE
        self._routes: dict[tuple[int, int, int, int], MessagePath] = {}
        self._kinds = len(_TOPICS) * self._stages**2
        """How many kinds of messages there are: from each stage to each other one, on each topic."""
        self._seconds: dict[StageTimes, list[float]] = {}
        self._effects = [effect * self._stages for effect in MemoryEffect]
        """The number of each effect for stage 0, in the order of `MemoryEffect`."""

    def write(self, rank: int, row: Collection[Action]) -> Instructions:
        """The instructions of `rank` for `row`."""
        costs, stages, compute = self._costs, self._stages, self._compute
        seconds = self._seconds_on(rank)
        forward, forward_kept, backward, backward_kept, backward_input, input_kept, backward_weight = self._effects[:7]
        send_activation, send_gradient, receive_activation, receive_gradient, reduce, update = self._effects[7:13]
        recompute = self._effects[MemoryEffect.RECOMPUTE]
        paths: dict[int, list[MessagePath]] = {}
        last: dict[int, int] = {}
        moved = _find_gradient_moves(row) if costs.streamed else frozenset[int]()
        kept = set(find_direct(row))
        written = Instructions([], [], [], [])
        kinds, details, effects, contents = written.kinds, written.details, written.effects, written.contents
        for action in row:
            stage = action.stage
            # Messages first, since most actions are messages.
            if isinstance(action, Send):
                number, target = action.microbatch, action.target
                key = stage * stages + target
                choice = paths.get(key) or paths.setdefault(key, self._paths_to(rank, stage, target, sends=True))
                kinds.append(SEND)
                details.append(choice[number % len(choice)])
                effects.append((send_activation if target > stage else send_gradient) + stage)
                contents.append(number * self._kinds + key)
            elif isinstance(action, Receive):
                number, source = action.microbatch, action.source
                key = source * stages + stage
                choice = paths.get(-key) or paths.setdefault(-key, self._paths_to(rank, stage, source, sends=False))
                kinds.append(RECEIVE)
                details.append(choice[number % len(choice)])
                effects.append((receive_activation if source < stage else receive_gradient) + stage)
                contents.append(number * self._kinds + key)
            elif isinstance(action, Reduce):
                kinds.append(REDUCE)
                reducing, handling = costs.reduce_seconds[stage], costs.reduce_handling_seconds[stage]
                blocking = costs.reduce_blocking[stage] if costs.assumptions.overlap_reduce else 1.0
                own = reducing, handling, blocking, last.get(stage, -1)
                details.append(ReduceInstruction(stage, action.version, *own))
                effects.append(reduce + stage)
            else:
                if isinstance(action, Forward):
                    effect = forward_kept if (stage, action.microbatch) in kept else forward
                elif isinstance(action, Backward):
                    last[stage] = len(kinds)
                    effect = backward_kept if (stage, action.microbatch) in kept else backward
                elif isinstance(action, BackwardInput):
                    effect = input_kept if (stage, action.microbatch) in kept else backward_input
                elif isinstance(action, BackwardWeight):
                    last[stage] = len(kinds)
                    effect = backward_weight
                elif isinstance(action, Update):
                    effect = update
                    if costs.streamed:
                        kinds.append(HOST_UPDATE)
                        details.append(self._host_update(action, seconds[effect + stage]))
                        effects.append(effect + stage)
                        continue
                elif isinstance(action, WeightMove):
                    effects.append(self._effects[_MOVES[type(action)]] + stage)
                    details.append(self._move(action, gradients=len(kinds) in moved))
                    kinds.append(HOST_COPY)
                    continue
                elif isinstance(action, Recompute):
                    effect = recompute
                    kept.add((stage, action.microbatch))
                else:
                    effects.append(self._effects[self._write_exchange(written, rank, action)] + stage)
                    continue
                kinds.append(compute)
                details.append(seconds[effect + stage])
                effects.append(effect + stage)
        if HOST_COPY in kinds:
            _await_copies(written, row)
            self._require_room(rank, row)
        return written

    def _seconds_on(self, rank: int) -> list[float]:
        """The seconds of the actions of `rank`, by effect and stage."""
        costs, times = self._costs, self._costs.times_of(rank)
        if times not in self._seconds:
            none = (0.0,) * self._stages
            seconds = enumerate(times.forward_seconds)
            more = tuple(each if stage in costs.recomputed else 0.0 for stage, each in seconds)
            split = tuple(costs.split_seconds + costs.split_share * seconds for seconds in times.backward_seconds)
            parts = {
                MemoryEffect.FORWARD: (times.forward_seconds, none),
                MemoryEffect.FORWARD_KEPT: (times.forward_seconds, none),
                MemoryEffect.BACKWARD: (times.backward_seconds, more),
                MemoryEffect.BACKWARD_KEPT: (times.backward_seconds, none),
                MemoryEffect.BACKWARD_INPUT: (times.input_seconds, more),
                MemoryEffect.BACKWARD_INPUT_KEPT: (times.input_seconds, none),
                MemoryEffect.BACKWARD_WEIGHT: (times.weight_seconds, split),
                MemoryEffect.UPDATE: (costs.update_seconds, none),
                MemoryEffect.RECOMPUTE: (times.forward_seconds, none),
            }
            action = 0.0 if costs.cluster is None else costs.cluster.action_seconds
            found = [map(sum, zip(*parts.get(effect, (none, none)), strict=True)) for effect in MemoryEffect]
            self._seconds[times] = [seconds + action for stages in found for seconds in stages]
        return self._seconds[times]

    def _copy(self, action: HostCopy) -> Copy:
        costs = self._costs
        if action.stage in costs.recomputed:
            raise PlanError(
                f"{action}: the schedule offloads what stage {action.stage} saves, and the plan recomputes it: "
                "expected one of both. Leave the stage out of recompute, or its offloads out of the order"
            )
        key = action.stage, action.microbatch, isinstance(action, Offload)
        return Copy(key, costs.offloaded_bytes[action.stage] / self._bandwidth(action, "offloads"))

    def _move(self, action: WeightMove, *, gradients: bool) -> Copy:
        """The copy of a fetch or a release; weights that leave are not copied, since the host has them."""
        costs, stage, leaves = self._costs, action.stage, isinstance(action, Release)
        moved = (0.0 if leaves else costs.weight_bytes[stage]) + gradients * costs.parameter_bytes[stage]
        return Copy((stage, _WEIGHTS, leaves), moved / self._bandwidth(action, "streams weights"), gradients)

    def _host_update(self, action: Update, seconds: float) -> HostUpdate:
        bandwidth = self._bandwidth(action, "streams weights")
        fetched, returned = self._costs.update_bytes(action.stage)
        return HostUpdate(seconds, fetched / bandwidth, returned / bandwidth, (action.stage, _WEIGHTS, True))

    def _bandwidth(self, action: Action, does: str) -> float:
        bandwidth = inf if self._costs.cluster is None else self._costs.cluster.host_bandwidth
        if bandwidth is None:
            raise PlanError(
                f"{action}: the schedule {does}, and host_bandwidth of the cluster is None: expected the bytes per "
                "second from a device to its host, as replace(cluster, host_bandwidth=25e9) sets them"
            )
        return bandwidth

    def _require_room(self, rank: int, row: Iterable[Action]) -> None:
        """Raises `PlanError` if more is on the host at once than it has room for. A slot is free at the backward."""
        costs, away = self._costs, set[tuple[int, int]]()
        held = sum(
            costs.update_bytes(stage)[0] + costs.frozen_bytes[stage]
            for stage in costs.streamed.intersection(self._placement.stages_of(rank))
        )
        most = inf if self._costs.cluster is None else self._costs.cluster.host_bytes
        for action in row:
            size = self._costs.offloaded_bytes[action.stage]
            if isinstance(action, Offload):
                held += size
                away.add((action.stage, action.microbatch))
            elif isinstance(action, InputGradients) and (action.stage, action.microbatch) in away:
                held -= size
            if held > most:
                raise PlanError(
                    f"{action} of rank {rank}: expected at most {most:.4g} bytes on the host, host_bytes of the "
                    f"cluster, found {held:.4g}: offload fewer microbatches at once, or stream fewer stages"
                )

    def _write_exchange(
        self, written: Instructions, rank: int, action: SendTied | ReceiveTied | SendNorms | ReceiveNorms | HostCopy
    ) -> MemoryEffect:
        """Writes a message that an update waits for, or a copy between device and host; returns its effect."""
        if isinstance(action, HostCopy):
            written.kinds.append(HOST_COPY)
            written.details.append(self._copy(action))
            return MemoryEffect.OFFLOAD if isinstance(action, Offload) else MemoryEffect.RELOAD
        there = peer(action, rank, self._placement)
        match action:
            case SendTied(stage, version, target):
                kind, detail = SEND, self._direct(rank, there, 0.0)
                content = self._content(_TIED, version, stage, target)
            case ReceiveTied(stage, version, source):
                kind, detail = RECEIVE, self._direct(there, rank, 0.0)
                content = self._content(_TIED, version, source, stage)
            case SendNorms(stage, version, target):
                # Of replicas that do the same, only one is simulated.
                others = (there,) if self._placement.split else peers(action, rank, self._placement)
                paths = tuple(self._direct(rank, other, _NORM_BYTES * self._stages) for other in others)
                written.kinds.append(MULTICAST)
                written.details.append(Multicast(self._content(_NORMS, version, stage, target), paths))
                return MemoryEffect.OTHER
            case ReceiveNorms(stage, version, source):
                kind, detail = RECEIVE, self._direct(there, rank, _NORM_BYTES * self._stages)
                content = self._content(_NORMS, version, source, stage)
            case _:
                assert_never(action)
        written.kinds.append(kind)
        written.details.append(detail)
        written.contents.append(content)
        return MemoryEffect.OTHER

    def _content(self, topic: int, number: int, source: int, target: int) -> int:
        return number * self._kinds + topic * self._stages**2 + source * self._stages + target

    def _paths_to(self, rank: int, stage: int, other: int, *, sends: bool) -> list[MessagePath]:
        """The paths between `rank`, for `stage`, and each replica of `other`, in the order of the microbatches."""
        placement = self._placement
        count = 1 if placement.split else placement.replicas(other)
        peers = [placement.rank_of(other, microbatch) for microbatch in range(count)]
        if sends:
            return [self._path(stage, rank, other, peer) for peer in peers]
        return [self._path(other, peer, stage, rank) for peer in peers]

    def _path(self, stage: int, rank: int, target: int, peer: int) -> MessagePath:
        key = stage, rank, target, peer
        if key not in self._routes:
            split, stages = self._placement.split, self._placement.stages
            senders = stages[stage] if split else (rank,)
            receivers = stages[target] if split else (peer,)
            low, high = sorted((stage, target))
            size = self._costs.wire_bytes[low] if high == low + 1 else self._skips.get((low, high), 0.0)
            self._routes[key] = self._number(rank, peer, self._route(size, senders, receivers), (low, high))
        return self._routes[key]

    def _route(self, size_bytes: float, senders: tuple[int, ...], receivers: tuple[int, ...]) -> Route:
        costs = self._costs
        shared, width = costs.assumptions.shared_nic, costs.tensor_parallel
        return find_route(costs.cluster, size_bytes, senders, receivers, shared=shared, width=width)

    def _number(self, rank: int, peer: int, route: Route, cut: tuple[int, int] | None) -> MessagePath:
        edge = self.edges.setdefault((rank, peer), len(self.edges))
        legs = tuple((self.links.setdefault(link, len(self.links)), seconds) for link, seconds in route.legs)
        for link, seconds in legs:
            if cut is not None:
                self.cuts[link, cut] = seconds
        return MessagePath(
            edge=edge,
            link=legs[0][0] if len(legs) == 1 else -1,
            seconds=max(seconds for _, seconds in legs),
            latency_seconds=route.latency_seconds,
            handling_seconds=route.handling_seconds,
            copying_seconds=route.copying_seconds,
            blocking=route.blocking if self._costs.assumptions.overlap else 1.0,
            legs=legs,
        )

    def _direct(self, rank: int, peer: int, size_bytes: float) -> MessagePath:
        """The path of a message that crosses no cut. Tied gradients have no bytes: a profile does not have them."""
        key = -1, rank, int(size_bytes), peer
        if key not in self._routes:
            route = self._route(size_bytes, (rank,), (peer,))
            self._routes[key] = self._number(rank, peer, route, None)
        return self._routes[key]


_MOVES = {Fetch: MemoryEffect.FETCH, Release: MemoryEffect.RELEASE}


def _find_gradient_moves(row: Iterable[Action]) -> frozenset[int]:
    """The places in `row` of the fetches and releases that move gradients too.

    A release does where its visit, or a fetch, has left gradients on the device. A fetch does where there are some on
    the host, and more are added to them before the next release.
    """
    found, there, away, fetches = set[int](), set[int](), set[int](), dict[int, int]()
    for place, action in enumerate(row):
        stage = action.stage
        if isinstance(action, WeightGradients):
            there.add(stage)
            if stage in away:
                away.discard(stage)
                found.add(fetches[stage])
        elif isinstance(action, Update):
            away.discard(stage)
        elif isinstance(action, Fetch):
            fetches[stage] = place
        elif isinstance(action, Release) and stage in there:
            there.discard(stage)
            away.add(stage)
            found.add(place)
    return frozenset(found)


def _await_copies(written: Instructions, row: Iterable[Action]) -> None:
    """Has each forward and backward wait for the offloads whose memory is free then, or which have been reloaded since
    the last one; each backward for its reload; and the first computation after a fetch for the weights.
    """
    leaving: dict[CopyKey, int] = {}
    coming = set[int]()
    due: list[CopyKey] = []
    for index, action in enumerate(row):
        if isinstance(action, Offload):
            leaving[action.stage, action.microbatch, True] = action.behind
        elif isinstance(action, Reload):
            key = action.stage, action.microbatch, True
            due += [key] if leaving.pop(key, 0) else []
        elif isinstance(action, Fetch):
            coming.add(action.stage)
        elif isinstance(action, Recompute):
            if action.stage in coming:
                coming.discard(action.stage)
                written.kinds[index] = AWAITING_COMPUTE
                written.details[index] = written.details[index], ((action.stage, _WEIGHTS, False),)
        elif isinstance(action, Forward | InputGradients | BackwardWeight):
            if action.stage in coming:
                coming.discard(action.stage)
                due.append((action.stage, _WEIGHTS, False))
            due += [key for key, behind in leaving.items() if behind == 1]
            due.append((action.stage, action.microbatch, False))
            leaving = {key: behind - 1 for key, behind in leaving.items() if behind > 1}
            written.kinds[index] = AWAITING_COMPUTE
            written.details[index] = written.details[index], tuple(due)
            due = []


def content_stages(contents: npt.NDArray[np.int64], stages: int) -> tuple[_Numbers, _Numbers]:
    """The sending and the receiving stage of each message that carries an activation or gradient; else 0 and 0."""
    keys = contents % (len(_TOPICS) * stages**2)
    keys = np.where(keys < stages**2, keys, 0)
    return keys // stages, keys % stages


def content_text(content: int, stages: int) -> str:
    """The content of a message, for an error."""
    number, key = divmod(content, len(_TOPICS) * stages**2)
    topic, pair = divmod(key, stages**2)
    source, target = divmod(pair, stages)
    return f"{_TOPICS[topic]}{number} from stage {source} to stage {target}"
