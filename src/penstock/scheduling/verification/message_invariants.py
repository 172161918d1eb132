"""The invariants between stages: every action has what it needs, messages match in order, and no rank waits forever.

The channel that they assume is the weakest that a transport offers: one queue for each directed edge between ranks,
no tags, receives that block and sends that do not; an all-reduce waits until every replica of the stage is there.

Rules of this file:
  1. An invariant is a function that returns nothing or raises a `ScheduleError` with the row.
  2. An invariant may rely on those of the stages, and on those before it in `require_message_invariants`.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from math import lcm
from typing import NoReturn, TypeAlias, assert_never

import numpy as np

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Fetch,
    Forward,
    Message,
    Offload,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Receiving,
    Recompute,
    Reduce,
    Release,
    Reload,
    Send,
    Sending,
    SendNorms,
    SendTied,
    Update,
    carried_norms,
)
from penstock.scheduling.lowering import counterpart, nexts, partners, peer, peers
from penstock.scheduling.verification.stage_invariants import KINDS, Row
from penstock.scheduling.verification.violations import StagedPrograms, report, show_row

Deed: TypeAlias = tuple[str, int, int]
"""What a rank does: F, I, B (the gradients of inputs are there) or W (those of weights are) of a stage, U or an
all-reduce (R) of a stage, or the receive of an activation (A) or gradient (G), of the gradients of tied weights (T), or
of the norm (N) of a stage; of A, G and T then the stage that it came from, else -1."""
Need: TypeAlias = tuple[Deed, int]
"""A deed, and the microbatch, or of U, R, T and N the version, that it is to be done for."""

_OWN = KINDS[Reload]
"""The last of the kinds of microbatches that pass no message."""
_SILENT = {KINDS[kind] for kind in (Update, Fetch, Release)}
"""The kinds of versions that pass no message."""
_NAMES = {
    "F": "forward",
    "B": "backward",
    "W": "backward",
    "I": "input backward",
    "A": "receive of the activation",
    "G": "receive of the gradient",
}


def _require_neighbors(row: Row) -> None:
    invariant = "messages pass only between neighbors or stages that share weights or a skip, on different ranks"
    staged, placement = row.staged, row.staged.placement
    places = np.flatnonzero((row.kinds > _OWN) & (row.kinds != KINDS[Update]))
    # An all-reduce has a version where a message has the other stage.
    others = np.where(row.kinds == KINDS[Reduce], row.stages, row.others)
    ways = np.stack((row.kinds, row.stages, others), axis=1)[places]
    for index in sorted(places[np.unique(ways, axis=0, return_index=True)[1]]):
        action = row.actions[index]
        if isinstance(action, Reduce):
            if staged.schedule.placement.replicas(action.stage) == 1:
                expected = f"none: stage {action.stage} has no replicas"
                row.fail(index, invariant, expected, "drop it, or let lower() derive it")
        elif isinstance(action, Message):
            other = counterpart(action).stage
            allowed, expected = _find_neighbors(action, row)
            if other not in allowed or other >= len(placement.stages) or row.rank in placement.stages[other]:
                row.fail(index, invariant, expected, "let lower() derive the messages")


def _find_neighbors(message: Message, row: Row) -> tuple[tuple[int, ...], str]:
    """The stages that such a message may pass to or from, and in words."""
    stage = message.stage
    match message:
        case Send() | Receive():
            allowed = (*_nexts(stage, row, later=False), *_nexts(stage, row, later=True))
            expected = f"a neighbor of stage {stage} on another rank"
            if far := [other for other in allowed if abs(other - stage) > 1]:
                expected += f", or stage {' or '.join(map(str, far))}, with which it shares a skip"
            return allowed, expected
        case SendTied() | ReceiveTied():
            expected = f"a stage on another rank that shares weights with stage {stage}"
            return partners(stage, row.staged.schedule.ties), expected
        case SendNorms() | ReceiveNorms():
            allowed = (stage - 1, stage + 1) if row.staged.schedule.norms else ()
            return allowed, f"a neighbor of stage {stage} on another rank, and a schedule with norms"
        case _:
            assert_never(message)


def _require_data(row: Row) -> None:
    invariant = "an action comes after what it needs"
    done: defaultdict[Deed, set[int]] = defaultdict(set)
    known: dict[tuple[int, int, int], tuple[list[set[int]], list[set[int]]]] = {}
    """By kind, stage and other stage of actions of microbatches: what is done of the deeds that they need and do."""
    ways = zip(row.kinds.tolist(), row.stages.tolist(), row.others.tolist(), row.numbers.tolist(), strict=True)
    for index, (kind, stage, other, number) in enumerate(ways):
        # The last field of what computes is a version.
        key = kind, stage, other if kind > _OWN else -1
        seen = known.get(key)
        if seen is not None and all([number in of for of in seen[0]]):
            for of in seen[1]:
                of.add(number)
            continue
        action = row.actions[index]
        needs = list(_needs(action, row))
        for need in needs:
            if need[1] not in done[need[0]]:
                expected = f"{_describe(need)} on stage {need[0][1]} before {action}"
                row.fail(index, invariant, expected, "put it before, or let lower() derive the messages")
        if isinstance(action, SendTied | SendNorms | Reduce) and number in done["U", stage, -1]:
            expected = f"it before the update of stage {stage} to version {number}"
            row.fail(index, invariant, expected, "put it before the update")
        deeds = list(_deeds(action, row, done))
        for deed, done_for in deeds:
            done[deed].add(done_for)
        if kind < KINDS[Update]:
            known[key] = [done[deed] for deed, _ in needs], [done[deed] for deed, _ in deeds]


def _deeds(action: Action, row: Row, done: Mapping[Deed, set[int]]) -> Iterator[Need]:
    """What a rank has done with `action`, after what is `done`."""
    match action:
        case Forward(stage, microbatch):
            yield ("F", stage, -1), microbatch
        case Backward(stage, microbatch):
            yield ("B", stage, -1), microbatch
            yield ("W", stage, -1), microbatch
        case BackwardInput(stage, microbatch):
            yield ("B", stage, -1), microbatch
            yield ("I", stage, -1), microbatch
        case BackwardWeight(stage, microbatch):
            yield ("W", stage, -1), microbatch
        case Receive(stage, microbatch, source):
            yield ("A" if source < stage else "G", stage, source), microbatch
        case ReceiveTied(stage, version, source):
            yield ("T", stage, source), version
        case ReceiveNorms(stage, version, source):
            for other in carried_norms(row.staged.schedule.stages, source, stage):
                yield ("N", other, -1), version
        case Reduce(stage, version):
            # A sum over replicas that lacks gradients is none.
            if all(number in done[deed] for deed, number in _summands(stage, version, row)):
                yield ("R", stage, -1), version
        case Update(stage, version):
            yield ("U", stage, -1), version
        case Send() | SendTied() | SendNorms() | Offload() | Reload() | Recompute() | Fetch() | Release():
            pass
        case _:
            assert_never(action)


def _describe(need: Need) -> str:
    (letter, stage, source), number = need
    if letter == "T":
        return f"the gradients of tied weights of stage {source} for version {number}"
    if letter == "R":
        return "the all-reduce of all gradients"
    if letter == "N":
        return f"the norm for version {number}"
    from_afar = f" from stage {source}" if source >= 0 and abs(source - stage) > 1 else ""
    return f"the {_NAMES[letter]} of microbatch {number}{from_afar}"


def _needs(action: Action, row: Row) -> Iterator[Need]:
    """What a rank must have done before `action`."""
    schedule, placement = row.staged.schedule, row.staged.placement.stages
    match action:
        case Forward(stage, microbatch):
            for other in _nexts(stage, row, later=False):
                together = row.rank in placement[other]
                yield ("F", other, -1) if together else ("A", stage, other), microbatch
        case Backward(stage, microbatch) | BackwardInput(stage, microbatch):
            yield ("F", stage, -1), microbatch
            for other in _nexts(stage, row, later=True):
                together = row.rank in placement[other]
                yield ("B", other, -1) if together else ("G", stage, other), microbatch
        case BackwardWeight(stage, microbatch):
            yield ("I", stage, -1), microbatch
        case Send(stage, microbatch, target):
            yield ("F" if target > stage else "B", stage, -1), microbatch
        case SendTied(stage, version):
            yield from _last_backward(stage, version, row)
        case SendNorms(stage, version, target):
            for other in carried_norms(schedule.stages, stage, target):
                yield from _norm_sources(other, version, row)
        case Update(stage, version):
            yield from _summands(stage, version, row)
            if schedule.placement.replicas(stage) > 1:
                yield ("R", stage, -1), version
            for other in range(schedule.stages if schedule.norms else 0):
                yield from _norm_sources(other, version, row)
        case Receive() | ReceiveTied() | ReceiveNorms() | Reduce():
            pass
        case Offload() | Reload() | Recompute() | Fetch() | Release():
            pass
        case _:
            assert_never(action)


def _nexts(stage: int, row: Row, *, later: bool) -> tuple[int, ...]:
    return nexts(stage, row.staged.schedule.stages, row.staged.schedule.skips, later=later)


def _summands(stage: int, version: int, row: Row) -> Iterator[Need]:
    """The gradients that the update of `stage` to `version` sums up."""
    yield from _last_backward(stage, version, row)
    for partner in partners(stage, row.staged.schedule.ties):
        yield from _tied_gradients(stage, version, partner, row)


def _tied_gradients(stage: int, version: int, partner: int, row: Row) -> Iterator[Need]:
    if row.rank in row.staged.placement.stages[partner]:
        yield from _last_backward(partner, version, row)
    else:
        yield ("T", stage, partner), version


def _norm_sources(stage: int, version: int, row: Row) -> Iterator[Need]:
    """What gives a rank the norm of `stage`: a message, or the gradients, with those of later stages that share
    weights.
    """
    if row.rank not in row.staged.placement.stages[stage]:
        yield ("N", stage, -1), version
    elif row.staged.schedule.placement.replicas(stage) > 1:
        yield ("R", stage, -1), version
    else:
        yield from _last_backward(stage, version, row)
        for partner in partners(stage, row.staged.schedule.ties):
            if partner > stage:
                yield from _tied_gradients(stage, version, partner, row)


def _last_backward(stage: int, version: int, row: Row) -> Iterator[Need]:
    """The last backward of `stage` on its rank of those that its update to `version` sums up."""
    size = row.staged.guarantees.microbatches_per_update[stage]
    own = range((version - 1) * size, min(version * size, row.staged.microbatches))
    if mine := row.staged.placement.microbatches_of(row.rank, own):
        yield ("W", stage, -1), mine[-1]


_Edge: TypeAlias = tuple[int, int]
_Meeting: TypeAlias = Reduce | Update
"""What all replicas of a stage come to before one of them goes on."""
_Stops: TypeAlias = list[list[tuple[int, Message | _Meeting, tuple[_Edge, ...]]]]
"""By rank: the messages and meetings of its row, each with its place and the edges that it passes."""
_Queues: TypeAlias = defaultdict[_Edge, list[tuple[int, Message]]]
"""By edge: messages with their places in the row, in its order."""


def _find_stops(staged: StagedPrograms, rows: Sequence[Row]) -> _Stops:
    placement = staged.placement
    stops: _Stops = [[] for _ in staged.programs]
    # Replicas take microbatches in turn, so that this number of them have all the edges that there are.
    rounds = lcm(*(placement.stride(stage) for stage in range(len(placement.stages))))
    # Replicas that gather what each has updated.
    gathering = range(len(placement.stages) if staged.schedule.gathers else 0)
    meetings = {(KINDS[Update], stage) for stage in gathering if staged.schedule.placement.replicas(stage) > 1}
    for row in rows:
        known: dict[tuple[int, int, int, int], tuple[_Edge, ...]] = {}
        ways = zip(
            row.kinds.tolist(), row.stages.tolist(), (row.numbers % rounds).tolist(), row.others.tolist(), strict=True
        )
        for index, way in enumerate(ways):
            if way[0] <= _OWN or (way[0] in _SILENT and way[:2] not in meetings):
                continue
            action = row.actions[index]
            assert isinstance(action, Message | _Meeting)
            edges = known.get(way)
            if edges is None:
                if isinstance(action, Sending):
                    edges = tuple((row.rank, there) for there in peers(action, row.rank, placement))
                else:
                    edges = ((peer(action, row.rank, placement), row.rank),) if isinstance(action, Message) else ()
                known[way] = edges
            stops[row.rank].append((index, action, edges))
    return stops


def _find_queues(stops: _Stops) -> tuple[_Queues, _Queues]:
    sends: _Queues = defaultdict(list)
    receives: _Queues = defaultdict(list)
    for own in stops:
        for index, action, edges in own:
            if not isinstance(action, _Meeting):
                for edge in edges:
                    (sends if isinstance(action, Sending) else receives)[edge].append((index, action))
    return sends, receives


def _require_delivery(staged: StagedPrograms, stops: _Stops) -> None:
    """Every message is sent once and received once, and in order."""
    invariant = "every message is sent once and received once; none is left over after the drain"
    for rank, own in enumerate(stops):
        first = {action: index for index, action, _ in reversed(own)}
        if len(first) < len(own):
            repeated = next(index for index, action, _ in own if index != first[action])
            report(staged, invariant, rank, repeated, expected="a new message", fix="drop the second one")
    sends, receives = _find_queues(stops)
    due = {edge: [counterpart(action) for _, action in queue] for edge, queue in sends.items()}
    found = {edge: [action for _, action in queue] for edge, queue in receives.items()}
    wrong = [] if due == found else [edge for edge in {**due, **found} if due.get(edge) != found.get(edge)]
    for queues, others, end, fix in (
        (sends, found, 0, "receive it, or do not send it"),
        (receives, {edge: [action for _, action in sends[edge]] for edge in wrong}, 1, "send it, or do not receive it"),
    ):
        for edge in wrong:
            for index, action in queues[edge]:
                other = counterpart(action)
                if other not in others.get(edge, ()):
                    expected = f"{other} on rank {edge[1 - end]}"
                    report(staged, invariant, edge[end], index, expected=expected, fix=fix)
    invariant = "messages are received in the order in which they were sent, on each edge between two ranks"
    for source, rank in wrong:
        for (_, send), (index, receive) in zip(sends[source, rank], receives[source, rank], strict=True):
            if counterpart(send) != receive:
                expected = f"{counterpart(send)}, since {send} is what rank {source} sends next to rank {rank}"
                report(staged, invariant, rank, index, expected=expected, fix="order the two ranks alike")


def _find_waiting(staged: StagedPrograms, stops: _Stops) -> Iterator[tuple[int, dict[int, int]]]:
    """Runs the programs abstractly, segment by segment: a rank goes on until it needs a message not sent yet.

    Yields the segments that do not end, each with the ranks that wait and the places of what they wait in. Messages
    are received in the order of the sends, so that those of an edge need only be counted.
    """
    position = [0] * len(stops)
    there: defaultdict[_Edge, int] = defaultdict(int)
    """The messages of each edge that are sent and not received."""
    for segment, ends in enumerate(staged.ends):
        waiting: dict[_Edge, int] = {}
        meeting: defaultdict[_Meeting, list[int]] = defaultdict(list)
        ready = list(range(len(stops)))
        while ready:
            rank = ready.pop()
            own, end = stops[rank], ends[rank]
            while position[rank] < len(own) and own[position[rank]][0] < end:
                _, action, edges = own[position[rank]]
                if isinstance(action, _Meeting):
                    meeting[action].append(rank)
                    if len(meeting[action]) < staged.placement.replicas(action.stage):
                        break
                    # The last to come goes on at once, and so do those that wait, behind the action.
                    others = meeting.pop(action)[:-1]
                    for other in others:
                        position[other] += 1
                    ready += others
                elif edges and edges[0][1] == rank:
                    if not there[edges[0]]:
                        waiting[edges[0]] = rank
                        break
                    there[edges[0]] -= 1
                else:
                    for edge in edges:
                        there[edge] += 1
                        if edge in waiting:
                            ready.append(waiting.pop(edge))
                position[rank] += 1
        blocked = sorted([*waiting.values(), *chain.from_iterable(meeting.values())])
        if blocked:
            yield segment, {rank: stops[rank][position[rank]][0] for rank in blocked}
            return


def _report_deadlock(staged: StagedPrograms, segment: int, position: dict[int, int]) -> NoReturn:
    rows = [show_row(staged.programs, rank, place) for rank, place in position.items()]
    reasons: list[str] = []
    for rank, place in position.items():
        action = staged.programs[rank][place]
        if isinstance(action, _Meeting):
            others = [str(other) for other in staged.placement.stages[action.stage] if other != rank]
            purpose = "reduce" if isinstance(action, Reduce) else "update"
            reasons.append(f"rank {rank} waits for rank {' and '.join(others)} to {purpose}")
        else:
            assert isinstance(action, Receiving)
            reasons.append(f"rank {rank} waits for rank {peer(action, rank, staged.placement)}")
    within, fix = "", "send before the receive that waits for the answer"
    if staged.in_segments:
        within = f" within {staged.name_of(segment)}"
        fix += ", and in the same step or an earlier one"
    raise ScheduleError(
        f"schedule {staged.schedule.name!r} violates an invariant: no rank waits forever{within}, "
        "when receives block and sends do not\n"
        + "".join(f"  {row}\n" for row in rows)
        + f"  found: {', '.join(reasons)}\n"
        + f"  fix: {fix}"
    )


def require_message_invariants(staged: StagedPrograms, rows: Sequence[Row]) -> None:
    """Raises `ScheduleError` for the first invariant that does not hold. `rows`: of all ranks."""
    for row in rows:
        _require_neighbors(row)
    stops = _find_stops(staged, rows)
    _require_delivery(staged, stops)
    for row in rows:
        _require_data(row)
    for segment, position in _find_waiting(staged, stops):
        _report_deadlock(staged, segment, position)
