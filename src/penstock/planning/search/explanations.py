"""Explanations: the result of a search in words and a table, or what would be enough where it has none."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil, floor, inf, log10
from typing import Unpack

from penstock.errors import PlanError
from penstock.planning.memory import OPTIMIZER_COPIES, peak_bytes
from penstock.planning.predictions import cost_of, cost_per_million, prediction_of
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.data_parallelism import WithoutPipeline, without_pipelines
from penstock.planning.search.plan_search import EQUAL, Rejection, SearchResult
from penstock.planning.search.streamed_plans import smallest_streamed
from penstock.planning.search.tensor_groups import compare_plans, profile_of_plan
from penstock.planning.stage_costs import chain_costs
from penstock.scheduling.schedule_names import names_of
from penstock.simulating.assumptions import Options
from penstock.simulating.lost_time import Losses
from penstock.simulating.outcomes import evaluate
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan
from penstock.values.profiles import Profile
from penstock.values.quantities import bytes_text, seconds_text, table_lines

_ROWS = 10
"""Plans in the table."""

_WORTH = 0.02
"""The share of a minibatch below which messages in fewer bytes are not worth a line."""

_REASON = 160
"""Characters of the reason of a rejection."""


def explain_search(
    search: SearchResult,
    losses: Losses,
    cluster: Cluster,
    profile: Profile | None,
    *,
    optimizer_copies: float = OPTIMIZER_COPIES,
    epoch_samples: float | None = None,
) -> str:
    """What is faster without a pipeline (if there is a `profile` of whole layers on one device); the best plan with its
    devices, the ranked table with costs where prices are known, where the time of the best goes, why the runner-up is
    not the best, what training without a pipeline would take, and what could not be planned.
    """
    best, *others = search.ranked
    kinds = [] if cluster.is_equal else _kinds(best, cluster)
    ways = _alternatives(best, cluster, profile, optimizer_copies) if cluster.devices > 1 and profile else ()
    lines = [
        *_faster_without(best, ways),
        str(best),
        *kinds,
        "",
        *_table(search.ranked[:_ROWS], cluster, epoch_samples),
    ]
    hidden = len(search.ranked[_ROWS:]) + search.not_simulated
    lines += [f"and {hidden} more that are slower"] if hidden else []
    lines += ["", f"The best is limited by: {prediction_of(best).limit}."]
    needs = f"The fullest device needs {bytes_text(max(prediction_of(best).peak_bytes))}"
    least = cluster.least_memory_bytes
    lines += [f"{needs}; no limit was given." if least is None else f"{needs} of {bytes_text(least)}."]
    lines += [f"Its time goes to: {losses}."]
    lines += [_compare(best, others[0])] if others else []
    lines += _advise(search.ranked)
    if ways:
        lines += [f"Without a pipeline, by formulas instead of simulation: {'; '.join(map(str, ways))}."]
    lines += _list(search.rejections)
    return "\n".join(lines)


def wire_note(best: Plan, profile: Profile, cluster: Cluster, losses: Losses, **options: Unpack[Options]) -> str:
    """A line that says how much of what crosses cuts links carry, or what it would gain if they carried half; nothing
    if nothing would be gained. `options`: of the simulator.
    """
    crossing, sent = (sum(layer.cut_bytes for layer in each.layers[:-1]) for each in (profile, profile.on_wire))
    if profile.on_wire is not profile:
        share = f"{sent / crossing:.0%} of what crosses cuts" if crossing else ""
        return f"\nLinks carry {share}, as with wire_dtype= of the pipeline." if share else ""
    if losses.transfer <= _WORTH * losses.seconds:
        return ""
    halved = evaluate(best, profile.with_wire_share(0.5), cluster, **options).samples_per_second
    gain = halved / prediction_of(best).samples_per_second - 1
    if gain < _WORTH:
        return ""
    return (
        f"\nWith wire_dtype=torch.bfloat16 links would carry half of float32 activations, and this plan would make "
        f"{rate_text(halved)} samples/s, {gain:.1%} more. Plan with --wire-share 0.5 or Profile.with_wire_share(0.5): "
        "another plan may gain more still."
    )


def shape_text(plan: Plan) -> str:
    """The replicas of the stages: ``15-1``, ``8 stages x 2`` for many equal ones, ``data parallel x 4`` for one."""
    replicas = plan.replicas[: len(plan.stages) // plan.stages_per_rank]
    if len(replicas) == 1:
        text = f"data parallel x {replicas[0]}" if replicas[0] > 1 else "1 stage"
    elif len(set(replicas)) > 1 or 1 < len(replicas) <= 4:
        text = "-".join(map(str, replicas))
    else:
        text = f"{len(replicas)} stages"
        text += f" x {replicas[0]}" if replicas[0] > 1 else ""
    text += f", v={plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""
    return text + (f", t={plan.tensor_parallel}" if plan.tensor_parallel > 1 else "")


def _kinds(plan: Plan, cluster: Cluster) -> list[str]:
    """The devices of every stage, and those that are left out."""
    devices = plan.devices or tuple(range(plan.ranks))

    def named(ranks: Sequence[int]) -> str:
        counts = Counter(_kind_text(cluster.kind_of(rank)) for rank in ranks)
        return ", ".join(f"{count} x {name}" for name, count in counts.items())

    lines = [
        f"stage {index} on {named([devices[rank] for rank in stage.ranks])}" for index, stage in enumerate(plan.stages)
    ]
    left = sorted(set(range(cluster.devices)) - set(devices))
    return [*lines, *([f"left out: {named(left)}"] if left else [])]


def _kind_text(kind: DeviceKind) -> str:
    name = kind.name or "device"
    return name if kind.speed == 1 else f"{name} ({kind.speed:.3g} times as fast)"


def _alternatives(
    best: Plan, cluster: Cluster, profile: Profile, optimizer_copies: float
) -> tuple[WithoutPipeline, ...]:
    size = best.microbatch_size or profile.microbatch_size
    # Where every microbatch has an update of its own, a minibatch of one would leave all devices but one idle.
    microbatches = cluster.devices if best.definition.updates_per_microbatch else best.microbatches
    every = {cluster.class_of(rank): rank for rank in range(cluster.devices)}
    scaled, picked = profile.scaled(size), [cluster.pick([rank]) for rank in every.values()]
    alone = [without_pipelines(scaled, one, microbatches, optimizer_copies)[0] for one in picked]
    alone.sort(key=lambda way: (not way.fits, way.minibatch_seconds))
    return replace(alone[0], name="one device"), *without_pipelines(scaled, cluster, microbatches, optimizer_copies)


def _faster_without(best: Plan, ways: Sequence[WithoutPipeline]) -> list[str]:
    """A line that says so where data parallelism or one device is at least as fast as stages."""
    rate = prediction_of(best).samples_per_second
    if best.ranks == len(best.stages[0].ranks):
        name = f"data parallelism on {best.ranks} devices" if best.ranks > 1 else "one device alone"
        return [f"A pipeline gains nothing here: the fastest plan is {name}.", ""]
    faster = [way for way in ways if way.fits and way.samples_per_second > rate * (1 + EQUAL)]
    if not faster:
        return []
    most = max(way.samples_per_second for way in faster)
    name = next(way.name for way in faster if way.samples_per_second >= most * (1 - EQUAL))
    text = f"{name}, {rate_text(most)} samples/s where this plan makes {rate_text(rate)}"
    return [f"Training without a pipeline is faster, by a formula: {text}.", ""]


def _table(plans: Sequence[Plan], cluster: Cluster, epoch_samples: float | None) -> list[str]:
    head = ["", "cut by", "schedule", "replicas", "m x b", "minibatch", "samples/s", "bubble", "peak", "limited by"]
    rows = [head, *(_row(position, plan) for position, plan in enumerate(plans, start=1))]
    if cluster.price_per_hour():
        columns: list[tuple[str | float | None, ...]] = [
            ("per million", *(cost_per_million(plan, cluster) for plan in plans))
        ]
        if epoch_samples is not None:
            columns.append(("per epoch", *(cost_of(epoch_samples, plan, cluster) for plan in plans)))
        for column in columns:
            for row, cost in zip(rows, column, strict=True):
                row.insert(-1, f"{cost:.4g}" if isinstance(cost, float) else cost or "-")
    return table_lines(rows, left={1, 2, 3, len(rows[0]) - 1})


def _row(position: int, plan: Plan) -> list[str]:
    predicted = prediction_of(plan)
    return [
        str(position),
        plan.planner,
        str(plan.schedule) + (" recompute" if plan.recompute else ""),
        shape_text(plan),
        f"{plan.microbatches} x {plan.microbatch_size}",
        seconds_text(predicted.minibatch_seconds),
        rate_text(predicted.samples_per_second),
        f"{predicted.bubble:.1%}",
        bytes_text(max(predicted.peak_bytes)),
        predicted.limit,
    ]


def _compare(best: Plan, other: Plan) -> str:
    """Why `other` is not the best."""
    rate, lost = prediction_of(best).samples_per_second, prediction_of(other).samples_per_second
    name = f"The runner-up ({_name(other)})"
    if lost >= rate * (1 - EQUAL):
        peaks = [max(prediction_of(plan).peak_bytes) for plan in (best, other)]
        if best.definition.flushes and not other.definition.flushes:
            return f"{name} is as fast, but its weights are stale."
        if peaks[0] < peaks[1]:
            return f"{name} is as fast, but needs {bytes_text(peaks[1])} where the best needs {bytes_text(peaks[0])}."
        return f"{name} is as fast and needs as much memory."
    return f"{name} {_slower(rate, lost)}: it is limited by {prediction_of(other).limit}."


def rate_text(rate: float) -> str:
    """Samples per second with four digits, and never as a power of ten below a million."""
    return f"{rate:.4g}" if rate < 1e4 or rate >= 1e6 else f"{rate:.0f}"


def _slower(rate: float, lost: float) -> str:
    """How much slower `lost` samples per second are than `rate`."""
    times = rate / lost if lost else float("inf")
    return f"is {times - 1:.1%} slower" if times < 2 else f"takes {times:.3g} times as long"


def _advise(ranked: Sequence[Plan]) -> list[str]:
    """Warnings about the best plan."""
    best = ranked[0]
    lines = []
    if not best.definition.flushes:
        advice = "it trains with stale weights, so watch the loss"
        same = next((plan for plan in ranked if plan.definition.flushes), None)
        if same is not None:
            slower = _slower(prediction_of(best).samples_per_second, prediction_of(same).samples_per_second)
            advice += (
                f"; the best plan that trains as one device does ({_name(same)}) {slower}: "
                "without asynchronous=True (--asynchronous), only such are planned for"
            )
        lines.append(f"{best.schedule} never flushes: {advice}.")
    if best.definition.updates_per_microbatch and best.routing == "round-robin" and len(set(best.replicas)) > 1:
        lines.append(
            "Its stages update at different rates, a stage of r replicas once in r microbatches: plan for another "
            "schedule if you do not mean it."
        )
    return lines


def _list(rejections: Sequence[Rejection]) -> list[str]:
    """One line for every planner and schedule without a plan."""
    first = {(rejection.planner, rejection.schedule): rejection.reason for rejection in reversed(rejections)}
    lines = [f"  {planner}, {schedule}: {_shorten(reason)}" for (planner, schedule), reason in sorted(first.items())]
    return ["", "Not possible:", *lines] if lines else []


def _shorten(reason: str) -> str:
    line = reason.splitlines()[0]
    return line if len(line) <= _REASON else line[: _REASON - 3].rsplit(" ", 1)[0] + " ..."


def _name(plan: Plan) -> str:
    return f"{plan.schedule}, {shape_text(plan)}" + (", recompute" if plan.recompute else "")


_DOUBLINGS = 4

_MOST_DEVICES = 128
"""With more devices a search takes too long for an error message."""

_NOT_STREAMED = (
    f"expected no other schedule than {names_of(lambda each: each.for_streams)} beside streamed=True, no planner, "
    "vertical_sync or recompute=False, and equally many stages on all ranks, found other options: leave them out"
)


def explain_infeasibility(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, found: SearchResult
) -> PlanError:
    """The error of a search that `found` no plan."""
    free = cluster.with_memory(None)
    either = replace(constraints, recompute=True) if constraints.recompute is None else constraints
    unlimited = () if constraints.streamed else compare_plans(profiles, free, either, refine=False).ranked
    needed = {plan: _needed_bytes(plan, profiles, constraints) for plan in unlimited}
    streamed = smallest_streamed(profiles, free, constraints)
    if streamed is not None:
        needed[streamed] = max(prediction_of(streamed).peak_bytes)
    if cluster.least_memory_bytes is None or not needed:
        reasons = "; ".join(dict.fromkeys(rejection.reason for rejection in found.rejections))
        return PlanError(f"no plan: {reasons or _NOT_STREAMED}")
    plan = min(needed, key=needed.__getitem__)
    memory = _three_digits_up(needed[plan])
    if plan is not streamed:
        memory, plan = _least_memory(profiles, cluster, constraints, memory, plan)
    enough = [f"{bytes_text(memory)} on each device (for {_wording(plan)})", *_changes(profiles, cluster, constraints)]
    weights = bytes_text(profiles[0].parameter_bytes + profiles[0].frozen_bytes)
    devices = "1 device" if cluster.devices == 1 else f"each of {cluster.devices} devices"
    return PlanError(
        f"nothing fits: expected a plan with at most {bytes_text(cluster.least_memory_bytes)} on {devices}, found none "
        f"for {weights} of weights. Each of these would be enough: {'; '.join(enough)}"
    )


def _least_memory(
    profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints, enough: float, plan: Plan
) -> tuple[float, Plan]:
    """The least memory with which the search finds a plan of which no stage is streamed, up to 1 % and rounded up to
    three digits, and that plan.

    `enough`: memory that is enough for `plan`.
    """
    too_little, high = cluster.least_memory_bytes or 0.0, enough
    while high > 1.01 * too_little and (middle := _three_digits_up((too_little + high) / 2)) < high:
        found = compare_plans(profiles, cluster.with_memory(middle), constraints, refine=False).ranked
        if found:
            high, plan = middle, found[0]
        else:
            too_little = middle
    return high, plan


def _three_digits_up(number: float) -> float:
    unit = 10.0 ** (floor(log10(number)) - 2) if number > 0 else 1.0
    return ceil(number / unit * (1 - 1e-12)) * unit


def _changes(profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> Iterator[str]:
    """Words for every kind of change of the search that is enough, for the least change of its kind."""

    def attempt(words: str, profiles: Sequence[Profile], cluster: Cluster, constraints: PlanConstraints) -> str:
        ranked = () if constraints.streamed else compare_plans(profiles, cluster, constraints, refine=False).ranked
        plan = ranked[0] if ranked else smallest_streamed(profiles, cluster, constraints)
        return f"{words} (for {_wording(plan)})" if plan else ""

    smallest = min(profiles, key=lambda profile: profile.microbatch_size)
    halves = [smallest.microbatch_size >> power for power in range(1, smallest.microbatch_size.bit_length())]
    again = [replace(constraints, recompute=True)] if constraints.recompute is False else []
    wider = _wider_clusters(cluster) if constraints.stages is None else ()
    for attempts in (
        (attempt(f"{wide.devices} devices", profiles, wide, constraints) for wide in wider),
        (attempt("recompute=True", profiles, cluster, changed) for changed in again),
        (attempt(f"microbatches of {size} samples", (smallest.scaled(size),), cluster, constraints) for size in halves),
    ):
        yield from islice(filter(None, attempts), 1)
    if cluster.host_bandwidth is None and constraints.streamed is None:
        words = (
            "host_bandwidth of the cluster, with which weights can stay on the host: penstock probe measures it; on a "
            "CPU it is that of the directory offload_to="
        )
        yield from filter(None, [attempt(words, profiles, replace(cluster, host_bandwidth=inf), constraints)])


def _needed_bytes(plan: Plan, profiles: Sequence[Profile], constraints: PlanConstraints) -> float:
    """The memory with which the search accepts `plan`: planners count the gradients as if they were permanent."""
    profile = profile_of_plan(plan, profiles)
    costs = chain_costs(profile, recompute=bool(plan.recompute))
    counted = peak_bytes(plan, costs, constraints.kept_copies, shared=constraints.shard_optimizer)
    return max(*counted, *(plan.predicted.peak_bytes if plan.predicted else ()))


def _wording(plan: Plan) -> str:
    text = f"{plan.schedule} on {shape_text(plan)}" + (" with recomputation" if plan.recompute else "")
    return text + (" and weights on the host" if plan.streamed else "")


def _wider_clusters(cluster: Cluster) -> Iterator[Cluster]:
    """2, 4, 8, ... times the devices, connected by the outermost level, or by the slowest link of a matrix."""
    if not cluster.is_equal:
        # Which kind of device to add is not known.
        return
    for _ in range(_DOUBLINGS):
        if 2 * cluster.devices > _MOST_DEVICES:
            return
        if isinstance(cluster.links, LinkLevels):
            *inner, (count, bandwidth) = cluster.links.levels
            links = replace(cluster.links, levels=(*inner, (2 * count, bandwidth)))
            cluster = replace(cluster, links=links, kinds=cluster.kinds * 2)
        else:
            wider = Cluster.uniform(2 * cluster.devices, cluster.slowest, cluster.least_memory_bytes)
            cluster = replace(wider, host_bandwidth=cluster.host_bandwidth)
        yield cluster
