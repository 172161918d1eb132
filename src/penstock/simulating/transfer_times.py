"""The route of a message: which links it occupies, for how long, and how much later it arrives.

A link is busy for bytes / bandwidth, and the message arrives one latency later: the latency of one message and the
bytes of the next overlap. Besides, it takes processor time at both ends (`MessageCosts`). Where several ranks send one
message together (a split microbatch, a group of tensor-parallel ranks), all their transfers run at once and the slowest
decides [SPP 2022, section III].
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product
from math import inf
from typing import TypeAlias, assert_never

from penstock.errors import PlanError
from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels, LinkMatrix

Link: TypeAlias = tuple[int, int]
"""A directed pair of ranks; the first of each side where several send together. Where all ranks of two servers a and b
share one link, it is (-1 - a, -1 - b)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The links that a message occupies, each with its seconds, and the latency."""

    legs: tuple[tuple[Link, float], ...]
    latency_seconds: float
    handling_seconds: float = 0.0
    """How long each end is busy with the message whatever its size; the busiest end where there are several."""
    copying_seconds: float = 0.0
    """And with its bytes."""
    blocking: float = 0.0
    """The share of its time on the links in which its ends do nothing else; the most where there are several."""


def find_route(
    cluster: Cluster | None,
    size_bytes: float,
    senders: Sequence[int],
    receivers: Sequence[int],
    *,
    shared: bool,
    width: int = 1,
) -> Route:
    """The route of `size_bytes` from `senders` to `receivers`; each sender sends an equal share to each receiver.

    `shared`: all pairs of ranks on two servers share the link between the servers. `width`: the number of
    tensor-parallel ranks in each sender and receiver; rank i of one sends to rank i of the other. Without a cluster
    links are instant.
    """
    link = senders[0] * width, receivers[0] * width
    share_bytes = size_bytes / (len(senders) * len(receivers))
    if cluster is None:
        return Route(((link, 0.0),), 0.0)
    ends: list[tuple[Sequence[int], Sequence[int]]] = [(senders, receivers)]
    if width > 1:
        ends = [
            ([rank * width + tp_rank for rank in senders], [rank * width + tp_rank for rank in receivers])
            for tp_rank in range(width)
        ]
    latency = 0.0
    costs: tuple[float, ...] = (0.0, 0.0, 0.0)
    for both in ends if cluster.has_message_costs else ():
        costs = tuple(map(max, costs, _occupied(cluster, share_bytes, *both)))
    if not shared:
        least = inf
        for both in ends:
            bandwidth, delay = slowest_link(cluster, *both)
            least, latency = min(least, bandwidth), max(latency, delay)
        return Route(((link, share_bytes / least),), latency, *costs)
    size = _server_size(cluster)
    loads: defaultdict[Link, float] = defaultdict(float)
    for a, b in chain.from_iterable(product(*both) for both in ends):
        here, there = a // size, b // size
        seconds = share_bytes / cluster.bandwidth(a, b)
        latency = max(latency, cluster.latency(a, b))
        if here == there:
            loads[link] = max(loads[link], seconds)
        else:
            loads[-1 - here, -1 - there] += seconds
    return Route(tuple(loads.items()), latency, *costs)


def _occupied(
    cluster: Cluster, share_bytes: float, senders: Sequence[int], receivers: Sequence[int]
) -> tuple[float, float, float]:
    """How long a message occupies the busiest of its ends: whatever its size, and for its bytes; and the largest share
    of its time on a link that blocks them.

    Each end has as many messages as there are ranks at the other end, all but the one to itself.
    """
    ends = [[cluster.message_costs(a, b) for b in receivers if a != b] for a in senders]
    ends += [[cluster.message_costs(a, b) for a in senders if a != b] for b in receivers]
    handling = max(sum(cost.seconds for cost in end) for end in ends)
    copying = max(share_bytes * sum(cost.seconds_per_byte for cost in end) for end in ends)
    return handling, copying, max((cost.blocking for end in ends for cost in end), default=0.0)


def _server_size(cluster: Cluster) -> int:
    """The ranks of a server, the innermost level of `cluster`. Raises `PlanError` if its links are a matrix."""
    match cluster.links:
        case LinkLevels(levels=levels):
            return levels[0][0]
        case LinkMatrix():
            raise PlanError(
                "shared_nic: expected a cluster with servers, found links as a matrix, which has none: describe the "
                "cluster with Cluster.hierarchical, or measure its links while all ranks send at once"
            )
        case _:
            assert_never(cluster.links)


def slowest_link(cluster: Cluster, senders: Sequence[int], receivers: Sequence[int]) -> tuple[float, float]:
    """(Least bandwidth, largest latency) from any of `senders` to any other rank of `receivers`; (inf, 0.0) if none.

    In a hierarchy the cost is proportional to the number of ranks, not of pairs.
    """
    if len(senders) == len(receivers) == 1:
        return cluster.bandwidth(senders[0], receivers[0]), cluster.latency(senders[0], receivers[0])
    links = cluster.links
    match links:
        case LinkLevels(levels, latencies):
            joining = list(_levels_between(links, senders, receivers))
            found = [(levels[level][1], latencies[level]) for level in joining]
        case LinkMatrix():
            pairs = [(a, b) for a, b in product(senders, receivers) if a != b]
            found = [(cluster.bandwidth(a, b), cluster.latency(a, b)) for a, b in pairs]
        case _:
            assert_never(links)
    return min((bandwidth for bandwidth, _ in found), default=inf), max((latency for _, latency in found), default=0.0)


def _levels_between(links: LinkLevels, senders: Sequence[int], receivers: Sequence[int]) -> Iterator[int]:
    """The levels that join a sender to another rank that receives."""
    size = 1
    for level, (count, _) in enumerate(links.levels):
        inner, size = size, size * count
        both = {rank // size for rank in senders} & {rank // size for rank in receivers}
        # A component with a sender and a receiver joins them if they are in two parts of it.
        parts = {rank // inner for rank in (*senders, *receivers) if rank // size in both}
        if len(parts) > len(both):
            yield level
