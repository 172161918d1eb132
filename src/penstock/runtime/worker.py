"""One rank at work: reads a program of actions and carries it out.

The worker is where executor, weights and transport meet; they do not know each other. It takes no decision: which
action comes next, with which version of the weights, is all in the program.

Laws of this file:
  1. One action, one method. The order of actions is the program's, never the worker's.
  2. It waits in `Receive` and `ReceiveTied` and nowhere else.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeAlias, assert_never

import torch
from torch import Tensor

from penstock.capturing.chain import LayerChain, ModelOutput, StageModule
from penstock.capturing.randomness import microbatch_seed
from penstock.errors import PenstockError, ScheduleError
from penstock.runtime.executor import StageExecutor
from penstock.runtime.microbatches import Microbatch
from penstock.runtime.transport import Edge, Message, Ticket, Transport
from penstock.runtime.weights import VersionedWeights
from penstock.scheduling.actions import (
    Action,
    Backward,
    Forward,
    Receive,
    ReceiveTied,
    Reduce,
    Send,
    SendTied,
    Update,
)
from penstock.scheduling.schedules import Schedule

__all__ = ["LocalStage", "Pass", "Record", "Worker"]

POSTED_AHEAD = 2
"""Receives that are posted on an edge before they are needed: one in use and one on its way."""


Record: TypeAlias = tuple[int, Action, float, float]
"""The rank, what it did, and from when to when, in seconds of ``time.perf_counter``."""


@dataclass(slots=True, eq=False)
class LocalStage:
    """What a rank holds of one stage."""

    weights: VersionedWeights
    evaluation: Callable[[], StageModule]
    """The stage in evaluation mode over the newest weights. Captured on the first call."""
    ties: Mapping[int, tuple[str, ...]]
    """For every stage that shares weights with this one, the names of these weights."""
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
    loss: Tensor | None = None
    """Mean over the samples seen so far, times their share of the minibatch; float64, dimension 0."""
    outputs: list[tuple[Tensor, ...]] = field(default_factory=list)
    """In evaluation: the values of the model's output, microbatch by microbatch."""


class Worker:
    """One rank of a pipeline."""

    def __init__(
        self,
        rank: int,
        schedule: Schedule,
        stages: Mapping[int, LocalStage],
        chain: LayerChain,
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: torch.optim.Optimizer | None,
        transport: Transport,
    ) -> None:
        self.rank = rank
        self.stages = stages
        self._schedule = schedule
        self._chain = chain
        self._loss_fn = loss_fn
        self._optimizer = optimizer
        self._transport = transport
        self._pass = Pass(training=True)
        self._records: list[Record] = []
        self._microbatches: dict[int, Microbatch] = {}
        self._due: defaultdict[Edge, deque[Receive | ReceiveTied]] = defaultdict(deque)
        self._tickets: dict[Action, Ticket] = {}
        self._arrived: dict[tuple[int, int, int], Message] = {}
        self._leaving: dict[tuple[int, int, int], tuple[Hashable, Message]] = {}
        self._loss_gradients: dict[int, Tensor] = {}
        self._tied: dict[tuple[int, int], Mapping[str, Tensor | None]] = {}
        """What a stage (first) has got from another one (second): gradients of the weights that they share."""

    def begin(self, current: Pass, microbatches: Mapping[int, Microbatch], program: Iterable[Action]) -> None:
        """Prepares for `program`, which forwards `microbatches`, and posts its first receives."""
        self._pass = current
        self._microbatches.update(microbatches)
        for action in program:
            if isinstance(action, Receive | ReceiveTied):
                self._due[self._edge_to(action)].append(action)
        for edge in self._due:
            for _ in range(POSTED_AHEAD):
                self._post(edge)

    def end(self) -> list[Record]:
        """What was done since `begin`."""
        if not self._pass.training:
            self._microbatches.clear()
        records, self._records = self._records, []
        return records

    def ready(self, action: Action) -> bool:
        """Whether `execute` would not have to wait."""
        return not isinstance(action, Receive | ReceiveTied) or self._tickets[action].ready()

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
                    self._send(action)
                case Receive():
                    self._receive(action)
                case SendTied():
                    self._send_tied(action)
                case ReceiveTied():
                    self._receive_tied(action)
                case Reduce():
                    raise ScheduleError(f"{action}: replicas of a stage do not run yet; give each stage one rank")
                case _:
                    assert_never(action)
        except BaseException as error:
            layers = self.stages[action.stage].weights.module(0).names
            error.add_note(
                f"penstock: this was action {action} of rank {self.rank}; stage {action.stage} holds the layers "
                f"{layers[0]} to {layers[-1]}"
            )
            raise
        self._records.append((self.rank, action, start, time.perf_counter()))

    def _forward(self, action: Forward) -> None:
        stage, k = self.stages[action.stage], action.microbatch
        microbatch = self._microbatches[k]
        # Activations are never None; only gradients can be.
        received = [tensor for tensor in self._take(action.stage, k, action.stage - 1) if tensor is not None]
        if not self._pass.training:
            with torch.no_grad():
                outputs = stage.evaluation()(received, microbatch.inputs)
                if self._is_last(action.stage):
                    self._finish(microbatch, outputs)
                else:
                    self._put(action.stage, k, 1, outputs)
            return
        module = stage.weights.module(action.version)
        seed = microbatch_seed(self._pass.seed, self._pass.microbatches_before + k)

        def compute(received: Sequence[Tensor]) -> tuple[Tensor, ...]:
            outputs = module(received, microbatch.inputs, seed)
            return (self._loss(self._chain.output, microbatch, outputs),) if self._is_last(action.stage) else outputs

        outputs = stage.executor.forward(k, received, compute)
        if self._is_last(action.stage):
            self._add_loss(outputs[0], microbatch)
            # d(loss of the update) / d(loss of the microbatch): its share of the samples that the update is taken over.
            alone = self._schedule.microbatches_per_update == 1
            self._loss_gradients[k] = torch.full_like(outputs[0], 1.0 if alone else microbatch.weight)
        else:
            self._put(action.stage, k, 1, outputs)

    def _backward(self, action: Backward) -> None:
        k = action.microbatch
        if self._is_last(action.stage):
            gradients: Message = (self._loss_gradients.pop(k),)
        else:
            gradients = self._take(action.stage, k, action.stage + 1)
        result = self.stages[action.stage].executor.backward(k, gradients)
        if action.stage > 0:
            self._put(action.stage, k, -1, result)
        if action.stage == min(self.stages):
            del self._microbatches[k]

    def _update(self, action: Update) -> None:
        weights = self.stages[action.stage].weights
        weights.begin_update(action.version, self._add_tied(action, weights.gradients(action.gradient_version)))
        if self._optimizer is not None:
            self._optimizer.step()
        weights.end_update(action.gradient_version)

    def _add_tied(self, action: Update, own: dict[str, Tensor]) -> dict[str, Tensor]:
        """`own` gradients with those of tied weights summed over the stages that share them, in the stages' order."""
        ties = self.stages[action.stage].ties
        parts: dict[int, Mapping[str, Tensor | None]] = {action.stage: own}
        for partner, names in ties.items():
            neighbour = self.stages.get(partner)
            if neighbour is not None and (action.stage, partner) not in self._tied:
                # Both are on this rank and the other one updates later, when the gradients here will be forgotten.
                self._tied[partner, action.stage] = {name: own.get(name) for name in names}
                self._tied[action.stage, partner] = neighbour.weights.gradients(action.gradient_version)
            parts[partner] = self._tied.pop((action.stage, partner))
        sums = dict(own)
        for name in {name for names in ties.values() for name in names}:
            sharing = sorted(s for s in parts if s == action.stage or name in ties[s])
            gradients = [gradient for s in sharing if (gradient := parts[s].get(name)) is not None]
            if gradients:
                sums[name] = reduce(torch.add, gradients)
        return sums

    def _send_tied(self, action: SendTied) -> None:
        stage = self.stages[action.stage]
        gradients = stage.weights.gradients(action.version - 1)
        message = tuple(gradients.get(name) for name in stage.ties[action.target])
        edge = Edge(self.rank, self._schedule.rank_of(action.target))
        self._transport.send(edge, ("tied", action.stage, action.target), message)

    def _receive_tied(self, action: ReceiveTied) -> None:
        message = self._tickets.pop(action).wait()
        names = self.stages[action.stage].ties[action.source]
        self._tied[action.stage, action.source] = dict(zip(names, message, strict=True))
        self._post(self._edge_to(action))

    def _send(self, action: Send) -> None:
        form, message = self._leaving.pop((action.stage, action.microbatch, action.target))
        self._transport.send(Edge(self.rank, self._schedule.rank_of(action.target)), form, message)

    def _receive(self, action: Receive) -> None:
        message = self._tickets.pop(action).wait()
        self._arrived[action.stage, action.microbatch, action.source] = message
        self._post(self._edge_to(action))

    def _post(self, edge: Edge) -> None:
        """Posts the next receive that is due on `edge`, if there is one."""
        if due := self._due[edge]:
            action = due.popleft()
            form: Hashable = ("tied", action.source, action.stage)
            if isinstance(action, Receive):
                form = self._form(action.source, action.stage, action.microbatch)
            self._tickets[action] = self._transport.post(edge, form)

    def _edge_to(self, action: Receive | ReceiveTied) -> Edge:
        return Edge(self._schedule.rank_of(action.source), self.rank)

    def _form(self, source: int, target: int, microbatch: int) -> Hashable:
        return (source, target, self._pass.training, self._microbatches[microbatch].signature)

    def _take(self, stage: int, microbatch: int, source: int) -> Message:
        """What stage `source` made of `microbatch` for `stage`; nothing comes from before the first stage."""
        return self._arrived.pop((stage, microbatch, source)) if source >= 0 else ()

    def _put(self, stage: int, microbatch: int, direction: int, message: Message) -> None:
        """Leaves `message` for the next stage in `direction`: at hand if it is on this rank, else for a Send."""
        target = stage + direction
        if self._schedule.rank_of(target) == self.rank:
            self._arrived[target, microbatch, stage] = message
        else:
            self._leaving[stage, microbatch, target] = (self._form(stage, target, microbatch), message)

    def _is_last(self, stage: int) -> bool:
        return stage == self._schedule.stages - 1

    def _loss(self, form: ModelOutput, microbatch: Microbatch, outputs: Sequence[Tensor]) -> Tensor:
        loss = self._loss_fn(form.build(dict(zip(form.values, outputs, strict=True))), microbatch.target)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
            raise PenstockError(
                "loss_fn(output, target) must return one number as a tensor, the mean over the microbatch's samples; "
                f"it returned {found}. Reduce it, for instance with .mean()"
            )
        return loss

    def _add_loss(self, loss: Tensor, microbatch: Microbatch) -> None:
        share = loss.detach().double().reshape(()) * microbatch.weight
        self._pass.loss = share if self._pass.loss is None else self._pass.loss + share

    def _finish(self, microbatch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
        """The end of an evaluation forward."""
        if self._pass.keeps_outputs:
            self._pass.outputs.append(outputs)
        else:
            self._add_loss(self._loss(self._chain.evaluation().output, microbatch, outputs), microbatch)
