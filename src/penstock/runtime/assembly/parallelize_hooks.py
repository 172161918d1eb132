"""Applies a user's `parallelize` hook to the stages of this process, and checks the result.

The hook gets the module of a stage, whose layers are the model's own modules, and the mesh of its processes. It applies
PyTorch's parallelism in place: `parallelize_module` over ``tp``, `fully_shard` over ``dp``. Parameters become
`DTensor`s; names and whole shapes stay, so that the plan, the optimizer and checkpoints do not change.

A combination that would give other numbers than one device, or hang, is refused: docs/composition.md lists them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import GraphModule

from penstock.capturing.chain import Layer, LayerChain, StageModule
from penstock.capturing.joining import JoinedLayers
from penstock.capturing.model_forms import ModelOutput
from penstock.capturing.module_state import is_plain, same_content
from penstock.capturing.sequential import EagerLayer, Form
from penstock.errors import PlanError
from penstock.runtime.assembly.captured_models import CapturedModel
from penstock.runtime.assembly.pipeline_options import Parallelize, PipelineOptions
from penstock.runtime.assembly.scheduled_plans import ScheduledPlan
from penstock.runtime.batches.batch_splitter import held_stages
from penstock.runtime.collectives.agreements import agreed
from penstock.runtime.devices.host_stores import make_host_store
from penstock.runtime.devices.staging import staging_for
from penstock.runtime.execution.compilation import compile_chain
from penstock.runtime.parameters.host_states import HostStates
from penstock.runtime.parameters.shards import dimensions_of
from penstock.runtime.transport.tensor_parallel_transport import stage_mesh
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedule_names import names_of
from penstock.scheduling.schedules import Schedule
from penstock.torch_internals.modules import is_compiled
from penstock.torch_internals.unimported import is_dtensor, is_fully_sharded
from penstock.values.plans import Plan

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


@dataclass(frozen=True, slots=True, eq=False)
class ParallelStages:
    chain: LayerChain
    """Its parameters are those after the hook; compiled if the user asked for that."""
    modules: Mapping[int, StageModule]
    """By stage; empty if there was no hook."""
    tp_group: dist.ProcessGroup | None = None
    """The processes of this rank; None if it is one process."""
    mesh_groups: Sequence[dist.ProcessGroup] = ()
    """All groups of the mesh that the hook was given."""
    host: HostStates | None = None
    """What has weights that were made at home."""
    in_step: int = 1
    """The number of replicas that gather weights together, and so must do equally many forwards in every stage."""


def _check_hook(hook: Parallelize | None, plan: Plan, schedule: Schedule, chain: LayerChain, *, processes: int) -> None:
    if hook is None:
        if plan.tensor_parallel > 1:
            raise PlanError(
                f"tensor_parallel is {plan.tensor_parallel} and there is no hook that splits the stages: every "
                "tensor-parallel rank would compute the same. Pass parallelize=, or set tensor_parallel to 1"
            )
        return
    if processes == 1:
        raise PlanError(
            "parallelize= works over a DeviceMesh, and this is a single process without one: start it with torchrun, "
            "or leave parallelize= out, which gives the same numbers"
        )
    _check_evaluation(chain)
    if schedule.ties:
        names = ", ".join(map(str, schedule.ties))
        raise PlanError(
            f"weights are shared by the stages {names} and there is a parallelize= hook: the copies would have to be "
            "laid out alike. Untie the weights, or plan the layers that share them into one stage"
        )


def make_own_stages(
    options: PipelineOptions, world: World, captured: CapturedModel, planned: ScheduledPlan
) -> ParallelStages:
    """The stages of this process: with weights, after the hook, and compiled. Collective.

    Raises `PlanError` for a result of the hook that cannot be trained exactly, and `PenstockError` on every process if
    `init_fn` fails on one.
    """
    plan, chain, init_fn, host = planned.plan, captured.chain, options.model.init_fn, None
    if captured.weightless is not None and init_fn is not None:
        held = held_stages(plan, planned.schedule, planned.ranks)
        layers = [layer for stage in held for layer in range(stage.start, stage.stop)]
        away = [layer for index in plan.streaming for layer in range(plan.stages[index].start, plan.stages[index].stop)]
        with agreed(world, "while it made its weights"):
            if away:
                host = HostStates(
                    make_host_store(options.run.offload_to, staging_for(captured.device)), captured.device
                )
            chain = captured.weightless.materialize(
                layers, init_fn, options.run.seed or 0, streamed=away, move_home=host.move_home if host else None
            )
    stages = _parallelize(options, world, chain, planned)
    splits, kinds = planned.schedule.guarantees.splits, planned.granularities
    layerwise = [s.start for index, s in enumerate(plan.stages) if splits or kinds.get(index) == "layers"]
    return replace(stages, chain=compile_chain(stages.chain, captured.compilation, layerwise), host=host)


def _parallelize(options: PipelineOptions, world: World, chain: LayerChain, planned: ScheduledPlan) -> ParallelStages:
    hook, plan, schedule = options.run.parallelize, planned.plan, planned.schedule
    with agreed(world, "while it checked parallelize= against its plan"):
        _check_hook(hook, plan, schedule, chain, processes=world.processes)
    if hook is None:
        return ParallelStages(chain, {})
    tensor_parallel_size = plan.tensor_parallel
    (rank,) = planned.ranks
    device = next((parameter.device for parameter in chain.parameters.values()), torch.device("cpu"))
    mesh = stage_mesh(schedule.placement.stages, rank, tensor_parallel_size, device, options.run.timeout_seconds)
    with agreed(world, "while it parallelized its stages"):
        result, modules = _apply(hook, mesh, chain, plan, schedule, stages=schedule.stages_of(rank))
        sharded = any(sharded_modules(module) for module in modules.values())
        if sharded and options.recipe.keeps_masters(schedule.guarantees.delays):
            raise PlanError(
                "version_dtype= and hooks that predict keep what forwards read beside the optimizer's parameters, and "
                "fully_shard makes what forwards read of the optimizer's: leave the one or the other out. "
                "fully_shard(..., mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)) computes in a low "
                "precision, too"
            )
    in_step = schedule.placement.replicas(0) if any(world.gather(sharded)) else 1
    tp_group = mesh.get_group("tp") if tensor_parallel_size > 1 else None
    return ParallelStages(result, modules, tp_group, mesh.get_all_groups(), in_step=in_step)


def _apply(
    hook: Parallelize, mesh: DeviceMesh, chain: LayerChain, plan: Plan, schedule: Schedule, *, stages: Iterable[int]
) -> tuple[LayerChain, dict[int, StageModule]]:
    changed: dict[int, nn.Parameter] = {}
    modules = {}
    for index in stages:
        module = chain.stage(plan.stages[index].start, plan.stages[index].stop)
        module.blocks = _blocks_of(module)
        # A hook may change the shape of a parameter that stays the same object.
        before = {name: (p, p.shape) for name, p in module.named_parameters(remove_duplicate=False)}
        returned = hook(module, mesh)
        if returned is not None and returned is not module:
            raise PlanError(
                f"parallelize= returned {type(returned).__name__} for stage {index}: expected the stage's module, "
                "changed in place, or None. Do not wrap the stage: use fully_shard or parallelize_module, which work "
                "in place; replicas need no DistributedDataParallel, their gradients are summed anyway"
            )
        _check_parameters(index, module, before, changed)
        _check_modules(index, module, schedule)
        modules[index] = module
    parameters = {name: changed.get(id(parameter), parameter) for name, parameter in chain.parameters.items()}
    # Modules that were changed in place are not captured again: the chain in evaluation mode is this one.
    result = replace(chain, parameters=parameters, evaluation=lambda: result)
    return result, modules


def _check_evaluation(chain: LayerChain) -> None:
    """Raises `PlanError` if the model computes something else in evaluation mode outside of its blocks.

    A module that a hook has changed is not captured again, so that the trace of the training evaluates, too. Blocks
    know their mode.
    """
    evaluated = chain.evaluation()
    for layer, other in zip(chain.layers, evaluated.layers, strict=True):
        if not _compute_alike(layer, other):
            raise PlanError(
                f"parallelize= is given, and the code between the blocks of the model does something else in "
                f"evaluation, around layer {layer.name}: expected code that is the same in both modes, since modules "
                "that a hook has changed are not captured again. Move what depends on the mode (a dropout, a "
                "BatchNorm) into a block, or pass the model as nn.Sequential or as a list of layers"
            )
    if _returned(chain.output) != _returned(evaluated.output):
        raise PlanError(
            f"parallelize= is given, and the model returns {evaluated.output.structure} in evaluation and "
            f"{chain.output.structure} in training, or other constants: expected the same, since modules that a hook "
            "has changed are not captured again. Return the same in both modes"
        )


def computes_alike(chain: LayerChain, other: LayerChain) -> bool:
    """Whether two chains compute and return the same, layer by layer."""
    alike = len(chain.layers) == len(other.layers) and all(map(_compute_alike, chain.layers, other.layers))
    return alike and _returned(chain.output) == _returned(other.output)


def _compute_alike(layer: Layer, other: Layer) -> bool:
    """Whether two layers call the same blocks alike, by the same operators over the same values and tensors."""
    if list(_facts(layer)) != list(_facts(other)):
        return False
    pairs = zip(_tensors_outside_blocks(layer.module), _tensors_outside_blocks(other.module), strict=True)
    return all(own is its or same_content(own.detach(), its.detach()) for own, its in pairs)


def _facts(layer: Layer) -> Iterator[Any]:
    yield layer.inputs, layer.outputs
    for inner in layer.module.modules():
        yield type(inner).__qualname__
        match inner:
            case JoinedLayers():
                yield inner.reads, inner.writes
            case EagerLayer():
                yield inner.name, inner.by_forward, _facts_of(inner.takes)
            case GraphModule():
                yield inner.code


def _tensors_outside_blocks(layer: nn.Module) -> list[Tensor]:
    graphs = [inner for inner in layer.modules() if isinstance(inner, GraphModule)]
    held = [attrgetter(str(node.target))(inner) for inner in graphs for node in inner.graph.find_nodes(op="get_attr")]
    return [each for each in held if isinstance(each, Tensor)]


def _returned(output: ModelOutput) -> tuple[Any, ...]:
    return output.leaves, _facts_of(Form(output.structure, output.constants))


def _facts_of(form: Form) -> tuple[str, list[str]]:
    """What two captures can compare `form` by: a plain constant by its value, any other by its class."""
    constants = (each.__qualname__ if isinstance(each, type) else each for each in form.constants)
    return str(form.structure), [repr(each) if is_plain(each) else type(each).__qualname__ for each in constants]


def _blocks_of(stage: StageModule) -> dict[str, nn.Module]:
    """The model's own modules in `stage`, each once, under its first name: a hook must not change one twice."""
    names: dict[nn.Module, str] = {}
    for inner in stage.modules():
        if isinstance(inner, EagerLayer):
            names.setdefault(inner.body, inner.name)
    return {name: body for body, name in names.items()}


def sharded_modules(module: nn.Module) -> list["FSDPModule"]:
    """The modules in `module` that `fully_shard` was applied to."""
    return [inner for inner in module.modules() if is_fully_sharded(inner)]


def _check_parameters(
    stage: int,
    module: StageModule,
    before: Mapping[str, tuple[nn.Parameter, torch.Size]],
    changed: dict[int, nn.Parameter],
) -> None:
    """Adds to `changed` the present parameter for each one in `before`, by the id of the old one."""
    after = dict(module.named_parameters(remove_duplicate=False))
    if before.keys() != after.keys():
        different = sorted(before.keys() ^ after.keys())
        raise PlanError(
            f"parallelize= gave stage {stage} other parameters than it had ({', '.join(different[:3])}): expected the "
            "same names, since checkpoints and the optimizer go by them. Do not add, remove, wrap or compile modules"
        )
    for name, (old, shape) in before.items():
        new = after[name]
        if new.shape != shape:
            raise PlanError(
                f"parallelize= gave {name} of stage {stage} the shape {tuple(new.shape)}, it was {tuple(shape)}: "
                "expected a DTensor, which keeps the whole shape. Split it with parallelize_module or distribute_tensor"
            )
        if changed.setdefault(id(old), new) is not new:
            raise PlanError(
                f"{name} of stage {stage} is shared by several modules and parallelize= replaced it in one of them: "
                "the copies would drift apart. Leave shared weights as they are, or untie them"
            )
        if extra := set(dimensions_of(new)) - {"dp", "tp"}:
            raise PlanError(
                f"{name} of stage {stage} is laid out over the mesh dimension(s) {sorted(extra)}: expected dp or tp. "
                "Use the mesh that the hook is given, as in fully_shard(module, mesh=mesh['dp'])"
            )


def _check_modules(stage: int, module: StageModule, schedule: Schedule) -> None:
    if any(is_compiled(inner) for inner in module.modules()):
        raise PlanError(
            f"parallelize= compiled a module of stage {stage}: expected modules that run as they are, since each "
            "weight version needs a copy of them. Leave torch.compile out"
        )
    sharded = sharded_modules(module)
    over_replicas = [name for name, p in module.named_parameters() if "dp" in dimensions_of(p)]
    if not sharded:
        if over_replicas:
            raise PlanError(
                f"{over_replicas[0]} of stage {stage} is a DTensor over dp: the replicas compute different "
                "microbatches, which a DTensor takes for one tensor. Use mesh['tp'] for it, and fully_shard for dp"
            )
        return
    if any(managed and not any(map(_is_sharded, managed)) for managed in map(_managed, sharded)):
        raise PlanError(
            f"fully_shard was applied to stage {stage} over other processes than its replicas: expected "
            "fully_shard(module, mesh=mesh['dp'])"
        )
    _check_sharded(stage, schedule)


def _managed(module: "FSDPModule") -> list[nn.Parameter]:
    """The parameters that `module` shards itself, without those that a module inside it shards."""
    assert isinstance(module, nn.Module)
    inner = {id(p) for child in sharded_modules(module) if child is not module for p in cast(Any, child).parameters()}
    return [p for p in module.parameters() if id(p) not in inner]


def _is_sharded(parameter: nn.Parameter) -> bool:
    """Whether each replica holds another shard of `parameter`."""
    if not is_dtensor(parameter):
        return False
    dimensions = zip(dimensions_of(parameter), parameter.placements, strict=True)
    return any(name == "dp" and not placement.is_replicate() for name, placement in dimensions)


def _check_sharded(stage: int, schedule: Schedule) -> None:
    """Raises `PlanError` if replicas could enter the collectives of `fully_shard` unequally often, or share twice."""
    if schedule.gathers:
        raise PlanError(
            f"fully_shard was applied to stage {stage}, and shard_optimizer= is given: expected one of them, since "
            "fully_shard spreads the optimizer's state over the replicas as well. Leave shard_optimizer= out"
        )
    if not schedule.flushes or schedule.versions(stage) > 1:
        raise PlanError(
            f"fully_shard was applied to stage {stage} and {schedule.name!r} keeps several versions of weights: "
            "expected one, since a fully sharded module cannot be copied. Use a flushing schedule "
            f"({names_of(lambda each: each.flushes and not each.splits_backward)})"
        )
    if schedule.guarantees.splits:
        raise PlanError(
            f"fully_shard was applied to stage {stage} and {schedule.name!r} computes the gradients of inputs and "
            "those of weights apart: expected whole backwards, since fully_shard sums the gradients of weights when "
            "those of inputs are there. Use another flushing schedule "
            f"({names_of(lambda each: each.flushes and not each.splits_backward)})"
        )
    placement = schedule.placement
    if not placement.equal(range(schedule.stages)):
        raise PlanError(
            f"fully_shard was applied to stage {stage} of a pipeline with {placement.text()} replicas: expected "
            "equally many of every stage. The replicas gather weights together, so one that waits for a microbatch "
            "would hold up the other, and that wait is not in the proof that the schedule cannot deadlock"
        )
    if not placement.split and schedule.microbatches % placement.replicas(stage):
        raise PlanError(
            f"fully_shard was applied to stage {stage} with {placement.replicas(stage)} replicas for "
            f"{schedule.microbatches} microbatches: expected a multiple, since all replicas gather and sum equally "
            "often. Change microbatches"
        )
