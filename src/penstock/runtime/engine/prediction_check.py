"""Compares the plan's prediction with the measured steps, and logs the difference once.

Every process measures the same steps, and after the last of them all exchange the results. The step of rank 0 is the
pipeline's: it begins first, and under a flush it ends last. Time between steps (reading data, logging) is neither
measured nor predicted.

A warning names a stage whose work differs from its prediction by more than that of the others does. Where all are off
alike, the machine is busy with something else (or with more processes than it has cores), which is no mistake of the
plan, so that a line at level INFO says it.

In a single process the ranks take turns. Its steps are compared with the work of all ranks together, and there is no
bubble to compare.
"""

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median, median_low

from penstock.doctor.stragglers import stage_seconds
from penstock.runtime.batches.results import ActionTiming
from penstock.runtime.devices.timestamps import Timer, Timestamp
from penstock.runtime.engine.step_records import measured_spans
from penstock.runtime.transport.worlds import World
from penstock.timelines.timelines import Timeline
from penstock.values.plans import Plan
from penstock.values.quantities import seconds_text

WARM_UP_STEPS = 3
"""Steps that are not measured, while libraries load, memory is allocated and connections are made."""
MEASURED_STEPS = 8
TOLERANCE = 0.2
"""Errors above it are explained."""
DEVIATION = 1.5
"""A stage that is this many times as far from its prediction as the others is named."""


@dataclass(frozen=True, slots=True)
class _Comparison:
    predicted_seconds: float
    measured_seconds: float
    predicted_bubble: float
    measured_bubble: float | None
    """None in a single process, whose ranks take turns."""
    in_turn: int = 1
    """The number of ranks that take turns in a single process."""

    stages: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    """By stage, the seconds of one microbatch that were predicted and measured; empty if none were predicted."""

    @property
    def error(self) -> float:
        """0.1: a step takes 10 % longer than predicted."""
        return self.measured_seconds / self.predicted_seconds - 1

    @property
    def deviating(self) -> int | None:
        """The stage that explains the error; None if there is little to explain, or no stage stands out."""
        factors = {stage: measured / predicted for stage, (predicted, measured) in self.stages.items() if predicted}
        if abs(self.error) <= TOLERANCE or len(factors) < 2:
            return None
        sign = 1 if self.error > 0 else -1
        stage = max(factors, key=lambda each: sign * factors[each])
        usual = median_low(factor for each, factor in factors.items() if each != stage)
        return stage if (factors[stage] / usual) ** sign > DEVIATION else None

    def __str__(self) -> str:
        expected = seconds_text(self.predicted_seconds)
        turns = f" for the {self.in_turn} ranks in turn" if self.in_turn > 1 else ""
        text = (
            f"a step takes {seconds_text(self.measured_seconds)} and {expected} was predicted{turns} "
            f"({self.measured_seconds / self.predicted_seconds:.2f} times"
        )
        if self.measured_bubble is not None:
            text += f"; bubble {self.measured_bubble:.1%}, predicted {self.predicted_bubble:.1%}"
        text += ")"
        if abs(self.error) > TOLERANCE:
            text += f". {self._explain()}; Pipeline.timeline().explain() says where the time goes"
        return text

    def _explain(self) -> str:
        stage = self.deviating
        if stage is not None:
            predicted, measured = self.stages[stage]
            return (
                f"Stage {stage} takes {seconds_text(measured)} for a microbatch and {seconds_text(predicted)} was "
                f"predicted ({measured / predicted:.2f} times), which is further off than the other stages: look at "
                "what its layers do, or profile the model again and plan with that"
            )
        alike = "No stage stands out" if self.stages else "The plan does not say what it predicts for its stages"
        return (
            f"{alike}: if each process has a core and no other program runs, profile and probe the machine as the "
            "training uses it (as many processes and threads) and plan again"
        )


class PredictionCheck:
    """Measures the steps of one process until there are enough, and compares them with those of all processes."""

    def __init__(self, plan: Plan, skipped: int, world: World, timer: Timer) -> None:
        self._plan = plan
        self._timer = timer
        self._skipped = skipped
        """The first steps of a run, which are not measured: the pipeline fills."""
        self._world = world
        self._steps: list[tuple[Timestamp, Timestamp, Sequence[ActionTiming]]] = []
        self._comparison: _Comparison | None = None

    def wants(self, step: int, samples: Iterable[int]) -> bool:
        """Whether to `add` step `step` of a run, whose microbatches have `samples` each.

        Only microbatches of the size that the prediction is for count.
        """
        size = self._plan.microbatch_size
        if self._comparison is not None or step < self._skipped:
            return False
        return size is None or all(number == size for number in samples)

    def add(self, start: Timestamp, stop: Timestamp, timings: Sequence[ActionTiming]) -> None:
        """Adds a step from `start` to `stop`, with the actions of this process in it."""
        self._steps.append((start, stop, timings))

    def compare(self) -> _Comparison | None:
        """The comparison, once enough is measured; until then None. Rank 0 logs it the first time. Collective then: the
        processes come to it at the end of the same step.
        """
        if len(self._steps) == MEASURED_STEPS:
            steps = self._measure()
            self._steps = []
            self._comparison = self._conclude(self._world.gather(steps, "comparing steps with their prediction"))
            if self._world.rank == 0:
                level = logging.INFO if self._comparison.deviating is None else logging.WARNING
                logging.getLogger("penstock").log(level, "%s", self._comparison)
        return self._comparison

    def _measure(self) -> list[float]:
        """What this process measured: medians of the seconds of a step and of the busy seconds of all its ranks, and
        then each stage with its seconds of one microbatch.
        """
        seconds = median(self._timer.seconds(start, stop) for start, stop, _ in self._steps)
        busy = median(self._busy_seconds(start, timings) for start, _, timings in self._steps)
        spans = [span for start, _, timings in self._steps for span in measured_spans(timings, self._timer, start)]
        work = stage_seconds(Timeline(tuple(spans), self._plan.ranks))
        return [seconds, busy, *(number for pair in work.items() for number in pair)]

    def _busy_seconds(self, start: Timestamp, timings: Iterable[ActionTiming]) -> float:
        timeline = Timeline(tuple(measured_spans(timings, self._timer, start)), self._plan.ranks)
        return sum(timeline.busy_seconds(rank) for rank in range(self._plan.ranks))

    def _conclude(self, measurements: Sequence[Sequence[float]]) -> _Comparison:
        predicted, ranks = self._plan.predicted, self._plan.ranks
        assert predicted is not None
        measured_seconds, busy = measurements[0][0], sum(measured[1] for measured in measurements)
        stages = _by_stage(predicted.stage_seconds, measurements)
        seconds, in_turn = predicted.minibatch_seconds, 1
        bubble: float | None = max(0.0, 1 - busy / (ranks * measured_seconds))
        if len(measurements) == 1:
            seconds, in_turn, bubble = seconds * ranks * (1 - predicted.bubble), ranks, None
        return _Comparison(seconds, measured_seconds, predicted.bubble, bubble, in_turn, stages=stages)


def _by_stage(predicted: Sequence[float], measurements: Sequence[Sequence[float]]) -> Mapping[int, tuple[float, float]]:
    """By stage, the predicted seconds of one microbatch, and those that its slowest replica measured."""
    slowest: dict[int, float] = {}
    for measured in measurements:
        for stage, seconds in zip(map(int, measured[2::2]), measured[3::2], strict=True):
            slowest[stage] = max(seconds, slowest.get(stage, 0.0))
    return {stage: (predicted[stage], seconds) for stage, seconds in sorted(slowest.items())} if predicted else {}


def make_prediction_check(plan: Plan, flushes: bool, world: World, timer: Timer) -> PredictionCheck | None:
    """The check of the prediction of `plan`; None if it has none."""
    predicted = plan.predicted
    if predicted is None or not 0 < predicted.minibatch_seconds * (1 - predicted.bubble) < math.inf:
        return None
    filling = 0 if flushes else -(-2 * len(plan.stages) // plan.microbatches)
    return PredictionCheck(plan, max(WARM_UP_STEPS, filling), world, timer)
