"""`Pipeline` wraps a model and trains it in stages.

It captures the model, makes a schedule of the plan, has the schedule proved, and builds the stages of this process.
Then it hands the programs of the schedule to the workers, step by step.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from copy import copy
from dataclasses import replace
from functools import partial
from logging import getLogger
from pathlib import Path
from time import perf_counter
from types import TracebackType
from typing import Any, Literal, Self, overload

import torch
from torch import Tensor, nn

from penstock.autoplans import AutoPlan, plan_pipeline
from penstock.capturing.initialization import InitFn
from penstock.capturing.model_kinds import modules_in
from penstock.capturing.preservation import in_mode
from penstock.capturing.reads import Change
from penstock.capturing.sequential import watch_shared
from penstock.doctor.stragglers import Stragglers
from penstock.errors import CheckpointError, PenstockError, TransportError, counted
from penstock.reporting.stats import Stats, StatsSource
from penstock.runtime.assembly.captured_models import capture_for_training
from penstock.runtime.assembly.first_batch import FirstBatch
from penstock.runtime.assembly.flight_watch import watch_flight
from penstock.runtime.assembly.guarded_calls import (
    FailureGuard,
    StepConditions,
    collective,
    give_hints,
    open_resources,
    remind_to_drain,
)
from penstock.runtime.assembly.parallelize_hooks import computes_alike, make_own_stages
from penstock.runtime.assembly.partial_models import ModelParts, old_numbers
from penstock.runtime.assembly.pipeline_options import (
    Balance,
    Check,
    ModelOptions,
    Parallelize,
    PipelineOptions,
    PlanOptions,
    RecomputeChoice,
    RunOptions,
)
from penstock.runtime.assembly.recaptures import refit, refuse_unfollowed, refused
from penstock.runtime.assembly.setup_agreement import check_agreement, check_optimizers, check_options
from penstock.runtime.assembly.started_engines import replace_stages, start_engine
from penstock.runtime.assembly.weight_exports import export_weights, hold
from penstock.runtime.batches.batch_splitter import (
    BatchSplitter,
    RequiredInputs,
    explained_mismatches,
    find_inputs,
    held_stages,
)
from penstock.runtime.batches.microbatches import Microbatch, join
from penstock.runtime.batches.results import Loss, StepResult
from penstock.runtime.checkpoints.background_saves import BackgroundSave, Count, Place
from penstock.runtime.checkpoints.checkpoint_reader import checked_path
from penstock.runtime.checkpoints.checkpoints import make_checkpoints
from penstock.runtime.checkpoints.resumption import resume_training, signals_held
from penstock.runtime.checkpoints.state_checks import check_state
from penstock.runtime.collectives.timeouts import check_timeout
from penstock.runtime.engine.local_stage import parameters_of
from penstock.runtime.parameters.optimizer_steps import replaced_parameters
from penstock.runtime.transport.worlds import World, join_world
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.scheduling.schedules import Schedule
from penstock.testing.faults import inject_here
from penstock.timelines.timelines import Timeline
from penstock.training.losses import LossFunction, LossWeight
from penstock.training.optimizers import MakeOptimizer, MakeScheduler
from penstock.training.recipes import Recipe
from penstock.training.scaling import LossScale, OnNonfinite
from penstock.training.update_corrections import UpdateHook
from penstock.training.wire_codecs import WireDtype
from penstock.values.plans import Plan
from penstock.values.profiles import Profile

log = getLogger("penstock")


class Pipeline:
    """Trains `model` in pipeline stages, with the numbers of one device.

    Args:
        model: any ``nn.Module`` (or a list of layers), whole and identical on every rank, or on the meta device with
            `init_fn`. It is trained in place: its parameters on this rank are always the newest weights.
        sample: example inputs of one microbatch: a tuple of arguments or a dict of keywords.
        loss_fn: ``loss_fn(output, target)`` returns the mean over the microbatch's samples. It may also return a dict
            of other means (accuracy, terms of the loss), which become ``result.metrics``. `model_loss` takes the loss
            that the model computes from labels among its inputs: docs/huggingface.md.
        optimizer: called once with the parameters that this process updates, a list with their names
            (`NamedParameters`). It returns a ``torch.optim.Optimizer``, or several for disjoint parameters.
        schedule: ``gpipe``, ``1f1b-flush`` (default), ``interleaved``, ``spp``, ``zb-h1``, ``zb-v``, ``v-half``,
            ``v-min``, ``breadth-first``, ``pipedream`` or ``2bw``; or your own `ScheduleDefinition`.
        microbatches: the number of microbatches that a step cuts its batch into (default 1).
        stages: the number of stages (default: one for each process, two with ``interleaved`` and in a V). In a
            single process there are as many ranks as stages (half as many with these).
        plan: the stages, schedule and microbatches in one value, instead of the three arguments before. ``"auto"``
            measures the model, and the links between the processes. It takes the plan with the most samples per second
            that uses all processes, with replicas where that is faster, and that flushes; it keeps what is given of the
            three, and with `stages` has one rank per stage. In a single process links are instant. A function of the
            number of processes makes the plan of each run of a job that may go on with fewer.
        balance: where stages begin without a `plan`. ``"work"`` (default): so that the stage with the most work has as
            little as possible, estimated from the operators that every layer runs on `sample` and the bytes that they
            move. ``"measured"``: by measured seconds instead; takes seconds. ``"layers"``: by their number.
        vertical_sync: with ``pipedream``, every stage uses the version that the first stage used.
        autocast: ``torch.bfloat16`` or ``torch.float16``: forwards, losses and evaluations compute under PyTorch's
            autocast. The weights, their gradients and the optimizer's state keep their types.
        version_dtype: the same type: weight versions of float32 parameters with two dimensions or more are kept in it,
            and the optimizer steps float32 masters. Saves memory with several versions: docs/training.md.
        loss_weight: ``loss_weight(target)`` returns the number of items that the loss for `target` is the mean over,
            where these are not samples (tokens without padding, say). Means over a minibatch are then means over them.
        loss_scale: losses are multiplied by it before the backward and gradients divided by it after, against
            underflow in float16: a number, or ``"dynamic"`` or a `LossScale`, which skip updates whose gradients are
            not finite and then lower the scale.
        clip_grad_norm: gradients are scaled down before an update so that their norm over all stages is at most this,
            with the numbers of ``torch.nn.utils.clip_grad_norm_`` on one device. This, `loss_scale` and
            ``on_nonfinite="skip"`` need all gradients for an update, and ``pipedream`` refuses them.
        lr_scheduler: called with each optimizer; returns a scheduler of ``torch.optim.lr_scheduler``, which steps with
            every update of a stage. Do not step it yourself.
        update_hooks: see every update of every parameter, may correct it, and may predict the weights that forwards
            read: `WeightPrediction`, `WeightAverage`, or your own `UpdateHook`.
        on_nonfinite: ``"raise"`` (default): a loss that is not finite is an error. ``"skip"``: updates whose gradients
            are not finite are left out, as with `loss_scale`. ``"rollback"``: a loss that is not finite also takes the
            training back to its newest checkpoint in `resume`: docs/training.md.
        recompute: True keeps only each stage's input of a microbatch in flight, and computes the stage again in its
            backward; ``"layers"`` keeps the input of every layer; a set of numbers names the stages to recompute as a
            whole. None (default) follows the plan.
        compile: True compiles every stage with ``torch.compile``, a dict with these arguments: docs/compile.md.
        init_fn: ``init_fn(name, tensor)`` writes the weights of a model on the meta device: docs/initialization.md.
        parallelize: called as ``parallelize(stage_module, mesh)`` for every stage of this process. It may apply
            PyTorch's tensor parallelism over ``mesh["tp"]`` and `fully_shard` over ``mesh["dp"]`` (the replicas) to
            the model's modules in ``stage_module.blocks``, in place. Supported combinations: docs/composition.md.
        tensor_parallel: the number of consecutive processes that hold one replica together; by default the plan's.
        wire_dtype: where links are slow, ``torch.bfloat16`` or another type that activations and their gradients are
            rounded to at every cut between stages, for fewer bytes; or a `WireCodec` such as `RowInt8`: docs/wire.md.
        seed: seeds dropout and other random layers, whose numbers depend on it, the microbatch and the layer only.
            None leaves them to PyTorch's own stream.
        check: the first step compares losses of the plain model on two microbatches at once and apart, and in one
            process gradients, where that is cheap: ``"warn"`` (default), ``"strict"`` (every difference is an error) or
            ``"off"``: docs/inputs.md.
        resume: a directory of checkpoints. The training goes on from the newest whole one, under any plan, or starts if
            there is none; and SIGTERM and SIGUSR1 save there and leave: docs/reliability.md.
        save_frozen: False: checkpoints have digests of frozen weights and their scales in place of their numbers, which
            a load compares with those of the model: docs/checkpoints.md.
        offload_to: where a schedule with offloads moves what forwards save: ``"host"`` (memory, pinned beside a GPU),
            or on a CPU a directory: docs/memory.md.
        state_on_host: the optimizer's state and all weight versions but the one in use are in `offload_to`, and on the
            device while they are used: docs/memory.md.
        shard_optimizer: of the replicas of a stage each steps a part of the parameters and has the optimizer's state of
            that part alone (ZeRO-1): docs/memory.md.
        memory_bytes: with ``plan="auto"``, the most bytes of a device that a rank may take. Where nothing fits, weights
            live in `offload_to` while they are not used, too.
        timeout_seconds: how long a rank waits for another one before it takes it for dead.

    Under ``torchrun`` every process is one rank and must make the same calls in the same order. In a single process all
    ranks run in turn, with the same schedule and the same numbers. ``with penstock.Pipeline(...) as pipe:`` drains and
    closes the pipeline at the end of the block.

    Raises:
        CaptureError: the model cannot be captured; the message names the line of the model and a remedy.
        PlanError, ScheduleError: the plan does not fit the model, the processes or the schedule.
        TransportError: from any method, if another rank failed, died or hangs.
    """

    auto_plan: AutoPlan | None = None
    """What ``plan="auto"`` measured on all ranks, and the plan that it made; None with another plan."""
    plan: Plan
    """The plan that runs."""
    schedule: Schedule
    """The schedule of the plan."""
    optimizers: tuple[torch.optim.Optimizer, ...]
    """What `optimizer` returned; empty if this process trains no parameter."""
    required_inputs: RequiredInputs

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        sample: tuple[Any, ...] | dict[str, Any],
        loss_fn: LossFunction,
        optimizer: MakeOptimizer,
        *,
        schedule: ScheduleDefinition | str | None = None,
        microbatches: int | None = None,
        stages: int | None = None,
        plan: Plan | str | Callable[[int], Plan] | None = None,
        balance: Balance = "work",
        vertical_sync: bool = False,
        autocast: torch.dtype | None = None,
        version_dtype: torch.dtype | None = None,
        loss_weight: LossWeight | None = None,
        loss_scale: LossScale | str | float | None = None,
        clip_grad_norm: float | None = None,
        lr_scheduler: MakeScheduler | None = None,
        update_hooks: Sequence[UpdateHook] | UpdateHook = (),
        on_nonfinite: OnNonfinite = "raise",
        recompute: RecomputeChoice = None,
        compile: bool | Mapping[str, Any] = False,
        init_fn: InitFn | None = None,
        parallelize: Parallelize | None = None,
        tensor_parallel: int | None = None,
        wire_dtype: WireDtype | None = None,
        seed: int | None = 0,
        check: Check = "warn",
        resume: str | Path | None = None,
        save_frozen: bool = True,
        offload_to: str | Path = "host",
        state_on_host: bool = False,
        shard_optimizer: bool = False,
        memory_bytes: float | None = None,
        timeout_seconds: float = 600.0,
    ) -> None:
        self._build(
            lambda: PipelineOptions(
                ModelOptions(model, sample, init_fn),
                Recipe(
                    loss_fn,
                    optimizer,
                    autocast=autocast,
                    loss_scale=loss_scale,
                    clip_grad_norm=clip_grad_norm,
                    lr_scheduler=lr_scheduler,
                    loss_weight=loss_weight,
                    version_dtype=version_dtype,
                    update_hooks=update_hooks,
                    on_nonfinite=on_nonfinite,
                    wire_dtype=wire_dtype,
                ),
                PlanOptions(
                    plan=plan,
                    schedule=schedule,
                    microbatches=microbatches,
                    stages=stages,
                    balance=balance,
                    vertical_sync=vertical_sync,
                    tensor_parallel=tensor_parallel,
                    recompute=recompute,
                    state_on_host=state_on_host,
                    shard_optimizer=shard_optimizer,
                    memory_bytes=memory_bytes,
                ),
                RunOptions(
                    compile=compile,
                    parallelize=parallelize,
                    seed=seed,
                    check=check,
                    resume=resume,
                    save_frozen=save_frozen,
                    offload_to=offload_to,
                    timeout_seconds=timeout_seconds,
                ),
            ),
            timeout_seconds,
        )

    def _build(
        self, make_options: Callable[[], PipelineOptions], timeout_seconds: float, *, again: bool = False
    ) -> None:
        """Builds the pipeline, in the five steps of docs/architecture.md.

        `make_options`: raises for a wrong argument. The processes have met by then, so that it is an error of all.
        `again`: in place of itself with another plan, to go on from its own checkpoint.
        """
        inject_here()
        self._world: World = join_world(check_timeout(timeout_seconds))
        self._guarded, self._opened = FailureGuard(self._world), open_resources(self, self._world)
        with self._guarded("building the pipeline"):
            self._options = options = make_options()
            recipe, run = options.recipe, options.run
            if not again:
                check_options(self._world, options)
            # 1. The model becomes a chain of layers.
            captured = capture_for_training(self._world, options)
            self._device = captured.device
            # 2. The plan has a schedule, which is the same on all ranks.
            planned, measured = plan_pipeline(options, self._world, captured)
            self.auto_plan = self.auto_plan if again else measured
            self._planned, self.plan, self.schedule = planned, planned.plan, planned.schedule
            held = held_stages(self.plan, self.schedule, planned.ranks)
            self.required_inputs = find_inputs(captured.chain, held)
            check_agreement(self._world, self.plan, captured.chain, self.schedule, weights=not again)
            # 3. to 5. This process gets its layers, is connected with the others, and builds stages and workers.
            self._own_stages = make_own_stages(options, self._world, captured, planned)
            self._chain = self._own_stages.chain
            self._watch_shared()
            self._engine, self._updater = start_engine(
                self._world, planned, self._own_stages, recipe, run, device=self._device, opened=self._opened
            )
            self.optimizers = self._updater.optimizers
            compared = FirstBatch(options, captured, self.schedule, self.required_inputs.target)
            # The plain model has no room where weights are on the host.
            skips = run.check == "off" or again or bool(self.schedule.streamed)
            self._first_batch = None if skips else compared
            self._prepare_calls()
        back = partial(self._checkpoints.go_back, guarded=self._guarded) if recipe.on_nonfinite == "rollback" else None
        claims = None if again else self._checkpoints.claims
        self._resumption = resume_training(self, run.resume, self._world, run.timeout_seconds, back, claims=claims)
        if run.resume is not None:
            self._opened.callback(self._resumption.close)

    def _prepare_calls(self) -> None:
        """Makes what the calls of the user need beside the engine, and what watches over them."""
        model, world = self._options.model, self._world
        modules = modules_in(model.model)
        # What closes the pipeline must not keep it alive.
        guarded, engine = self._guarded, self._engine
        self._checkpoints = checkpoints = make_checkpoints(
            world,
            engine,
            self._options.recipe,
            self._updater,
            plan=self.plan,
            model=model.model,
            chain=self._chain,
            drain=partial(guarded.run, "in a drain", engine.drain),
            parallelized=self._options.run.parallelize is not None,
            saves_frozen=self._options.run.save_frozen,
            timeout_seconds=self._options.run.timeout_seconds,
        )
        self._opened.callback(lambda: checkpoints.close(guarded.failed))
        self._parts, self._begins = ModelParts(model.model, self._chain, checkpoints.training.stages), True
        guarded.after_load = partial(self._parts.leave, loaded=True)
        guarded.all_refuse = engine.calls.refuse
        self._splitter = BatchSplitter(
            self._chain,
            self.schedule,
            self.required_inputs,
            self._options.recipe,
            in_step=self._own_stages.in_step,
            allow=engine.resized,
        )
        trains = check_optimizers(world, self.optimizers, self._parameters(), self._updater.schedulers)
        self._conditions = StepConditions(modules, self.optimizers, trains)
        self._drain_reminder = remind_to_drain(self, engine, world.rank)
        self._explained = partial(explained_mismatches, spec=self._chain.inputs, sample=model.sample)
        give_hints(modules, self.schedule, world.rank)
        self._opened.callback(watch_flight(world, self.plan, engine.recorder, guarded, self._device))
        known = self.auto_plan.profile if self.auto_plan else None
        self._stats_source = StatsSource(self._chain, self.plan, self.schedule, self._device, world, profile=known)

    def _watch_shared(self) -> None:
        if self._options.run.watches:
            watch_shared([self._chain.layers[stage.start : stage.stop] for stage in self.plan.stages])

    def measure(self, *, iterations: int = 10, warmup: int = 2, progress: bool | None = False) -> Profile:
        """Measures the layers of the model on this process's device, as `penstock.profile` does, under `autocast`, with
        the pipeline's optimizer.

        It runs every layer several times and leaves the model as it was. After a `parallelize` hook it is collective,
        for one stage without replicas (`Profile.tensor_parallel`). Raises `PenstockError`.
        """
        from penstock.profiling.profiler import profile as profile_layers

        if self._own_stages.modules and self.plan.ranks > self.plan.tensor_parallel:
            found = "the layers are spread over processes: expected one stage without replicas. Measure with stages=1"
            raise PenstockError(f"{found} on tensor_parallel processes, or before: penstock.profile(model, sample)")
        if self._has_weights_away:
            found = "weights of streamed stages are on the host: expected all on the device that is measured"
            raise PenstockError(f"{found}. Measure before the pipeline is built: penstock.profile(model, sample)")
        sample, recipe = self._options.model.sample, self._options.recipe
        measured = partial(
            profile_layers, self._chain, sample, optimizer=recipe.optimizer, wire_dtype=recipe.wire_dtype
        )
        with old_numbers(self._options.model.model):
            return measured(autocast=recipe.autocast, iterations=iterations, warmup=warmup, progress=progress)

    @property
    def _has_weights_away(self) -> bool:
        """Whether the device has not all weights of this process between steps."""
        return bool(self.plan.streaming) and self._device.type != "cpu"

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The first of `optimizers`; most pipelines have one."""
        return self.optimizers[0] if self.optimizers else None

    @property
    def rank(self) -> int:
        """The rank of this process; 0 in a single process."""
        return self._world.rank

    def step(self, inputs: Any, target: Any = None) -> StepResult:
        """One training step on a minibatch: forward, backward and update. Every rank passes the same batch.

        `inputs`: a tuple of arguments, a dict of keywords, or the only argument. `target`: the second argument of
        `loss_fn`; tensors whose dimension 0 counts the samples are cut along with the inputs. None with `model_loss`.
        A `Microbatches` takes the place of both where you cut the batch yourself. Under an asynchronous schedule some
        backwards of this minibatch are left to the next step, or to `drain`. The learning rates are in ``result.lr``.
        What your own backwards have left in ``.grad`` of the parameters is dropped.
        """
        with self._guarded.calling("step()", self):
            if (change := self._chain.reads.change()) is not None:
                self._follow(change)
            with self._guarded("reading a batch", harmless=True):
                self._conditions.check()
                microbatches = self._splitter.for_step(inputs, target)
            with self._guarded("in a step"), self._explained("step", inputs, target):
                loss = self._begin(microbatches) if self._begins else self._engine.train(microbatches)
                result = StepResult(loss, self._updater.rates)
            self._resumption.after_step(result.loss, self._engine.transport.check)
        return result

    def _follow(self, change: Change) -> None:
        """Captures the model again, since what the code between its blocks has read has a `change`. Raises
        `PenstockError` if the running stages cannot follow it.
        """
        start = perf_counter()
        with self._guarded("in a step"):
            self._engine.calls.announce(f"step after a change of {change.name}", (), self._engine.trained, None)
        model = self._options.model
        with self._guarded("capturing the model again", harmless=True), refused(change), old_numbers(model.model):
            refuse_unfollowed(
                change, self._own_stages, weightless=model.init_fn is not None, away=self._has_weights_away
            )
            with self._chain.reads.modes_as_read():
                captured = capture_for_training(self._world, self._options)
            plan, chain = refit(self.plan, self._chain, captured.chain)
            planned = replace(self._planned, plan=plan)
            own = make_own_stages(self._options, self._world, replace(captured, chain=chain), planned)
            same = computes_alike(self._chain, own.chain)
        if not same:
            self.drain()
        self.plan, self._planned, self._own_stages, self._chain = plan, planned, own, own.chain
        self._watch_shared()
        replace_stages(self._engine, plan, self._chain)
        self.required_inputs = find_inputs(self._chain, held_stages(plan, self.schedule, planned.ranks))
        self._splitter = replace(self._splitter, chain=self._chain, required=self.required_inputs)
        self._explained = partial(explained_mismatches, spec=self._chain.inputs, sample=model.sample)
        if self._first_batch is not None:
            self._first_batch = FirstBatch(self._options, captured, self.schedule, self.required_inputs.target)
        log.info("%s: the model was captured again in %.2f s", change, perf_counter() - start)

    def _begin(self, microbatches: Sequence[Microbatch]) -> Loss:
        """Makes the first step, or the first one after `gather_model`."""
        if self._first_batch is None:
            self._parts.leave()
            loss = self._engine.train(microbatches)
        else:
            train = partial(self._first_batch.train, before=self._parts.leave)
            loss = train(microbatches, self._world, self._engine, self.optimizers)
        self._first_batch, self._begins = None, False
        return loss

    @contextmanager
    def _evaluation(self, cut: Callable[[BatchSplitter], Sequence[Microbatch]]) -> Iterator[Sequence[Microbatch]]:
        """Drains, and gives what `cut` makes of a batch, between the model's own ``eval()`` and ``train(mode)``, which
        may read and write old weights, too.
        """
        self.drain()
        # Whatever mode the model is in.
        if (change := self._chain.reads.without("training").change()) is not None:
            self._follow(change)
        model = self._options.model.model
        with ExitStack() as mode:
            with self._guarded("reading a batch", harmless=True):
                mode.enter_context(in_mode(modules_in(model), training=False, watched=partial(old_numbers, model)))
                microbatches = cut(self._splitter)
            yield microbatches

    @collective
    def drain(self) -> None:
        """Finishes the microbatches in flight. The next step starts a new run of the schedule, from the newest weights.

        A schedule that flushes has nothing left to compute. Under every schedule the replicas of a stage then take over
        the buffers of the first one (each has seen only its own microbatches, for BatchNorm's statistics). All messages
        of this rank have been sent when this returns, so that its process may leave the process group.
        """
        self._guarded.run("in a drain", self._engine.drain)

    @collective
    def evaluate(self, inputs: Any, target: Any = None) -> StepResult:
        """The loss in evaluation mode with the newest weights, without gradients, for a batch of any size.

        Drains first, and calls the model's ``eval()`` before and ``train(mode)`` after it. The loss is the mean over
        the batch's samples.
        """
        cut = self._evaluation(lambda splitter: splitter.for_evaluation(inputs, target))
        with cut as microbatches, self._guarded("in an evaluation"), self._explained("evaluate", inputs, target):
            return StepResult(self._engine.evaluate(microbatches))

    @collective
    def predict(self, inputs: Any) -> Any:
        """The model's output in evaluation mode with the newest weights, on every rank, for a batch of any size.

        Drains first, and calls the model's ``eval()`` before and ``train(mode)`` after it. If the batch takes several
        microbatches, tensors whose dimension 0 counts samples are concatenated, and others are stacked.
        """
        cut = self._evaluation(lambda splitter: splitter.for_prediction(inputs))
        with cut as microbatches, self._guarded("in a prediction"), self._explained("predict", inputs):
            values = self._engine.predict(microbatches)
            outputs = [self._chain.evaluation().output.build(value) for value in values]
            return join(outputs, [microbatch.samples for microbatch in microbatches])

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages, each once, in the order of the layers: the newest weights."""
        return iter(self._parameters().values())

    def named_parameters(self, prefix: str = "") -> Iterator[tuple[str, nn.Parameter]]:
        """`parameters` with the names that they have in the model, as pairs; `prefix` and a dot before each name."""
        start = f"{prefix}." if prefix else ""
        return ((start + name, parameter) for name, parameter in self._parameters().items())

    @collective
    def averages(self) -> dict[str, Tensor]:
        """The averages of this process's parameters, by name, that a `WeightAverage` in ``update_hooks`` keeps.

        Drains first. `PenstockError` without such a hook.
        """
        self.drain()
        return self._updater.averages(self._parameters())

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Gives the parameters their `averages` in a ``with`` block: for results, `state_dict` and `save_weights`."""
        averages = self.averages()
        with self._conditions.averaged(self._parts.leave), replaced_parameters(self._parameters(), averages):
            yield

    @collective
    def timeline(self, minibatches: int = 1) -> Timeline:
        """What every rank did in the last `minibatches` steps (at most 8), as measured. Collective."""
        self._guarded.check_open()
        measured = self._engine.timeline(self._world, self.plan.tensor_parallel, minibatches)
        return replace(measured, title=f"{type(self._options.model.model).__name__}, {measured.title}")

    def stats(
        self,
        *,
        tokens_per_sample: float | None = None,
        flops_per_sample: float | None = None,
        peak_flops: float | None = None,
        all_ranks: bool = False,
    ) -> Stats:
        """Speed, utilization, bubble and memory in the last steps (at most 8), as this rank has measured them.

        It waits for nothing and sends nothing, unless `all_ranks` asks for the numbers of all ranks; it is then
        collective. `tokens_per_sample` makes tokens of samples; by default they are the items that ``loss_weight``
        counts, on ranks that read targets. `flops_per_sample`: the floating-point operations of forward and backward;
        by default counted at the first call, unless `parallelize` spreads the layers. `peak_flops`: what one device can
        do in a second; by default from a table of GPUs. docs/observability.md explains the numbers.
        """
        return self._stats_source.stats(
            self._engine.speed(),
            tokens_per_sample=tokens_per_sample,
            flops_per_sample=flops_per_sample,
            peak_flops=peak_flops,
            all_ranks=all_ranks,
        )

    @collective
    def stragglers(
        self, *, profile: Profile | None = None, tolerance: float = 1.25, layers: bool = False
    ) -> Stragglers:
        """Ranks, stages and links that were slow in the last 8 steps, compared with `profile`, with that of
        ``plan="auto"``, or with estimates. `layers` measures the layers, too. Collective. docs/doctor.md explains it.
        """
        measure = self.measure if layers else None
        return self._stats_source.stragglers(self.timeline(8), profile, tolerance, measure)

    @collective
    def replan(self, *, profile: Profile | None = None, apply: Place | None = None) -> Plan:
        """The plan with a new cut, by the seconds of the stages in the last 8 steps. Collective. Its ``explanation``
        says what is expected of it and how to apply it. `profile` as in `stragglers`.

        `apply`: a directory of checkpoints. If the cut is another one, the pipeline saves itself there, is built again
        in place with the plan, and goes on from the checkpoint; `optimizers` are new ones then.
        """
        plan = self._stats_source.recut(self.timeline(8), profile)
        if apply is not None and checked_path(apply) and plan.stages != self.plan.stages:
            options, rollbacks = self._options.replanned(plan), self.rollbacks
            with signals_held():
                saved, own, claims = self.save(apply), self._checkpoints.own, copy(self._checkpoints.claims)
                self.close()
                with old_numbers(options.model.model):
                    self._build(lambda: options, options.run.timeout_seconds, again=True)
                    self._checkpoints.continue_from(own, claims, saved, self._guarded)
            self._parts.leave(loaded=True)
            self._resumption.rollbacks = rollbacks
        return plan

    @property
    def gradient_norm(self) -> float | None:
        """The norm of the gradients of this process's last update, before clipping. None without ``clip_grad_norm`` or
        before the first update.
        """
        return self._engine.scales.gradient_norm()

    @property
    def loss_scale(self) -> float | None:
        """The present scale of the loss, by the last message to this process; None without ``loss_scale``."""
        return None if self._options.recipe.loss_scale is None else self._engine.scales.present()

    @property
    def skipped_updates(self) -> int:
        """The updates that a stage of this process left out since their gradients were not finite (the most of one)."""
        return self._engine.scales.skipped_updates()

    @property
    def rollbacks(self) -> int:
        """How often the training went back to a checkpoint: ``on_nonfinite="rollback"``."""
        return self._resumption.rollbacks

    @collective
    def state_dict(self) -> dict[str, Any]:
        """``{"model": ..., "optimizer": ..., "pipeline": ...}`` of this process's stages, under the model's own names.

        Copies; `save` needs none. Drains first. In a single process ``model`` has the keys of ``model.state_dict()``.
        """
        self.drain()
        return self._checkpoints.training.copied()

    @collective
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores this process's stages from `state`, which may hold more (a whole model). Drains first.

        Raises `CheckpointError`, before anything is changed, if `state` is not whole or of another training.
        """
        self._conditions.check_weights("load_state_dict")
        self.drain()
        check_state(self._checkpoints.training, state)
        self._checkpoints.training.restore(state)
        self._guarded.after_load()

    @property
    def steps(self) -> int:
        """The steps trained so far, those before a checkpoint that was loaded included."""
        return self._engine.steps

    def track(self, **objects: Any) -> None:
        """Keeps the state of loaders and of your own objects in checkpoints, by name: ``pipe.track(batches=batches)``.

        They have ``state_dict()``, of numbers, texts, tensors and containers of these, and ``load_state_dict()``; or
        they are a `torch.Generator`. If a checkpoint was loaded before, they get their states now.
        """
        if any(isinstance(each, Pipeline) for each in objects.values()):
            raise CheckpointError(
                "track(...): expected objects of yours, found a pipeline, which saves itself. Leave it out"
            )
        self._checkpoints.own.track(objects)

    @overload
    def save(self, directory: Place, step: Count = ..., *, keep: Count = ..., keep_every: Count = ...) -> Path: ...
    @overload
    def save(
        self, directory: Place, step: Count = ..., *, keep: Count = ..., keep_every: Count = ..., wait: Literal[False]
    ) -> BackgroundSave: ...
    @collective
    def save(
        self, directory: Place, step: Count = None, *, keep: Count = None, keep_every: Count = None, wait: bool = True
    ) -> Path | BackgroundSave:
        """Writes a checkpoint that any number of stages can `load`, and returns its path. Drains first. Collective.

        It appears whole as ``step-000100`` in `directory`. `step`: its number, by default `steps`; the same step is
        replaced. `keep`: how many of the last stay, besides those whose step `keep_every` divides. `CheckpointError`,
        the same on all ranks, if it cannot be written; the training can go on. ``wait=False`` saves while steps run,
        and returns a handle. docs/checkpoints.md says more.
        """
        self._conditions.check_weights("save")
        return self._checkpoints.save(directory, step, keep=keep, keep_every=keep_every, wait=wait)

    @collective
    def load(self, directory: str | Path) -> None:
        """Restores this process's stages, under any plan, from what `save` wrote. Drains first. Collective.

        `directory`: that of a run, whose newest whole checkpoint is taken, or one step in it. `CheckpointError` on all
        ranks, before anything is changed, if there is none, or one that is damaged or of another training.
        """
        self._conditions.check_weights("load")
        self._checkpoints.load(directory, self._guarded)

    @collective
    def save_weights(
        self, directory: str | Path, *, max_shard_size: int | str = "5GB", dtype: torch.dtype | None = None
    ) -> None:
        """Writes the whole model to `directory` for ``from_pretrained`` of transformers. Drains first. Collective.

        The files are ``model.safetensors``, or shards of at most `max_shard_size` (bytes, or a text such as "5GB") with
        an index, and the model's configurations if it has any. Every process writes its own tensors. `dtype`: of
        floating-point values in the files; by default that of the model. Of a PEFT model the adapter is written, as
        PEFT does. Weights that were in `directory` are replaced after everything is written; other files stay. Several
        hosts must share the file system. There is no state of the optimizer: `save` writes that.
        """
        self.drain()
        # Not guarded: an error reaches all processes here, and the training can go on after it.
        training = self._checkpoints.training
        held = hold(self._chain, {**training.held, **training.scales}, self._world)
        export_weights(self._options.model.model, held, directory, max_shard_size=max_shard_size, dtype=dtype)

    @collective
    def full_state_dict(self, *, rank: int | None = 0) -> dict[str, Any]:
        """Copies of the whole model's ``state_dict()`` on the CPU of `rank`, or of all ranks if it is None.

        The other ranks return an empty dict. Drains first. Collective. `save_weights` needs no memory for all of them.
        """
        self.drain()
        training, world = self._checkpoints.training, self._world
        return hold(self._chain, training.held, world).state_dict(rank) | training.gather_entries(world, rank)

    @collective
    def gather_model(self) -> None:
        """Brings the newest weights and buffers of all processes into the model of each. Drains first. Collective.

        The model, its ``generate`` and ``save_pretrained`` can then be called, until the next `step` or `load`. Without
        it, a read of what another process trains is a `PenstockError`.
        """
        self.drain()
        self._begins = True
        self._parts.gather(self._world, self._device)

    @collective
    def close(self) -> None:
        """Drains if microbatches are in flight, unless an exception is on its way. Waits for a save, ends the
        transport's threads, and removes its hooks on the process and the model. A second call does nothing.

        A pipeline that lives as long as its process need not be closed.
        """
        with self._guarded.closing(self._opened, self._drain_reminder) as drains:
            if drains and self._engine.undrained:
                self.drain()

    def __repr__(self) -> str:
        sizes = ((len(self.plan.stages), "stage"), (self.plan.microbatches, "microbatch"), (self.steps, "step"))
        run = ", ".join([self.schedule.name, *(counted(*size) for size in sizes)])
        return f"<{type(self).__name__}, rank {self.rank} of {self._world.processes}: {run}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Drains and closes. After an exception it only closes, and the exception ends the other ranks as well."""
        if error is None:
            with closing(self):
                if not (self._guarded.closed or self._guarded.failed):
                    self.drain()
            return
        # A failure inside the pipeline was reported by the pipeline, and another rank's by that rank.
        if not (self._guarded.closed or self._guarded.failed or isinstance(error, TransportError | SystemExit)):
            self._world.report("outside the pipeline", error)
        self._drain_reminder.detach()
        # The user sees the exception of the block, whatever closing meets.
        with suppress(Exception):
            self.close()

    def _parameters(self) -> dict[str, nn.Parameter]:
        return parameters_of(self._engine.stages)


def build_pipeline(options: PipelineOptions) -> Pipeline:
    """The pipeline that `Pipeline` makes of `options` as arguments."""
    pipe = Pipeline.__new__(Pipeline)
    pipe._build(lambda: options, options.run.timeout_seconds)
    return pipe
