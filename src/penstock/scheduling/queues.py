"""Queues between ranks: finds the skips that fit into them, without a verification of the whole schedule.

Messages from one rank to another arrive in the order of their sends, for all stages together. Where ranks hold several
stages, the messages of two pairs of stages may share a queue; they fit if they are sent and received in the same order.
Whether they fit depends on two pairs at a time only, so skips can be added one by one.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from penstock.scheduling.actions import Forward, InputGradients
from penstock.scheduling.placements import Skip, StageLayout
from penstock.scheduling.schedules import Schedule

_Moment: TypeAlias = tuple[int, int]
"""The index of an action in its rank's row, and the position among the messages of that action."""
_Stream: TypeAlias = dict[tuple[int, int], list[tuple[_Moment, _Moment]]]
"""By edge, the messages of one pair of stages: when each is sent and when received."""


def find_places(schedule: Schedule, skips: Iterable[Skip]) -> tuple[Skip, ...]:
    """The `skips` that fit into the queues of a step of `schedule`, beside all messages of neighbors.

    They are tried in the order given: each must fit together with those before it.
    """
    if schedule.definition.layout is StageLayout.V_SHAPE:  # there, receives follow the sends in any order
        return tuple(skips)
    queues = _Queues(schedule)
    for stage in range(schedule.stages - 1):
        queues.add((stage, stage + 1))
    return tuple(skip for skip in skips if queues.add(skip))


@dataclass(slots=True)
class _Queues:
    """Holds the messages of the pairs of stages that were added."""

    schedule: Schedule
    places: dict[tuple[bool, int, int], int] = field(init=False)
    """The index in its rank's row, by forward (True) or backward, stage and microbatch."""
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
        """The messages of forwards and of backwards, which go opposite ways and share no queue."""
        placement, distance = self.schedule.placement, there - here
        for forward in (True, False):
            source, target = (here, there) if forward else (there, here)
            stream: _Stream = {}
            for microbatch in range(self.schedule.microbatches):
                edge = placement.rank_of(source, microbatch), placement.rank_of(target, microbatch)
                if edge[0] != edge[1]:
                    # One action sends to its neighbor first and receives from its neighbor last.
                    sent = self.places[forward, source, microbatch], distance
                    received = self.places[forward, target, microbatch], -distance
                    stream.setdefault(edge, []).append((sent, received))
            yield stream


def _fit(messages: list[tuple[_Moment, _Moment]], others: list[tuple[_Moment, _Moment]]) -> bool:
    merged = sorted((*messages, *others))
    return all(one[1] < other[1] for one, other in pairwise(merged))
