"""The invariants between stages: every action has what it needs, messages match in order, and no rank waits forever.

The channel that they assume is the weakest that a transport offers: one queue for each directed edge between ranks,
no tags, receives that block and sends that do not; an all-reduce waits until every replica of the stage is there.

Rules of this file:
  1. An invariant is a function that returns nothing or raises a `ScheduleError` with the row.
  2. An invariant may rely on those of the stages, and on those before it in `require_message_invariants`.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain, compress
from typing import NoReturn, TypeAlias, assert_never

import numpy as np

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    Message,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Receiving,
    Reduce,
    Send,
    Sending,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.definitions import NormRule
from penstock.scheduling.lowering import counterpart, nexts, partners, peer, peers
from penstock.scheduling.norms import Norm, carried_norms, known_norms
from penstock.scheduling.verification.stage_invariants import KINDS, Numbers, Row, Turns
from penstock.scheduling.verification.violations import StagedPrograms, report, show_row

Need: TypeAlias = tuple[str, int, int, int]
"""What a rank has done: F, I, B (the gradients of inputs are there) or W (those of weights are) of a stage and a
microbatch, U or an all-reduce (R) of a stage for a version, or the receive of an activation (A) or gradient (G) of a
microbatch, of the gradients of tied weights (T) for a version, or of the norm (N) of a stage for a version; of A, G and
T then the stage that it came from, else -1."""

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
    places = np.flatnonzero((row.kinds > KINDS[BackwardWeight]) & (row.kinds != KINDS[Update]))
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
            allowed, expected = _find_neighbors(action, staged)
            if other not in allowed or other >= len(placement.stages) or row.rank in placement.stages[other]:
                row.fail(index, invariant, expected, "let lower() derive the messages")


def _find_neighbors(message: Message, staged: StagedPrograms) -> tuple[tuple[int, ...], str]:
    """The stages that such a message may pass to or from, and in words."""
    stage = message.stage
    match message:
        case Send() | Receive():
            allowed = (*_nexts(stage, staged, later=False), *_nexts(stage, staged, later=True))
            expected = f"a neighbor of stage {stage} on another rank"
            if far := [other for other in allowed if abs(other - stage) > 1]:
                expected += f", or stage {' or '.join(map(str, far))}, with which it shares a skip"
            return allowed, expected
        case SendTied() | ReceiveTied():
            expected = f"a stage on another rank that shares weights with stage {stage}"
            return partners(stage, staged.schedule.ties), expected
        case SendNorms() | ReceiveNorms():
            allowed = () if staged.schedule.norm_rule is NormRule.NONE else (stage - 1, stage + 1)
            return allowed, f"a neighbor of stage {stage} on another rank, and a schedule with norms"
        case _:
            assert_never(message)


def _require_data(staged: StagedPrograms) -> None:
    invariant = "an action comes after what it needs"
    for rank, row in enumerate(staged.programs):
        done: set[Need] = set()
        for index, action in enumerate(row):
            for need in _needs(action, rank, staged):
                if need not in done:
                    expected = f"{_describe(need)} on stage {need[1]} before {action}"
                    fix = "put it before, or let lower() derive the messages"
                    report(staged, invariant, rank, index, expected=expected, fix=fix)
            if isinstance(action, SendTied | SendNorms | Reduce) and ("U", action.stage, action.version, -1) in done:
                expected = f"it before the update of stage {action.stage} to version {action.version}"
                report(staged, invariant, rank, index, expected=expected, fix="put it before the update")
            match action:
                case Forward(stage, microbatch):
                    done.add(("F", stage, microbatch, -1))
                case Backward(stage, microbatch):
                    done.update((letter, stage, microbatch, -1) for letter in "BW")
                case BackwardInput(stage, microbatch):
                    done.update((letter, stage, microbatch, -1) for letter in "BI")
                case BackwardWeight(stage, microbatch):
                    done.add(("W", stage, microbatch, -1))
                case Receive(stage, microbatch, source):
                    done.add(("A" if source < stage else "G", stage, microbatch, source))
                case ReceiveTied(stage, version, source):
                    done.add(("T", stage, version, source))
                case ReceiveNorms(stage, version, source):
                    norms = carried_norms(staged.schedule, source, version, stage)
                    done.update(("N", *norm, -1) for norm in norms)
                case Reduce(stage, version):
                    # A sum over replicas that lacks gradients is none.
                    if done.issuperset(_summands(stage, version, rank, staged)):
                        done.add(("R", stage, version, -1))
                case Update(stage, version):
                    done.add(("U", stage, version, -1))
                case Send() | SendTied() | SendNorms():
                    pass
                case _:
                    assert_never(action)


def _describe(need: Need) -> str:
    letter, stage, number, source = need
    if letter == "T":
        return f"the gradients of tied weights of stage {source} for version {number}"
    if letter == "R":
        return "the all-reduce of all gradients"
    if letter == "N":
        return f"the norm for version {number}"
    from_afar = f" from stage {source}" if source >= 0 and abs(source - stage) > 1 else ""
    return f"the {_NAMES[letter]} of microbatch {number}{from_afar}"


def _needs(action: Action, rank: int, staged: StagedPrograms) -> Iterator[Need]:
    """What `rank` must have done before `action`."""
    placement = staged.placement.stages
    match action:
        case Forward(stage, microbatch):
            for other in _nexts(stage, staged, later=False):
                together = rank in placement[other]
                yield ("F", other, microbatch, -1) if together else ("A", stage, microbatch, other)
        case Backward(stage, microbatch) | BackwardInput(stage, microbatch):
            yield "F", stage, microbatch, -1
            for other in _nexts(stage, staged, later=True):
                together = rank in placement[other]
                yield ("B", other, microbatch, -1) if together else ("G", stage, microbatch, other)
        case BackwardWeight(stage, microbatch):
            yield "I", stage, microbatch, -1
        case Send(stage, microbatch, target):
            yield "F" if target > stage else "B", stage, microbatch, -1
        case SendTied(stage, version):
            yield from _last_backward(stage, version, rank, staged)
        case SendNorms(stage, version, target):
            for norm in carried_norms(staged.schedule, stage, version, target):
                yield from _norm_sources(norm, rank, staged)
        case Update(stage, version):
            yield from _summands(stage, version, rank, staged)
            if staged.schedule.placement.replicas(stage) > 1:
                yield "R", stage, version, -1
            for norm in known_norms(staged.schedule, stage, version):
                yield from _norm_sources(norm, rank, staged)
        case Receive() | ReceiveTied() | ReceiveNorms() | Reduce():
            pass
        case _:
            assert_never(action)


def _nexts(stage: int, staged: StagedPrograms, *, later: bool) -> tuple[int, ...]:
    return nexts(stage, staged.schedule.stages, staged.schedule.skips, later=later)


def _summands(stage: int, version: int, rank: int, staged: StagedPrograms) -> Iterator[Need]:
    """The gradients that the update of `stage` to `version` sums up on `rank`."""
    yield from _last_backward(stage, version, rank, staged)
    for partner in partners(stage, staged.schedule.ties):
        yield from _tied_gradients(stage, version, partner, rank, staged)


def _tied_gradients(stage: int, version: int, partner: int, rank: int, staged: StagedPrograms) -> Iterator[Need]:
    if rank in staged.placement.stages[partner]:
        yield from _last_backward(partner, version, rank, staged)
    else:
        yield "T", stage, version, partner


def _norm_sources(norm: Norm, rank: int, staged: StagedPrograms) -> Iterator[Need]:
    """What gives `rank` a norm: a message, or the gradients, with those of later stages that share weights. A run that
    continues another one has the norms of that run.
    """
    stage, version = norm
    if version <= 0:
        return
    if rank not in staged.placement.stages[stage]:
        yield "N", stage, version, -1
    elif staged.schedule.placement.replicas(stage) > 1:
        yield "R", stage, version, -1
    else:
        yield from _last_backward(stage, version, rank, staged)
        for partner in partners(stage, staged.schedule.ties):
            if partner > stage:
                yield from _tied_gradients(stage, version, partner, rank, staged)


def _last_backward(stage: int, version: int, rank: int, staged: StagedPrograms) -> Iterator[Need]:
    """The last backward of `stage` on `rank` of those that its update to `version` sums up."""
    size = staged.guarantees.microbatches_per_update[stage]
    own = range((version - 1) * size, min(version * size, staged.microbatches))
    if mine := staged.placement.microbatches_of(rank, own):
        yield "W", stage, mine[-1], -1


_Edge: TypeAlias = tuple[int, int]
_Stops: TypeAlias = list[list[tuple[int, Message | Reduce, tuple[_Edge, ...]]]]
"""By rank: the messages and all-reduces of its row, each with its place and the edges that it passes."""
_Queues: TypeAlias = defaultdict[_Edge, list[tuple[int, Message]]]
"""By edge: messages with their places in the row, in its order."""


def _find_stops(staged: StagedPrograms) -> _Stops:
    placement = staged.placement
    stops: _Stops = [[] for _ in staged.programs]
    for rank, row in enumerate(staged.programs):
        for index, action in enumerate(row):
            if isinstance(action, Compute):
                continue
            edges: tuple[_Edge, ...] = ()
            if isinstance(action, Sending):
                edges = tuple((rank, there) for there in peers(action, rank, placement))
            elif isinstance(action, Receiving):
                edges = ((peer(action, rank, placement), rank),)
            stops[rank].append((index, action, edges))
    return stops


def _find_queues(stops: _Stops) -> tuple[_Queues, _Queues]:
    sends: _Queues = defaultdict(list)
    receives: _Queues = defaultdict(list)
    for own in stops:
        for index, action, edges in own:
            if not isinstance(action, Reduce):
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
        meeting: defaultdict[Reduce, list[int]] = defaultdict(list)
        ready = list(range(len(stops)))
        while ready:
            rank = ready.pop()
            own, end = stops[rank], ends[rank]
            while position[rank] < len(own) and own[position[rank]][0] < end:
                _, action, edges = own[position[rank]]
                if isinstance(action, Reduce):
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
        if isinstance(action, Reduce):
            others = [str(other) for other in staged.placement.stages[action.stage] if other != rank]
            reasons.append(f"rank {rank} waits for rank {' and '.join(others)} to reduce")
        else:
            assert isinstance(action, Receiving)
            reasons.append(f"rank {rank} waits for rank {peer(action, rank, staged.placement)}")
    within, fix = "", "send before the receive that waits for the answer"
    if staged.segments:
        within = f" within {staged.name_of(segment)}"
        fix += ", and in the same step or an earlier one"
    raise ScheduleError(
        f"schedule {staged.schedule.name!r} violates an invariant: no rank waits forever{within}, "
        "when receives block and sends do not\n"
        + "".join(f"  {row}\n" for row in rows)
        + f"  found: {', '.join(reasons)}\n"
        + f"  fix: {fix}"
    )


def require_message_invariants(staged: StagedPrograms, turns: Sequence[Turns], *, in_full: bool) -> None:
    """Raises `ScheduleError` for the first invariant that does not hold. `turns`: of all stages.

    What actions need is checked on columns first, and if that does not succeed, or `in_full`, along the actions.
    """
    for row in dict.fromkeys(own.row for own in turns):
        _require_neighbors(row)
    stops = _find_stops(staged)
    _require_delivery(staged, stops)
    if in_full or not has_data(staged, turns):
        _require_data(staged)
    for segment, position in _find_waiting(staged, stops):
        _report_deadlock(staged, segment, position)


def has_data(staged: StagedPrograms, turns: Sequence[Turns]) -> bool:
    """Whether a fast proof that every action comes after what it needs succeeds. One that does not says nothing.

    What microbatches need is checked on columns, and what updates need by a walk along the few actions that matter.
    """
    if not all(_computes_in_order(own, turns) and _reduces_in_order(own) for own in turns):
        return False
    if not staged.schedule.ties and staged.schedule.norm_rule is NormRule.NONE:
        return True
    few: list[tuple[Action, ...]] = [() for _ in staged.programs]
    for row in dict.fromkeys(own.row for own in turns):
        chosen = row.kinds >= KINDS[Update]
        for own in turns:
            if own.row is row:
                # The last microbatch of each update.
                chosen |= np.isin(row.numbers, row.mine[np.append(np.diff(own.rounds) != 0, True)[: len(row.mine)]])
        few[row.rank] = tuple(compress(row.actions, chosen.tolist()))
    try:
        _require_data(replace(staged, programs=tuple(few)))
    except ScheduleError:
        return False
    return True


def _computes_in_order(turns: Turns, others: Sequence[Turns]) -> bool:
    """Whether every forward and backward comes after what it needs and before its messages."""
    row, schedule = turns.row, turns.row.staged.schedule
    beside = {own.stage: own for own in others if own.row is row}
    trains = turns.guarantees.trains
    orders = [turns.forwards[: len(turns.inputs)] < turns.inputs]
    orders.append((turns.inputs < turns.weights) | (row.kinds[turns.inputs] == KINDS[Backward]))
    for name, later in (("forwards", False), ("inputs", True)) if trains else (("forwards", False),):
        computed: Numbers = getattr(turns, name)
        for kind, side in ((KINDS[Receive], later), (KINDS[Send], not later)):
            for other in nexts(turns.stage, schedule.stages, schedule.skips, later=side):
                if other not in beside:
                    places = _places_of(turns, kind, other)
                    if len(places) != len(computed):
                        return False
                    orders.append(places < computed if side is later else computed < places)
                elif side is later:
                    orders.append(getattr(beside[other], name) < computed)
    return all(bool(order.all()) for order in orders)


def _places_of(turns: Turns, kind: int, other: int) -> Numbers:
    """The places of the messages with stage `other`, by microbatch; none if not each of the rank has one."""
    row = turns.row
    places = np.flatnonzero((row.stages == turns.stage) & (row.kinds == kind) & (row.others == other))
    numbers = row.numbers[places]
    order = np.argsort(numbers)
    return places[order] if np.array_equal(numbers[order], row.mine) else places[:0]


def _reduces_in_order(turns: Turns) -> bool:
    """Whether replicas sum their gradients between the last backward and the update."""
    row, updates = turns.row, turns.updates
    reduces = np.flatnonzero((row.stages == turns.stage) & (row.kinds == KINDS[Reduce]))
    if row.staged.schedule.placement.replicas(turns.stage) == 1 or not turns.guarantees.trains:
        return not len(reduces)
    if not np.array_equal(row.numbers[reduces], row.numbers[updates]):
        return False
    ends = np.searchsorted(row.mine, row.numbers[reduces] * turns.size)
    return bool(((reduces < updates) & (np.searchsorted(turns.weights, reduces) >= ends)).all())
