"""Skip connections past stages: which values go directly from stage to stage, and which the stages between relay.

Relayed, a value crosses every cut on its way as part of the message that crosses anyway, and each stage between holds
it until the backward. Directly it crosses once, in a message more each way. In a hierarchy of links the direct way is
never slower than the slowest link of the other.

Rules of this file:
  1. What is chosen depends on the schedule and on what the values are, so that every rank chooses alike.
  2. A skip that would violate an invariant of the verifier is left out: where stages of one rank take turns
     (`interleaved`) a queue between two ranks might not keep its order, and gradients of shared weights and norms use
     the queues, too.
  3. Where a rank holds one stage there is nothing to try: a queue has the messages of one pair of stages, which both
     handle in the order of the microbatches, and no rank waits for more than before, since what skips stages leaves
     together with what reaches them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, get_args

from penstock.errors import PlanError, ScheduleError
from penstock.scheduling.placements import Skip
from penstock.scheduling.queues import find_places
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.verification.verifier import verify

__all__ = ["MESSAGE_BYTES", "SkipChoice", "choose_skips"]

MESSAGE_BYTES = 1e5
"""What a message costs more than its bytes, in bytes: 100 us at 1 GB/s. Measured: an empty message takes 110 to 120 us
from process to process over Gloo on one host, and networks of 10 Gbit/s pass 1.25 GB/s at best."""

SkipChoice: TypeAlias = Literal["auto", "relayed", "direct"]
"""``auto``: directly where it costs less. ``direct``: wherever the invariants of the schedule allow it."""


def choose_skips(schedule: Schedule, hops: Mapping[Skip, float], choice: SkipChoice = "auto") -> Schedule:
    """`schedule` with those of the skips `hops` that are taken; their bytes are of a microbatch, one way.

    `PlanError` for a choice that there is not.
    """
    if choice not in get_args(SkipChoice):
        raise PlanError(
            f"skips={choice!r}: expected 'auto' (directly where that costs less), 'relayed' or 'direct'. Leave it out"
        )
    placement = schedule.placement
    if choice == "relayed" or (placement.split and not placement.equal(range(schedule.stages))):
        # Where parts of microbatches are joined on the way and cut again, memory lies otherwise than without, and
        # layers that draw random numbers in its order would draw others.
        return schedule
    wanted = [hop for hop in sorted(hops) if choice == "direct" or _saves(schedule, hop, hops[hop])]
    if schedule.stages_per_rank > 1:
        # Where a queue has no place for all, those that save the most come first.
        wanted.sort(key=lambda hop: (-hops[hop] * max(1, _passed(schedule, hop)), hop))
        wanted = sorted(find_places(_shortened(schedule), wanted))
    if schedule.ties or schedule.norms:
        return _added(schedule, wanted)
    return replace(schedule, skips=tuple(wanted))


def _saves(schedule: Schedule, skip: Skip, size_bytes: float) -> bool:
    """Whether fewer bytes pass directly, by enough to be worth one more message."""
    here, there = skip
    sent = schedule.placement.stages[here] != schedule.placement.stages[there]
    return _passed(schedule, skip) * size_bytes > sent * MESSAGE_BYTES


def _passed(schedule: Schedule, skip: Skip) -> int:
    """How many times less a value is sent that takes `skip`."""
    stages = schedule.placement.stages
    relayed = sum(stages[stage] != stages[stage + 1] for stage in range(*skip))
    return relayed - (stages[skip[0]] != stages[skip[1]])


def _shortened(schedule: Schedule) -> Schedule:
    """`schedule` with microbatches for two rounds of the ranks, if it has more of them and flushes."""
    rounds = schedule.microbatches // schedule.ranks
    if not schedule.flushes or rounds <= 2 or schedule.microbatches % schedule.ranks:
        return schedule
    return replace(schedule, microbatches=2 * schedule.ranks)


def _added(schedule: Schedule, skips: Sequence[Skip]) -> Schedule:
    """`schedule` with as many more of `skips` as its laws allow: all, or else those of one half and then the other."""
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
