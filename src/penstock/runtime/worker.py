"""One rank at work: reads a program of actions and carries it out.

The worker is where executor, weights and transport meet; they do not know each other. It takes no decision: which
action comes next, with which version of the weights, is all in the program.

Laws of this file:
  1. One action, one method. The order of actions is the program's, never the worker's.
  2. It waits in `Receive`, `ReceiveTied`, `ReceiveNorms` and `Reduce` and nowhere else.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TypeAlias, assert_never

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.capturing.chain import LayerChain, ModelOutput
from penstock.capturing.randomness import microbatch_seed, part_seed
from penstock.errors import PenstockError, TransportError
from penstock.runtime.executor import StageExecutor
from penstock.runtime.mailboxes import Mailbox
from penstock.runtime.microbatches import Microbatch, take_part
from penstock.runtime.recomputation import Grain, Recomputation
from penstock.runtime.reductions import Reducer
from penstock.runtime.results import Figures
from penstock.runtime.shards import whole
from penstock.runtime.transport import Message, Transport
from penstock.runtime.updates import Updater
from penstock.runtime.weights import VersionedWeights
from penstock.scheduling.actions import (
    Action,
    Backward,
    Forward,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Reduce,
    Send,
    SendNorms,
    SendTied,
    Update,
)
from penstock.scheduling.methods import VersionRule
from penstock.scheduling.norms import Norm, carried_norms
from penstock.scheduling.recomputation import find_direct
from penstock.scheduling.schedules import Schedule
from penstock.training.losses import LossFunction, compute_loss

__all__ = ["LocalStage", "Pass", "Record", "Worker"]

Record: TypeAlias = tuple[int, Action, float, float]
"""The rank, what it did, and from when to when, in seconds of ``time.perf_counter``."""


Computing: TypeAlias = Callable[[], AbstractContextManager[None]]


@dataclass(slots=True, eq=False)
class LocalStage:
    """What a rank holds of one stage."""

    weights: VersionedWeights
    evaluation: Callable[[], Callable[[Sequence[Tensor], Mapping[str, Tensor]], tuple[Tensor, ...]]]
    """The stage in evaluation mode over the newest weights. Captured on the first call."""
    ties: Mapping[int, tuple[str, ...]]
    """For every stage that shares weights with this one, the names of these weights."""
    reducer: Reducer | None = None
    """Sums gradients over the replicas of the stage; None if there is one only."""
    recomputes: Grain | None = None
    """Whether what a backward needs is computed again then, and for how many layers at a time."""
    executor: StageExecutor = field(default_factory=StageExecutor)


@dataclass(slots=True, eq=False)
class Pass:
    """One minibatch, or one batch of an evaluation, and what it leaves on the rank of the last stage."""

    training: bool
    seed: int = 0
    """Of the random layers."""
    microbatches_before: int = 0
    """Microbatches trained before the present run of the schedule."""
    keeps_outputs: bool = False
    """In evaluation: whether the model's output is wanted, and not its loss."""
    admitted: int = 0
    """Microbatches admitted in the present run of the schedule, those of this pass included."""
    figures: dict[tuple[int, int], Figures] = field(default_factory=dict)
    """By rank and microbatch: what the last stage found of the rank's samples of it."""
    outputs: dict[int, tuple[Tensor, ...]] = field(default_factory=dict)
    """In evaluation, by microbatch: the values of the model's output."""


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
        computing: Computing = nullcontext,
    ) -> None:
        """Forwards and losses are computed inside of ``computing()``."""
        self.rank = rank
        self.stages = stages
        self._schedule = schedule
        self._chain = chain
        self._loss_fn = loss_fn
        self._updater = updater
        self._computing = computing
        self._mailbox = Mailbox(rank, schedule, transport)
        self._averages = schedule.promise.rule in (VersionRule.NEWEST, VersionRule.INPUT_STAGE)
        """Whether an update is taken over a round of microbatches, one for each replica, instead of a minibatch."""
        self._recomputations = {
            index: Recomputation(stage.recomputes, loss_fn if self._is_last(index) else None)
            for index, stage in stages.items()
            if stage.recomputes is not None
        }
        self._direct: frozenset[tuple[int, int]] = frozenset()
        """The stages and microbatches whose backward follows their forward at once."""
        self._pass = Pass(training=True)
        self._records: list[Record] = []
        self._microbatches: dict[int, Microbatch] = {}
        self._loss_gradients: dict[int, Tensor] = {}
        self._tied: dict[tuple[int, int, int], Mapping[str, Tensor | None]] = {}
        """What a stage (first) has got from another one (second) for an update to a version (third): gradients of the
        weights that they share.
        """
        self._whole: dict[tuple[int, int], dict[str, Tensor]] = {}
        """The gradients that this rank has for an update of a stage (first) to a version (second), once its last
        backward for it is done. Not left with the weights, since those of the next update may be taken at one version.
        """
        self._norms: dict[Norm, Tensor] = {}
        """What this rank knows of the gradients of stages, for exchange: see `known_norms`."""
        self._sums: dict[tuple[int, int], dict[str, Tensor]] = {}
        """The gradients for an update of a stage (first) to a version (second), summed over its replicas."""

    def begin(
        self, current: Pass, schedule: Schedule, microbatches: Mapping[int, Microbatch], program: Sequence[Action]
    ) -> None:
        """Prepares for `program`, a part of `schedule` that forwards `microbatches`, and posts its first receives."""
        self._pass = current
        placement, stage = schedule.placement, min(self.stages)
        for k, microbatch in microbatches.items():
            ranks = placement.ranks_for(stage, k)
            if self.rank in ranks:
                part = ranks.index(self.rank)
                self._microbatches[k] = take_part(self._chain.inputs, microbatch, part, len(ranks))
        self._direct = find_direct(program) if self._recomputations else frozenset()
        self._mailbox.begin(schedule, self._microbatches, program)

    def end(self) -> list[Record]:
        """What was done since `begin`."""
        if not self._pass.training:
            self._microbatches.clear()
        records, self._records = self._records, []
        return records

    def ready(self, action: Action) -> bool:
        """Whether `execute` would not have to wait."""
        if isinstance(action, Receive | ReceiveTied | ReceiveNorms):
            return self._mailbox.ready(action)
        return not isinstance(action, Reduce) or self._start_reduce(action).ready(action.version)

    def execute(self, action: Action) -> None:
        """Carries out one action."""
        start = time.perf_counter()
        try:
            match action:
                case Forward():
                    self._forward(action)
                case Backward():
                    self._backward(action)
                case Update():
                    self._update(action)
                case Send():
                    self._mailbox.send(action)
                case Receive():
                    self._mailbox.receive(action)
                case SendTied():
                    self._send_tied(action)
                case ReceiveTied():
                    names = self.stages[action.stage].ties[action.source]
                    message = self._mailbox.receive_tied(action)
                    self._tied[action.stage, action.source, action.version] = dict(zip(names, message, strict=True))
                case SendNorms():
                    norms = carried_norms(self._schedule, action.stage, action.version, action.target)
                    self._mailbox.send_norms(action, tuple(self._norms[norm] for norm in norms))
                case ReceiveNorms():
                    norms = carried_norms(self._schedule, action.source, action.version, action.stage)
                    self._norms.update(zip(norms, self._mailbox.receive_norms(action), strict=True))
                case Reduce():
                    # The sum goes on beside the backward that makes the gradients: it began with the first bucket.
                    start = min(start, self._reduce(action))
                case _:
                    assert_never(action)
        except BaseException as found:
            error = _explained(found, action.stage)
            layers = self.stages[action.stage].weights.module(0).names
            error.add_note(
                f"penstock: this was action {action} of rank {self.rank}; stage {action.stage} holds the layers "
                f"{layers[0]} to {layers[-1]}"
            )
            if error is not found:
                raise error from found
            raise
        self._records.append((self.rank, action, start, time.perf_counter()))

    def _forward(self, action: Forward) -> None:
        stage, k = self.stages[action.stage], action.microbatch
        microbatch = self._microbatches[k]
        # Activations are never None; only gradients can be.
        found = self._mailbox.take(action.stage, k, action.stage - 1)
        received = [tensor for tensor in found if tensor is not None]
        if not self._pass.training:
            with torch.no_grad(), self._computing():
                outputs = stage.evaluation()(received, microbatch.inputs)
                if self._is_last(action.stage):
                    self._finish(k, microbatch, outputs)
                else:
                    self._mailbox.put(action.stage, k, action.stage + 1, outputs)
            return
        module = stage.weights.module(action.version)
        seed = microbatch_seed(self._pass.seed, self._pass.microbatches_before + k)
        seed = part_seed(seed, microbatch.part)
        recomputation = None if (action.stage, k) in self._direct else self._recomputations.get(action.stage)
        around = recomputation.around if recomputation else None

        metrics: dict[str, Tensor] = {}

        def compute(received: Sequence[Tensor]) -> tuple[Tensor, ...]:
            with self._computing():
                outputs: tuple[Tensor, ...] = module(received, microbatch.inputs, seed, around)
                if not self._is_last(action.stage):
                    return outputs
                # The loss is one layer more.
                loss = partial(self._loss, self._chain.output, microbatch, metrics)
                return around(None, loss, outputs) if around else loss(*outputs)

        again = recomputation.remember(module, (*received, *microbatch.tensors)) if recomputation else None
        outputs = stage.executor.forward(k, received, compute, again)
        if self._is_last(action.stage):
            self._note(k, microbatch, outputs[0], metrics)
            # d(loss of the update) / d(loss of the microbatch): its share of the minibatch's samples; or one, and the
            # update divides by the microbatches that it is taken over, which are not the same number for all stages.
            alone = microbatch.samples / microbatch.whole
            self._loss_gradients[k] = torch.full_like(outputs[0], alone if self._averages else microbatch.weight)
        else:
            self._mailbox.put(action.stage, k, action.stage + 1, outputs)

    def _backward(self, action: Backward) -> None:
        k, stage = action.microbatch, self.stages[action.stage]
        if self._is_last(action.stage):
            gradients: Message = (self._loss_gradients.pop(k),)
        else:
            gradients = self._mailbox.take(action.stage, k, action.stage + 1)
        update = k // self._schedule.promise.microbatches_per_update[action.stage] + 1
        last = k == self._schedule.last_taken(self.rank, action.stage, update)
        # A late update with tied weights sums after backwards of the next one, which not all replicas have had then.
        if last and stage.reducer is not None and not (stage.ties and action.stage in self._schedule.deferred):
            stage.reducer.arm(update, stage.weights.leaves(action.version))
        result = stage.executor.backward(k, gradients)
        if last:
            self._whole[action.stage, update] = stage.weights.take_gradients(action.version)
        if action.stage > 0:
            self._mailbox.put(action.stage, k, action.stage - 1, result)
        if action.stage == min(self.stages):
            del self._microbatches[k]

    def _start_reduce(self, action: Reduce) -> Reducer:
        """Gives away this rank's gradients for the update to ``action.version``."""
        key, stage = (action.stage, action.version), self.stages[action.stage]
        assert stage.reducer is not None
        if key not in self._sums:
            self._sums[key] = self._own_gradients(*key)
            stage.reducer.start(action.version, self._sums[key])
        return stage.reducer

    def _reduce(self, action: Reduce) -> float:
        """Waits for the sums; returns when the first gradients left."""
        reducer = self._start_reduce(action)
        began = reducer.began(action.version)
        self._sums[action.stage, action.version] = reducer.finish(action.version)
        return began

    def _update(self, action: Update) -> None:
        key, weights = (action.stage, action.version), self.stages[action.stage].weights
        gradients = self._sums.pop(key) if key in self._sums else self._own_gradients(*key)
        self._whole.pop(key, None)
        if weights.begin_update(action.version, gradients):
            if (count := self._averaged_over(*key)) > 1:
                for gradient in gradients.values():
                    gradient.div_(count)
            others = (held.weights for other, held in self.stages.items() if other != action.stage)
            self._updater.step(action.stage, others)
            weights.end_update()

    def _averaged_over(self, stage: int, version: int) -> int:
        """How many microbatches' gradients, each of weight one, an update divides by; 1 where weights are shares."""
        if not self._averages:
            return 1
        size = self._schedule.promise.microbatches_per_update[stage]
        return min(version * size, self._pass.admitted) - (version - 1) * size

    def _own_gradients(self, stage: int, version: int) -> dict[str, Tensor]:
        """This rank's gradients for the update of `stage` to `version`, with those of tied weights; {} if it has none,
        which is when it had no microbatch of those.
        """
        return self._add_tied(stage, version, self._whole.get((stage, version), {}))

    def _add_tied(self, stage: int, version: int, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """`own` gradients with those of tied weights summed over the stages that share them, in the stages' order."""
        ties = self.stages[stage].ties
        parts: dict[int, Mapping[str, Tensor | None]] = {stage: own}
        for partner, names in ties.items():
            if partner in self.stages and (stage, partner, version) not in self._tied:
                # Both are on this rank and the other one updates later, when the gradients here will be forgotten.
                self._tied[partner, stage, version] = {name: own.get(name) for name in names}
                self._tied[stage, partner, version] = self._whole.get((partner, version), {})
            parts[partner] = self._tied.pop((stage, partner, version))
        sums = dict(own)
        for name in {name for names in ties.values() for name in names}:
            sharing = sorted(s for s in parts if s == stage or name in ties[s])
            gradients = [gradient for s in sharing if (gradient := parts[s].get(name)) is not None]
            if gradients:
                sums[name] = reduce(torch.add, gradients)
        return sums

    def _send_tied(self, action: SendTied) -> None:
        gradients = self._whole.get((action.stage, action.version), {})
        names = self.stages[action.stage].ties[action.target]
        self._mailbox.send_tied(action, tuple(gradients.get(name) for name in names))

    def _is_last(self, stage: int) -> bool:
        return stage == self._schedule.stages - 1

    def _loss(
        self, form: ModelOutput, microbatch: Microbatch, metrics: dict[str, Tensor], *outputs: Tensor
    ) -> tuple[Tensor]:
        """The loss; what `loss_fn` returns beside it goes to `metrics`."""
        output = form.build(dict(zip(form.values, outputs, strict=True)))
        loss, beside = compute_loss(self._loss_fn, output, microbatch.target)
        metrics.update(beside)
        # A loss may be a DTensor where the layers before it are split over processes.
        return (whole(loss),)

    def _note(self, k: int, microbatch: Microbatch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        values = torch.stack([whole(value.detach()).double().reshape(()) for value in (loss, *metrics.values())])
        self._pass.figures[self.rank, k] = Figures(tuple(metrics), values * microbatch.weight)

    def _finish(self, k: int, microbatch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
        """The end of an evaluation forward."""
        if self._pass.keeps_outputs:
            self._pass.outputs[k] = tuple(map(whole, outputs))
        else:
            metrics: dict[str, Tensor] = {}
            (loss,) = self._loss(self._chain.evaluation().output, microbatch, metrics, *outputs)
            self._note(k, microbatch, loss, metrics)


def _explained(error: BaseException, stage: int) -> BaseException:
    """`error`, or what it means if it is one of a connection inside of `stage`, which names a socket."""
    if not isinstance(error, dist.DistError) and "gloo/transport" not in str(error):
        return error
    if isinstance(error, PenstockError):
        return error
    return TransportError(
        f"the connection to another process of stage {stage} broke in a collective of PyTorch's: that process failed, "
        f"died or left the training loop earlier. Look at its log. torch.distributed says: {error}"
    )
