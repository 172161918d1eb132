"""The stages of this process at work: minibatch after minibatch, drains and evaluations.

The engine has the workers of this process carry out the parts of the schedule and counts how far training has come.

Laws of this file:
  1. It knows neither the user's batches nor files: microbatches come in, handles of results go out.
  2. Every rank calls the same methods in the same order.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.runtime.batches.loss_reports import Reports
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.passes import ActionTiming, Pass
from penstock.runtime.batches.results import Loss
from penstock.runtime.devices.device_context import DeviceContext
from penstock.runtime.engine.buffers import share_buffers
from penstock.runtime.engine.cooperative_scheduler import run_programs
from penstock.runtime.engine.local_stages import LocalStage
from penstock.runtime.engine.prediction_checks import Forecast
from penstock.runtime.engine.worker import Worker
from penstock.runtime.parameters.gradient_norms import Norms
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.transport.transport import Transport
from penstock.runtime.transport.worlds import World
from penstock.scheduling.actions import Action
from penstock.scheduling.definitions import Drain, Segment, Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.timelines.spans import Span
from penstock.timelines.timelines import Timeline
from penstock.training.recipes import Recipe
from penstock.training.scaling import LossScaler

__all__ = ["Engine", "LocalStages", "make_workers"]

KEPT_MINIBATCHES = 8
"""The last minibatches whose records are kept."""

LocalStages: TypeAlias = Mapping[int, Mapping[int, LocalStage]]
"""What this process holds: for each of its ranks its stages."""


class Engine:
    """Runs `schedule` on the `stages` of this process with one worker for each of its ranks.

    `forecast`: is told how long steps take on `context`. `seed`: of the random layers.
    """

    def __init__(
        self,
        schedule: Schedule,
        stages: LocalStages,
        workers: Sequence[Worker],
        transport: Transport,
        forecast: Forecast | None,
        context: DeviceContext,
        seed: int | None,
    ) -> None:
        self.seed = seed
        self.transport = transport
        self.records: deque[list[ActionTiming]] = deque(maxlen=KEPT_MINIBATCHES)
        """What was done in the last minibatches."""
        self._schedule, self._stages, self._workers = schedule, stages, tuple(workers)
        self._ranks = tuple(stages)
        self._reports = Reports(transport, self._ranks, self._ranks[0], context.device, context.staging)
        self._forecast, self._context = forecast, context
        last = schedule.stages - 1
        self._told = [worker.scales for worker in workers if worker.scales is not None and last in worker.stages]
        """The courses of the loss scale on those ranks that have the last stage."""
        self._minibatch = 0
        """Minibatches trained since the last drain: the present run of the schedule."""
        self._microbatches_before = 0
        """Microbatches trained before the present run."""
        self._prepared: tuple[Segment | None, Mapping[int, Sequence[Action]]] = None, {}
        """The programs of a part, before they are wanted."""

    @property
    def trained(self) -> int:
        """The microbatches trained so far."""
        return self._microbatches_before + self._minibatch * self._schedule.microbatches

    def train(self, microbatches: Sequence[Microbatch]) -> Loss:
        """One training step on a minibatch; its loss, perhaps on its way."""
        first = self._minibatch * self._schedule.microbatches
        current = self._training_pass(first + self._schedule.microbatches)
        measured = self._forecast and self._forecast.wants(self._minibatch, (part.samples for part in microbatches))
        start = self._context.timer.now() if measured else 0.0
        self._run(current, microbatches, first, self._schedule, Step(self._minibatch))
        self._minibatch += 1
        if self._forecast:
            if measured:
                self._forecast.add(start, self._context.timer.now(), self.records[-1])
            self._forecast.compare()
        return self._reports.loss(current, self._schedule.placement, range(first, first + len(microbatches)))

    def drain(self) -> None:
        """Finishes what is in flight, and waits until what this process had to send has been sent."""
        if not self._schedule.flushes and self._minibatch > 0:
            microbatches = self._minibatch * self._schedule.microbatches
            self._run(self._training_pass(microbatches), (), 0, self._schedule, Drain(self._minibatch))
            self.restart(self._microbatches_before + microbatches)
        self.share_buffers()
        self.transport.flush()

    def restart(self, microbatches: int) -> None:
        """Begins a new run of the schedule after so many `microbatches` of training, from the newest weights."""
        for stages in self._stages.values():
            for stage in stages.values():
                stage.weights.restart()
        for worker in self._workers:
            worker.restart()
        self._microbatches_before, self._minibatch = microbatches, 0

    def share_buffers(self) -> None:
        """The replicas of every stage take over the buffers of the first one."""
        share_buffers(self._stages, self._schedule.placement, self.transport)

    def evaluate(self, microbatches: Sequence[Microbatch]) -> Loss:
        """The mean loss of `microbatches` in evaluation mode with the newest weights; perhaps on its way."""
        current = self._infer(microbatches, keeps_outputs=False)
        return self._reports.loss(current, self._in_turn, range(len(microbatches)))

    def predict(self, microbatches: Sequence[Microbatch]) -> list[list[Tensor]]:
        """The values of the model's output for each of `microbatches`. Waits for them."""
        current = self._infer(microbatches, keeps_outputs=True)
        return self._reports.outputs(current, self._in_turn, microbatches)

    def gradient_norm(self) -> float | None:
        """The norm at the last update; None if there was none, or norms are not exchanged."""
        found = [worker.norms.newest for worker in self._workers if worker.norms is not None]
        return float(found[0]) if found and found[0] is not None else None

    def loss_scale(self) -> float | None:
        """The scale of the loss, on processes without the last stage as they heard it last; None if there is none."""
        if self._told:
            return self._told[0].scale
        norms = self._workers[0].norms
        if norms is None or norms.newest_scale is None or self._workers[0].scales is None:
            return None
        return float(norms.newest_scale)

    def scale_state(self) -> dict[str, Any]:
        """What a checkpoint keeps of the loss scale: the last stage's, whose process alone says so."""
        return {"loss_scale": self._told[0].state()} if self._told else {}

    def load_scale(self, state: Mapping[str, Any]) -> None:
        """Goes on from `scale_state`, if there is one."""
        for course in self._told:
            course.load_state(state.get("loss_scale", {}))

    def timeline(self, world: World, tensor_parallel_size: int, minibatches: int) -> Timeline:
        """What every rank did in its last `minibatches`. Collective.

        `tensor_parallel_size`: the number of processes of a rank. They do the same, and the first one reports it.
        """
        told = list(self.records)[-minibatches:] if world.rank % tensor_parallel_size == 0 else []
        mine = [record for records in told for record in records]
        times = iter(self._context.timer.to_host_seconds([mark for *_, start, stop in mine for mark in (start, stop)]))
        timed = [(rank, str(action), next(times), next(times)) for rank, action, *_ in mine]
        records = [record for some in world.gather(timed) for record in some]
        zero = min((start for _, _, start, _ in records), default=0.0)
        spans = (Span(rank, action, start - zero, stop - zero) for rank, action, start, stop in records)
        return Timeline(tuple(spans), self._schedule.ranks)

    def prediction_error(self) -> float | None:
        """By how much steps take longer than predicted; None without a prediction, or until all have measured."""
        comparison = self._forecast.compare() if self._forecast else None
        return None if comparison is None else comparison.error

    def _training_pass(self, admitted: int) -> Pass:
        return Pass(training=True, seed=self.seed, microbatches_before=self._microbatches_before, admitted=admitted)

    def _infer(self, microbatches: Sequence[Microbatch], keeps_outputs: bool) -> Pass:
        current = Pass(training=False, keeps_outputs=keeps_outputs)
        made = self._schedule
        forwards = inference(made.ranks, made.stages_per_rank, len(microbatches), self._in_turn)
        self._run(current, microbatches, 0, forwards, Step(0))
        return current

    @property
    def _in_turn(self) -> Placement:
        """The stages with replicas that take microbatches in turn, as in evaluations of any batch size."""
        return Placement(self._schedule.placement.stages)

    def _run(
        self, current: Pass, microbatches: Sequence[Microbatch], first: int, schedule: Schedule, part: Segment
    ) -> None:
        """Has the workers carry out `part` of `schedule`; `microbatches` are numbered from `first`."""
        prepared, programs = self._prepared
        if schedule is not self._schedule or part != prepared:
            programs = self._programs(schedule, part)
        numbered = dict(enumerate(microbatches, first))
        for worker in self._workers:
            worker.begin(current, schedule, numbered, programs[worker.rank])
        trains = schedule is self._schedule and isinstance(part, Step)
        with self._context.streams.ordered_segment():
            run_programs(self._workers, programs, self._context.streams, self._prepare if trains else None)
        records = [record for worker in self._workers for record in worker.end()]
        if current.training:
            self.records.append(records)

    def _prepare(self) -> None:
        """Makes the program of the step that most likely follows the present one."""
        following = Step(self._minibatch + 1)
        self._prepared = following, self._programs(self._schedule, following)

    def _programs(self, schedule: Schedule, part: Segment) -> Mapping[int, Sequence[Action]]:
        return {rank: schedule.row(rank, part) for rank in self._ranks}


def make_workers(
    recipe: Recipe,
    schedule: Schedule,
    chain: LayerChain,
    stages: LocalStages,
    counted: Mapping[int, Mapping[str, nn.Parameter]],
    updater: Updater,
    transport: Transport,
    context: DeviceContext,
) -> list[Worker]:
    """A worker for each rank of this process. `counted`: by stage, the parameters whose norms it tells."""
    return [
        Worker(
            rank,
            schedule,
            own,
            chain,
            recipe.loss_fn,
            updater,
            transport,
            partial(recipe.computing, context.device) if recipe.autocast else None,
            Norms(schedule, counted, chain.parameters, recipe.clip_grad_norm, context.device)
            if schedule.norms
            else None,
            LossScaler(recipe.scaling) if recipe.scaling else None,
            context.timer.now,
        )
        for rank, own in stages.items()
    ]
