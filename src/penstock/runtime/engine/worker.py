"""One rank at work: reads a program of actions and carries it out.

The worker is where executor, weights and transport meet; they do not know each other. It takes no decision: which
action comes next, with which version of the weights, is all in the program.

Laws of this file:
  1. One action, one method. The order of actions is the program's, never the worker's.
  2. It waits in `Receive`, `ReceiveTied`, `ReceiveNorms` and `Reduce` and nowhere else.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TypeAlias, assert_never, cast

import torch
from torch import Tensor

from penstock.capturing.chain import LayerChain
from penstock.capturing.model_forms import ModelOutput
from penstock.capturing.randomness import microbatch_seed, part_seed
from penstock.runtime.batches.microbatches import Microbatch, take_part
from penstock.runtime.batches.passes import ActionTiming, Pass
from penstock.runtime.batches.results import Figures
from penstock.runtime.devices.timestamps import HostTimer, Timestamp
from penstock.runtime.engine.gradients import Gradients
from penstock.runtime.engine.local_stages import LocalStage
from penstock.runtime.engine.mailboxes import Mailbox
from penstock.runtime.execution.executor import Compute
from penstock.runtime.execution.recomputation import Recomputation
from penstock.runtime.parameters.gradient_norms import Norms
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.shards import whole
from penstock.runtime.transport.failures import explained
from penstock.runtime.transport.transport import Message, Transport
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Forward,
    InputGradients,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.definitions import VersionRule
from penstock.scheduling.norms import known_norms
from penstock.scheduling.recomputation import find_direct
from penstock.scheduling.schedules import Schedule
from penstock.training.losses import LossFunction, compute_loss
from penstock.training.scaling import LossScaler

__all__ = ["Computing", "Worker"]

Computing: TypeAlias = Callable[[], AbstractContextManager[None]]


class Worker:
    """One rank of a pipeline."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, LocalStage],
        chain: LayerChain,
        loss_fn: LossFunction,
        updater: Updater,
        transport: Transport,
        computing: Computing | None = None,
        norms: Norms | None = None,
        scales: LossScaler | None = None,
        now: Callable[[], Timestamp] = HostTimer.now,
    ) -> None:
        """`computing`: gives the context that forwards and losses are computed in. `norms`: if the schedule has them.
        `scales`: of the losses; needs norms. `now`: takes the time.
        """
        self.rank = rank
        self.stages = stages
        self._schedule = schedule
        self._chain = chain
        self._loss_fn = loss_fn
        self._updater = updater
        self._computing = computing
        self.norms, self.scales, self._now = norms, scales, now
        self._mailbox = Mailbox(rank, schedule, transport)
        self._averages = schedule.guarantees.rule in (VersionRule.NEWEST, VersionRule.INPUT_STAGE)
        """Whether an update is taken over a round of microbatches, one for each replica, instead of a minibatch."""
        modules = {index: stage.weights.stage for index, stage in stages.items()}
        self._sources = {index: tuple(index - away for away in module.sources) for index, module in modules.items()}
        self._targets = {index: tuple(index + away for away in module.targets) for index, module in modules.items()}
        self._first = min(stages)
        self._random = frozenset(index for index, module in modules.items() if any(module.random))
        """The stages with layers that draw random numbers."""
        self._recomputations = {
            index: Recomputation(stage.recomputes, loss_fn if self._is_last(index) else None)
            for index, stage in stages.items()
            if stage.recomputes is not None
        }
        self._direct: frozenset[tuple[int, int]] = frozenset()
        """The stages and microbatches whose backward follows their forward at once."""
        self._pass = Pass(training=True)
        self._records: list[ActionTiming] = []
        self._microbatches: dict[int, Microbatch] = {}
        self._loss_gradients: dict[int, Tensor] = {}
        self._gradients = Gradients(rank, schedule, stages)

    def begin(
        self, current: Pass, schedule: Schedule, microbatches: Mapping[int, Microbatch], program: Sequence[Action]
    ) -> None:
        """Prepares for `program`, a part of `schedule` that forwards `microbatches`, and posts its first receives."""
        self._pass = current
        placement, stage = schedule.placement, self._first
        if placement.replicas(stage) == 1:
            self._microbatches.update(microbatches)
        else:
            for k, microbatch in microbatches.items():
                ranks = placement.ranks_for(stage, k)
                if self.rank in ranks:
                    part = ranks.index(self.rank)
                    self._microbatches[k] = take_part(self._chain.inputs, microbatch, part, len(ranks))
        self._direct = find_direct(program) if self._recomputations else frozenset()
        self._mailbox.begin(schedule, self._microbatches, program)

    def end(self) -> list[ActionTiming]:
        """What was done since `begin`. The user finds the newest weights in the model again."""
        for stage in self.stages.values():
            stage.weights.rest()
        if not self._pass.training:
            self._microbatches.clear()
        records, self._records = self._records, []
        return records

    def restart(self) -> None:
        """A new run of the schedule begins: versions are counted anew."""
        if self.norms is not None:
            self.norms.restart()
        if self.scales is not None:
            self.scales.restart()

    def ready(self, action: Action) -> bool:
        """Whether `execute` would not have to wait."""
        if isinstance(action, Receive | ReceiveTied | ReceiveNorms):
            return self._mailbox.ready(action)
        if not isinstance(action, Reduce):
            return True
        return self._gradients.start_reduce(action.stage, action.version).ready(action.version)

    def execute(self, action: Action) -> None:
        """Carries out one action."""
        start, update = self._now(), None
        try:
            match action:
                case Forward():
                    self._forward(action)
                case Backward():
                    self._backward(action)
                case BackwardInput():
                    self._backward_input(action)
                case BackwardWeight():
                    self._backward_weight(action)
                case Update():
                    update = self._update(action)
                case Send():
                    self._mailbox.send(action)
                case Receive():
                    self._mailbox.receive(action)
                case SendTied(stage, version, target):
                    self._mailbox.send_tied(action, self._gradients.tied(stage, version, target))
                case ReceiveTied(stage, version, source):
                    self._gradients.add_tied(stage, version, source, self._mailbox.receive_tied(action))
                case SendNorms(stage, version, target):
                    self._mailbox.send_norms(action, self._known(stage, version).told(stage, version, target))
                case ReceiveNorms(stage, version, source):
                    assert self.norms is not None
                    self.norms.hear(stage, version, source, self._mailbox.receive_norms(action))
                case Reduce(stage, version):
                    # The sum goes on beside the backward that makes the gradients: it began with the first bucket.
                    start = self._gradients.began(stage, version) or start
                    self._gradients.reduce(stage, version)
                case _:
                    assert_never(action)
        except BaseException as found:
            error = explained(found, action.stage)
            layers = self.stages[action.stage].weights.stage.names
            error.add_note(
                f"penstock: this was action {action} of rank {self.rank}; stage {action.stage} holds the layers "
                f"{layers[0]} to {layers[-1]}"
            )
            if error is not found:
                raise error from found
            raise
        self._records.append((self.rank, action, *(update or (start, self._now()))))

    def _forward(self, action: Forward) -> None:
        stage, k = self.stages[action.stage], action.microbatch
        microbatch = self._microbatches[k]
        if not self._pass.training:
            self._evaluate(action.stage, k, microbatch)
            return
        module = stage.weights.module(action.version)
        run = partial(stage.replays.run, k) if stage.replays else module
        if stage.order is not None:
            stage.order.read(action.version)
        # Activations are never None; only gradients can be.
        received = cast(
            "tuple[Tensor, ...]", self._mailbox.collect(action.stage, k, self._sources[action.stage], later=False)
        )
        last = self._is_last(action.stage)
        seed = self._pass.seed if action.stage in self._random else None
        if seed is not None:
            seed = part_seed(microbatch_seed(seed, self._pass.microbatches_before + k), microbatch.part)
        recomputation = None if (action.stage, k) in self._direct else self._recomputations.get(action.stage)
        point = partial(stage.weights.module, action.version)
        around = recomputation.around(point) if recomputation else None

        metrics: dict[str, Tensor] = {}

        def compute(received: Sequence[Tensor]) -> tuple[Tensor, ...]:
            outputs: tuple[Tensor, ...] = run(received, microbatch.inputs, seed, around)
            if not last:
                return outputs
            # The loss is one layer more.
            if around:
                return around(None, partial(self._loss, self._chain.output, microbatch, metrics), outputs)
            return self._loss(self._chain.output, microbatch, metrics, *outputs)

        again = recomputation.remember(point, module, (*received, *microbatch.tensors)) if recomputation else None
        within = compute if self._computing is None else _inside(self._computing, compute)
        outputs = stage.executor.forward(k, received, within, again)
        if not last:
            self._mailbox.deal(action.stage, k, self._targets[action.stage], outputs, later=True)
            return
        self._note(k, microbatch, outputs[0], metrics)
        # d(loss of the update) / d(loss of the microbatch): its share of the minibatch's samples; or one, and the
        # update divides by the microbatches that it is taken over, which are not the same number for all stages.
        weight = microbatch.share if self._averages else microbatch.weight
        self._loss_gradients[k] = torch.full_like(outputs[0], weight * self._scale(action.stage, k))

    def _backward(self, action: Backward) -> None:
        gradients, stage = self._gradients_of_outputs(action), self.stages[action.stage]
        update = self._prepare(action)
        result = stage.executor.backward(action.microbatch, gradients)
        if stage.replays is not None:
            stage.replays.release(action.microbatch)
        if update is not None:
            self._gradients.take(action.stage, update, action.version)
        self._deal_gradients(action, result)

    def _backward_input(self, action: BackwardInput) -> None:
        gradients = self._gradients_of_outputs(action)
        self._deal_gradients(action, self.stages[action.stage].executor.backward_input(action.microbatch, gradients))

    def _backward_weight(self, action: BackwardWeight) -> None:
        stage = self.stages[action.stage]
        update = self._prepare(action)
        # Sums over replicas begin by hooks.
        hooked = update is not None and stage.reducer is not None
        stage.executor.backward_weight(action.microbatch, hooked)
        if update is not None:
            self._gradients.take(action.stage, update, action.version)

    def _prepare(self, action: Backward | BackwardWeight) -> int | None:
        """Before gradients of weights are made: the version that they are the last ones for, if they are."""
        order = self.stages[action.stage].order
        if order is not None:
            order.settle()
        return self._gradients.prepare(action.stage, action.microbatch, action.version)

    def _gradients_of_outputs(self, action: InputGradients) -> Message:
        """What a backward starts from."""
        if self._is_last(action.stage):
            return (self._loss_gradients.pop(action.microbatch),)
        return self._mailbox.collect(action.stage, action.microbatch, self._targets[action.stage], later=True)

    def _deal_gradients(self, action: InputGradients, gradients: Message) -> None:
        """Hands on the gradients of what a stage received."""
        self._mailbox.deal(action.stage, action.microbatch, self._sources[action.stage], gradients, later=False)
        if action.stage == self._first:
            del self._microbatches[action.microbatch]

    def _scale(self, stage: int, microbatch: int) -> float:
        """What the loss of `microbatch` is multiplied with."""
        if self.scales is None:
            return 1.0
        return self.scales.used(microbatch // self._schedule.guarantees.microbatches_per_update[stage] + 1)

    def _update(self, action: Update) -> tuple[Timestamp, Timestamp]:
        """Returns from when to when."""
        stage, version = action.stage, action.version
        weights, skipped = self.stages[stage].weights, False
        if self.norms is not None:
            norms = self._known(stage, version)
            overflown = norms.overflown(stage, version) if self.scales is not None else []
            updates = [of for _, of in overflown]
            skipped = version in updates
            if self.scales is not None and self._is_last(stage):
                self.scales.settle(updates, keep=version - 2 * self._schedule.stages)
            gradients = norms.clip(stage, version, self._finished(stage, version), overflown)
        else:
            gradients = self._finished(stage, version)
        order = self.stages[stage].order
        with nullcontext() if order is None else order.making(version, gradients):
            start = self._now()
            if weights.begin_update(version, {} if skipped else gradients):
                readings: Mapping[str, Tensor] = {}
                if not skipped:
                    others = (held.weights for other, held in self.stages.items() if other != stage)
                    readings = self._updater.step(stage, weights, others)
                weights.end_update(readings)
            stop = self._now()
        self._gradients.forget(stage, version)
        return start, stop

    def _known(self, stage: int, version: int) -> Norms:
        """The norms, with those of the stages that this rank holds."""
        assert self.norms is not None
        # Neighbours on this rank send each other no message. The last stage first: it knows the scale.
        for other, of in reversed(known_norms(self._schedule, stage, version)):
            if other in self.stages and of == version and not self.norms.knows(other, of):
                scale = self._scale_of(other, of)
                gradients = self._gradients.counted(other, of)
                if gradients is None:
                    gradients = self._finished(other, of)
                elif scale is not None:
                    gradients = {name: gradient / scale for name, gradient in gradients.items()}
                self.norms.know(other, of, gradients, 1.0 if scale is None else scale)
        return self.norms

    def _scale_of(self, stage: int, version: int) -> float | None:
        """What the losses of an update were multiplied with; None if nothing scales them."""
        if self.scales is None:
            return None
        assert self.norms is not None
        return self.scales.used(version) if self._is_last(stage) else self.norms.scale(version)

    def _finished(self, stage: int, version: int) -> dict[str, Tensor]:
        """The gradients that `stage` updates with, unless they are clipped."""
        scale = self._scale_of(stage, version)
        return self._gradients.mean(stage, version, self._averaged_over(stage, version), scale)

    def _averaged_over(self, stage: int, version: int) -> int:
        """How many microbatches' gradients, each of weight one, an update divides by; 1 where weights are shares."""
        if not self._averages:
            return 1
        size = self._schedule.guarantees.microbatches_per_update[stage]
        return min(version * size, self._pass.admitted) - (version - 1) * size

    def _is_last(self, stage: int) -> bool:
        return stage == self._schedule.stages - 1

    def _loss(
        self, form: ModelOutput, microbatch: Microbatch, metrics: dict[str, Tensor], *outputs: Tensor
    ) -> tuple[Tensor]:
        """The loss; what `loss_fn` returns beside it goes to `metrics`."""
        loss, beside = compute_loss(self._loss_fn, form.build(outputs), microbatch.target)
        metrics.update(beside)
        # A loss may be a DTensor where the layers before it are split over processes.
        return (whole(loss),)

    def _note(self, k: int, microbatch: Microbatch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        values = tuple([whole(value.detach()) for value in (loss, *metrics.values())])
        if self.stages[self._schedule.stages - 1].replays is not None:
            # They may be what the stage made, which lies where its next forward will.
            values = tuple([value.clone() for value in values])
        self._pass.figures[self.rank, k] = Figures(tuple(metrics), values, microbatch.weight)

    def _evaluate(self, stage: int, k: int, microbatch: Microbatch) -> None:
        """A forward without gradients. Between stages everything is relayed then: an evaluation has no skips."""
        received = [tensor for tensor in self._mailbox.take(stage, k, stage - 1) if tensor is not None]
        with torch.no_grad(), self._computing() if self._computing else nullcontext():
            outputs = self.stages[stage].evaluation()(received, microbatch.inputs)
            if self._is_last(stage):
                self._finish(k, microbatch, outputs)
            else:
                self._mailbox.put(stage, k, stage + 1, outputs)

    def _finish(self, k: int, microbatch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
        """The end of an evaluation forward."""
        if self._pass.keeps_outputs:
            self._pass.outputs[k] = tuple(map(whole, outputs))
        else:
            metrics: dict[str, Tensor] = {}
            (loss,) = self._loss(self._chain.evaluation().output, microbatch, metrics, *outputs)
            self._note(k, microbatch, loss, metrics)


def _inside(computing: Computing, compute: Compute) -> Compute:
    def inside(received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        with computing():
            return compute(received)

    return inside
