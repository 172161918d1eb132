"""`Pipeline`: a model, wrapped, that trains in stages.

The facade. It captures the model, makes the plan a schedule, has the schedule proved, gives each rank its stages, and
then hands programs to the workers step by step. What happens inside a step is the schedule's and the worker's.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.autoplans import Choices, plan_automatically
from penstock.capturing import capture
from penstock.errors import PenstockError
from penstock.profiling.profiler import profile as measure
from penstock.runtime.agreements import agreed
from penstock.runtime.buffers import share_buffers
from penstock.runtime.checkpoint import held_tensors, named_state, read, restore, write
from penstock.runtime.forecasts import forecast_of, mark_now
from penstock.runtime.hooks import Parallelize, parallelize_stages
from penstock.runtime.microbatches import Microbatch, chunks, join, split
from penstock.runtime.recomputation import Recompute, choose_grains
from penstock.runtime.reports import Reports
from penstock.runtime.results import StepResult
from penstock.runtime.setup import (
    build_stages,
    check_agreement,
    check_plan,
    choose_plan,
    connect,
    learning_rate_factors,
    make_schedule,
)
from penstock.runtime.shards import whole
from penstock.runtime.turns import run_programs
from penstock.runtime.worker import Pass, Record, Worker
from penstock.runtime.worlds import World, join_world
from penstock.scheduling.methods import Drain, Part, Step
from penstock.scheduling.placements import Placement
from penstock.scheduling.schedules import Schedule, inference
from penstock.scheduling.verifier import verify
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.spans import Span
from penstock.values.timelines import Timeline

__all__ = ["Pipeline"]

KEPT_MINIBATCHES = 8
"""The last minibatches whose spans `Pipeline.timeline` can return."""


class Pipeline:
    """Trains `model` in pipeline stages, with the numbers of one device.

    Args:
        model: any ``nn.Module`` (or a list of layers), whole and identical on every rank. It is trained in place: its
            parameters on this rank are always the newest weights.
        sample: example inputs of one microbatch; a tuple of arguments or a dict of keywords.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the microbatch's samples.
        optimizer: called once with the list of this process's parameters; returns a ``torch.optim.Optimizer``.
        schedule: ``gpipe``, ``1f1b-flush`` (default), ``interleaved``, ``spp``, ``1f1b`` or ``2bw``.
        microbatches: into how many microbatches a step cuts its batch (default 1).
        stages: how many stages (default: one for each process, two with ``interleaved``). In a single process there
            are as many ranks as stages (half as many with ``interleaved``).
        plan: the stages, schedule and microbatches in one; instead of the three before. ``"auto"`` measures the
            model on rank 0 and the links between the processes, and takes the plan with the most samples per second
            that has one rank per stage and, unless `schedule` says otherwise, flushes. What is given of the three is
            kept. The prediction is for batches of `microbatches` times the samples of `sample`. In a single process
            `stages` says how many ranks to plan for, and links are instant.
        vertical_sync: with ``1f1b``, every stage uses the version that the first stage used.
        scale_learning_rates: with ``1f1b``, multiplies the learning rates of a stage of r replicas with r / r0, where
            r0 are those of the first stage: it updates once in r microbatches with their mean gradient. The papers say
            nothing of it; PipeDream's program does so. Off by default.
        recompute: True keeps of a microbatch in flight only each stage's input, and computes the stage again in its
            backward; ``"layers"`` keeps the input of every layer; a set of numbers is of the stages to recompute as
            a whole. None (default) follows the plan.
        parallelize: called as ``parallelize(stage_module, mesh)`` for every stage of this process. It may apply
            PyTorch's tensor parallelism over ``mesh["tp"]`` and `fully_shard` over ``mesh["dp"]`` (the replicas) to
            ``stage_module.layers``, in place. What works with what: docs/composition.md.
        tensor_parallel: so many consecutive processes hold one replica together; of the plan, or 1.
        seed: of dropout and other random layers; their numbers depend on it, the microbatch and the layer only.
        timeout_seconds: how long a rank waits for another one before it takes it for dead.

    Under ``torchrun`` every process is one rank and must make the same calls in the same order. In a single process all
    ranks run in turn, with the same schedule and the same numbers.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of the model and the way out.
        PlanError, ScheduleError: the plan does not fit the model, the processes or the schedule.
        TransportError: from any method, if another rank failed, died or hangs.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        sample: tuple[Any, ...] | dict[str, Any],
        loss_fn: Callable[[Any, Any], Tensor],
        optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer],
        schedule: str | None = None,
        microbatches: int | None = None,
        stages: int | None = None,
        plan: Plan | str | None = None,
        vertical_sync: bool = False,
        scale_learning_rates: bool = False,
        recompute: Recompute = None,
        parallelize: Parallelize | None = None,
        tensor_parallel: int | None = None,
        seed: int = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        self.cluster: Cluster | None = None
        """What ``plan="auto"`` found the links to be; None with another plan."""
        self._world: World = join_world()
        self._failed = ""
        self._sample = sample
        with self._guarded("building the pipeline"):
            with agreed(self._world, "while it captured the model"):
                self._chain = capture(model, sample)
            self._device = _device(self._chain.parameters)
            if isinstance(plan, str):
                choices = Choices(schedule, microbatches, stages, vertical_sync)
                made = plan_automatically(self._world, self._chain, sample, self._device, plan, choices)
                plan, self.profile, self.cluster = made.plan, made.profile, made.cluster
            with agreed(self._world, "while it read its plan"):
                wish = (schedule, stages, microbatches, vertical_sync, tensor_parallel)
                self.plan = choose_plan(plan, len(self._chain.layers), self._world.processes, *wish)
                """The plan that runs."""
                self.plan, grains = choose_grains(self.plan, recompute)
                check_plan(self.plan, self._chain)
                self.schedule: Schedule = make_schedule(self.plan, self._chain)
                """The schedule that runs."""
                verify(self.schedule)
                self._ranks = self._world.local(self.schedule.ranks, self.plan.tensor_parallel)
            check_agreement(self._world, self.plan, self._chain)
            held = parallelize_stages(parallelize, self._world, self._chain, self.plan, self.schedule, timeout_seconds)
            self._chain, self._hooked = held.chain, held
            self._forecast = forecast_of(self.plan, self.schedule.flushes, self._world)
            self._seed = seed
            self._transport = connect(self._world, self.schedule, self._device, timeout_seconds, held.lanes)
            self._stages = build_stages(
                self.plan, self._chain, self.schedule, self._ranks, self._transport, grains, held.modules
            )
            trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
            self.optimizer: torch.optim.Optimizer | None = optimizer(trained) if trained else None
            """Over this process's parameters; None if it has none to train."""
            self._reports = Reports(self._transport, self._ranks, self._ranks[0])
            self._workers = tuple(self._worker(rank, loss_fn, scale_learning_rates) for rank in self._ranks)
        self._minibatch = 0
        """Minibatches stepped since the last drain: the present run of the schedule."""
        self._microbatches_before = 0
        """Microbatches trained before the present run."""
        self._records: deque[list[Record]] = deque(maxlen=KEPT_MINIBATCHES)

    @cached_property
    def profile(self) -> Profile:
        """The layers of the model as measured on this process's device, on the first use; with ``plan="auto"``, on
        rank 0's before planning.
        """
        if self._hooked.modules:
            raise PenstockError("the layers are spread over processes: measure before, penstock.profile(model, sample)")
        return measure(self._chain, self._sample, progress=False)

    @property
    def rank(self) -> int:
        """The rank of this process; 0 in a single process."""
        return self._world.rank

    def step(self, inputs: Any, target: Any) -> StepResult:
        """One training step on a minibatch: forward, backward and update. Every rank passes the same batch.

        `inputs`: a tuple of arguments, a dict of keywords, or the one argument. `target`: what `loss_fn` takes; tensors
        whose dimension 0 counts the samples are cut along with the inputs. Under an asynchronous schedule some
        backwards of this minibatch are left to the next step, or to `drain`.
        """
        with self._guarded("reading a batch", harmless=True):
            placement = self.schedule.placement
            parts = max(map(len, placement.stages)) if placement.split else 1
            microbatches = split(self._chain.inputs, inputs, target, self.schedule.microbatches, parts)
        with self._guarded("in a step"):
            first = self._minibatch * self.schedule.microbatches
            current = self._training_pass(first + self.schedule.microbatches)
            measured = self._forecast and self._forecast.wants(self._minibatch, (part.samples for part in microbatches))
            start = mark_now(self._device) if measured else 0.0
            self._run(current, microbatches, first, self.schedule, Step(self._minibatch))
            self._minibatch += 1
            if self._forecast:
                if measured:
                    self._forecast.add(start, mark_now(self._device), self._records[-1])
                self._forecast.compare()
            numbers = range(first, first + len(microbatches))
            return StepResult(self._reports.loss(current, self.schedule.placement, numbers))

    def drain(self) -> None:
        """Finishes what is in flight. The next step starts a new run of the schedule, from the newest weights.

        A schedule that flushes has nothing left to compute. Whatever the schedule, the replicas of a stage take over
        the buffers of the first one (BatchNorm's statistics, of which each has seen its own microbatches), and when
        this returns all that this rank had to send has been sent, so that its process may leave the process group.
        """
        with self._guarded("in a drain"):
            if not self.schedule.flushes and self._minibatch > 0:
                microbatches = self._minibatch * self.schedule.microbatches
                self._run(self._training_pass(microbatches), (), 0, self.schedule, Drain(self._minibatch))
                self._restart(self._microbatches_before + microbatches)
            share_buffers(self._stages, self.schedule.placement, self._transport)
            self._transport.flush()

    def evaluate(self, inputs: Any, target: Any) -> StepResult:
        """The loss in evaluation mode with the newest weights, without gradients, for a batch of any size.

        Drains first. The loss is the mean over the batch's samples.
        """
        self.drain()
        current, microbatches = self._infer(inputs, target, keeps_outputs=False)
        with self._guarded("in an evaluation"):
            return StepResult(self._reports.loss(current, self._in_turn, range(len(microbatches))))

    def predict(self, inputs: Any) -> Any:
        """What the model returns in evaluation mode with the newest weights, on every rank, for a batch of any size.

        Drains first. Where the batch takes several microbatches, tensors whose dimension 0 counts samples are
        concatenated, others are stacked.
        """
        self.drain()
        current, microbatches = self._infer(inputs, None, keeps_outputs=True)
        with self._guarded("in a prediction"):
            form = self._chain.evaluation().output
            values = self._reports.outputs(current, self._in_turn, microbatches)
            outputs = [form.build(dict(zip(form.values, value, strict=True))) for value in values]
            return join(outputs, [microbatch.samples for microbatch in microbatches])

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this process's stages: the newest weights, in the order of the layers."""
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this process's stages, by the names that they have in the model."""
        stages = {index: stage for held in self._stages.values() for index, stage in held.items()}
        return {name: p for index in sorted(stages) for name, p in stages[index].weights.parameters.items()}

    def timeline(self, minibatches: int = 1) -> Timeline:
        """What every rank did in the last `minibatches` steps (at most 8), as measured. Collective."""
        # The lanes of a rank do the same; the first one tells of it.
        told = list(self._records)[-minibatches:] if self._world.rank % self.plan.tensor_parallel == 0 else []
        mine = [record for records in told for record in records]
        records = [record for some in self._world.gather(mine) for record in some]
        zero = min((start for _, _, start, _ in records), default=0.0)
        spans = (Span(rank, str(action), start - zero, stop - zero) for rank, action, start, stop in records)
        return Timeline(tuple(spans), self.schedule.ranks)

    def prediction_error(self) -> float | None:
        """How far the steps are from the plan's prediction: 0.1 if they take 10 % longer, -0.1 if 10 % less.

        Of the median of 8 steps on rank 0, without what happens between steps, after the first steps and with
        microbatches of the plan's size. None for a plan without a prediction, and until all ranks have measured. Waits
        for nobody, so that one rank may know it before another. When rank 0 does, it writes both numbers to the
        ``penstock`` logger, as a warning if they are more than 20 % apart. In a single process, where the ranks take
        turns, the prediction is the work of all ranks.
        """
        comparison = self._forecast.compare() if self._forecast else None
        return None if comparison is None else comparison.error

    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ..., "pipeline": ...}``: this process's part under the model's own names.

        Drains first. In a single process ``model`` has the keys of ``model.state_dict()``.
        """
        self.drain()
        trained = self._microbatches_before + self._minibatch * self.schedule.microbatches
        return {
            "model": {name: whole(tensor.detach()) for name, tensor in self._held().items()},
            "optimizer": named_state(self.optimizer, self.named_parameters()),
            "pipeline": {"microbatches": trained, "seed": self._seed},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this process's part out of `state`, which may hold more (a whole model's). Drains first.

        Raises `CheckpointError`, before anything is changed, if `state` lacks a part or has one of another shape.
        """
        self.drain()
        progress = restore(state, self._held(), self.optimizer, self.named_parameters())
        self._seed = progress["seed"]
        self._restart(progress["microbatches"])
        # Replicas in this process hold buffers that no state dict names.
        share_buffers(self._stages, self.schedule.placement, self._transport)

    def save(self, directory: str | Path) -> None:
        """Writes a checkpoint that any number of stages can `load`. Drains first. Collective.

        What was in `directory` is replaced when all is written. Several hosts must share the file system.
        """
        state = self.state_dict()
        with self._guarded("in a save"):
            write(state, directory, self._world)

    def load(self, directory: str | Path) -> None:
        """Takes this process's part out of a checkpoint that `save` wrote, under whatever plan. Drains first.
        Collective.

        `CheckpointError` if there is no checkpoint, or it is of another model.
        """
        self.drain()
        with self._guarded("in a load", harmless=True):
            state = read(directory, self._held(), self.named_parameters(), self._world)
            self.load_state_dict(state)

    def close(self) -> None:
        """Ends the transport's threads. A pipeline that lives as long as its process need not be closed."""
        self._transport.close()
        self._world.leave()

    def _training_pass(self, admitted: int) -> Pass:
        return Pass(training=True, seed=self._seed, microbatches_before=self._microbatches_before, admitted=admitted)

    def _restart(self, microbatches: int) -> None:
        """Begins a new run of the schedule after so many `microbatches` of training, from the newest weights."""
        for stages in self._stages.values():
            for stage in stages.values():
                stage.weights.restart()
        self._microbatches_before, self._minibatch = microbatches, 0

    def _worker(self, rank: int, loss_fn: Callable[[Any, Any], Tensor], scale_learning_rates: bool) -> Worker:
        return Worker(
            rank,
            self.schedule,
            self._stages[rank],
            self._chain,
            loss_fn,
            self.optimizer,
            self._transport,
            learning_rate_factors(self.schedule, scale_learning_rates),
        )

    def _held(self) -> dict[str, Tensor]:
        """The entries of the model's state dict that belong to this process's stages."""
        held = {stage for stages in self._stages.values() for stage in stages}
        return held_tensors(self._chain, (self.plan.stages[stage] for stage in held))

    def _infer(self, inputs: Any, target: Any, keeps_outputs: bool) -> tuple[Pass, tuple[Microbatch, ...]]:
        """Forwards of a batch in evaluation mode, in as many microbatches as the captured size makes of it."""
        with self._guarded("reading a batch", harmless=True):
            count = chunks(self._chain.inputs, inputs)
            microbatches = split(self._chain.inputs, inputs, target, count + -count % self._hooked.in_step)
        with self._guarded("in an evaluation"):
            current = Pass(training=False, keeps_outputs=keeps_outputs)
            made = self.schedule
            forwards = inference(made.ranks, made.stages_per_rank, len(microbatches), self._in_turn)
            self._run(current, microbatches, 0, forwards, Step(0))
            return current, microbatches

    @property
    def _in_turn(self) -> Placement:
        """The stages with replicas that take microbatches in turn, as in evaluations of any batch size."""
        return Placement(self.schedule.placement.stages)

    def _run(
        self, current: Pass, microbatches: Sequence[Microbatch], first: int, schedule: Schedule, part: Part
    ) -> None:
        """Has the workers of this process carry out `part` of `schedule`; `microbatches` are numbered from `first`."""
        programs = {rank: schedule.row(rank, part) for rank in self._ranks}
        numbered = dict(enumerate(microbatches, first))
        for worker in self._workers:
            worker.begin(current, schedule, numbered, programs[worker.rank])
        run_programs(self._workers, programs)
        records = [record for worker in self._workers for record in worker.end()]
        if current.training:
            self._records.append(records)

    @contextmanager
    def _guarded(self, place: str, harmless: bool = False) -> Iterator[None]:
        """Tells the other processes of an error in its body, after which the pipeline is of no use.

        A `harmless` error leaves a pipeline in a single process as it was.
        """
        if self._failed:
            raise PenstockError(
                f"this pipeline failed before ({self._failed}) and its microbatches in flight are lost: build a new "
                "Pipeline and load a state dict"
            )
        try:
            yield
        except BaseException as error:
            if not harmless or self._world.processes > 1:
                self._failed = f"{type(error).__name__} {place}"
            self._world.report(place, error)
            raise


def _device(parameters: Mapping[str, nn.Parameter]) -> torch.device:
    return next((parameter.device for parameter in parameters.values()), torch.device("cpu"))
