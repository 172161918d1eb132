"""How a rank spends a step: arithmetic on what the workers recorded.

Every action leaves a span from its start to its stop, by a clock that all processes of a machine share. So a wait for a
message can be divided at the moment when its sender had handed it over: before it the rank waits for its neighbour,
which is the schedule's bubble or the neighbour's own overhead; after it, for the message on its way, or for itself to
wake up. What lies between two spans of a step, and around them, is the time of the code that drives the actions.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from penstock.scheduling import Receive, Send, parse
from penstock.timelines.timelines import Span


@dataclass(frozen=True, slots=True)
class Parts:
    """Seconds of a step of one rank, on average over some steps."""

    forward: float = 0.0
    backward: float = 0.0
    update: float = 0.0
    send: float = 0.0
    neighbour: float = 0.0
    """In receives, until the message has been sent."""
    message: float = 0.0
    """In receives, from then on."""
    other: float = 0.0
    """In all other actions."""
    between: float = 0.0
    """Between the actions of a step."""
    around: float = 0.0
    """Before the first and after the last of them."""

    @property
    def total(self) -> float:
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


def parts_of(spans: Iterable[Span], rank: int, steps: int, step_seconds: float) -> Parts:
    """What `rank` did in `steps` steps, of `step_seconds` each. `spans`: of all ranks, in these steps only.

    `ValueError` if the rank did not do equally much in every step: then spans cannot be assigned to steps.
    """
    spans = list(spans)
    sent = {_key(action): span for span in spans if isinstance(action := parse(span.action), Send)}
    own = sorted((span for span in spans if span.rank == rank), key=lambda span: span.start_seconds)
    if not own or len(own) % steps:
        raise ValueError(f"rank {rank} has {len(own)} spans, which are not equally many in each of {steps} steps")
    seconds = dict.fromkeys((field.name for field in fields(Parts)), 0.0)
    for span in own:
        action = parse(span.action)
        if isinstance(action, Receive):
            # Over messages that were sent in an earlier step nothing was waited for.
            sender = sent.get(_key(action))
            there = span.start_seconds if sender is None else sender.stop_seconds
            neighbour = min(max(there - span.start_seconds, 0.0), span.seconds)
            seconds["neighbour"] += neighbour
            seconds["message"] += span.seconds - neighbour
        else:
            seconds[span.kind if span.kind in ("forward", "backward", "update", "send") else "other"] += span.seconds
    lengths = [_length(own[start : start + len(own) // steps]) for start in range(0, len(own), len(own) // steps)]
    seconds["between"] = sum(lengths) - sum(span.seconds for span in own)
    seconds["around"] = steps * step_seconds - sum(lengths)
    return Parts(**{name: found / steps for name, found in seconds.items()})


def _length(spans: Sequence[Span]) -> float:
    """From the first start to the last stop."""
    return spans[-1].stop_seconds - spans[0].start_seconds


def _key(action: Send | Receive) -> tuple[int, int, int]:
    """What a send and its receive have in common: the stages, and the microbatch."""
    match action:
        case Send(stage, microbatch, target):
            return stage, target, microbatch
        case Receive(stage, microbatch, source):
            return source, stage, microbatch
