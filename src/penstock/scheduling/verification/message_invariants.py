"""The invariants between stages: every action has what it needs, messages match in order, and no rank waits forever.

The channel that they assume is the weakest that a transport offers: one queue for each directed edge between ranks,
no tags, receives that block and sends that do not; an all-reduce waits until every replica of the stage is there.

Rules of this file:
  1. An invariant is a function of `StagedPrograms` that returns nothing or raises a `ScheduleError` with the row.
  2. An invariant may rely on those of the stages, and on those before it in `MESSAGE_INVARIANTS`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import chain
from typing import NoReturn, TypeAlias, assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Compute,
    Forward,
    InputGradients,
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
    WeightGradients,
)
from penstock.scheduling.definitions import Drain, NormRule, Step
from penstock.scheduling.lowering import counterpart, nexts, partners, peer, peers
from penstock.scheduling.norms import Norm, carried_norms, known_norms
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


def _require_neighbors(staged: StagedPrograms) -> None:
    invariant = "messages pass only between neighbors or stages that share weights or a skip, on different ranks"
    placement = staged.placement
    for rank, row in enumerate(staged.programs):
        right: set[tuple[type[Action], int, int]] = set()
        for index, action in enumerate(row):
            stage = action.stage
            if isinstance(action, Reduce) and staged.schedule.placement.replicas(stage) == 1:
                fix = "drop it, or let lower() derive it"
                report(staged, invariant, rank, index, expected=f"none: stage {stage} has no replicas", fix=fix)
            if not isinstance(action, Message):
                continue
            other = counterpart(action).stage
            if (type(action), stage, other) in right:
                continue
            allowed, expected = _find_neighbors(action, staged)
            if other not in allowed or other >= len(placement.stages) or rank in placement.stages[other]:
                report(staged, invariant, rank, index, expected=expected, fix="let lower() derive the messages")
            right.add((type(action), stage, other))


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


def _require_matches(staged: StagedPrograms) -> None:
    invariant = "every message is sent once and received once; none is left over after the drain"
    found: dict[tuple[int, Message], int] = {}
    for rank, row in enumerate(staged.programs):
        for index, action in enumerate(row):
            if isinstance(action, Message):
                if (rank, action) in found:
                    report(staged, invariant, rank, index, expected="a new message", fix="drop the second one")
                found[rank, action] = index
    for sends in (True, False):
        for (rank, action), index in found.items():
            other = counterpart(action)
            if isinstance(action, Sending) != sends:
                continue
            for there in peers(action, rank, staged.placement):
                if (there, other) not in found:
                    fix = "receive it, or do not send it" if sends else "send it, or do not receive it"
                    report(staged, invariant, rank, index, expected=f"{other} on rank {there}", fix=fix)


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


def _require_fifo(staged: StagedPrograms) -> None:
    invariant = "messages are received in the order in which they were sent, on each edge between two ranks"
    sends, receives = _find_queues(_find_stops(staged))
    for (source_rank, rank), queue in receives.items():
        for (_, send), (index, receive) in zip(sends[source_rank, rank], queue, strict=True):
            if counterpart(send) != receive:
                expected = f"{counterpart(send)}, since {send} is what rank {source_rank} sends next to rank {rank}"
                fix = "order the two ranks alike"
                report(staged, invariant, rank, index, expected=expected, fix=fix)


def are_delivered(staged: StagedPrograms) -> bool:
    """Whether every message is sent once and received once, in order, and no rank waits forever.

    The invariants of matches, order and progress say the same, and where one is violated; this takes less time.
    """
    stops = _find_stops(staged)
    if any(len({action for _, action, _ in own}) < len(own) for own in stops):
        return False
    sends, receives = _find_queues(stops)
    sent = {edge: [counterpart(action) for _, action in queue] for edge, queue in sends.items()}
    received = {edge: [action for _, action in queue] for edge, queue in receives.items()}
    return sent == received and not any(_find_waiting(staged, stops))


def _require_progress(staged: StagedPrograms) -> None:
    for segment, position in _find_waiting(staged, _find_stops(staged)):
        _report_deadlock(staged, segment, position)


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
        within = f" within {_name(staged, segment)}"
        fix += ", and in the same step or an earlier one"
    raise ScheduleError(
        f"schedule {staged.schedule.name!r} violates an invariant: no rank waits forever{within}, "
        "when receives block and sends do not\n"
        + "".join(f"  {row}\n" for row in rows)
        + f"  found: {', '.join(reasons)}\n"
        + f"  fix: {fix}"
    )


def require_segments(staged: StagedPrograms) -> None:
    """A step carries the forwards of its own minibatch, a drain none; a flushing step carries all else of it too."""
    flushes = staged.schedule.flushes
    invariant = f"a step carries the {'actions' if flushes else 'forwards'} of its own minibatch, and a drain none"
    starts = ((0,) * staged.schedule.ranks, *staged.ends)
    for number, segment in enumerate(staged.segments):
        match segment:
            case Step(minibatch):
                own = staged.shape.microbatches_of(minibatch)
            case Drain():
                own = range(0)
            case _:
                assert_never(segment)
        for rank, row in enumerate(staged.programs):
            start, end = starts[number][rank], staged.ends[number][rank]
            for index in range(start, end):
                action = row[index]
                if isinstance(action, Update) and staged.schedule.definition.updates_at_once:
                    microbatch = (action.version - 1) * staged.schedule.microbatches
                elif isinstance(action, Forward | InputGradients | WeightGradients | Send | Receive):
                    microbatch = action.microbatch
                else:
                    continue
                if (flushes or isinstance(action, Forward)) and microbatch not in own:
                    expected = f"in {_name(staged, number)} " + (
                        f"only microbatches {own.start} to {own.stop - 1}" if own else "no such action"
                    )
                    report(
                        staged, invariant, rank, index, expected=expected, fix="yield it in the step that it belongs to"
                    )


def _name(staged: StagedPrograms, segment: int) -> str:
    match staged.segments[segment]:
        case Step(minibatch):
            return f"step({minibatch})"
        case Drain(minibatches):
            return f"drain({minibatches})"
        case _ as unknown:
            assert_never(unknown)


MESSAGE_INVARIANTS: tuple[Callable[[StagedPrograms], None], ...] = (
    _require_neighbors,
    _require_matches,
    _require_data,
    _require_fifo,
    _require_progress,
)

ROW_INVARIANTS = (_require_neighbors, _require_data)
"""Those of `MESSAGE_INVARIANTS` that a row keeps or violates by itself, whatever other ranks do."""
