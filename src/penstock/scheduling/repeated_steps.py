"""The rows of one rank, step after step, each made from an earlier one where the steps repeat.

In a schedule of Penstock the replicas take their turns again after a few steps, a cycle. A step does what the step one
cycle before did, for later microbatches and versions, as soon as the pipe is full. Steps before that read version 0 in
place of older ones and have no backwards of earlier steps, so they differ from what comes one cycle later.
"""

from dataclasses import dataclass, fields
from math import lcm
from operator import add
from typing import Any

from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Step
from penstock.scheduling.schedules import Schedule

_Values = tuple[int, ...]


@dataclass(slots=True)
class _LastStep:
    """The last step at one place of the cycle."""

    minibatch: int
    row: tuple[Action, ...]
    kinds: tuple[Any, ...]
    """The types of its actions."""
    values: list[_Values]
    """What the fields of its actions hold."""
    shifts: list[_Values]
    """What a cycle adds to each field."""
    repeats: bool = False
    """Whether the step does what the one before it did, a cycle later."""


class RepeatedSteps:
    """The rows of `rank` in the steps of a run of `schedule`."""

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule, self._rank = schedule, rank
        placement = schedule.placement
        self._cycle = lcm(*map(placement.stride, range(schedule.stages)))
        self._last: dict[int, _LastStep] = {}
        """By place in the cycle."""

    def row(self, minibatch: int) -> tuple[Action, ...]:
        """``schedule.row(rank, Step(minibatch))``. It takes least time where the last call was for the step before."""
        last = self._last.get(minibatch % self._cycle)
        if last is None or last.minibatch != minibatch - self._cycle:
            self._last[minibatch % self._cycle] = last = self._read(minibatch)
            return last.row
        values = [tuple(map(add, *pair)) for pair in zip(last.values, last.shifts, strict=True)]
        row = tuple([kind(*own) for kind, own in zip(last.kinds, values, strict=True)])
        if last.repeats:
            last.minibatch, last.row, last.values = minibatch, row, values
            return row
        made = self._last[minibatch % self._cycle] = self._read(minibatch)
        made.repeats = self._schedule.steps_alike and made.row == row
        return made.row

    def _read(self, minibatch: int) -> _LastStep:
        row = self._schedule.row(self._rank, Step(minibatch))
        kinds = tuple(map(type, row))
        names = {kind: [field.name for field in fields(kind)] for kind in kinds}
        values = [tuple([getattr(action, name) for name in names[type(action)]]) for action in row]
        microbatches = self._cycle * self._schedule.microbatches
        shifts = []
        for action in row:
            versions = microbatches // self._schedule.guarantees.microbatches_per_update[action.stage]
            by = {"microbatch": microbatches, "version": versions, "gradient_version": versions}
            shifts.append(tuple([by.get(name, 0) for name in names[type(action)]]))
        return _LastStep(minibatch, row, kinds, values, shifts)
