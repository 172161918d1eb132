"""The error for a search in which nothing fits in memory: it names what would be enough, each tried alone."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from math import inf

from penstock.errors import PlanError
from penstock.scheduling.orders import DEFAULT_SCHEDULE
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels
from penstock.values.quantities import bytes_text

__all__ = ["halves", "nothing_fits", "wider_clusters"]

_DOUBLINGS = 4

_MOST_DEVICES = 128
"""With more devices a search takes too long for an error message."""


def nothing_fits(
    kind: str, cluster: Cluster, parameter_bytes: float, attempts: Iterable[Iterable[str | None]]
) -> PlanError:
    """The error where no plan of `kind` fits on `cluster`.

    Each of `attempts` changes one thing, the least change first: it yields the words for a change that is enough, None
    for another. The first of each is named, and later ones are not tried.
    """
    enough = [words for attempt in attempts for words in islice(filter(None, attempt), 1)]
    least = cluster.least_memory_bytes
    memory = inf if least is None else least
    devices = "1 device" if cluster.devices == 1 else f"each of {cluster.devices} devices"
    advice = (
        f"Each of these would be enough: {'; '.join(enough)}"
        if enough
        else f"Use more devices, fewer or smaller microbatches, recompute=True, or the schedule {DEFAULT_SCHEDULE}"
    )
    return PlanError(
        f"nothing fits: expected {kind} with at most {bytes_text(memory)} on {devices}, found none for "
        f"{bytes_text(parameter_bytes)} of weights. {advice}"
    )


def wider_clusters(cluster: Cluster) -> Iterator[Cluster]:
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
            cluster = Cluster.uniform(2 * cluster.devices, cluster.slowest, cluster.least_memory_bytes)
        yield cluster


def halves(number: int) -> Iterator[int]:
    """Half of `number`, half of that, down to 1."""
    while number > 1:
        number //= 2
        yield number
