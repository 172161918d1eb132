"""The gradients of a rank's stages, from the weight of a loss to the gradients that an update steps with.

A rank first has the gradients of its own microbatches; then, for weights that stages share, the sums over these stages;
then the sums over the replicas of the stage. These are divided by the number of microbatches, where each had weight
one, and by the loss scale; and last they are clipped by their global norm. Where stages exchange norms, an update whose
gradients overflowed is skipped.

Replicas that share the optimizer's state receive the sums of the parameters that they own, and tell each other their
norms. Where the loss is scaled they receive all sums: its scale, by which gradients are divided before their norm is
taken, comes with the norms of another stage.

Laws of this file:
  1. Sums are taken in the order of the stages and of the replicas: the same bits everywhere.
  2. Gradients of several updates may be alive at once. With the weights are those of one update only: they are taken
     when it has all of them.
  3. The gradients of an update are changed in place, so nothing else may hold them: a sum over stages is a new tensor,
     since its summands may be in flight to another stage, or be the sum of that stage as well.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.engine.local_stage import LocalStage
from penstock.runtime.parameters.gradient_buckets import Reducer
from penstock.runtime.parameters.gradient_norms import GradientNorms, divide
from penstock.runtime.parameters.shards import local_shard
from penstock.runtime.transport.transport import Message
from penstock.scheduling.definitions import VersionRule
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals.unimported import is_dtensor
from penstock.training.scaling import LossScaler


class Gradients:
    """Holds the gradients of the `stages` of `rank` under `schedule`. Updates are named by stage and version.

    `norms`: exchanged between stages if the schedule does so. `scaler`: scales the losses; it needs norms.
    """

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, LocalStage],
        norms: GradientNorms | None,
        scaler: LossScaler | None,
    ) -> None:
        self.norms, self.scaler = norms, scaler
        self.skipped = dict.fromkeys(stages, 0)
        """By stage, the updates that were skipped."""
        self._rank, self._schedule, self._stages = rank, schedule, stages
        self._last_stage = schedule.stages - 1
        self._averages = schedule.guarantees.rule in (VersionRule.NEWEST, VersionRule.INPUT_STAGE)
        """Whether an update is taken over a round of microbatches, one for each replica, instead of a minibatch."""
        self.admitted = 0
        """Microbatches admitted in the present run of the schedule."""
        self._final = frozenset(
            stage
            for stage, held in stages.items()
            if norms is None and held.reducer is None and not held.ties and not self._averages
        )
        """The stages that update with their own gradients as they are."""
        self.weigh = self._loss_weight if self._averages or scaler is not None else None
        """Returns d(loss of the update) / d(loss of a microbatch), times the loss scale; None if that is the weight of
        the microbatch, its share of the minibatch.
        """
        groups = [schedule.placement.stages[stage] for stage in stages]
        self._sums_early = frozenset(
            stage
            for (stage, held), group in zip(stages.items(), groups, strict=True)
            if groups.count(group) == 1 or (held.reducer is not None and held.reducer.in_backward)
        )
        """The stages whose sums over replicas may begin within a backward. Where the same ranks sum for several stages,
        the n-th sums of all belong together, and replicas may end the backwards of the stages in different orders.
        """
        self._own: dict[tuple[int, int], dict[str, Tensor]] = {}
        """This rank's own gradients for an update, once its last backward for it is done."""
        self._lasts: dict[int, tuple[int, int | None]] = {}
        """By stage: the update that was asked for last, and the last microbatch that this rank takes for it."""
        self._tied: dict[tuple[int, int, int], Mapping[str, Tensor | None]] = {}
        """The gradients that a stage (first) received from another one (second) for an update to a version (third)."""
        self._sums: dict[tuple[int, int], dict[str, Tensor]] = {}
        """Sums over stages and replicas."""
        self._means: dict[tuple[int, int], dict[str, Tensor]] = {}

    def restart(self, schedule: Schedule, scales: Mapping[str, float]) -> None:
        """Begins a new run of `schedule`, with versions counted anew. `scales`: of the run that it continues."""
        self._schedule = schedule
        self._lasts.clear()
        if self.norms is not None:
            self.norms.restart()
        if self.scaler is not None:
            self.scaler.restart(scales)

    def _loss_weight(self, k: int, microbatch: Microbatch) -> float:
        """What `weigh` returns for microbatch `k`. Where updates are taken over rounds of microbatches it is the share
        of the microbatch, and `_average` divides by their number, which is not the same for all stages.
        """
        weight = microbatch.microbatch_share if self._averages else microbatch.weight
        if self.scaler is None:
            return weight
        size = self._schedule.guarantees.microbatches_per_update[self._last_stage]
        return weight * self.scaler.scale_of(k // size + 1)

    def prepare(self, stage: int, microbatch: int) -> int | None:
        """Prepares for a backward or weight backward. Returns the version that it completes, if it is the last one for
        an update; sums over replicas then begin while it runs.
        """
        update = microbatch // self._schedule.guarantees.microbatches_per_update[stage] + 1
        known, last = self._lasts.get(stage, (0, None))
        if known != update:
            last = self._schedule.last_microbatch(self._rank, stage, update)
            self._lasts[stage] = update, last
        if microbatch != last:
            return None
        held = self._stages[stage]
        # A deferred update with tied weights is summed after backwards of the next one, which other replicas may not
        # have run by then.
        if stage in self._sums_early and held.reducer and not (held.ties and stage in self._schedule.deferred):
            held.reducer.arm(update)
        return update

    def take(self, stage: int, update: int) -> None:
        """Takes the gradients for `update` from the weights, after its last backward."""
        held = self._stages[stage]
        self._own[stage, update] = held.weights.take_gradients()
        if held.reducer is not None:
            held.reducer.disarm()

    def held(self, stage: int) -> list[dict[str, Tensor]]:
        """The gradients of `stage` that its updates need, by name. Those that a sum has replaced are dropped."""
        for key in self._own.keys() & {*self._sums, *self._means}:
            if key[0] == stage:
                self._own[key] = {}
        tables = (self._own, self._sums, self._means)
        return [gradients for table in tables for key, gradients in table.items() if key[0] == stage]

    def tied(self, stage: int, update: int, target: int) -> Message:
        """The gradients that `stage` sends `target`: those of the weights that both use, with zeros for absent ones;
        then a one or zero for each, whether it is present. All are None where this replica has no microbatch.

        A gradient may depend on the data, such as that of an expert to which no token was sent.
        """
        names = self._stages[stage].ties[target]
        if self._schedule.last_microbatch(self._rank, stage, update) is None:
            return (None,) * (len(names) + 1)
        own, trained = self._own.get((stage, update), {}), self._stages[stage].weights.trained
        gradients = [
            own[name] if name in own else torch.zeros_like(trained[name], dtype=trained[name].grad_dtype)
            for name in names
        ]
        # Made on the device, so that a GPU's host does not wait for it.
        there = torch.cat([gradients[0].new_full((1,), float(name in own)) for name in names])
        return (*gradients, there)

    def add_tied(self, stage: int, update: int, source: int, message: Message) -> None:
        names = self._stages[stage].ties[source]
        *gradients, there = message
        if there is None:
            present = [0.0] * len(names)
        elif self._own.get((stage, update), {}).keys() >= set(names):
            # Zeros change no sum, and to read the numbers makes a GPU's host wait.
            present = [1.0] * len(names)
        else:
            present = there.tolist()
        found = zip(names, gradients, present, strict=True)
        self._tied[stage, source, update] = {name: gradient for name, gradient, here in found if here}

    def start_reduce(self, stage: int, update: int) -> Reducer:
        """Starts the all-reduce of this rank's gradients over the replicas."""
        reducer = self._stages[stage].reducer
        assert reducer is not None
        if (stage, update) not in self._sums:
            self._sums[stage, update] = self._over_stages(stage, update)
            reducer.start(update, self._sums[stage, update])
        return reducer

    def began(self, stage: int, update: int) -> Timestamp | None:
        """When the first gradients were sent to be summed over replicas; None if none were."""
        reducer = self._stages[stage].reducer
        assert reducer is not None
        return reducer.began(update)

    def reduce(self, stage: int, update: int) -> None:
        self._sums[stage, update] = self.start_reduce(stage, update).finish(update)
        shares = self._stages[stage].shares
        if shares is not None and self.norms is not None and self.scaler is None:
            self.norms.add_shares(stage, update, self._average(stage, update), shares)

    def norm_vectors(self, stage: int, version: int, target: int) -> tuple[Tensor, ...]:
        return self._local_norms(version).vectors_for(stage, version, target)

    def add_norms(self, stage: int, version: int, source: int, message: Message) -> None:
        assert self.norms is not None
        self.norms.add_received(stage, version, source, message)

    def for_update(self, stage: int, version: int) -> tuple[dict[str, Tensor], bool]:
        """The gradients that `stage` updates with, and whether the update is skipped since gradients overflowed.

        A loss scaler reads the norms on the host, and so waits until the device has computed them.
        """
        if stage in self._final:
            return self._own.pop((stage, version), {}), False
        norms, skipped = None if self.norms is None else self._local_norms(version), False
        gradients = self._average(stage, version)
        if norms is not None:
            if self.scaler is not None:
                skipped = norms.overflow(version)
                self.skipped[stage] += skipped
                if stage == self._last_stage:
                    self.scaler.update(version, skipped)
            norms.clip(version, gradients)
        del self._means[stage, version]
        self._own.pop((stage, version), None)
        return gradients, skipped

    def _local_norms(self, version: int) -> GradientNorms:
        """The norms, after those of the stages of this rank have been added."""
        assert self.norms is not None
        # Stages on one rank send each other no messages. The last stage comes first, since it has the scale.
        for stage in sorted(self._stages, reverse=True):
            if not self.norms.has(stage, version):
                scale = self._scale_of(stage, version)
                gradients = self._early_sums(stage, version)
                if gradients is None:
                    gradients = self._average(stage, version)
                elif scale is not None:
                    # Not in place: a sum of one summand is that tensor, which is still to be added to others.
                    gradients = {name: gradient / scale for name, gradient in gradients.items()}
                self.norms.add(stage, version, gradients, 1.0 if scale is None else scale)
        return self.norms

    def _scale_of(self, stage: int, version: int) -> float | None:
        """The factor on the losses of an update; None without loss scaling."""
        if self.scaler is None:
            return None
        assert self.norms is not None
        return self.scaler.scale_of(version) if stage == self._last_stage else self.norms.scale(version)

    def _early_sums(self, stage: int, update: int) -> dict[str, Tensor] | None:
        """The sums that the norm of `stage` is taken of, where it is needed before all gradients are there: all but
        those of weights that an earlier stage shares, whose gradients come later. None if all of them are there.
        """
        ties = self._stages[stage].ties
        if stage not in self._schedule.deferred or not any(partner < stage for partner in ties):
            return None
        own = self._own.get((stage, update), {})
        sums = {}
        for name in self._stages[stage].weights.parameters:
            partners = [partner for partner, names in ties.items() if name in names]
            if all(partner > stage for partner in partners):
                sharing = [own, *(self._tied[stage, partner, update] for partner in sorted(partners))]
                if gradients := [gradient for given in sharing if (gradient := given.get(name)) is not None]:
                    sums[name] = reduce(torch.add, gradients)
        return sums

    def _average(self, stage: int, update: int) -> dict[str, Tensor]:
        """The gradients that `stage` updates with, before clipping: the sums divided by the number of microbatches that
        had weight one, and by the loss scale.
        """
        if (stage, update) not in self._means:
            sums = self._sums.pop((stage, update), None)
            if sums is None:
                sums = self._over_stages(stage, update)
            numbers = [self._scale_of(stage, update) or 1.0]
            if self._averages:
                size = self._schedule.guarantees.microbatches_per_update[stage]
                numbers.insert(0, min(update * size, self.admitted) - (update - 1) * size)
            for number in numbers:
                if number != 1:
                    divide([_memory(gradient) for gradient in sums.values()], number)
            self._means[stage, update] = sums
        return self._means[stage, update]

    def _over_stages(self, stage: int, update: int) -> dict[str, Tensor]:
        """This rank's own gradients, with those of tied weights summed over the stages that share them."""
        own, ties = self._own.get((stage, update), {}), self._stages[stage].ties
        by_stage: dict[int, Mapping[str, Tensor | None]] = {stage: own}
        for partner, names in ties.items():
            if partner in self._stages and (stage, partner, update) not in self._tied:
                # Both are on this rank, and the other one updates later, when these gradients have been dropped.
                self._tied[partner, stage, update] = {name: own.get(name) for name in names}
                self._tied[stage, partner, update] = self._own.get((partner, update), {})
            by_stage[partner] = self._tied.pop((stage, partner, update))
        sums = dict(own)
        for name in {name for names in ties.values() for name in names}:
            sharing = sorted(s for s in by_stage if s == stage or name in ties[s])
            gradients = [gradient for s in sharing if (gradient := by_stage[s].get(name)) is not None]
            if gradients:
                sums[name] = reduce(torch.add, gradients) if len(gradients) > 1 else gradients[0].clone()
        return sums


def _memory(gradient: Tensor) -> Tensor:
    """The tensor to change in place: the local shard of a `DTensor`, else `gradient` itself, since a change of another
    view of a sparse tensor may not reach it.
    """
    return local_shard(gradient) if is_dtensor(gradient) else gradient


class LossScales:
    """The loss scales, and the norms, of the stages whose `gradients` are here, those of one rank each. `last`: the
    last stage, whose rank alone changes its scale.
    """

    def __init__(self, gradients: Sequence[Gradients], last: int) -> None:
        self._gradients, self._last = gradients, last
        self._scalers = [each.scaler for each in gradients if each.scaler is not None and last in each._stages]

    def gradient_norm(self) -> float | None:
        """The norm at the last update; None before the first one, or if norms are not exchanged."""
        found = [each.norms.newest for each in self._gradients if each.norms is not None]
        return float(found[0]) if found and found[0] is not None else None

    def present(self) -> float | None:
        """The scale of the loss, on processes without the last stage that of the last update; None if there is none."""
        if self._scalers:
            return self._scalers[0].scale
        first = self._gradients[0]
        if first.norms is None or first.norms.newest_scale is None or first.scaler is None:
            return None
        return float(first.norms.newest_scale)

    @property
    def used(self) -> bool:
        """Whether the loss is scaled, on any process."""
        return any(each.scaler is not None for each in self._gradients)

    def skipped_updates(self) -> int:
        """The updates that a stage of this process skipped; of the stage with the most."""
        return max((count for each in self._gradients for count in each.skipped.values()), default=0)

    def state(self, stage: int | None = None) -> dict[str, Any]:
        """The state of a loss scaler that changes, for a checkpoint; {} on processes without the last stage, or of
        another `stage` than the last.
        """
        state = self._scalers[0].state() if self._scalers and stage in (None, self._last) else {}
        return {"loss_scale": state} if state else {}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restores what `state` returned, if there is something."""
        for scaler in self._scalers:
            scaler.load_state(state.get("loss_scale", {}))
