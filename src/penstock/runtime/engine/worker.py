"""One rank at work: carries out a program of actions.

The worker is where forwards, gradients, weights and messages meet; they do not import each other. It decides nothing:
which action comes next, and with which version of the weights, is in the program.

Laws of this file:
  1. One action, one method. The order of actions is the program's, never the worker's. Only the optimizers' steps of
     updates that no action of the step reads are made together, in the last `Update` of the process.
  2. It blocks in `Receive`, `ReceiveTied`, `ReceiveNorms` and `Reduce`; in an `Update` where replicas share the
     optimizer's state, and where an option needs what is on its way between device and host: a loss scaler, state on
     the host, a snapshot.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from time import perf_counter
from typing import Any, NoReturn, TypeAlias, assert_never, cast

from torch import Tensor
from torch.profiler import record_function

from penstock.capturing.chain import LayerChain
from penstock.capturing.model_forms import ModelInputs
from penstock.runtime.batches.microbatches import Microbatch, take_slice
from penstock.runtime.batches.results import ActionTiming, BatchRun
from penstock.runtime.collectives.failures import explained
from penstock.runtime.devices.timestamps import Timestamp
from penstock.runtime.engine.flight_recorder import FlightRow
from penstock.runtime.engine.forwards import Forwards
from penstock.runtime.engine.gradients import Gradients
from penstock.runtime.engine.local_stage import LocalStage
from penstock.runtime.engine.loss_head import LossHead
from penstock.runtime.engine.mailbox import Mailbox
from penstock.runtime.engine.snapshots import Snapshots
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.parameters.residence import Residence
from penstock.runtime.parameters.weight_versions import VersionedWeights
from penstock.runtime.transport.transport import Message
from penstock.scheduling.actions import (
    Action,
    Backward,
    BackwardInput,
    BackwardWeight,
    Fetch,
    Forward,
    HostCopy,
    InputGradients,
    Offload,
    Receive,
    ReceiveNorms,
    ReceiveTied,
    Recompute,
    Reduce,
    Release,
    Reload,
    Send,
    SendNorms,
    SendTied,
    Update,
    WeightGradients,
    WeightReading,
)
from penstock.scheduling.schedules import Schedule
from penstock.timelines.spans import trace_label
from penstock.torch_internals.autograd import is_profiling

_COMPUTATIONS = (Forward, Backward, BackwardInput, BackwardWeight)
_WAITING = (Receive, ReceiveTied, ReceiveNorms, Reduce)
"""What may wait for another rank."""

Lasted: TypeAlias = tuple[Timestamp, Timestamp]
"""When something began and ended."""
ActionHook: TypeAlias = Callable[[int, BatchRun, Action], None]
"""Is called with the rank, the batch and the action."""
ACTION_HOOKS: list[ActionHook] = []
"""Are called before every action of a training. The list is empty outside of `penstock.testing`."""


class Worker:
    def __init__(
        self,
        rank: int,
        stages: Mapping[int, LocalStage],
        mailbox: Mailbox,
        inputs: ModelInputs,
        forwards: Forwards,
        heads: Mapping[int, LossHead],
        gradients: Gradients,
        updater: Updater,
        snapshots: Snapshots,
        weights: Sequence[VersionedWeights],
        now: Callable[[], Timestamp],
    ) -> None:
        """`inputs`: describes the model's inputs. `heads`: the loss head of the last stage if it is on this rank.
        `weights`: those of all stages of the process.
        """
        self.rank, self.stages, self.gradients = rank, stages, gradients
        self._mailbox, self._inputs, self._forwards, self._heads = mailbox, inputs, forwards, heads
        self.updater, self._now = updater, now
        self.snapshots = snapshots
        """Of all stages of the process; its workers share it."""
        self._weights = weights
        self._takes_turns = len(weights) > len(stages)
        """Whether other ranks of the process work while this one need not."""
        self._first = min(stages)
        self._batch, self._training = BatchRun(training=True), True
        self._labels = False
        """Whether a profiler was active when the segment began."""
        self._timings: list[ActionTiming] = []
        self.row = FlightRow(rank, ())
        """How far the present program is."""
        self.left: deque[Action] = deque()
        """What is left of it."""
        self._microbatches: dict[int, Microbatch] = {}
        self._residences = {index: stage.residence for index, stage in stages.items() if stage.residence is not None}
        self._home = updater.host if self._residences else None
        """Has the weights and gradients of streamed stages while they are not here."""
        self._coming: dict[int, Residence] = {}
        """The stages whose weights are on their way to the device."""
        self._read_modules()

    def _read_modules(self) -> None:
        modules = {index: stage.weights.stage for index, stage in self.stages.items()}
        self._sources = {index: tuple(index - away for away in module.sources) for index, module in modules.items()}
        self._targets = {index: tuple(index + away for away in module.targets) for index, module in modules.items()}
        self._differentiable = {
            index: tuple(name in module.differentiable for name in module.sent) for index, module in modules.items()
        }

    def use_chain(self, chain: LayerChain) -> None:
        """Runs the stages as modules of `chain`, which they have by now, and ends them as it does."""
        self._inputs = chain.inputs
        self._read_modules()
        self._forwards.read_modules()
        for head in self._heads.values():
            head.chain = chain

    @property
    def checks_losses(self) -> bool:
        """Whether a loss of this rank that is not finite is an error."""
        return any(head.checks for head in self._heads.values())

    def begin(
        self, batch: BatchRun, schedule: Schedule, microbatches: Mapping[int, Microbatch], program: Sequence[Action]
    ) -> None:
        """Prepares for `program`, a segment of `schedule` that forwards `microbatches`, and posts its first
        receives.
        """
        self._batch, self._training, self._labels = batch, batch.training, is_profiling()
        placement, stage = schedule.placement, self._first
        if placement.replicas(stage) == 1:
            self._microbatches.update(microbatches)
        else:
            for k, microbatch in microbatches.items():
                ranks = placement.ranks_for(stage, k)
                if self.rank in ranks:
                    index = ranks.index(self.rank)
                    self._microbatches[k] = take_slice(self._inputs, microbatch, index, len(ranks))
        self.row, self.left = FlightRow(self.rank, program), deque(program)
        if self._training:
            for held in self.stages.values():
                held.weights.begin()
        offloaded = {(action.stage, action.microbatch) for action in program if isinstance(action, Offload)}
        self._forwards.begin(batch, program, offloaded)
        self.gradients.admitted = batch.admitted
        self._mailbox.begin(schedule, self._microbatches, program)

    def end(self) -> list[ActionTiming]:
        """The timings of the actions since `begin`. The user finds the newest weights in the model again."""
        if not self._training:
            self._microbatches.clear()
        for stage in self.stages.values() if self._training else ():
            stage.weights.rest()
            if stage.reducer is not None:
                # A backward that failed has left its hooks.
                stage.reducer.disarm()
        for residence in self._residences.values():
            residence.end()
        timings, self._timings = self._timings, []
        return timings

    def ready(self) -> bool:
        """Whether the next action need not wait."""
        action = self.left[0]
        if isinstance(action, Receive | ReceiveTied | ReceiveNorms):
            return self._mailbox.ready(action)
        if isinstance(action, Reduce):
            return self.gradients.start_reduce(action.stage, action.version).ready(action.version)
        return True

    def advance(self) -> bool:
        """Carries out the next action. Of several workers in a process, only if it need not wait. Returns whether it
        did.
        """
        action, row = self.left[0], self.row
        if self._takes_turns and isinstance(action, _WAITING) and not self.ready():
            return False
        self.left.popleft()
        carry_out = _METHODS[type(action)]
        start = self._now()
        row.starts.append(perf_counter())
        try:
            if ACTION_HOOKS and self._training:
                for hook in ACTION_HOOKS:
                    hook(self.rank, self._batch, action)
            if self._forwards.offloads.leaving and isinstance(action, _COMPUTATIONS):
                self._forwards.offloads.begin_computation()
            if self._residences and isinstance(action, WeightReading):
                self._await_weights(action.stage)
            if self._labels:
                with record_function(trace_label(str(action))):
                    lasted = carry_out(self, action)
            else:
                lasted = carry_out(self, action)
        except BaseException as found:
            _explain(found, action, self.rank, self.stages[action.stage].weights.stage.names)
        self._timings.append((self.rank, action, *(lasted or (start, self._now()))))
        row.stops.append(perf_counter())
        return True

    def _change_saved(self, action: HostCopy | Recompute) -> None:
        """Moves, or computes again, what the forward of a microbatch saved for its backward."""
        executor = self.stages[action.stage].executor
        match action:
            case Offload():
                executor.saved_tensors(action.microbatch).offload(action.behind)
            case Reload():
                executor.saved_tensors(action.microbatch).reload()
            case Recompute():
                executor.recompute(action.microbatch)
            case _:
                assert_never(action)

    def _await_weights(self, stage: int) -> None:
        """Has what is computed from now on find the weights of `stage`, if it is streamed."""
        if stage in self._coming:
            self._coming.pop(stage).arrive()
        if self._home is not None:
            self._home.drop_sent()

    def _fetch(self, action: Fetch) -> None:
        residence, weights = self._residences[action.stage], self.stages[action.stage].weights
        first = next(a for a in self.left if a.stage == action.stage and isinstance(a, Release | WeightGradients))
        residence.fetch({} if isinstance(first, Release) else weights.aside)
        self._coming[action.stage] = residence

    def _release(self, action: Release) -> None:
        residence, weights = self._residences[action.stage], self.stages[action.stage].weights
        self._coming.pop(action.stage, None)
        if self._training:
            weights.set_aside()
        # Between steps what is in `.grad` is the user's.
        residence.release([weights.aside, *self.gradients.held(action.stage)] if self._training else ())

    def _forward(self, action: Forward) -> None:
        index, k = action.stage, action.microbatch
        microbatch = self._microbatches[k]
        if not self._training:
            self._evaluate(index, k, microbatch)
            return
        order = self.stages[index].order
        if order is not None:
            order.read(action.version)
        # Activations are never None; only gradients can be.
        received = cast("tuple[Tensor, ...]", self._mailbox.collect(index, k, self._sources[index], later=False))
        outputs = self._forwards.train(index, k, action.version, microbatch, received)
        if index not in self._heads:
            for output, differentiable in zip(outputs, self._differentiable[index], strict=True):
                # The data may decide that it requires none, and both ends of a cut agree for all data.
                if differentiable and not output.requires_grad:
                    output.requires_grad_()
            self._mailbox.deal(index, k, self._targets[index], outputs, later=True)

    def _evaluate(self, index: int, k: int, microbatch: Microbatch) -> None:
        """Runs a forward without gradients. Evaluations have no skips: every value goes from neighbour to neighbour."""
        received = [tensor for tensor in self._mailbox.take(index, k, index - 1) if tensor is not None]
        outputs = self._forwards.evaluate(index, k, microbatch, received)
        if index not in self._heads:
            self._mailbox.put(index, k, index + 1, outputs)

    def _backward(self, action: Backward) -> None:
        gradients, stage = self._gradients_of_outputs(action), self.stages[action.stage]
        update = self._prepare(action)
        stage.weights.accumulate(action.version)
        result = stage.executor.backward(action.microbatch, gradients)
        if update is not None:
            self.gradients.take(action.stage, update)
        self._deal_gradients(action, result)

    def _backward_input(self, action: BackwardInput) -> None:
        gradients, stage = self._gradients_of_outputs(action), self.stages[action.stage]
        stage.weights.point(action.version)
        self._deal_gradients(action, stage.executor.backward_input(action.microbatch, gradients))

    def _backward_weight(self, action: BackwardWeight) -> None:
        stage = self.stages[action.stage]
        update = self._prepare(action)
        stage.weights.accumulate(action.version)
        stage.executor.backward_weight(action.microbatch)
        if update is not None:
            self.gradients.take(action.stage, update)

    def _prepare(self, action: Backward | BackwardWeight) -> int | None:
        """Prepares for gradients of weights. Returns the version whose update they are the last ones for, if any."""
        order = self.stages[action.stage].order
        if order is not None:
            order.settle()
        return self.gradients.prepare(action.stage, action.microbatch)

    def _gradients_of_outputs(self, action: InputGradients) -> Message:
        """The gradients that a backward starts from."""
        if action.stage in self._heads:
            return (self._heads[action.stage].gradients.pop(action.microbatch),)
        return self._mailbox.collect(action.stage, action.microbatch, self._targets[action.stage], later=True)

    def _deal_gradients(self, action: InputGradients, gradients: Message) -> None:
        """Hands on the gradients of the values that a stage received."""
        self._mailbox.deal(action.stage, action.microbatch, self._sources[action.stage], gradients, later=False)
        if action.stage == self._first:
            del self._microbatches[action.microbatch]

    def _send(self, action: Send) -> None:
        self._mailbox.send(action)

    def _receive(self, action: Receive) -> None:
        self._mailbox.receive(action)

    def _send_tied(self, action: SendTied) -> None:
        self._mailbox.send_values(action, self.gradients.tied(action.stage, action.version, action.target))

    def _receive_tied(self, action: ReceiveTied) -> None:
        received = self._mailbox.receive_values(action)
        self.gradients.add_tied(action.stage, action.version, action.source, received)

    def _send_norms(self, action: SendNorms) -> None:
        if self._home is not None:
            self._home.settle()
        self._mailbox.send_values(action, self.gradients.norm_vectors(action.stage, action.version, action.target))

    def _receive_norms(self, action: ReceiveNorms) -> None:
        received = self._mailbox.receive_values(action)
        self.gradients.add_norms(action.stage, action.version, action.source, received)

    def _reduce(self, action: Reduce) -> Lasted:
        # The sum runs beside the backward that makes the gradients: it began with the first bucket.
        start = self.gradients.began(action.stage, action.version) or self._now()
        self.gradients.reduce(action.stage, action.version)
        return start, self._now()

    def _update(self, action: Update) -> Lasted:
        stage, version = action.stage, action.version
        weights, order = self.stages[stage].weights, self.stages[stage].order
        if self._home is not None:
            self._home.settle()
        gradients, skipped = self.gradients.for_update(stage, version)
        with nullcontext() if order is None else order.making(version, gradients):
            if self.snapshots.present is not None:
                self.snapshots.before_update(stage)
            start = self._now()
            if not self.updater.together:
                # The optimizers have the parameters of all stages, and step those with gradients.
                for other in self._weights:
                    other.set_aside()
            made = self.updater.update(stage, version, weights, None if skipped else gradients)
            if self.snapshots.present is not None:
                for each in made:
                    self.snapshots.after_update(each, version)
            stop = self._now()
        return start, stop


def _explain(found: BaseException, action: Action, rank: int, layers: Sequence[str]) -> NoReturn:
    """Raises `found`, with what `action` was and where. `layers`: of its stage."""
    error = explained(found, action.stage)
    error.add_note(
        f"penstock: this was action {action} of rank {rank}; stage {action.stage} holds the layers "
        f"{layers[0]} to {layers[-1]}"
    )
    if error is not found:
        raise error from found
    raise found


_METHODS: dict[type[Action], Callable[[Worker, Any], Lasted | None]] = {
    Forward: Worker._forward,
    Backward: Worker._backward,
    BackwardInput: Worker._backward_input,
    BackwardWeight: Worker._backward_weight,
    Update: Worker._update,
    Offload: Worker._change_saved,
    Reload: Worker._change_saved,
    Recompute: Worker._change_saved,
    Fetch: Worker._fetch,
    Release: Worker._release,
    Send: Worker._send,
    Receive: Worker._receive,
    SendTied: Worker._send_tied,
    ReceiveTied: Worker._receive_tied,
    SendNorms: Worker._send_norms,
    ReceiveNorms: Worker._receive_norms,
    Reduce: Worker._reduce,
}
"""What carries out an action. Returns when it began and ended, where that is not what its caller measures."""
