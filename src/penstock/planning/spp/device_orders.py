"""The order in which the devices of a machine form a pipeline: recursive device ordering by minimum cuts.

[SPP 2022, algorithm 2]: cut the graph of devices in two where the least bandwidth crosses, order either side in the
same way, and put one behind the other. Stages then take neighbours in this order, so that slow links are seldom
crossed. The minimum cut is that of Stoer and Wagner (Journal of the ACM, 1997). Where the text leaves a choice, ours
is:

  1. A link is as fast as the slower of its two directions: a pipeline uses both, for activations and for gradients.
  2. The printed minimum cut, by the sum over all pairs of devices, splits a single device off a server, since a server
     of 4 among 8 has 112 links to the others and a device 31. Here a *group*, devices with faster links among
     themselves than any of them has to the outside, is one node until it is alone, and two groups are connected by one
     link: their slowest. Servers, and racks of servers, are groups. So each group is contiguous in the order.
  3. The smaller side comes last; of two equal sides the one with the lowest rank comes first. Of equal cuts, within
     rounding, the first is taken, which keeps equal devices in ascending order.
  4. Either side may be reversed, so that the two are connected by the fastest possible link. (On random graphs of 4 and
     5 devices this reduces the excess over the best of all orders by a quarter to a third.)
"""

from collections.abc import Iterator, Sequence
from functools import partial, reduce
from itertools import groupby

import numpy as np

from penstock.planning.stage_costs import Matrix
from penstock.values.clusters import Cluster

_EQUAL = 1 - 1e-9
"""Sums of the same bandwidths in another order are the same cut."""


def device_order(speeds: Matrix) -> tuple[int, ...]:
    """All devices in the order of the pipeline.

    `speeds`, (V, V): bytes per second between two devices, symmetric; the diagonal is not read (see `link_speeds`).
    O(V^4) in the worst case, mostly in numpy; 64 devices take a fraction of a second.
    """
    groups = device_groups(speeds)

    def arrange(members: tuple[int, ...]) -> tuple[int, ...]:
        if len(members) == 1:
            return members
        subgroups = _subgroups(members, groups)
        joined = np.array([[speeds[np.ix_(one, other)].min() for other in subgroups] for one in subgroups])
        return _recursive_cuts(speeds, joined, [arrange(subgroup) for subgroup in subgroups])

    return arrange(tuple(range(len(speeds))))


def minimum_cut(weights: Matrix) -> tuple[float, tuple[int, ...]]:
    """(Weight, one side) of the cut of a graph into two non-empty sides with the least weight of edges between them.

    `weights`, (n, n): symmetric, 0 or more, n at least 2; the diagonal is not read. The other side holds node 0.
    O(n^3).
    """
    joined = weights.astype(np.float64)
    merged: list[list[int]] = [[node] for node in range(len(joined))]
    least, side = np.inf, merged[-1]
    while len(merged) > 1:
        before, last, weight = _cut_of_the_phase(joined)
        if weight < least * _EQUAL or len(merged) == len(weights):
            least, side = weight, list(merged[last])
        joined[before] += joined[last]
        joined[:, before] += joined[:, last]
        joined = np.delete(np.delete(joined, last, 0), last, 1)
        merged[before] += merged[last]
        del merged[last]
    return float(least), tuple(sorted(side))


def device_groups(speeds: Matrix) -> tuple[tuple[int, ...], ...]:
    """The groups of two or more devices, but not all, by size: their links inside are faster than those outside.

    Any two groups are disjoint, or one contains the other. `speeds` as for `device_order`.
    """
    groups = []
    for mask in _linked(speeds):
        inside = speeds[np.ix_(mask, mask)].copy()
        np.fill_diagonal(inside, np.inf)
        if inside.min() > speeds[np.ix_(mask, ~mask)].max():
            groups.append(tuple(int(device) for device in np.flatnonzero(mask)))
    return tuple(sorted(groups, key=lambda group: (len(group), group)))


def link_speeds(cluster: Cluster) -> Matrix:
    """(V, V): bytes per second between two ranks, in the slower direction; infinite from a rank to itself."""
    ranks = range(cluster.devices)
    speeds = np.array([[cluster.bandwidth(a, b) for b in ranks] for a in ranks], dtype=np.float64)
    slower: Matrix = np.minimum(speeds, speeds.T)
    return slower


def link_latencies(cluster: Cluster) -> Matrix:
    """(V, V): seconds before the first byte arrives, in the slower direction; 0 from a rank to itself."""
    ranks = range(cluster.devices)
    latencies = np.array([[cluster.latency(a, b) if a != b else 0.0 for b in ranks] for a in ranks], dtype=np.float64)
    slower: Matrix = np.maximum(latencies, latencies.T)
    return slower


def _recursive_cuts(speeds: Matrix, weights: Matrix, subgroups: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    """Algorithm 2 over `subgroups`, each in order already; row i of `weights` has the links of ``subgroups[i]``."""
    links = weights[~np.eye(len(subgroups), dtype=bool)]
    if not len(links) or links.min() >= links.max() * _EQUAL:
        # With equal links every subgroup is cut off in turn, the last first; finding these cuts would take long.
        return reduce(partial(_join, speeds), subgroups)
    _, side = minimum_cut(weights)
    other = tuple(subgroup for subgroup in range(len(subgroups)) if subgroup not in side)
    # Subgroup 0, which has the lowest rank, is in `other`.
    first, last = (other, side) if len(side) <= len(other) else (side, other)
    one, two = (
        _recursive_cuts(speeds, weights[np.ix_(half, half)], [subgroups[subgroup] for subgroup in half])
        for half in (first, last)
    )
    return _join(speeds, one, two)


def _join(speeds: Matrix, one: tuple[int, ...], two: tuple[int, ...]) -> tuple[int, ...]:
    """`one` and then `two`, either reversed if that gives a faster link between them."""
    turned = [(left, right) for right in (two, two[::-1]) for left in (one, one[::-1])]
    left, right = max(turned, key=lambda pair: float(speeds[pair[0][-1], pair[1][0]]))
    return left + right


def _cut_of_the_phase(weights: Matrix) -> tuple[int, int, float]:
    """The last two nodes, if the most tightly connected one is added in each step, and the cut around the last."""
    connection = weights[0].copy()
    waiting = np.ones(len(weights), dtype=bool)
    waiting[0] = False
    before = last = 0
    weight = 0.0
    for _ in range(len(weights) - 1):
        tightest = connection[waiting].max()
        before, last = last, int((waiting & (connection >= tightest * _EQUAL)).argmax())
        weight = float(connection[last])
        connection += weights[last]
        waiting[last] = False
    return before, last, weight


def _linked(speeds: Matrix) -> Iterator[np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """The connected components of the links of at least some speed, for every speed: two or more devices, not all.

    Every group is among them. The fastest links are added first (Kruskal).
    """
    ones, others = np.triu_indices(len(speeds), 1)
    between = speeds[ones, others]
    labels, apart = np.arange(len(speeds)), len(speeds)
    fastest_first = np.argsort(-between, kind="stable").tolist()
    for _, equal in groupby(fastest_first, key=between.tolist().__getitem__):
        joined = set[int]()
        for link in equal:
            one, other = int(ones[link]), int(others[link])
            if labels[one] != labels[other]:
                labels[labels == labels[other]] = labels[one]
                joined.add(one)
                apart -= 1
                if apart == 1:
                    return
        for label in sorted({int(labels[device]) for device in joined}):
            yield labels == label


def _subgroups(members: Sequence[int], groups: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    """The largest groups in `members` and the devices in none, by their lowest rank."""
    left = set(members)
    subgroups = []
    for group in reversed(groups):
        if len(group) < len(members) and left.issuperset(group):
            subgroups.append(group)
            left -= set(group)
    return sorted([*subgroups, *((device,) for device in left)])
