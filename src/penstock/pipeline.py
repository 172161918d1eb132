"""`Pipeline`: a model, wrapped, that trains in stages.

The facade. It captures the model, makes the plan a schedule, has the schedule proved, gives each rank its stages, and
then hands programs to the workers step by step. What happens inside a step is the schedule's and the worker's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.autoplans import Choices, plan_automatically
from penstock.capturing.initialization import InitFn
from penstock.errors import PenstockError
from penstock.profiling.profiler import profile as measure
from penstock.runtime.assembly.captured_models import capture_for_training
from penstock.runtime.assembly.checkpoint import held_tensors, named_state, read, restore, write
from penstock.runtime.assembly.connections import buffered_stages, connect
from penstock.runtime.assembly.failure_guard import FailureGuard
from penstock.runtime.assembly.parallelize_hooks import Parallelize, parallelize_stages
from penstock.runtime.assembly.restrictions import check_parts, needs_whole_backwards
from penstock.runtime.assembly.stages import (
    build_stages,
    check_agreement,
    check_plan,
    choose_plan,
    counted_parameters,
    learning_rate_factors,
    make_schedule,
)
from penstock.runtime.batches.batch_splitter import BatchCutter
from penstock.runtime.batches.microbatches import join
from penstock.runtime.batches.required_inputs import RequiredInputs, find_required_inputs, held_stages
from penstock.runtime.batches.results import StepResult
from penstock.runtime.devices.device_context import make_device_context
from penstock.runtime.engine.engine import Engine, LocalStages, make_workers
from penstock.runtime.engine.prediction_checks import forecast_of
from penstock.runtime.execution.recomputation import Granularity, Recompute, choose_grains
from penstock.runtime.parameters.optimizer_steps import Updater, exchanged, readings_of
from penstock.runtime.parameters.shards import whole
from penstock.runtime.transport.collective_errors import agreed
from penstock.runtime.transport.transport import Transport
from penstock.runtime.transport.worlds import World, join_world
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import SkipChoice
from penstock.scheduling.verification.verifier import verify
from penstock.timelines.timelines import Timeline
from penstock.training.losses import LossFunction, LossWeight
from penstock.training.optimizers import MakeOptimizer, MakeScheduler, make_optimizers
from penstock.training.recipes import Recipe
from penstock.training.scaling import LossScale
from penstock.training.update_hooks import UpdateHook
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

__all__ = ["Pipeline"]


class Pipeline:
    """Trains `model` in pipeline stages, with the numbers of one device.

    Args:
        model: any ``nn.Module`` (or a list of layers), whole and identical on every rank, or on the meta device with
            `init_fn`. It is trained in place: its parameters on this rank are always the newest weights.
        sample: example inputs of one microbatch; a tuple of arguments or a dict of keywords.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the microbatch's samples, or that and a dict of
            other means (accuracy, parts of the loss), which steps and evaluations report as ``result.metrics``.
        optimizer: called once with the list of this process's trained parameters, which knows their names
            (`NamedParameters`); returns a ``torch.optim.Optimizer`` or several, each for some of them.
        schedule: ``gpipe``, ``1f1b-flush`` (default), ``interleaved``, ``spp``, ``zb-h1``, ``zb-v``, ``pipedream`` or
            ``2bw``.
        microbatches: into how many microbatches a step cuts its batch (default 1).
        stages: how many stages (default: one for each process, two with ``interleaved`` and ``zb-v``). In a single
            process there are as many ranks as stages (half as many with these two).
        plan: the stages, schedule and microbatches in one; instead of the three before. ``"auto"`` measures the
            model on rank 0 and the links between the processes, and takes the plan with the most samples per second
            that has one rank per stage and, unless `schedule` says otherwise, flushes. What is given of the three is
            kept. The prediction is for batches of `microbatches` times the samples of `sample`. In a single process
            `stages` says how many ranks to plan for, and links are instant.
        vertical_sync: with ``pipedream``, every stage uses the version that the first stage used.
        autocast: ``torch.bfloat16`` or ``torch.float16``: forwards, losses and evaluations compute under PyTorch's
            autocast; the weights, their gradients and the optimizer's state stay as they are.
        version_dtype: the same type: weight versions of float32 parameters with two dimensions or more are kept in it,
            and the optimizer steps float32 masters. Saves memory with several versions: docs/training.md.
        loss_weight: ``loss_weight(target)`` says how many things the loss for `target` is the mean over, where they are
            not its samples: tokens without the padding, say. Means over a minibatch then are means over them.
        loss_scale: losses are multiplied by it before the backward and gradients divided by it after, against
            underflow in float16: ``"dynamic"`` or a `LossScale`, which skip updates whose gradients are not finite and
            then lower the scale, or a number.
        clip_grad_norm: gradients are scaled down before an update so that their norm over all stages is at most this,
            with the numbers of ``torch.nn.utils.clip_grad_norm_`` on one device. Under ``pipedream`` an update does not
            wait for the stages before its own: of these it takes the latest norms that have come.
        lr_scheduler: called with each optimizer; the scheduler of ``torch.optim.lr_scheduler`` that it returns steps
            with every update, of every stage by itself. Do not step it yourself.
        update_hooks: see every update of every parameter, may correct it, and may say what forwards read:
            `WeightPrediction`, `ErrorFeedback`, `LookAhead`, `WeightAverage`, or an `UpdateHook` of yours.
        scale_learning_rates: with ``pipedream``, multiplies the learning rates of a stage of r replicas with r / r0,
            where r0 are those of the first stage: it updates once in r microbatches with their mean gradient. The
            papers say nothing of it; PipeDream's program does so. Off by default.
        recompute: True keeps of a microbatch in flight only each stage's input, and computes the stage again in its
            backward; ``"layers"`` keeps the input of every layer; a set of numbers is of the stages to recompute as
            a whole. None (default) follows the plan.
        compile: True compiles every stage with ``torch.compile``, a dict with these arguments: docs/compile.md.
        init_fn: ``init_fn(name, tensor)`` writes the weights of a model on the meta device: docs/initialization.md.
        parallelize: called as ``parallelize(stage_module, mesh)`` for every stage of this process. It may apply
            PyTorch's tensor parallelism over ``mesh["tp"]`` and `fully_shard` over ``mesh["dp"]`` (the replicas) to
            ``stage_module.layers``, in place. What works with what: docs/composition.md.
        tensor_parallel: so many consecutive processes hold one replica together; of the plan, or 1.
        skips: ``"auto"`` sends what only later stages read directly past those between where that costs less;
            ``"relayed"`` and ``"direct"`` decide for all: docs/semantics.md.
        seed: of dropout and other random layers; their numbers depend on it, the microbatch and the layer only. With
            None they go on in PyTorch's own stream.
        timeout_seconds: how long a rank waits for another one before it takes it for dead.

    Under ``torchrun`` every process is one rank and must make the same calls in the same order. In a single process all
    ranks run in turn, with the same schedule and the same numbers.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of the model and the way out.
        PlanError, ScheduleError: the plan does not fit the model, the processes or the schedule.
        TransportError: from any method, if another rank failed, died or hangs.
    """

    cluster: Cluster | None = None
    """What ``plan="auto"`` found the links to be; None with another plan."""
    reads: RequiredInputs

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        sample: tuple[Any, ...] | dict[str, Any],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        schedule: str | None = None,
        microbatches: int | None = None,
        stages: int | None = None,
        plan: Plan | str | None = None,
        vertical_sync: bool = False,
        autocast: torch.dtype | None = None,
        version_dtype: torch.dtype | None = None,
        loss_weight: LossWeight | None = None,
        loss_scale: LossScale | str | float | None = None,
        clip_grad_norm: float | None = None,
        lr_scheduler: MakeScheduler | None = None,
        update_hooks: Sequence[UpdateHook] = (),
        scale_learning_rates: bool = False,
        recompute: Recompute = None,
        compile: bool | Mapping[str, Any] = False,
        init_fn: InitFn | None = None,
        parallelize: Parallelize | None = None,
        tensor_parallel: int | None = None,
        skips: SkipChoice = "auto",
        seed: int | None = 0,
        timeout_seconds: float = 600.0,
    ) -> None:
        updating = (loss_fn, optimizer, autocast, loss_scale, clip_grad_norm, lr_scheduler, scale_learning_rates)
        recipe = Recipe(*updating, loss_weight, version_dtype, update_hooks)
        self._world: World = join_world()
        self._guarded, self._sample = FailureGuard(self._world), sample
        with self._guarded("building the pipeline"):
            with agreed(self._world, "while it captured the model"):
                beginning = capture_for_training(model, sample, init_fn, recipe, compile, parallelize is not None)
                self._chain, self._device = beginning.chain, beginning.device
            if isinstance(plan, str):
                undivided = needs_whole_backwards(bool(compile), parallelize is not None, recompute)
                plan = self._plan(plan, Choices(schedule, microbatches, stages, vertical_sync, undivided, autocast))
            with agreed(self._world, "while it read its plan"):
                wish = (schedule, stages, microbatches, vertical_sync, tensor_parallel)
                chosen = choose_plan(plan, len(self._chain.layers), self._world.processes, *wish)
                self.plan, grains = choose_grains(chosen, recompute)
                """The plan that runs."""
                check_plan(self.plan, self._chain)
                self.schedule: Schedule = make_schedule(self.plan, self._chain, recipe.needs_norms, skips)
                """The schedule that runs."""
                verify(self.schedule)
                check_parts(self.schedule, bool(compile), parallelize is not None, grains)
                self._ranks = self._world.local(self.schedule.ranks, self.plan.tensor_parallel)
                self.reads = find_required_inputs(self._chain, held_stages(self.plan, self.schedule, self._ranks))
            check_agreement(self._world, self.plan, self._chain, self.schedule)
            self._chain = beginning.give_weights(self._world, self.reads.stages, seed)
            hooked = (parallelize, self._world, self._chain, self.plan, self.schedule, timeout_seconds)
            held = parallelize_stages(*hooked, recipe.keeps_masters)
            self._chain, self._hooked = beginning.compiled(held.chain, self.plan, self.schedule, grains), held
            buffered = buffered_stages(self._world, self.plan, self._chain, self.schedule, held.modules)
            transport = connect(self._world, self.schedule, buffered, self._device, timeout_seconds, held.tp_group)
            self._stages = self._build(recipe, transport, grains)
            self._recipe, self._engine = recipe, self._start(recipe, transport, seed)

    def _plan(self, plan: str, choices: Choices) -> Plan:
        made = plan_automatically(self._world, self._chain, self._sample, self._device, plan, choices)
        self.profile, self.cluster = made.profile, made.cluster
        return made.plan

    def _build(self, recipe: Recipe, transport: Transport, grains: Mapping[int, Granularity]) -> LocalStages:
        """What this process holds."""
        readings = readings_of(recipe, self.schedule.guarantees.delays)
        modules = self._hooked.modules
        self._context = make_device_context(self._device, self._ranks, transport.check)
        held = (self._ranks, transport, grains, modules, readings, self._context)
        return build_stages(self.plan, self._chain, self.schedule, *held)

    def _start(self, recipe: Recipe, transport: Transport, seed: int | None) -> Engine:
        """A worker for each rank of this process, and the engine over them."""
        schedule, chain = self.schedule, self._chain
        self.optimizers = make_optimizers(recipe.optimizer, self.named_parameters())
        """What `optimizer` returned, over this process's parameters; empty if it has none to train."""
        factors = learning_rate_factors(schedule, self._stages, recipe.scale_learning_rates)
        self._updater = Updater(self.optimizers, factors, recipe.lr_scheduler, recipe.hooks, schedule.guarantees.delays)
        forecast = forecast_of(self.plan, schedule.flushes, self._world, self._context.timer)
        counted = counted_parameters(self.plan, chain)
        self._cutter = BatchCutter(chain, schedule, self.reads, recipe.loss_weight, self._hooked.in_step)
        workers = make_workers(recipe, schedule, chain, self._stages, counted, self._updater, transport, self._context)
        return Engine(schedule, self._stages, workers, transport, forecast, self._context, seed)

    @cached_property
    def profile(self) -> Profile:
        """The layers of the model as measured on this process's device, on the first use; with ``plan="auto"``, on
        rank 0's before planning.
        """
        if self._hooked.modules:
            raise PenstockError("the layers are spread over processes: measure before, penstock.profile(model, sample)")
        return measure(self._chain, self._sample, autocast=self._recipe.autocast, progress=False)

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The first of `optimizers`, of which most pipelines have one."""
        return self.optimizers[0] if self.optimizers else None

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
            microbatches = self._cutter.for_step(inputs, target)
        with self._guarded("in a step"):
            return StepResult(self._engine.train(microbatches))

    def drain(self) -> None:
        """Finishes what is in flight. The next step starts a new run of the schedule, from the newest weights.

        A schedule that flushes has nothing left to compute. Whatever the schedule, the replicas of a stage take over
        the buffers of the first one (BatchNorm's statistics, of which each has seen its own microbatches), and when
        this returns all that this rank had to send has been sent, so that its process may leave the process group.
        """
        with self._guarded("in a drain"):
            self._engine.drain()

    def evaluate(self, inputs: Any, target: Any) -> StepResult:
        """The loss in evaluation mode with the newest weights, without gradients, for a batch of any size.

        Drains first. The loss is the mean over the batch's samples.
        """
        self.drain()
        with self._guarded("reading a batch", harmless=True):
            microbatches = self._cutter.for_evaluation(inputs, target)
        with self._guarded("in an evaluation"):
            return StepResult(self._engine.evaluate(microbatches))

    def predict(self, inputs: Any) -> Any:
        """What the model returns in evaluation mode with the newest weights, on every rank, for a batch of any size.

        Drains first. Where the batch takes several microbatches, tensors whose dimension 0 counts samples are
        concatenated, others are stacked.
        """
        self.drain()
        with self._guarded("reading a batch", harmless=True):
            microbatches = self._cutter.for_evaluation(inputs, None)
        with self._guarded("in a prediction"):
            values = self._engine.predict(microbatches)
            form = self._chain.evaluation().output
            outputs = [form.build(value) for value in values]
            return join(outputs, [microbatch.samples for microbatch in microbatches])

    def parameters(self) -> list[nn.Parameter]:
        """The parameters of this process's stages: the newest weights, in the order of the layers."""
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of this process's stages, by the names that they have in the model."""
        stages = {index: stage for held in self._stages.values() for index, stage in held.items()}
        return {name: p for index in sorted(stages) for name, p in stages[index].weights.parameters.items()}

    def averages(self) -> dict[str, Tensor]:
        """What the `WeightAverage` among ``update_hooks`` keeps of this process's parameters, by name. Drains first.

        `PenstockError` if there is none.
        """
        self.drain()
        return self._updater.averages(self.named_parameters())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In its body the parameters have their `averages`, for evaluations, predictions and `state_dict`; do not
        train there.
        """
        averages = self.averages()
        with exchanged(self.named_parameters(), averages):
            yield

    def timeline(self, minibatches: int = 1) -> Timeline:
        """What every rank did in the last `minibatches` steps (at most 8), as measured. Collective."""
        return self._engine.timeline(self._world, self.plan.tensor_parallel, minibatches)

    @property
    def gradient_norm(self) -> float | None:
        """The norm that the last update of this process was clipped by, before clipping; None without
        ``clip_grad_norm`` or before the first update.
        """
        return self._engine.gradient_norm()

    @property
    def loss_scale(self) -> float | None:
        """The present scale of the loss, as far as this process knows; None without ``loss_scale``."""
        return self._engine.loss_scale()

    def prediction_error(self) -> float | None:
        """How far the steps are from the plan's prediction: 0.1 if they take 10 % longer, -0.1 if 10 % less.

        Of the median of 8 steps on rank 0, without what happens between steps, after the first steps and with
        microbatches of the plan's size. None for a plan without a prediction, and until all ranks have measured. Waits
        for nobody, so that one rank may know it before another. When rank 0 does, it writes both numbers to the
        ``penstock`` logger, as a warning if they are more than 20 % apart. In a single process, where the ranks take
        turns, the prediction is the work of all ranks.
        """
        return self._engine.prediction_error()

    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ..., "pipeline": ...}``: this process's part under the model's own names.

        Drains first. In a single process ``model`` has the keys of ``model.state_dict()``.
        """
        self.drain()
        return {
            "model": {name: whole(tensor.detach()) for name, tensor in self._held().items()},
            "optimizer": named_state(self.optimizers, self.named_parameters(), self._updater.hooks),
            "pipeline": {
                "microbatches": self._engine.trained,
                "seed": self._engine.seed,
                **self._updater.state(),
                **self._engine.scale_state(),
            },
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes this process's part out of `state`, which may hold more (a whole model's). Drains first.

        Raises `CheckpointError`, before anything is changed, if `state` lacks a part or has one of another shape.
        """
        self.drain()
        progress = restore(state, self._held(), self.optimizers, self.named_parameters(), self._updater.hooks)
        self._updater.load_state(progress)
        self._engine.load_scale(progress)
        self._engine.seed = progress["seed"]
        self._engine.restart(progress["microbatches"])
        # Replicas in this process hold buffers that no state dict names.
        self._engine.share_buffers()

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
        self._engine.transport.close()
        self._world.leave()

    def _held(self) -> dict[str, Tensor]:
        """The entries of the model's state dict that belong to this process's stages."""
        return held_tensors(self._chain, self.reads.stages)
