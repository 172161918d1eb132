"""The last steps of this process: when it did what in them, and how fast they were.

A step lasts from its start to the start of the next step, so that the time between steps (loading data, logging)
counts. Where something else was done in between (an evaluation, a drain), the step is left out. If no two steps follow
each other, a step lasts from its start to the end of its last action.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import attrgetter

from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import ActionTiming
from penstock.runtime.devices.timestamps import Timer, Timestamp
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline

_SAMPLES = attrgetter("samples")
KEPT_MINIBATCHES = 8
"""The last minibatches whose timings are kept."""


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """Records what this process did in one step, or with no samples in one drain."""

    start: Timestamp
    timings: Sequence[ActionTiming]
    samples: int = 0
    items: float | None = None
    """The number of items that ``loss_weight`` counted in the minibatch; None if this process counts none."""
    follows: bool = False
    """Whether the process did nothing else since the step before."""

    @classmethod
    def of(
        cls, start: Timestamp, timings: Sequence[ActionTiming], microbatches: Sequence[Microbatch], follows: bool
    ) -> "StepRecord":
        counted = microbatches[0].weigh is not None
        samples = sum(map(_SAMPLES, microbatches))
        return cls(start, timings, samples, microbatches[0].total if counted else None, follows)


@dataclass(frozen=True, slots=True)
class Speed:
    """The measurement of some steps of this process."""

    steps: int
    seconds: float
    """The sum over these steps; so are `samples` and `items`."""
    samples: int
    items: float | None
    """None if this process does not count them."""
    idle_share: float | None
    """The share of the time without forward, backward or update; None if several ranks take turns in this process."""


def measure_speed(records: Iterable[StepRecord], timer: Timer, ranks: Sequence[int]) -> Speed | None:
    """The speed of `records` whose work is done, as `timer` has measured it; None if there are none. `ranks`: of this
    process.
    """
    ended = [record for record in records if all(timer.passed(stop) for *_, stop in record.timings)]
    following = ((first, second) for first, second in pairwise(ended) if second.follows)
    lasting = [(first, timer.seconds(first.start, second.start)) for first, second in following]
    lasting = lasting or [(record, _extent(record, timer)) for record in ended if record.samples]
    seconds = sum(taken for _, taken in lasting)
    if seconds <= 0:
        return None
    counts = [record.items for record, _ in lasting if record.items is not None]
    idle = None
    if len(ranks) == 1:
        busy = sum(_busy_seconds(record, timer, ranks[0] + 1) for record, _ in lasting)
        idle = max(0.0, 1 - busy / seconds)
    return Speed(
        steps=len(lasting),
        seconds=seconds,
        samples=sum(record.samples for record, _ in lasting),
        items=sum(counts) if len(counts) == len(lasting) else None,
        idle_share=idle,
    )


def _extent(record: StepRecord, timer: Timer) -> float:
    return max((timer.seconds(record.start, stop) for *_, stop in record.timings), default=0.0)


def _busy_seconds(record: StepRecord, timer: Timer, ranks: int) -> float:
    """The seconds in which the first `ranks` compute, added. Blocks until the device has done the work of `record`."""
    spans = [
        Span(of, str(action), timer.seconds(record.start, start), timer.seconds(record.start, stop))
        for of, action, start, stop in record.timings
    ]
    timeline = Timeline(tuple(spans), ranks)
    return sum(map(timeline.busy_seconds, range(ranks)))
