"""The order of devices: minimum cuts against brute force, and servers that stay together."""

import random
from itertools import combinations, pairwise, permutations

import numpy as np
import pytest

from penstock.planning.spp.device_orders import device_groups, device_order, link_latencies, link_speeds, minimum_cut
from penstock.values import Cluster


def random_graph(generator, nodes, draw):
    weights = np.zeros((nodes, nodes))
    for a, b in combinations(range(nodes), 2):
        weights[a, b] = weights[b, a] = draw()
    return weights


def across(weights, side):
    """The weight of the edges from `side` to the rest."""
    return sum(weights[a, b] for a in side for b in range(len(weights)) if b not in side)


def cuts(nodes):
    """All parts of a graph that do not hold node 0."""
    for size in range(1, nodes):
        yield from combinations(range(1, nodes), size)


def servers(generator, sizes, inside, outside):
    """Servers of `sizes` devices, ranks shuffled: (bandwidths, the ranks of each server)."""
    ranks = list(range(sum(sizes)))
    generator.shuffle(ranks)
    owned, first = [], 0
    for size in sizes:
        owned.append(set(ranks[first : first + size]))
        first += size
    home = {rank: index for index, own in enumerate(owned) for rank in own}
    ranges = [generator.choice(inside) for _ in sizes]
    pairs = {
        (a, b): generator.uniform(*(ranges[home[a]] if home[a] == home[b] else outside))
        for a, b in combinations(range(len(ranks)), 2)
    }
    rows = [[pairs.get((min(a, b), max(a, b)), 0.0) for b in range(len(ranks))] for a in range(len(ranks))]
    return rows, owned


def places(order, members):
    return sorted(order.index(member) for member in members)


@pytest.mark.parametrize("seed", range(4))
def test_minimum_cut_is_the_least_of_all_cuts(seed):
    """500 random graphs each, 2,000 in all; zeros and ties are common in half of them."""
    generator = random.Random(seed)
    for case in range(500):
        draw = (lambda: generator.randint(0, 4)) if case % 2 else (lambda: generator.uniform(0, 9))
        weights = random_graph(generator, generator.randint(2, 8), draw)

        weight, side = minimum_cut(weights)

        assert weight == pytest.approx(min(across(weights, cut) for cut in cuts(len(weights))), rel=1e-9, abs=1e-9)
        assert weight == pytest.approx(across(weights, side), rel=1e-9, abs=1e-9)
        assert side in set(cuts(len(weights)))


def test_minimum_cut_of_the_example_of_stoer_and_wagner():
    weights = np.zeros((8, 8))
    edges = {(1, 2): 2, (1, 5): 3, (2, 3): 3, (2, 5): 2, (2, 6): 2, (3, 4): 4, (3, 7): 2, (4, 7): 2, (4, 8): 2}
    edges |= {(5, 6): 3, (6, 7): 1, (7, 8): 3}
    for (a, b), weight in edges.items():
        weights[a - 1, b - 1] = weights[b - 1, a - 1] = weight

    assert minimum_cut(weights) == (4, (2, 3, 6, 7))


@pytest.mark.parametrize("seed", range(3))
def test_every_device_has_one_place(seed):
    generator = random.Random(seed)
    for _ in range(200):
        speeds = random_graph(generator, generator.randint(1, 12), lambda: generator.choice((1, 2, 7, 9.5, np.inf)))

        assert sorted(device_order(speeds)) == list(range(len(speeds)))


@pytest.mark.parametrize("seed", range(4))
def test_groups_are_exactly_the_sets_that_are_faster_inside(seed):
    generator = random.Random(seed)
    for _ in range(100):
        devices = generator.randint(1, 7)
        speeds = random_graph(generator, devices, lambda: generator.randint(1, 9))
        expected = set()
        for size in range(2, devices):
            for group in combinations(range(devices), size):
                inner = min(speeds[a, b] for a, b in combinations(group, 2))
                outer = max(speeds[a, b] for a in group for b in range(devices) if b not in group)
                if inner > outer:
                    expected.add(group)
        groups = device_groups(speeds)

        assert set(groups) == expected
        assert len(groups) == len(expected)
        order = device_order(speeds)
        for group in groups:
            found = places(order, group)
            assert found == list(range(found[0], found[0] + len(group)))


@pytest.mark.parametrize("seed", range(5))
def test_servers_with_unequal_links_stay_together(seed):
    """The machine of SPP's section V-B (8 x 4, PCIe or NVLink inside) and others, ranks shuffled."""
    generator = random.Random(seed)
    for sizes in ([4] * 8, [2] * 6, [4] * 3, [8], [1, 2, 3, 4, 5], [6, 6]):
        rows, owned = servers(generator, sizes, [(96, 128), (160, 200)], (32, 40))
        order = device_order(link_speeds(Cluster.from_matrix(rows_of(rows))))

        assert sorted(order) == list(range(sum(sizes)))
        for own in owned:
            found = places(order, own)
            assert found == list(range(found[0], found[0] + len(own)))


def rows_of(rows):
    """A diagonal that no constructor refuses."""
    return [[speed or 1.0 for speed in row] for row in rows]


@pytest.mark.parametrize(
    "levels",
    [
        [(4, 12e9), (8, 1.25e9)],
        [(1, 5e9)],
        [(16, 1.1e9)],
        [(14, 0.7)],
        [(2, 2.5e10), (4, 1.2e10), (4, 1.3e9), (2, 1e8)],
        [(3, 7), (3, 7)],
    ],
)
def test_devices_that_are_alike_keep_their_order(levels):
    cluster = Cluster.hierarchical(levels)

    assert device_order(link_speeds(cluster)) == tuple(range(cluster.devices))


def test_a_chain_of_links_is_followed():
    """Devices joined in a row by fast links: the best order is the row, from either end."""
    row = (3, 0, 4, 1, 5, 2)
    speeds = np.full((6, 6), 1.0)
    for a, b in pairwise(row):
        speeds[a, b] = speeds[b, a] = 50.0

    assert device_order(speeds) in (row, row[::-1])


def test_order_is_near_the_best_for_neighbours():
    """The slowest link between neighbours, against the best of all orders of 5 devices: 300 random machines."""
    generator = random.Random(9)
    shares = []
    for _ in range(300):
        speeds = random_graph(generator, 5, lambda: generator.uniform(1, 10))
        slowest = {order: min(speeds[a, b] for a, b in pairwise(order)) for order in permutations(range(5))}
        shares.append(slowest[device_order(speeds)] / max(slowest.values()))

    assert max(shares) <= 1
    assert sum(shares) / len(shares) > 0.75


def test_links_are_as_slow_as_their_slower_direction():
    cluster = Cluster.from_matrix([[1, 5, 7], [4, 1, 9], [8, 9, 1]], latency_seconds=[[0, 2, 3], [1, 0, 4], [6, 5, 0]])

    assert link_speeds(cluster).tolist() == [[np.inf, 4, 7], [4, np.inf, 9], [7, 9, np.inf]]
    assert link_latencies(cluster).tolist() == [[0, 2, 6], [2, 0, 5], [6, 5, 0]]
