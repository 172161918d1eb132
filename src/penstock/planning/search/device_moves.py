"""Local search on devices that differ, around the best of the plans that the planners propose for them.

It moves each cut to every place, with the devices of its two stages as they are or swapped. It swaps devices between
stages, moves a replica to another stage, takes devices in or leaves them out, and joins or divides stages. In each
round the moves that are best by the closed form are simulated, and the first that is faster is taken.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from penstock.errors import PlanError, ScheduleError
from penstock.planning.predictions import slowest_seconds, speed_of
from penstock.planning.requests import number_ranks
from penstock.planning.stage_costs import AllReduce, ChainCosts
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.plans import Plan, Stage

_TRIED = 32
"""Moves that are simulated in a round."""

_ROUNDS = 12

_Block = tuple[int, int, frozenset[int]]
"""A stage: its first layer, where it stops, and its devices."""


def climb(
    plan: Plan,
    cluster: Cluster,
    costs: ChainCosts,
    simulate: Callable[[Plan], Plan],
    allreduce: AllReduce,
    *,
    straight: bool,
    stages: int | None = None,
    devices: int | None = None,
) -> Plan:
    """The fastest plan that moves lead to from `plan`, which has a prediction and one stage per rank.

    ``simulate(plan)`` adds a prediction and raises `PlanError` or `ScheduleError` for a plan that cannot run or does
    not fit. `straight`: no replicas. `stages`, `devices`: their numbers, if they are fixed.
    """
    whole = plan.microbatch_size if plan.routing == "split" else None

    def allowed(blocks: tuple[_Block, ...]) -> bool:
        widths = [len(devices) for _, _, devices in blocks]
        plain = max(widths) == 1 or not straight
        plain = plain and stages in (None, len(blocks)) and devices in (None, sum(widths))
        return plain and not any((whole or width) % width for width in widths)

    prices: dict[object, float] = {}
    tried = {_signature(_blocks(plan), cluster)}
    for _ in range(_ROUNDS):
        fresh: dict[object, tuple[_Block, ...]] = {}
        for blocks in moved_stages(_blocks(plan), cluster, costs):
            signature = _signature(blocks, cluster)
            if signature not in tried and allowed(blocks):
                fresh[signature] = blocks
                if signature not in prices:
                    prices[signature] = _price(plan, blocks, costs, cluster, allreduce)
        for each in sorted(fresh, key=prices.__getitem__)[:_TRIED]:
            tried.add(each)
            better = _faster(plan, fresh[each], simulate)
            if better is not None:
                plan = better
                break
        else:
            return plan
    return plan


def moved_stages(blocks: tuple[_Block, ...], cluster: Cluster, costs: ChainCosts) -> Iterator[tuple[_Block, ...]]:
    """The stages after every move."""
    yield from _moved_cuts(blocks)
    yield from _moved_devices(blocks, frozenset(range(cluster.devices)))
    yield from _joined(blocks)
    yield from _divided(blocks, costs)


def _faster(plan: Plan, blocks: tuple[_Block, ...], simulate: Callable[[Plan], Plan]) -> Plan | None:
    """`plan` with these stages if that is faster."""
    try:
        found = simulate(_placed(plan, blocks))
    except (PlanError, ScheduleError):
        return None
    return found if speed_of(found) > speed_of(plan) * (1 + 1e-6) else None


def _moved_cuts(blocks: tuple[_Block, ...]) -> Iterator[tuple[_Block, ...]]:
    """A cut at any place between its neighbors, with the devices of the two stages as they are or swapped."""
    for index in range(len(blocks) - 1):
        (start, _, one), (_, stop, two) = blocks[index : index + 2]
        for place in range(start + 1, stop):
            yield (*blocks[:index], (start, place, one), (place, stop, two), *blocks[index + 2 :])
            yield (*blocks[:index], (start, place, two), (place, stop, one), *blocks[index + 2 :])


def _moved_devices(blocks: tuple[_Block, ...], every: frozenset[int]) -> Iterator[tuple[_Block, ...]]:
    """Devices swapped, moved to another stage, taken in and left out."""
    free = every - frozenset().union(*(devices for _, _, devices in blocks))

    def changed(*changes: tuple[int, frozenset[int]]) -> tuple[_Block, ...]:
        made = list(blocks)
        for index, devices in changes:
            made[index] = (*made[index][:2], devices)
        return tuple(made)

    for a, b in combinations(range(len(blocks)), 2):
        one, two = blocks[a][2], blocks[b][2]
        yield changed((a, two), (b, one))
        for x in one:
            for y in two:
                yield changed((a, one - {x} | {y}), (b, two - {y} | {x}))
        for here, there, devices, others in ((a, b, one, two), (b, a, two, one)):
            for x in devices if len(devices) > 1 else ():
                yield changed((here, devices - {x}), (there, others | {x}))
    for index, (_, _, devices) in enumerate(blocks):
        for x in devices:
            if len(devices) > 1:
                yield changed((index, devices - {x}))
            for y in free:
                yield changed((index, devices - {x} | {y}))
        for y in free:
            yield changed((index, devices | {y}))


def _joined(blocks: tuple[_Block, ...]) -> Iterator[tuple[_Block, ...]]:
    """Two stages as one, on the devices of both or of either."""
    for index in range(len(blocks) - 1):
        (start, _, one), (_, stop, two) = blocks[index : index + 2]
        for devices in (one | two, one, two):
            yield (*blocks[:index], (start, stop, devices), *blocks[index + 2 :])


def _divided(blocks: tuple[_Block, ...], costs: ChainCosts) -> Iterator[tuple[_Block, ...]]:
    """One stage as two, cut where both halves of its devices take equally long."""
    for index, (start, stop, devices) in enumerate(blocks):
        if len(devices) < 2 or stop - start < 2:
            continue
        ranked = sorted(devices, key=lambda device: (float(costs.seconds_on([device])[0, -1]), device))
        for ordered in (ranked, ranked[::-1]):
            for count in {1, len(ordered) // 2, len(ordered) - 1}:
                first, second = ordered[:count], ordered[count:]
                here, there = costs.seconds_on(first) / len(first), costs.seconds_on(second) / len(second)
                cut = min(range(start + 1, stop), key=lambda j: max(here[start, j], there[j, stop]))
                halves = (start, cut, frozenset(first)), (cut, stop, frozenset(second))
                yield (*blocks[:index], *halves, *blocks[index + 1 :])


def _blocks(plan: Plan) -> tuple[_Block, ...]:
    devices = plan.devices or tuple(range(plan.ranks))
    return tuple((stage.start, stage.stop, frozenset(devices[rank] for rank in stage.ranks)) for stage in plan.stages)


def _stages(blocks: tuple[_Block, ...]) -> tuple[Stage, ...]:
    return tuple(Stage(start, stop, tuple(sorted(devices))) for start, stop, devices in blocks)


def _placed(plan: Plan, blocks: tuple[_Block, ...]) -> Plan:
    stages, devices = number_ranks(_stages(blocks))
    return replace(plan, stages=stages, devices=devices, predicted=None)


def _signature(blocks: tuple[_Block, ...], cluster: Cluster) -> object:
    """Equal for plans that differ only in which of equal devices they use, where all links are equal."""
    if isinstance(cluster.links, LinkLevels) and len({speed for count, speed in cluster.levels if count > 1}) == 1:
        return tuple(
            (start, stop, tuple(sorted(map(repr, map(cluster.class_of, devices))))) for start, stop, devices in blocks
        )
    return blocks


def _price(plan: Plan, blocks: tuple[_Block, ...], costs: ChainCosts, cluster: Cluster, allreduce: AllReduce) -> float:
    """The closed form: the slowest part, for each microbatch and, under a flush, for each stage but one."""
    filling = len(blocks) - 1 if plan.definition.flushes else 0
    return (plan.microbatches + filling) * slowest_seconds(_stages(blocks), costs, cluster, allreduce)
