"""The cheapest plan that ends an epoch in time: parts of the cluster are planned one by one, and compared by cost.

More devices are faster, and each of them does less for its price, since they wait for each other. So the cheapest plan
has as few devices as the deadline allows, or slow ones that cost little.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from penstock.errors import PlanError
from penstock.planning.prices import cost_of
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.quantities import seconds_text
from penstock.values.text_tables import table_lines

_EVERY_COUNT = 16
"""Of a kind with more devices only 1, 2, 4 and so on are planned, since each part takes a plan."""


@dataclass(frozen=True, slots=True)
class _Option:
    """The fastest plan of a part of the cluster."""

    plan: Plan
    """Its devices are those of the whole cluster."""
    seconds: float
    """Of an epoch."""
    cost: float
    part: str


def plan_in_time(
    find: Callable[[Cluster], Plan], cluster: Cluster, epoch_samples: float, deadline_seconds: float
) -> Plan:
    """The plan whose epoch costs least, of those that end it before the deadline.

    `find` plans a part. Parts are every number of devices of each kind, and the whole cluster; of a kind with more
    than 16 devices they are 1, 2, 4 and so on, and all. Raises `PlanError` if no price is known or no plan is fast
    enough.
    """
    if not cluster.price_per_hour():
        raise PlanError(
            "deadline_seconds: expected a cluster with prices, found none: give price_per_hour of its kinds "
            "(Cluster.with_kinds), or leave the deadline out for the fastest plan"
        )
    options, refused = [], None
    for part, ranks in _parts(cluster):
        try:
            found = find(cluster.pick(ranks))
        except PlanError as error:
            refused = error
            continue
        used = tuple(ranks[device] for device in found.devices or range(found.ranks))
        whole = replace(found, devices=used)
        cost = cost_of(epoch_samples, whole, cluster)
        assert whole.predicted is not None, "the planner predicts what it plans"
        if cost is not None:
            options.append(_Option(whole, epoch_samples / whole.predicted.samples_per_second, cost, part))
    if not options:
        raise refused or PlanError("deadline_seconds: expected prices of the devices that a plan uses: give them")
    soon = [option for option in options if option.seconds <= deadline_seconds]
    if not soon:
        best = min(options, key=lambda option: option.seconds)
        raise PlanError(
            f"deadline_seconds: expected {best.seconds:.6g} or more, the time of an epoch of the fastest plan, on "
            f"{best.part}, found {deadline_seconds:.6g}: give more time, or more devices"
        )
    chosen = min(soon, key=lambda option: option.cost)
    lines = _lines(options, chosen, deadline_seconds)
    return replace(chosen.plan, explanation=chosen.plan.explanation + "\n\n" + "\n".join(lines))


def _parts(cluster: Cluster) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Parts of the cluster with their names. Devices of a kind that follow each other are near each other."""
    kinds = {cluster.kind_of(rank): None for rank in range(cluster.devices)}
    for kind in kinds:
        ranks = tuple(rank for rank in range(cluster.devices) if cluster.kind_of(rank) == kind)
        few = len(ranks) <= _EVERY_COUNT
        for count in range(1, len(ranks) + 1):
            # A power of two has one bit.
            if few or count.bit_count() == 1 or count == len(ranks):
                yield f"{count} x {kind.name or 'device'}", ranks[:count]
    if len(kinds) > 1:
        yield "all devices", tuple(range(cluster.devices))


def _lines(options: list[_Option], chosen: _Option, deadline_seconds: float) -> list[str]:
    rows = [["part", "samples/s", "epoch", "per epoch", ""]]
    for option in options:
        assert option.plan.predicted is not None, "the planner predicts what it plans"
        late = "" if option.seconds <= deadline_seconds else "too late"
        numbers = [
            f"{option.plan.predicted.samples_per_second:.4g}",
            seconds_text(option.seconds),
            f"{option.cost:.4g}",
        ]
        rows.append([option.part, *numbers, "taken" if option is chosen else late])
    head = f"The cheapest plan that ends an epoch in {seconds_text(deadline_seconds)}; the fastest plan of each part:"
    return [head, *table_lines(rows, left={0, 4})]
