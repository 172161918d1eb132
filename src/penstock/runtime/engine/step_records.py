"""The last steps of this process: when it did what in them, how fast they were, and how fast the plan expected them.

A step lasts from its start to the start of the next step, so that the time between steps (loading data, logging)
counts. Where something else was done in between (an evaluation, a drain), the step is left out. If no two steps follow
each other, a step lasts from its start to the end of its last action. A comparison with a prediction uses this length,
since predictions contain no time between steps.
"""

import logging
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import ActionTiming
from penstock.runtime.devices.timestamps import Timer, Timestamp
from penstock.runtime.transport.worlds import World
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.values.plans import Plan
from penstock.values.quantities import seconds_text

KEPT_MINIBATCHES = 8
"""The last minibatches whose timings are kept."""
_WARM_UP_STEPS = 3
"""Steps that are not compared with a prediction, while libraries load, memory is allocated and connections are made."""
_TOLERANCE = 0.2
"""If a prediction is further off, the log says what explains it."""


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
        samples = sum(microbatch.samples for microbatch in microbatches)
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


class PredictionCheck:
    """Compares the prediction of `plan` with `KEPT_MINIBATCHES` steps, once all processes of `world` have made them.

    The step of rank 0 is the pipeline's: it begins first, and under a flush it ends last. `skipped`: the first steps of
    a run, in which the pipeline fills.
    """

    def __init__(self, plan: Plan, skipped: int, world: World, timer: Timer) -> None:
        self._plan, self._skipped, self._world, self._timer = plan, skipped, world, timer
        self.error: float | None = None
        """0.1 if a step takes 10 % longer than predicted; None until it is known."""

    def add(self, records: Collection[StepRecord], steps: int) -> None:
        """Compares the last `records` after the first `steps` of a run, if microbatches have the plan's size. Rank 0
        logs the comparison once. Collective then: the processes come to it at the end of the same step.
        """
        if self.error is not None or steps < self._skipped + KEPT_MINIBATCHES:
            return
        size = self._plan.microbatch_size
        if size is None or {record.samples for record in records} == {size * self._plan.microbatches}:
            measured = self._world.gather(self._measure(records), "comparing steps with their prediction")
            self.error = self._conclude([(seconds, busy) for seconds, busy in measured])

    def _measure(self, records: Collection[StepRecord]) -> list[float]:
        """The median seconds of a step, and the median busy seconds of the ranks of this process together."""
        seconds = median(_extent(record, self._timer) for record in records)
        busy = median(_busy_seconds(record, self._timer, self._plan.ranks) for record in records)
        return [seconds, busy]

    def _conclude(self, measurements: Sequence[tuple[float, float]]) -> float:
        predicted, ranks = self._plan.predicted, self._plan.ranks
        assert predicted is not None
        measured, expected = measurements[0][0], predicted.minibatch_seconds
        bubble = max(0.0, 1 - sum(busy for _, busy in measurements) / (ranks * measured))
        turns, bubbles = "", f"; bubble {bubble:.1%}, predicted {predicted.bubble:.1%}"
        if len(measurements) == 1:
            # The ranks of a single process take turns, so that there is no bubble to compare.
            expected *= ranks * (1 - predicted.bubble)
            turns, bubbles = f" for the {ranks} ranks in turn" if ranks > 1 else "", ""
        error = measured / expected - 1
        advice = ". Pipeline.stragglers() and Pipeline.timeline().explain() say where the time goes"
        if self._world.rank == 0:
            logging.getLogger("penstock").info(
                f"a step takes {seconds_text(measured)} and {seconds_text(expected)} was predicted{turns} "
                f"({measured / expected:.2f} times{bubbles}){advice if abs(error) > _TOLERANCE else ''}"
            )
        return error


def make_prediction_check(plan: Plan, flushes: bool, world: World, timer: Timer) -> PredictionCheck | None:
    """The check of the prediction of `plan`; None if it has none."""
    predicted = plan.predicted
    if predicted is None or not 0 < predicted.minibatch_seconds * (1 - predicted.bubble) < math.inf:
        return None
    filling = 0 if flushes else -(-2 * len(plan.stages) // plan.microbatches)
    return PredictionCheck(plan, max(_WARM_UP_STEPS, filling), world, timer)
