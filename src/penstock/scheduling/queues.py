"""Queues between ranks: which skips find a place in them, worked out pair by pair, which takes no proof of the whole.

Between two ranks messages arrive in the order in which they were sent, whichever stages they are of. Where ranks hold
several stages, the messages of two pairs of stages may share a queue; they fit if the senders and the receivers
come to them in the same order. Fitting is a matter of two pairs at a time, so that skips can be added one by one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from penstock.scheduling.actions import Forward, InputGradients
from penstock.scheduling.placements import Skip, StageLayout
from penstock.scheduling.schedules import Schedule

__all__ = ["find_places"]

_Moment: TypeAlias = tuple[int, int]
"""Place of an action in its rank's row, and the place among the messages of that action."""
_Stream: TypeAlias = dict[tuple[int, int], list[tuple[_Moment, _Moment]]]
"""By edge, the messages of one pair of stages: when each is sent and when received."""


def find_places(schedule: Schedule, skips: Iterable[Skip]) -> tuple[Skip, ...]:
    """Those of `skips` whose messages keep the order of every queue in a step of `schedule`, beside those of neighbours
    and of the ones before them.
    """
    if schedule.definition.layout is StageLayout.V_SHAPE:  # receives there follow the sends, whatever these are
        return tuple(skips)
    queues = _Queues(schedule)
    for stage in range(schedule.stages - 1):
        queues.add((stage, stage + 1))
    return tuple(skip for skip in skips if queues.add(skip))


@dataclass(slots=True)
class _Queues:
    """The messages of the pairs of stages that were added."""

    schedule: Schedule
    places: dict[tuple[bool, int, int], int] = field(init=False)
    """Of the forward (True) or backward of a stage and a microbatch in the row of its rank."""
    taken: dict[tuple[int, int], list[list[tuple[_Moment, _Moment]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places = {}
        for row in self.schedule.step(0):
            for index, action in enumerate(row):
                if isinstance(action, Forward | InputGradients):
                    self.places[isinstance(action, Forward), action.stage, action.microbatch] = index

    def add(self, pair: tuple[int, int]) -> bool:
        """Adds the messages of `pair`, both ways; False if they do not fit."""
        streams = list(self._streams(*pair))
        for stream in streams:
            for edge, messages in stream.items():
                if not all(_fit(messages, others) for others in self.taken.get(edge, ())):
                    return False
        for stream in streams:
            for edge, messages in stream.items():
                self.taken.setdefault(edge, []).append(messages)
        return True

    def _streams(self, here: int, there: int) -> Iterator[_Stream]:
        """Forward and backward, which go opposite ways and share no queue."""
        placement, distance = self.schedule.placement, there - here
        for forward in (True, False):
            source, target = (here, there) if forward else (there, here)
            stream: _Stream = {}
            for microbatch in range(self.schedule.microbatches):
                edge = placement.rank_of(source, microbatch), placement.rank_of(target, microbatch)
                if edge[0] != edge[1]:
                    # Of one action, the neighbor's message leaves first and is received last.
                    sent = self.places[forward, source, microbatch], distance
                    received = self.places[forward, target, microbatch], -distance
                    stream.setdefault(edge, []).append((sent, received))
            yield stream


def _fit(messages: list[tuple[_Moment, _Moment]], others: list[tuple[_Moment, _Moment]]) -> bool:
    merged = sorted((*messages, *others))
    return all(one[1] < other[1] for one, other in pairwise(merged))
