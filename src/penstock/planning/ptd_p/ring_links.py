"""The links of groups of ranks: the bandwidth and latency of the rings around each group.

Ranks are numbered as in Megatron-LM: tensor-parallel ranks are neighbours, then come the replicas of the same stage,
and the stages are farthest apart. Stage i, replica j, tensor-parallel rank k of (p, d, t) is rank (i d + j) t + k.

Every device has a link of its own at every level, as a server has a network card for each of its devices in
[Narayanan 2021, section 4.4.1]. Collectives run as many rings as there are parallel links: a group with q devices in
each server leaves a server over q cards at once. A matrix of links has no levels, and there is one ring.
"""

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from math import inf, prod
from typing import assert_never

from penstock.values.clusters import Cluster
from penstock.values.link_tables import LinkLevels, LinkMatrix


@dataclass(frozen=True, slots=True)
class Ring:
    """The rings of the slowest of several equal groups: bytes per second and seconds per message."""

    ranks: int
    bandwidth: float = inf
    latency_seconds: float = 0.0

    def allreduce_seconds(self, size_bytes: float) -> float:
        """The sum of `size_bytes` on every rank: each sends 2 (r - 1) / r of them in 2 (r - 1) messages."""
        return 2 * self.gather_seconds(size_bytes)

    def gather_seconds(self, size_bytes: float) -> float:
        """Every rank receives the slices of all others, `size_bytes` in all: (r - 1) / r of them in r - 1 messages."""
        return (self.ranks - 1) * (self.latency_seconds + size_bytes / self.ranks / self.bandwidth)

    def transfer_seconds(self, size_bytes: float) -> float:
        """One message to the next rank."""
        return self.latency_seconds + size_bytes / self.bandwidth if self.ranks > 1 else 0.0


def tensor_ring(cluster: Cluster, ranks: int, tensor: int) -> Ring:
    """The ring of the ranks 0 to t - 1, t to 2t - 1, ... below `ranks`."""
    return _slowest_ring(cluster, ranks, 1, tensor, True)


def data_ring(cluster: Cluster, ranks: int, tensor: int, data: int) -> Ring:
    """The ring of the replicas of a stage: every t-th of d t neighbours."""
    return _slowest_ring(cluster, ranks, tensor, data, True)


def pipeline_ring(cluster: Cluster, ranks: int, pipeline: int) -> Ring:
    """The ring of the stages, from the last back to the first for interleaving; a message takes one link."""
    return _slowest_ring(cluster, ranks, ranks // pipeline, pipeline, False)


@lru_cache(maxsize=4096)
def _slowest_ring(cluster: Cluster, ranks: int, stride: int, members: int, collective: bool) -> Ring:
    """The slowest of the groups of `members` ranks that are `stride` apart, among the first `ranks`."""
    if members == 1:
        return Ring(1)
    span = stride * members
    firsts = [first for start in range(0, ranks, span) for first in range(start, start + stride)]
    match cluster.links:
        case LinkLevels(levels):
            # All components of the last level but one are equal, and so are groups at the same offset in them.
            period = prod(count for count, _ in levels[:-1])
            firsts = list({first % period: first for first in firsts}.values())
        case LinkMatrix():
            pass
        case _:
            assert_never(cluster.links)
    found = [_ring(cluster, range(first, first + span, stride), collective) for first in firsts]
    return Ring(members, min(speed for speed, _ in found), max(latency for _, latency in found))


def _ring(cluster: Cluster, group: range, collective: bool) -> tuple[float, float]:
    """(Bytes per second, seconds per message) around one group."""
    match cluster.links:
        case LinkLevels(levels):
            bandwidth, latency, below = inf, 0.0, 1
            for (count, link), seconds in zip(levels, cluster.links.latency_seconds, strict=True):
                members = Counter(rank // below for rank in group)
                below *= count
                if len(members) > len({rank // below for rank in group}):
                    bandwidth = min(bandwidth, link * (min(members.values()) if collective else 1))
                    latency = max(latency, seconds)
            return bandwidth, latency
        case LinkMatrix():
            hops = [(a, b) for a, b in zip(group, (*group[1:], group[0]), strict=True)]
            hops += [(b, a) for a, b in hops]
            return min(cluster.bandwidth(a, b) for a, b in hops), max(cluster.latency(a, b) for a, b in hops)
        case _:
            assert_never(cluster.links)
