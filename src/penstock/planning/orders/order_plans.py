"""Plans whose order was found, and the frontier: what a step takes with less or more memory.

The other planners say where stages begin and lie, as if memory were free. The order is then found under the limit, for
the best few of these structures, with recomputation and without. The frontier does the same under several limits,
beside the named schedules: each of its plans is faster than all that need as little memory.
"""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from penstock.arguments import FLAG, Entries, FieldRules, check_arguments, number
from penstock.errors import PlanError, counted
from penstock.planning.orders.judged_stages import named_plans
from penstock.planning.orders.search import FoundOrder, find_order, limit_order
from penstock.planning.predictions import prediction_of, speed_of
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.tensor_groups import compare_plans, profile_of_plan
from penstock.rendering.frontier_drawings import PlanDot, draw_frontier
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.scheduling.schedule_names import find_definition
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.documents import write_text
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines

_STRUCTURES = 3
"""The structures for which an order is sought."""
LIMITS = (0.5, 0.625, 0.75, 1.0, 1.25, 1.5, 2.0)
"""Those of a frontier, in units of what `1f1b-flush` takes."""
_BAR = 40
_RULES: FieldRules = {"limits": Entries(number(above=0)), "whole_backwards": FLAG}


def plan_order(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, *, progress: bool | None = False
) -> Plan:
    """The fastest plan with an order of its own; see `penstock.plan` and `find_order`. `PlanError` if none fits."""
    found, refused = [], None
    for plan in _with_recomputation(_structures(profiles, cluster, constraints, progress), cluster, constraints):
        try:
            found.append(_find(plan, profiles, cluster, constraints, choose_recompute=constraints.recompute is None))
        except PlanError as error:
            refused = error
    if not found:
        raise refused or PlanError("planner='order': expected a pipeline without replicas, found none: drop an option")
    best = max(found, key=lambda each: speed_of(each.plan))
    names = tuple(layer.name for layer in profile_of_plan(best.plan, profiles).layers)
    return replace(best.plan, explanation=f"{best.plan}\n\n{best.plan.explanation}", layer_names=names)


def plan_limited(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, *, progress: bool | None = False
) -> Plan | None:
    """The fastest plan of the schedule that is named, with its order delayed where it would not fit; see `limit_order`.

    None if no schedule that flushes is named, if a planner is, whose plans are not changed, and if no delay is enough.
    """
    definition = find_definition(constraints.schedule)
    if definition is None or constraints.planner is not None or not definition.updates_at_once:
        return None
    free = replace(constraints, straight=True)
    ranked = compare_plans(profiles, cluster.with_memory(None), free, progress=progress).ranked
    alone = [plan for plan in ranked if max(plan.replicas) == 1][:_STRUCTURES]
    found = []
    for plan in _with_recomputation(alone, cluster, constraints):
        with suppress(PlanError):
            measured = profile_of_plan(plan, profiles)
            found.append((limit_order(plan, measured, cluster, **constraints.simulator_options), measured))
    if not found:
        return None
    best, measured = max(found, key=lambda each: speed_of(each[0]))
    names = tuple(layer.name for layer in measured.layers)
    why = f"\n\nNo plan fits in the usual order of {definition}: here a forward waits until its bytes fit."
    return replace(best, explanation=f"{best}{why if best.order else ''}", layer_names=names)


def _find(
    plan: Plan,
    profiles: Sequence[Profile],
    cluster: Cluster,
    constraints: PlanConstraints,
    memory_bytes: float | None = None,
    *,
    choose_recompute: bool,
) -> FoundOrder:
    return find_order(
        plan,
        profile_of_plan(plan, profiles),
        cluster,
        memory_bytes=memory_bytes,
        whole_backwards=constraints.whole_backwards,
        move_cuts=True,
        choose_recompute=choose_recompute,
        **constraints.simulator_options,
    )


def _structures(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, progress: bool | None
) -> list[Plan]:
    """The fastest plan of each of the best structures, where memory is free."""
    free = replace(constraints, planner=None, straight=True, synchronous=True, recompute=bool(constraints.recompute))
    ranked = compare_plans(profiles, cluster.with_memory(None), free, progress=progress).ranked
    distinct: dict[object, Plan] = {}
    for plan in ranked:
        if max(plan.replicas) == 1 and plan.ranks > 1:
            distinct.setdefault((plan.stages, plan.devices, plan.microbatch_size), plan)
    # Of each way to lay out stages the best is among them.
    layouts = dict.fromkeys(plan.definition.layout for plan in distinct.values())
    first = [next(plan for plan in distinct.values() if plan.definition.layout is layout) for layout in layouts]
    return [*first, *(plan for plan in distinct.values() if plan not in first)][: max(_STRUCTURES, len(first))]


def _with_recomputation(plans: Sequence[Plan], cluster: Cluster, constraints: PlanConstraints) -> Iterator[Plan]:
    for plan in plans:
        yield plan
        if constraints.recompute is None and cluster.least_memory_bytes is not None:
            yield replace(plan, recompute=True, predicted=None)


@dataclass(frozen=True, slots=True)
class FrontierPoint:
    """A plan, and at most what share of its step's time another order of its stages can save."""

    plan: Plan
    gap: float | None = None
    """None for a named schedule that was not sought for."""

    @property
    def seconds(self) -> float:
        """The time of a step."""
        return prediction_of(self.plan).minibatch_seconds

    @property
    def peak_bytes(self) -> float:
        """The most that any rank holds."""
        return max(prediction_of(self.plan).peak_bytes)

    @property
    def name(self) -> str:
        """The order, what recomputes, and the number of stages."""
        plan = self.plan
        some = "" if isinstance(plan.recompute, bool) else f" stages {', '.join(map(str, plan.recompute))}"
        return f"{plan.schedule}{f', recomputed{some}' if plan.recompute else ''}, {counted(len(plan.stages), 'stage')}"

    def dot(self) -> PlanDot:
        """The point in a picture."""
        more = "" if self.gap is None else f", at most {self.gap:.1%} to gain"
        return PlanDot(self.peak_bytes, self.seconds, f"{self.name}{more}")


@dataclass(frozen=True, slots=True)
class Frontier:
    """Holds the plans that are faster than all with as little memory, the least memory first; `str` is a table.

    `reference`: the plan with `1f1b-flush` that others are compared with.
    """

    points: tuple[FrontierPoint, ...]
    reference: FrontierPoint

    def __str__(self) -> str:
        head = ("peak", f"of {DEFAULT_SCHEDULE}", "step", f"of {DEFAULT_SCHEDULE}", "order", "at most to gain", "")
        rows = [head]
        for point in self.points:
            memory, time = point.peak_bytes / self.reference.peak_bytes, point.seconds / self.reference.seconds
            gap = "" if point.gap is None else f"{point.gap:.1%}"
            bar = "#" * round(_BAR * time / max(each.seconds / self.reference.seconds for each in self.points))
            cells = bytes_text(point.peak_bytes), f"{memory:.2f}", seconds_text(point.seconds), f"{time:.2f}"
            rows.append((*cells, point.name, gap, bar))
        return "\n".join(table_lines(rows, left={4, 6}))

    def svg(self) -> str:
        """A picture of the steps against the bytes, readable on light and dark pages."""
        return draw_frontier([point.dot() for point in self.points], self.reference.dot())

    def save_svg(self, path: str | Path) -> None:
        """Writes the picture. Raises `PlanError` if the file cannot be written."""
        write_text(path, self.svg(), PlanError)


def frontier(
    profile: Profile,
    cluster: Cluster,
    *,
    microbatches: int | None = None,
    limits: Sequence[float] = LIMITS,
    whole_backwards: bool = False,
    optimizer_copies: float = 2.0,
    state_on_host: bool = False,
) -> Frontier:
    """What a step takes against the most bytes of a rank: of named schedules and of orders that were found.

    `limits`: those under which orders are sought, in units of what `1f1b-flush` takes on its fullest rank; the memory
    of the cluster's devices is not used. `microbatches`: by default four for every device. `whole_backwards`: no
    backward is split. `optimizer_copies`: the optimizer's state in units of the weights. `state_on_host`: as in
    `Pipeline`. Takes about a second for every limit and structure, with 8 ranks and 32 microbatches. Raises
    `PlanError` if no pipeline is possible.
    """
    check_arguments("frontier", _RULES, PlanError, limits=limits, whole_backwards=whole_backwards)
    constraints = PlanConstraints(
        microbatches=microbatches,
        whole_backwards=whole_backwards,
        optimizer_copies=optimizer_copies,
        state_on_host=state_on_host,
        recompute=False,
        every_device=True,
    )
    free = cluster.with_memory(None)
    structures = _structures((profile,), free, constraints, progress=False)
    asked = [replace(plan, recompute=again, predicted=None) for plan in structures for again in (False, True)]
    named = []
    for plan in asked:
        for made in named_plans(replace(plan, planner=""), whole_backwards=whole_backwards):
            predicted = evaluate(made, profile, free, **constraints.simulator_options)
            named.append(FrontierPoint(replace(made, predicted=predicted)))
    reference = min(
        (point for point in named if point.plan.schedule == DEFAULT_SCHEDULE and not point.plan.recompute),
        key=lambda point: point.seconds,
        default=None,
    )
    if reference is None:
        raise PlanError("frontier: expected two devices and layers or more, found fewer: plan with penstock.plan")
    found = []
    for limit in limits:
        for plan in structures:
            try:
                best = _find(plan, [profile], free, constraints, limit * reference.peak_bytes, choose_recompute=True)
            except PlanError:
                continue
            found.append(FrontierPoint(best.plan, best.gap))
    return Frontier(tuple(_fastest([*found, *named])), reference)


def _fastest(points: Sequence[FrontierPoint]) -> Iterator[FrontierPoint]:
    """The points that are faster than all with as little memory, the least memory first."""
    least = float("inf")
    for point in sorted(points, key=lambda each: (each.peak_bytes, each.seconds)):
        if point.seconds < least * (1 - 1e-3):
            least = point.seconds
            yield point
