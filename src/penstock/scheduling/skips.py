"""Skip connections past stages: which values are sent directly, and which the stages between relay.

A relayed value crosses every cut on its way inside the message that crosses there anyway, and each stage between keeps
it until its backward. A direct value is sent once, in one more message each way. In a hierarchy of links the direct way
is never slower than the slowest link of the relayed way.

Rules of this file:
  1. The choice depends only on the schedule and the values, so that every rank makes the same choice.
  2. A skip that would violate an invariant of the verifier is left out. With several stages on a rank (`interleaved`)
     the messages of a queue might be sent and received in different orders, and the gradients of shared weights and the
     norms use the same queues.
  3. With one stage on each rank every skip fits. A queue then has the messages of one pair of stages, and both handle
     them in the order of the microbatches. No rank waits longer than before, since a direct value is sent together with
     the message to the next stage.

Messages from one rank to another arrive in the order of their sends, for all stages together. The messages of two pairs
of stages share a queue if they are sent and received in the same order. Whether they fit depends on two pairs at a time
only, so skips can be added one by one, without a verification of the whole schedule.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TypeAlias

from penstock.errors import ScheduleError
from penstock.scheduling.actions import Forward, InputGradients
from penstock.scheduling.placements import Skip
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify

MESSAGE_BYTES = 1e5
"""The fixed cost of a message, in bytes: 100 us at 1 GB/s. Measured: an empty message takes 110 to 120 us from process
to process over Gloo on one host. A network of 10 Gbit/s carries 1.25 GB/s at best."""


def choose_skips(schedule: Schedule, hops: Mapping[Skip, float]) -> Schedule:
    """`schedule` with those of `hops` that cost less than to relay. `hops`: bytes of a microbatch, one way, by skip."""
    placement = schedule.placement
    if placement.split and not placement.equal(range(schedule.stages)):
        # If replicas join and cut microbatches on the way, relayed values have another memory layout than direct ones,
        # and layers that draw random numbers in the order of memory would draw others.
        return schedule
    wanted = [hop for hop in sorted(hops) if _saves(schedule, hop, hops[hop])]
    if schedule.stages_per_rank > 1:
        # Not all skips may fit into a queue, so those that save the most are tried first.
        wanted.sort(key=lambda hop: (-hops[hop] * max(1, _passed(schedule, hop)), hop))
        wanted = sorted(find_places(_shortened(schedule), wanted))
    if schedule.ties or schedule.norms:
        return _added(schedule, wanted)
    return schedule if tuple(wanted) == schedule.skips else replace(schedule, skips=tuple(wanted))


def _saves(schedule: Schedule, skip: Skip, size_bytes: float) -> bool:
    """Whether the direct way saves enough bytes to be worth one more message."""
    here, there = skip
    sent = schedule.placement.stages[here] != schedule.placement.stages[there]
    return _passed(schedule, skip) * size_bytes > sent * MESSAGE_BYTES


def _passed(schedule: Schedule, skip: Skip) -> int:
    """How many sends of a value `skip` saves."""
    stages = schedule.placement.stages
    relayed = sum(stages[stage] != stages[stage + 1] for stage in range(*skip))
    return relayed - (stages[skip[0]] != stages[skip[1]])


def _shortened(schedule: Schedule) -> Schedule:
    """`schedule` with two microbatches per rank, if it flushes and has a greater multiple of the ranks.

    Programs are written for a number of microbatches of their own.
    """
    rounds = schedule.microbatches // schedule.ranks
    written = schedule.definition.programs
    if written or not schedule.flushes or rounds <= 2 or schedule.microbatches % schedule.ranks:
        return schedule
    return replace(schedule, microbatches=2 * schedule.ranks)


def _added(schedule: Schedule, skips: Sequence[Skip]) -> Schedule:
    """`schedule` with the `skips` that its invariants allow: all, or else those of each half in turn."""
    if not skips:
        return schedule
    made = replace(schedule, skips=tuple(sorted({*schedule.skips, *skips})))
    try:
        verify(made)
    except ScheduleError:
        if len(skips) == 1:
            return schedule
        half = len(skips) // 2
        return _added(_added(schedule, skips[:half]), skips[half:])
    return made


_Moment: TypeAlias = tuple[int, int]
"""The index of an action in its rank's row, and the position among the messages of that action."""
_Stream: TypeAlias = dict[tuple[int, int], list[tuple[_Moment, _Moment]]]
"""By edge, the messages of one pair of stages: when each is sent and when received."""


def find_places(schedule: Schedule, skips: Iterable[Skip]) -> tuple[Skip, ...]:
    """The `skips` that fit into the queues of a step of `schedule`, beside all messages of neighbors.

    They are tried in the order given: each must fit together with those before it.
    """
    if schedule.follows_sends:
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
