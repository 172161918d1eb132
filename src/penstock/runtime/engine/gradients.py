"""The gradients of a rank's stages, from their last backward for an update to what the update steps with.

First a rank has those of its own microbatches; then, for weights that stages share, the sums over these stages; then
the sums over the replicas of the stage; and last the mean, where each microbatch had weight one.

Laws of this file:
  1. Sums are taken in the order of the stages and of the replicas: the same bits everywhere.
  2. Gradients of several updates may be alive at once; none is left with the weights, since those of the next update
     may be taken at the same version.
  3. What an update steps with is changed in place, so nobody else holds it: a sum over stages is a new tensor, since
     the gradients that it is taken of may be on their way to another stage, or be its sum as well.
"""

from collections.abc import Mapping
from functools import reduce

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.engine.local_stages import LocalStage
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.shards import part_of
from penstock.runtime.transport.transport import Message
from penstock.scheduling.schedules import Schedule
from penstock.training.tensor_lists import divide

__all__ = ["Gradients"]


class Gradients:
    """Of the `stages` that `rank` holds under `schedule`. Updates are named by stage and version."""

    def __init__(self, rank: int, schedule: Schedule, stages: Mapping[int, LocalStage]) -> None:
        self._rank, self._schedule, self._stages = rank, schedule, stages
        self._whole: dict[tuple[int, int], dict[str, Tensor]] = {}
        """This rank's own gradients for an update, once its last backward for it is done."""
        self._lasts: dict[int, tuple[int, int | None]] = {}
        """By stage: the update that was asked for last, and the last microbatch that this rank takes for it."""
        self._tied: dict[tuple[int, int, int], Mapping[str, Tensor | None]] = {}
        """What a stage (first) has got from another one (second) for an update to a version (third)."""
        self._sums: dict[tuple[int, int], dict[str, Tensor]] = {}
        """With those of the other stages and replicas."""
        self._means: dict[tuple[int, int], dict[str, Tensor]] = {}

    def prepare(self, stage: int, microbatch: int, version: int) -> int | None:
        """Before a backward at `version`, or its weight part: if it is an update's last one, that update's version.

        The sums over replicas then begin while it runs.
        """
        update = microbatch // self._schedule.guarantees.microbatches_per_update[stage] + 1
        known, last = self._lasts.get(stage, (0, None))
        if known != update:
            last = self._schedule.last_microbatch(self._rank, stage, update)
            self._lasts[stage] = update, last
        if microbatch != last:
            return None
        held = self._stages[stage]
        # A late update with tied weights sums after backwards of the next one, which not all replicas have had then.
        if held.reducer is not None and not (held.ties and stage in self._schedule.deferred):
            held.reducer.arm(update, held.weights.leaves(version))
        return update

    def take(self, stage: int, update: int, version: int) -> None:
        """Takes those for `update` from the weights of `version`."""
        self._whole[stage, update] = self._stages[stage].weights.take_gradients(version)

    def tied(self, stage: int, update: int, target: int) -> Message:
        """What `stage` sends `target` of the weights that both use."""
        own = self._whole.get((stage, update), {})
        return tuple(own.get(name) for name in self._stages[stage].ties[target])

    def add_tied(self, stage: int, update: int, source: int, message: Message) -> None:
        """What `stage` has got from `source`."""
        self._tied[stage, source, update] = dict(zip(self._stages[stage].ties[source], message, strict=True))

    def start_reduce(self, stage: int, update: int) -> Reducer:
        """Gives away this rank's part of the sums over replicas."""
        reducer = self._stages[stage].reducer
        assert reducer is not None
        if (stage, update) not in self._sums:
            self._sums[stage, update] = self._over_stages(stage, update)
            reducer.start(update, self._sums[stage, update])
        return reducer

    def began(self, stage: int, update: int) -> Timestamp | None:
        """When the first gradients left for the sums over replicas; None if none have."""
        reducer = self._stages[stage].reducer
        assert reducer is not None
        return reducer.began(update)

    def reduce(self, stage: int, update: int) -> None:
        """Waits for the sums over replicas."""
        self._sums[stage, update] = self.start_reduce(stage, update).finish(update)

    def counted(self, stage: int, update: int) -> dict[str, Tensor] | None:
        """The sums that the norm of `stage` is taken of, where they are whole before the others: all but those of
        weights that a stage before it shares, whose gradients come later. None if all of them are there.
        """
        ties = self._stages[stage].ties
        if stage not in self._schedule.deferred or not any(partner < stage for partner in ties):
            return None
        own = self._whole.get((stage, update), {})
        sums = {}
        for name in self._stages[stage].weights.parameters:
            partners = [partner for partner, names in ties.items() if name in names]
            if all(partner > stage for partner in partners):
                parts = [own, *(self._tied[stage, partner, update] for partner in sorted(partners))]
                if gradients := [gradient for part in parts if (gradient := part.get(name)) is not None]:
                    sums[name] = reduce(torch.add, gradients)
        return sums

    def mean(self, stage: int, update: int, count: int, scale: float | None = None) -> dict[str, Tensor]:
        """The sums divided by `count`, and by the `scale` of the losses."""
        if (stage, update) not in self._means:
            sums = self._sums.pop((stage, update), None)
            if sums is None:
                sums = self._over_stages(stage, update)
            for number in (count, 1.0 if scale is None else scale):
                if number != 1:
                    divide([_memory(gradient) for gradient in sums.values()], number)
            self._means[stage, update] = sums
        return self._means[stage, update]

    def forget(self, stage: int, update: int) -> None:
        """The update is made."""
        self._means.pop((stage, update), None)
        self._whole.pop((stage, update), None)

    def _over_stages(self, stage: int, update: int) -> dict[str, Tensor]:
        """This rank's own gradients, with those of tied weights summed over the stages that share them."""
        own, ties = self._whole.get((stage, update), {}), self._stages[stage].ties
        parts: dict[int, Mapping[str, Tensor | None]] = {stage: own}
        for partner, names in ties.items():
            if partner in self._stages and (stage, partner, update) not in self._tied:
                # Both are on this rank and the other one updates later, when the gradients here will be forgotten.
                self._tied[partner, stage, update] = {name: own.get(name) for name in names}
                self._tied[stage, partner, update] = self._whole.get((partner, update), {})
            parts[partner] = self._tied.pop((stage, partner, update))
        sums = dict(own)
        for name in {name for names in ties.values() for name in names}:
            sharing = sorted(s for s in parts if s == stage or name in ties[s])
            gradients = [gradient for s in sharing if (gradient := parts[s].get(name)) is not None]
            if gradients:
                sums[name] = reduce(torch.add, gradients) if len(gradients) > 1 else gradients[0].clone()
        return sums


def _memory(gradient: Tensor) -> Tensor:
    """What is changed in place: of a `DTensor` this process's part. A change of another view of a sparse tensor may not
    reach it.
    """
    return part_of(gradient) if isinstance(gradient, DTensor) else gradient
