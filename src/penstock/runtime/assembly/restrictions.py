"""Refuses options that split backwards or the links between stages cannot work with, and says why."""

from collections.abc import Mapping

from penstock.capturing.chain import LayerChain
from penstock.capturing.crossings import crossings_of
from penstock.errors import PlanError
from penstock.runtime.execution.recomputation import Granularity, Recompute
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.schedules import Schedule
from penstock.training.recipes import Recipe
from penstock.training.wire_codecs import sent_bytes
from penstock.values.crossings import find_stops
from penstock.values.plans import Plan


def check_split_backwards(schedule: Schedule, compiled: bool, granularities: Mapping[int, Granularity]) -> None:
    """Raises `PlanError` if `schedule` splits backwards and its stages cannot. `granularities`: how they recompute."""
    if not schedule.guarantees.splits:
        return
    if compiled:
        _refuse(
            schedule,
            "compile= makes one function of a stage's backward, which computes both",
            "Leave compile= out",
        )
    layers = [stage for stage, granularity in granularities.items() if granularity == "layers"]
    if layers:
        _refuse(
            schedule,
            f'recompute="layers" (stages {", ".join(map(str, layers))}) forgets a layer as soon as its gradients are '
            "there, and would have to compute it a third time for its weights",
            "Use recompute=True, or a set of stages",
        )


def needs_whole_backwards(compiled: bool, parallelized: bool, recompute: Recompute) -> bool:
    """Whether schedules that split backwards are refused by `check_split_backwards`, or may be because a hook of
    `parallelize=` shards modules.
    """
    return compiled or parallelized or recompute == "layers"


def check_wire_dtype(recipe: Recipe, plan: Plan, chain: LayerChain) -> None:
    """Raises `PlanError` if ``wire_dtype=`` makes nothing smaller that the stages of `plan` send each other."""
    codec = recipe.codec
    if codec is None:
        return
    starts = [stage.start for stage in plan.stages]
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


def _refuse(schedule: Schedule, reason: str, remedy: str) -> None:
    raise PlanError(
        f"schedule {schedule.name!r} computes the gradients of inputs and those of weights apart, and {reason}: "
        f"expected stages whose backward autograd can do in two parts. {remedy}, or choose {DEFAULT_SCHEDULE!r}"
    )
