"""The laws between stages: every action has what it needs, messages match in order, and no rank waits for ever.

The channel that the laws assume is the weakest that a transport offers: one queue for each directed edge between ranks,
no tags, receives that block and sends that do not.

Laws of this file:
  1. A law is a function of the evidence that returns nothing, or raises a `ScheduleError` that shows the row.
  2. A law may rely on the stage laws, and on the laws before it in `MESSAGE_LAWS`.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import TypeAlias, assert_never

from penstock.errors import ScheduleError
from penstock.scheduling.actions import (
    Action,
    Backward,
    Forward,
    Message,
    Receive,
    ReceiveTied,
    Send,
    SendTied,
    Update,
)
from penstock.scheduling.evidence import Evidence, report_breach, show_row
from penstock.scheduling.lowering import counterpart, partners
from penstock.scheduling.methods import Drain, Step

__all__ = ["MESSAGE_LAWS", "require_parts"]

Need: TypeAlias = tuple[str, int, int, int]
"""What a rank has done: F or B of a stage and a microbatch, or the receive of an activation (A) or gradient (G) of a
microbatch, or of the gradients of tied weights (T) for a version; then the stage that it came from, else -1."""

_NAMES = {
    "F": "forward",
    "B": "backward",
    "A": "receive of the activation",
    "G": "receive of the gradient",
}


def _require_neighbours(evidence: Evidence) -> None:
    law = "only adjacent stages, and stages that share weights, talk, and only when they are on different ranks"
    shape = evidence.shape
    for row in evidence.programs:
        for index, action in enumerate(row):
            match action:
                case Send(stage=stage, target=other) | Receive(stage=stage, source=other):
                    allowed: tuple[int, ...] = (stage - 1, stage + 1)
                    expected = f"a neighbour of stage {stage} on another rank"
                case SendTied(stage=stage, target=other) | ReceiveTied(stage=stage, source=other):
                    allowed = partners(stage, evidence.schedule.ties)
                    expected = f"a stage on another rank that shares weights with stage {stage}"
                case Forward() | Backward() | Update():
                    continue
                case _:
                    assert_never(action)
            if other not in allowed or other >= shape.stages or shape.rank_of(stage) == shape.rank_of(other):
                report_breach(evidence, law, stage, index, expected, "let lower() derive the messages")


def _require_data(evidence: Evidence) -> None:
    law = "an action comes after what it needs"
    for row in evidence.programs:
        done: set[Need] = set()
        for index, action in enumerate(row):
            for need in _needs(action, evidence):
                if need not in done:
                    letter, stage, number, source = need
                    what = (
                        f"the gradients of tied weights of stage {source} for version {number}"
                        if letter == "T"
                        else f"the {_NAMES[letter]} of microbatch {number}"
                    )
                    expected = f"{what} on stage {stage} before {action}"
                    mend = "put it before, or let lower() derive the messages"
                    report_breach(evidence, law, action.stage, index, expected, mend)
            match action:
                case Forward(stage, microbatch):
                    done.add(("F", stage, microbatch, -1))
                case Backward(stage, microbatch):
                    done.add(("B", stage, microbatch, -1))
                case Receive(stage, microbatch, source):
                    done.add(("A" if source < stage else "G", stage, microbatch, -1))
                case ReceiveTied(stage, version, source):
                    done.add(("T", stage, version, source))
                case Send() | SendTied() | Update():
                    pass
                case _:
                    assert_never(action)


def _needs(action: Action, evidence: Evidence) -> Iterator[Need]:
    """What a rank must have done before `action`."""
    placement = evidence.shape.placement
    match action:
        case Forward(stage, microbatch):
            if stage > 0:
                together = placement[stage - 1] == placement[stage]
                yield ("F", stage - 1, microbatch, -1) if together else ("A", stage, microbatch, -1)
        case Backward(stage, microbatch):
            yield "F", stage, microbatch, -1
            if stage < len(placement) - 1:
                together = placement[stage + 1] == placement[stage]
                yield ("B", stage + 1, microbatch, -1) if together else ("G", stage, microbatch, -1)
        case Send(stage, microbatch, target):
            yield "F" if target > stage else "B", stage, microbatch, -1
        case SendTied(stage, version):
            yield "B", stage, version * evidence.shape.microbatches - 1, -1
        case Update(stage, version):
            for partner in partners(stage, evidence.schedule.ties):
                together = placement[partner] == placement[stage]
                last = version * evidence.shape.microbatches - 1
                yield ("B", partner, last, -1) if together else ("T", stage, version, partner)
        case Receive() | ReceiveTied():
            pass
        case _:
            assert_never(action)


def _require_matches(evidence: Evidence) -> None:
    law = "every message is sent once and received once; none is left over after the drain"
    found: dict[Message, tuple[int, int]] = {}
    for row in evidence.programs:
        for index, action in enumerate(row):
            if isinstance(action, Message):
                if action in found:
                    report_breach(evidence, law, action.stage, index, "a new message", "drop the second one")
                found[action] = action.stage, index
    for sends in (True, False):
        for action, (stage, index) in found.items():
            other = counterpart(action)
            if other not in found and isinstance(action, Send | SendTied) == sends:
                expected = f"{other} on rank {evidence.shape.rank_of(other.stage)}"
                mend = "receive it, or do not send it" if sends else "send it, or do not receive it"
                report_breach(evidence, law, stage, index, expected, mend)


def _require_fifo(evidence: Evidence) -> None:
    law = "messages are received in the order in which they were sent, on each edge between two ranks"
    placement = evidence.shape.placement
    sends: defaultdict[tuple[int, int], list[Send | SendTied]] = defaultdict(list)
    receives: defaultdict[tuple[int, int], list[tuple[int, Receive | ReceiveTied]]] = defaultdict(list)
    for rank, row in enumerate(evidence.programs):
        for index, action in enumerate(row):
            match action:
                case Send(target=target) | SendTied(target=target):
                    sends[rank, placement[target]].append(action)
                case Receive(source=source) | ReceiveTied(source=source):
                    receives[placement[source], rank].append((index, action))
                case Forward() | Backward() | Update():
                    pass
                case _:
                    assert_never(action)
    for (source_rank, rank), queue in receives.items():
        for send, (index, receive) in zip(sends[source_rank, rank], queue, strict=True):
            if counterpart(send) != receive:
                expected = f"{counterpart(send)}, since {send} is what rank {source_rank} sends next to rank {rank}"
                mend = "order the two ranks alike"
                report_breach(evidence, law, receive.stage, index, expected, mend)


def _require_progress(evidence: Evidence) -> None:
    """Run the programs abstractly, part by part: a rank goes on until it needs a message that nobody has sent yet."""
    programs = evidence.programs
    placement = evidence.shape.placement
    position = [0] * len(programs)
    sent: set[Action] = set()
    for part, ends in enumerate(evidence.ends):
        waiting: dict[Message, int] = {}
        ready = list(range(len(programs)))
        while ready:
            rank = ready.pop()
            row, index, end = programs[rank], position[rank], ends[rank]
            while index < end:
                action = row[index]
                match action:
                    case Send() | SendTied():
                        sent.add(action)
                        if action in waiting:
                            ready.append(waiting.pop(action))
                    case Receive() | ReceiveTied():
                        due = counterpart(action)
                        if due not in sent:
                            waiting[due] = rank
                            break
                    case Forward() | Backward() | Update():
                        pass
                    case _:
                        assert_never(action)
                index += 1
            position[rank] = index
        if waiting:
            _report_standstill(evidence, part, sorted(waiting.values()), position, placement)


def _report_standstill(
    evidence: Evidence, part: int, blocked: list[int], position: list[int], placement: tuple[int, ...]
) -> None:
    rows = [show_row(evidence.programs, rank, position[rank]) for rank in blocked]
    reasons: list[str] = []
    for rank in blocked:
        receive = evidence.programs[rank][position[rank]]
        assert isinstance(receive, Receive | ReceiveTied)
        reasons.append(f"rank {rank} waits for rank {placement[receive.source]}")
    within, mend = "", "send before the receive that waits for the answer"
    if evidence.parts:
        within = f" within {_name(evidence, part)}"
        mend += ", and in the same step or an earlier one"
    raise ScheduleError(
        f"schedule {evidence.schedule.method!r} breaks a law: no rank waits for ever{within}, "
        "when receives block and sends do not\n"
        + "".join(f"  {row}\n" for row in rows)
        + f"  found: {', '.join(reasons)}\n"
        + f"  to mend it: {mend}"
    )


def require_parts(evidence: Evidence) -> None:
    """A step carries the forwards of its own minibatch, a drain none; a flushing step carries all else of it too."""
    flushes = evidence.promise.flushes
    law = f"a step carries the {'actions' if flushes else 'forwards'} of its own minibatch, and a drain none"
    starts = ((0,) * evidence.shape.ranks, *evidence.ends)
    for number, part in enumerate(evidence.parts):
        match part:
            case Step(minibatch):
                own = evidence.shape.microbatches_of(minibatch)
            case Drain():
                own = range(0)
            case _:
                assert_never(part)
        for rank, row in enumerate(evidence.programs):
            start, end = starts[number][rank], evidence.ends[number][rank]
            for index in range(start, end):
                action = row[index]
                if isinstance(action, Update | SendTied | ReceiveTied):
                    continue
                if (flushes or isinstance(action, Forward)) and action.microbatch not in own:
                    expected = f"in {_name(evidence, number)} " + (
                        f"only microbatches {own.start} to {own.stop - 1}" if own else "no such action"
                    )
                    report_breach(
                        evidence, law, action.stage, index, expected, "yield it in the step that it belongs to"
                    )


def _name(evidence: Evidence, part: int) -> str:
    match evidence.parts[part]:
        case Step(minibatch):
            return f"step({minibatch})"
        case Drain(minibatches):
            return f"drain({minibatches})"
        case _ as unknown:
            assert_never(unknown)


MESSAGE_LAWS: tuple[Callable[[Evidence], None], ...] = (
    _require_neighbours,
    _require_matches,
    _require_data,
    _require_fifo,
    _require_progress,
)
