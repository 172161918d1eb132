"""`Pipeline`: a model, wrapped, that trains in stages.

The facade. It captures the model, makes the plan a schedule, has the schedule proved, gives each rank its stages, and
then hands programs to the workers step by step. What happens inside a step is the schedule's and the worker's.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch
from torch import Tensor, nn

from penstock.autoplans import AutoPlan, Choices, plan_automatically
from penstock.capturing.initialization import InitFn
from penstock.errors import PenstockError, TransportError
from penstock.profiling.profiler import profile as profile_layers
from penstock.runtime.assembly.captured_models import capture_for_training
from penstock.runtime.assembly.checkpoint import held_tensors, named_state, read, restore, write
from penstock.runtime.assembly.connections import buffered_stages, connect
from penstock.runtime.assembly.failure_guard import FailureGuard
from penstock.runtime.assembly.parallelize_hooks import Parallelize, parallelize_stages
from penstock.runtime.assembly.restrictions import check_split_backwards, needs_whole_backwards
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

    ``with penstock.Pipeline(...) as pipe:`` drains and closes it at the end of the block.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of the model and the way out.
        PlanError, ScheduleError: the plan does not fit the model, the processes or the schedule.
        TransportError: from any method, if another rank failed, died or hangs.
    """

    auto_plan: AutoPlan | None = None
    """What ``plan="auto"`` measured on all ranks, and the plan that it made; None with another plan."""
    reads: RequiredInputs

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        sample: tuple[Any, ...] | dict[str, Any],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        *,
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
        recipe = Recipe(
            loss_fn=loss_fn,
            optimizer=optimizer,
            autocast=autocast,
            loss_scale=loss_scale,
            clip_grad_norm=clip_grad_norm,
            lr_scheduler=lr_scheduler,
            scale_learning_rates=scale_learning_rates,
            loss_weight=loss_weight,
            version_dtype=version_dtype,
            update_hooks=update_hooks,
        )
        compiled, parallelized = bool(compile), parallelize is not None
        self._world: World = join_world()
        self._guarded, self._sample = FailureGuard(self._world), sample
        self._closed = False
        with self._guarded("building the pipeline"):
            with agreed(self._world, "while it captured the model"):
                captured = capture_for_training(
                    model, sample, init_fn=init_fn, recipe=recipe, compile=compile, parallelized=parallelized
                )
                self._chain, self._device = captured.chain, captured.device
            if isinstance(plan, str):
                choices = Choices(
                    schedule=schedule,
                    microbatches=microbatches,
                    stages=stages,
                    vertical_sync=vertical_sync,
                    whole_backwards=needs_whole_backwards(compiled, parallelized, recompute),
                    autocast=autocast,
                )
                plan = self._plan(plan, choices)
            with agreed(self._world, "while it read its plan"):
                chosen = choose_plan(
                    plan,
                    layers=len(self._chain.layers),
                    processes=self._world.processes,
                    schedule=schedule,
                    stages=stages,
                    microbatches=microbatches,
                    vertical_sync=vertical_sync,
                    tensor_parallel=tensor_parallel,
                )
                self.plan, grains = choose_grains(chosen, recompute)
                """The plan that runs."""
                check_plan(self.plan, self._chain)
                self.schedule: Schedule = make_schedule(self.plan, self._chain, recipe.needs_norms, skips)
                """The schedule that runs."""
                verify(self.schedule)
                check_split_backwards(self.schedule, compiled, parallelized, grains)
                self._ranks = self._world.local(self.schedule.ranks, self.plan.tensor_parallel)
                self.reads = find_required_inputs(self._chain, held_stages(self.plan, self.schedule, self._ranks))
            check_agreement(self._world, self.plan, self._chain, self.schedule)
            self._chain = captured.materialize(self._world, self.reads.stages, seed)
            self._parallel_stages = parallelize_stages(
                parallelize,
                self._world,
                chain=self._chain,
                plan=self.plan,
                schedule=self.schedule,
                timeout_seconds=timeout_seconds,
                masters=recipe.keeps_masters,
            )
            self._chain = captured.compile(self._parallel_stages.chain, self.plan, self.schedule, grains)
            transport = self._connect(timeout_seconds)
            self._stages = self._build(recipe, transport, grains)
            self._recipe, self._engine = recipe, self._start(recipe, transport, seed)

    def _plan(self, plan: str, choices: Choices) -> Plan:
        self.auto_plan = plan_automatically(
            plan, choices, world=self._world, chain=self._chain, sample=self._sample, device=self._device
        )
        return self.auto_plan.plan

    def _connect(self, timeout_seconds: float) -> Transport:
        world, schedule, parallel = self._world, self.schedule, self._parallel_stages
        buffered = buffered_stages(world, self.plan, self._chain, schedule, parallel.modules)
        return connect(
            world,
            schedule,
            buffered=buffered,
            device=self._device,
            timeout_seconds=timeout_seconds,
            lanes=parallel.lanes,
        )

    def _build(self, recipe: Recipe, transport: Transport, grains: Mapping[int, Granularity]) -> LocalStages:
        """The stages of this process."""
        self._site = make_device_context(self._device, self._ranks, transport.check)
        return build_stages(
            self.plan,
            self._chain,
            self.schedule,
            ranks=self._ranks,
            transport=transport,
            grains=grains,
            modules=self._parallel_stages.modules,
            compute_weights=readings_of(recipe, self.schedule.guarantees.delays),
            device_context=self._site,
        )

    def _start(self, recipe: Recipe, transport: Transport, seed: int | None) -> Engine:
        """A worker for each rank of this process, and the engine over them."""
        schedule, chain = self.schedule, self._chain
        self.optimizers = make_optimizers(recipe.optimizer, self._parameters())
        """What `optimizer` returned, over this process's parameters; empty if it has none to train."""
        factors = learning_rate_factors(schedule, self._stages, recipe.scale_learning_rates)
        self._updater = Updater(self.optimizers, factors, recipe.lr_scheduler, recipe.hooks, schedule.guarantees.delays)
        self._cutter = BatchCutter(chain, schedule, self.reads, recipe.loss_weight, self._parallel_stages.in_step)
        site, counted = self._site, counted_parameters(self.plan, chain)
        workers = make_workers(
            recipe,
            schedule,
            chain,
            self._stages,
            counted=counted,
            updater=self._updater,
            transport=transport,
            site=site,
        )
        forecast = forecast_of(self.plan, schedule.flushes, self._world, site.timer)
        return Engine(schedule, self._stages, workers, transport, forecast=forecast, site=site, seed=seed)

    def measure(self, *, iterations: int = 10, warmup: int = 2, progress: bool | None = False) -> Profile:
        """Measures the layers of the model on this process's device, as `penstock.profile` does, under `autocast`.

        It runs every layer several times and leaves the model as it was. Not collective. `PenstockError` after a
        `parallelize` hook.
        """
        if self._parallel_stages.modules:
            raise PenstockError("the layers are spread over processes: measure before, penstock.profile(model, sample)")
        autocast = self._recipe.autocast
        return profile_layers(
            self._chain, self._sample, autocast=autocast, iterations=iterations, warmup=warmup, progress=progress
        )

    @property
    def profile(self) -> NoReturn:
        """Replaced by `measure` and `auto_plan`."""
        raise AttributeError(
            "Pipeline.profile is no attribute any more, since a measurement runs the model for seconds: call "
            "pipe.measure(), or read pipe.auto_plan.profile if the plan was made with plan='auto'"
        )

    @property
    def cluster(self) -> NoReturn:
        """Replaced by `auto_plan`."""
        raise AttributeError("Pipeline.cluster is now pipe.auto_plan.cluster; auto_plan is None without plan='auto'")

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

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages, each once, in the order of the layers: the newest weights."""
        return iter(self._parameters().values())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters` with the names that they have in the model, as pairs; `prefix` and a dot before each name."""
        start = f"{prefix}." if prefix else ""
        return ((start + name, parameter) for name, parameter in self._parameters().items())

    def averages(self) -> dict[str, Tensor]:
        """What the `WeightAverage` among ``update_hooks`` keeps of this process's parameters, by name. Drains first.

        `PenstockError` if there is none.
        """
        self.drain()
        return self._updater.averages(self._parameters())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """In its body the parameters have their `averages`, for evaluations, predictions and `state_dict`; do not
        train there.
        """
        averages = self.averages()
        with exchanged(self._parameters(), averages):
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
            "optimizer": named_state(self.optimizers, self._parameters(), self._updater.hooks),
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
        progress = restore(state, self._held(), self.optimizers, self._parameters(), self._updater.hooks)
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
            state = read(directory, self._held(), self._parameters(), self._world)
            self.load_state_dict(state)

    def close(self) -> None:
        """Ends the transport's threads and undoes the hooks of the process. A second call does nothing.

        It does not drain. A pipeline that lives as long as its process need not be closed.
        """
        if not self._closed:
            self._closed = True
            self._engine.transport.close()
            self._world.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drains and closes. After an exception it only closes, and the exception ends the other ranks as well."""
        if error is None:
            try:
                if not (self._closed or self._guarded.failed):
                    self.drain()
            finally:
                self.close()
            return
        # A failure inside the pipeline was reported by the pipeline, and another rank's by that rank.
        if not (self._closed or self._guarded.failed or isinstance(error, TransportError | SystemExit)):
            self._world.report("outside the pipeline", error)
        # The user sees the exception of the block, whatever closing meets.
        with suppress(Exception):
            self.close()

    def _parameters(self) -> dict[str, nn.Parameter]:
        stages = {index: stage for own in self._stages.values() for index, stage in own.items()}
        return {name: p for index in sorted(stages) for name, p in stages[index].weights.parameters.items()}

    def _held(self) -> dict[str, Tensor]:
        """The entries of the model's state dict that belong to this process's stages."""
        return held_tensors(self._chain, self.reads.stages)
