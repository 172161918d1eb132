"""The plan that runs and its schedule, chosen from the options of a pipeline.

The plan is checked here, once, so that a wrong plan or an unsupported combination ends with an error instead of a
hang.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from penstock.arguments import Entries, check_fields, entries, integer, number, text_of
from penstock.capturing.chain import LayerChain, crossings_of, require_cuts
from penstock.errors import PlanError
from penstock.runtime.assembly.pipeline_options import PipelineOptions, PlanOptions, RecomputeChoice
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.transport.worlds import World
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.schedule_names import identify, names_of
from penstock.scheduling.schedules import Schedule
from penstock.scheduling.skips import choose_skips
from penstock.scheduling.verification.verifier import offloading_stages, verify
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks
from penstock.training.recipes import Recipe
from penstock.training.wire_codecs import sent_bytes
from penstock.values.crossings import find_hops, find_stops
from penstock.values.plan_stages import members_of
from penstock.values.plans import Plan, require_schedule
from penstock.values.plans import schedule as schedule_of


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """Holds a weight for every layer, of which only the ratios count, and a speed for every rank."""

    layers: tuple[float, ...]
    speeds: tuple[float, ...] = ()
    """By rank: how much of the weight it does in a time; empty if all ranks are equal."""
    shares: tuple[str, ...] = ()
    """`LayerChain.shares`."""

    def __post_init__(self) -> None:
        check_fields(self, {"layers": Entries(number(0)), "speeds": Entries(number(above=0))}, PlanError)

    def __iter__(self) -> Iterator[float]:
        return iter(self.layers)

    def __len__(self) -> int:
        return len(self.layers)


@dataclass(frozen=True, slots=True, eq=False)
class ScheduledPlan:
    """A plan with its schedule, both checked."""

    plan: Plan
    schedule: Schedule
    granularities: Mapping[int, Granularity]
    """By stage that recomputes, how."""
    ranks: tuple[int, ...]
    """Those of this process."""
    state_on_host: bool = False


def choose_plan(plan: Plan | None, wanted: PlanOptions, weights: LayerWeights, processes: int) -> Plan:
    """The plan to run: `plan` if there is one, else the layers, which weigh `weights`, balanced over the stages that
    are `wanted` (default: one for every `tensor_parallel` of the `processes`).

    ``stages=`` counts all stages. Where a rank can hold several, it holds ``stages / ranks`` of them, two by default,
    and always two in a V. Raises `PlanError` if the options contradict each other.
    """
    if plan is None:
        return _balanced_plan(wanted, weights, processes)
    schedule = None if wanted.schedule is None else identify(require_schedule(wanted.schedule))
    compared: list[tuple[str, object, object]] = [
        ("schedule", schedule, plan.schedule),
        ("microbatches", wanted.microbatches, plan.microbatches),
        ("stages", wanted.stages, len(plan.stages)),
        ("vertical_sync", wanted.vertical_sync or None, plan.vertical_sync),
        ("tensor_parallel", wanted.tensor_parallel, plan.tensor_parallel),
    ]
    for name, value, planned in compared:
        if value is not None and value != planned:
            raise PlanError(
                f"{name}={value!r} contradicts the plan, which has {name} {planned!r}: leave {name}= out, or change "
                "the plan"
            )
    return plan


def _balanced_plan(wanted: PlanOptions, weights: LayerWeights, processes: int) -> Plan:
    width = wanted.tensor_parallel or 1
    ranks = max(1, processes // width)
    per_rank = wanted.definition.layout.default_stages_per_rank(wanted.stages, ranks)
    total = wanted.stages or ranks * per_rank
    require_cuts(len(weights.layers), total, weights.shares)
    plan = Plan.balanced(
        weights.layers,
        total,
        wanted.definition,
        microbatches=wanted.microbatches or 1,
        stages_per_rank=per_rank,
        vertical_sync=wanted.vertical_sync,
        speeds=_group_speeds(weights.speeds, ranks, width),
    )
    if width > 1:
        stages = tuple(replace(stage, ranks=members_of(stage.ranks, width)) for stage in plan.stages)
        plan = replace(plan, stages=stages, tensor_parallel=width)
    if wanted.stages is not None and 1 < processes != plan.ranks:
        raise PlanError(
            f"stages={wanted.stages} needs {plan.ranks} processes, {processes} were started: "
            "start as many, or leave stages= out for as many stages as there are processes"
        )
    return plan


def _group_speeds(speeds: Sequence[float], ranks: int, width: int) -> tuple[float, ...]:
    """The speed of every group of `width` tensor-parallel processes, which is that of its slowest; none if unknown."""
    if len(speeds) != ranks * width:
        return ()
    return tuple(min(speeds[first : first + width]) for first in range(0, len(speeds), width))


def check_plan(plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` if `plan` does not fit the model."""
    if plan.layers != len(chain.layers):
        require_cuts(len(chain.layers), len(plan.stages), chain.shares)
        names = ", ".join(layer.name for layer in chain.layers)
        raise PlanError(
            f"the plan is for {plan.layers} layers and the model has {len(chain.layers)}: {names}. Plan with a profile "
            "of this model"
        )
    _check_memory(plan, chain)


def _check_memory(plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` if parameters of two stages lie in one memory, where a plain loop would train both in one."""
    stages = {
        parameter: index
        for index, stage in enumerate(plan.stages)
        for layer in chain.layers[stage.start : stage.stop]
        for parameter in layer.module.parameters()
        # Those that other libraries make are tensors without memory of their own.
        if type(parameter) is nn.Parameter and parameter.data_ptr()
    }
    last, end = None, 0
    for parameter in sorted(stages, key=lambda each: each.data_ptr()):
        both = [parameter] if last is None or parameter.data_ptr() >= end else [last, parameter]
        if len({stages[each] for each in both}) > 1 and any(each.requires_grad for each in both):
            names = [next(name for name, own in chain.parameters.items() if own is each) for each in both]
            raise PlanError(
                f"{' and '.join(names)}: expected parameters in memory of their own, found two of stages "
                f"{' and '.join(str(stages[each]) for each in both)} in one (weight.data = ...), which stages cannot "
                "keep equal. Assign the parameter itself, as in head.weight = embedding.weight"
            )
        reach = sum((size - 1) * stride for size, stride in zip(parameter.shape, parameter.stride(), strict=True))
        stop = parameter.data_ptr() + (reach + 1) * parameter.itemsize
        if stop > end:
            last, end = parameter, stop


def schedule_plan(chosen: Plan, chain: LayerChain, options: PipelineOptions, world: World) -> ScheduledPlan:
    """`chosen` with its schedule, as the `options` want it, for the processes of `world`.

    Raises `PlanError` or `ScheduleError` if the plan does not fit the model or the processes, or the schedule breaks a
    rule or cannot be combined with the options.
    """
    plan, stages = chosen, len(chosen.stages)
    granularities = _choose_granularities(options.plan.recompute, plan, stages)
    if granularities != _choose_granularities(None, plan, stages):
        plan = replace(plan, recompute=tuple(granularities), predicted=None)
    check_plan(plan, chain)
    schedule = make_schedule(plan, chain, options.recipe.needs_norms)
    # Layers that are computed again one by one keep no weights either.
    whole = frozenset(s for s, granularity in granularities.items() if granularity == "stage" or s in plan.streaming)
    schedule = replace(schedule, recomputed=whole, gathers=options.plan.shard_optimizer)
    verify(schedule)
    _check_split_backwards(schedule, granularities)
    _check_offloads(schedule, granularities)
    _check_wire_dtype(options.recipe, plan, chain)
    local = world.local(schedule.ranks, plan.tensor_parallel)
    on_host = options.plan.state_on_host or bool(plan.streamed)
    return ScheduledPlan(plan, schedule, granularities, local, on_host)


def _choose_granularities(recompute: RecomputeChoice, planned: Plan, stages: int) -> dict[int, Granularity]:
    """The stages that recompute, each as a whole or layer by layer. None follows the plan; anything else overrides it.

    Raises `PlanError` for another value, or for the number of a stage that does not exist.
    """
    if recompute is None or isinstance(recompute, bool):
        asked = sorted(planned.recomputed) if recompute is None else range(stages if recompute else 0)
        return dict.fromkeys(asked, "stage")
    if isinstance(recompute, str) and recompute == "layers":
        return dict.fromkeys(range(stages), "layers")
    if not isinstance(recompute, Collection) or isinstance(recompute, str | bytes | Mapping):
        raise PlanError(
            f"recompute=: expected True, False, 'layers' or the numbers of the stages to recompute, found "
            f"{text_of(recompute)}: give a single stage as {{1}}"
        )
    rule = integer(0, stages - 1).but(f"give stages of the plan, which has {stages}")
    given = entries("recompute=", recompute, PlanError)
    return dict.fromkeys(sorted(rule.check("recompute=", stage, PlanError) for stage in given), "stage")


def make_schedule(plan: Plan, chain: LayerChain, norms: bool = False) -> Schedule:
    """The schedule of `plan`, with the stages of this model that share weights. `norms`: whether stages exchange the
    norms of their gradients.

    `PlanError` if stages share weights that update at different times or have different numbers of replicas;
    `ScheduleError` if the plan's numbers do not fit the schedule.
    """
    schedule = schedule_of(plan)
    shared = tied_parameters(plan, chain)
    if shared and not plan.definition.synchronizes_updates:
        names = ", ".join(f"{name} (stages {', '.join(map(str, stages))})" for name, stages in shared.items())
        raise PlanError(
            f"weights are shared across stages: {names}. Under {str(plan.schedule)!r} every stage updates at its own "
            "time, so the copies would drift apart. Use a flushing schedule "
            f"({names_of(lambda each: each.flushes)}) or {names_of(lambda each: each.defers_updates)}, untie the "
            "weights, or plan the layers that share them into one stage"
        )
    for name, stages in shared.items():
        if hooks := gradient_hooks(chain.parameters[name]) + accumulated_hooks(chain.parameters[name]):
            raise PlanError(
                f"the parameter {name} is shared by stages {', '.join(map(str, stages))} and has the hook "
                f"{getattr(hooks[0], '__qualname__', hooks[0])!r}: expected none, since each stage has a part of its "
                "gradient only, and a plain loop calls the hook with the sum. Change the gradient in the optimizer's "
                "step, or plan the layers that share the weight into one stage"
            )
        if not schedule.placement.equal(stages):
            counts = ", ".join(f"stage {stage}: {schedule.placement.replicas(stage)}" for stage in stages)
            raise PlanError(
                f"{name} is shared by stages with different numbers of replicas ({counts}): expected equal numbers, "
                "since replica q of one exchanges its gradients with replica q of the other. Give them equally many "
                "ranks, or plan the layers that share the weight into one stage"
            )
    for index, stage in enumerate(plan.stages):
        layer = next((layer for layer in chain.layers[stage.start : stage.stop] if layer.rewrites), None)
        if layer is not None and schedule.in_flight(index) > 1:
            raise PlanError(
                f"the backward of {layer.name} changes {layer.rewrites} as its forward does, and stage {index} runs "
                f"forwards of {schedule.in_flight(index)} microbatches before their backwards: expected one, as in a "
                "plain loop, where the changes come in another order. torch.utils.checkpoint runs a forward again in "
                "the backward: leave it out and pass recompute=True, which changes buffers once, or pass "
                "microbatches=1"
            )
    schedule = replace(schedule, ties=tuple(sorted(set(shared.values()))), norms=norms)
    return choose_skips(schedule, find_hops(crossings_of(chain), starts_of(plan)))


def _check_split_backwards(schedule: Schedule, granularities: Mapping[int, Granularity]) -> None:
    """Raises `PlanError` if `schedule` splits backwards and its stages cannot. `granularities`: how they recompute."""
    layers = ", ".join(str(stage) for stage, granularity in granularities.items() if granularity == "layers")
    # Tried on 3 ranks, fullest rank, against recompute=True: zb-h1 1.00 for all; zb-v 0.97 to 1.00 for transformers
    # with fused attention and for convolutions, 0.83 where attention saves its scores.
    if schedule.guarantees.splits and layers:
        raise PlanError(
            f"schedule {schedule.name!r} computes the gradients of inputs and those of weights apart, and "
            f'recompute="layers" (stages {layers}) would hardly hold less than recompute=True, since what layers read '
            "and the gradients of their results are kept for the gradients of weights: expected stages whose backward "
            f"autograd can do in two parts. Use recompute=True, or a set of stages, or choose {DEFAULT_SCHEDULE!r}"
        )


def _check_offloads(schedule: Schedule, granularities: Mapping[int, Granularity]) -> None:
    """Raises `PlanError` if a stage that recomputes offloads."""
    for index in sorted(offloading_stages(schedule) & granularities.keys()) if granularities else ():
        raise PlanError(
            f"stage {index} is to be recomputed, and the schedule offloads what it saves: expected one of both, since "
            "a recomputed stage saves nothing that could be moved. Leave the stage out of recompute=, or its "
            f"offloads ({index}H...) and reloads ({index}D...) out of the order"
        )


def _check_wire_dtype(recipe: Recipe, plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` if ``wire_dtype=`` makes nothing smaller that the stages of `plan` send each other."""
    codec = recipe.codec
    if codec is None:
        return
    starts = starts_of(plan)
    crossing = {each.name for each in crossings_of(chain) if len(find_stops(each, starts)) > 1}
    kinds = {
        name: kind for layer in chain.layers for name, kind in zip(layer.outputs, layer.output_kinds, strict=False)
    }
    known = {name: kinds[name] for name in sorted(crossing & kinds.keys())}
    if known and not any(sent_bytes(codec, *kind) < sent_bytes(None, *kind) for kind in known.values()):
        found = ", ".join(f"{name} {shape} {dtype}" for name, (shape, dtype) in [*known.items()][:3])
        raise PlanError(
            f"wire_dtype={recipe.wire_dtype!r}: expected floating tensors between the stages that it makes smaller, "
            f"found {found}: leave it out, or give one of fewer bytes, such as penstock.RowInt8()"
        )


def starts_of(plan: Plan) -> Sequence[int]:
    """The first layer of each stage."""
    return [stage.start for stage in plan.stages]


def tied_parameters(plan: Plan, chain: LayerChain) -> dict[str, tuple[int, ...]]:
    """The parameters that several stages use, by name, with these stages."""
    result: dict[str, tuple[int, ...]] = {}
    for name, parameter in distinct_parameters(chain.parameters).items():
        layers = chain.readers[name]
        stages = tuple(
            index for index, s in enumerate(plan.stages) if any(s.start <= layer < s.stop for layer in layers)
        )
        if len(stages) > 1 and parameter.requires_grad:
            result[name] = stages
    return result


def distinct_parameters(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Each parameter once, under its first name."""
    seen: dict[int, str] = {}
    for name, parameter in parameters.items():
        seen.setdefault(id(parameter), name)
    return {name: parameters[name] for name in seen.values()}
