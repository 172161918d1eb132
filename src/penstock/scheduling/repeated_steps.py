"""The rows of one rank, step after step, each made from an earlier one where the steps repeat.

In a schedule of Penstock the replicas take their turns again after a few steps, a cycle. A step does what the step one
cycle before did, for later microbatches and versions, as soon as the pipe is full. Steps before that read version 0 in
place of older ones and have no backwards of earlier steps, so they differ from what comes one cycle later.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from math import lcm
from operator import add
from typing import Any

from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Step
from penstock.scheduling.schedules import Schedule

_Values = tuple[int, ...]
"""What the fields of an action hold, in their order."""


@dataclass(slots=True)
class _LastStep:
    """The last step at one place of the cycle, as numbers, of which the row one cycle later is made."""

    minibatch: int
    kinds: Sequence[Any]
    """The types of its actions."""
    values: list[_Values]
    """By action."""
    shifts: list[_Values]
    """What a cycle adds to them."""
    repeats: bool
    """Whether the step did what the one before it did, a cycle later."""

    @classmethod
    def of(cls, minibatch: int, row: Sequence[Action], schedule: Schedule, cycle: int, repeats: bool) -> "_LastStep":
        """The step `minibatch` with these actions. `cycle`: how many steps later the replicas take their turns again;
        its microbatches are later, and the versions that each stage makes of them.
        """
        values, shifts = [], []
        microbatches = cycle * schedule.microbatches
        for action in row:
            versions = microbatches // schedule.guarantees.microbatches_per_update[action.stage]
            names = [field.name for field in fields(action)]
            by = {"microbatch": microbatches, "version": versions, "gradient_version": versions}
            values.append(tuple([getattr(action, name) for name in names]))
            shifts.append(tuple([by.get(name, 0) for name in names]))
        return cls(minibatch, tuple(map(type, row)), values, shifts, repeats)

    def advance(self, minibatch: int) -> tuple[Action, ...]:
        """The row of `minibatch`, one cycle later, which is the last step from now on."""
        self.minibatch = minibatch
        self.values = [tuple(map(add, *pair)) for pair in zip(self.values, self.shifts, strict=True)]
        return tuple([kind(*values) for kind, values in zip(self.kinds, self.values, strict=True)])


class RepeatedSteps:
    """The rows of `rank` in the steps of a run of `schedule`."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule, self._rank = schedule, rank
        self._cycle = lcm(*map(schedule.placement.stride, range(schedule.stages)))
        # Twice the most microbatches that are in flight between the first rank and the last one.
        self._full = -(-2 * max(schedule.ranks, schedule.stages) // schedule.microbatches)
        """The steps that fill the pipe. Some of them may look alike, and what comes after them does not."""
        self._last: dict[int, _LastStep] = {}
        """By place in the cycle."""
        self._first: tuple[Action, ...] | None = None
        """The row of step 0, which begins each run."""

    def row(self, minibatch: int) -> tuple[Action, ...]:
        """``schedule.row(rank, Step(minibatch))``. It takes least time where the last call was for the step before."""
        if minibatch == 0 and self._first is not None:
            return self._first
        place, before, shifted = minibatch % self._cycle, minibatch - self._cycle, None
        last = self._last.get(place)
        if last is not None and last.minibatch == before:
            shifted = last.advance(minibatch)
            if last.repeats:
                return shifted
        row = self._schedule.row(self._rank, Step(minibatch))
        repeats = row == shifted and before >= self._full and self._schedule.steps_alike
        self._last[place] = _LastStep.of(minibatch, row, self._schedule, self._cycle, repeats)
        if minibatch == 0:
            self._first = row
        return row
