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


@dataclass(slots=True)
class _Pattern:
    """A row as numbers, of which the row one cycle later is made."""

    kinds: Sequence[Any]
    """The types of the actions."""
    values: list[_Values]
    """What the fields of the actions hold."""
    shifts: list[_Values]
    """What a cycle adds to them."""

    @classmethod
    def of(cls, row: Sequence[Action], schedule: Schedule, cycle: int) -> "_Pattern":
        values, shifts = [], []
        microbatches = cycle * schedule.microbatches
        for action in row:
            versions = microbatches // schedule.guarantees.microbatches_per_update[action.stage]
            names = [field.name for field in fields(action)]
            by = {"microbatch": microbatches, "version": versions, "gradient_version": versions}
            values.append(tuple([getattr(action, name) for name in names]))
            shifts.append(tuple([by.get(name, 0) for name in names]))
        return cls(tuple(map(type, row)), values, shifts)

    def advance(self) -> tuple[Action, ...]:
        """The row one cycle later, of which this is the pattern from now on."""
        self.values = [tuple(map(add, *pair)) for pair in zip(self.values, self.shifts, strict=True)]
        return tuple([kind(*values) for kind, values in zip(self.kinds, self.values, strict=True)])


@dataclass(slots=True)
class _LastStep:
    """The last step at one place of the cycle."""

    minibatch: int
    row: tuple[Action, ...]
    pattern: _Pattern | None = None
    """Made of the row when the step one cycle later is asked for."""
    repeats: bool = False
    """Whether the step did what the one before it did, a cycle later."""


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

    def row(self, minibatch: int) -> tuple[Action, ...]:
        """``schedule.row(rank, Step(minibatch))``. It takes least time where the last call was for the step before."""
        last = self._last.get(minibatch % self._cycle)
        follows = last is not None and last.minibatch == minibatch - self._cycle
        shifted: tuple[Action, ...] = ()
        if last is not None and follows:
            last.pattern = last.pattern or _Pattern.of(last.row, self._schedule, self._cycle)
            shifted = last.pattern.advance()
            if last.repeats:
                last.minibatch, last.row = minibatch, shifted
                return shifted
        made = _LastStep(minibatch, self._schedule.row(self._rank, Step(minibatch)))
        alike = self._schedule.steps_alike and made.row == shifted
        made.repeats = follows and alike and minibatch - self._cycle >= self._full
        self._last[minibatch % self._cycle] = made
        return made.row
