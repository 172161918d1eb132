"""PipeDream's partitioner against brute force, and on the profiles that its authors measured.

The oracle enumerates every plan that the recurrence permits and takes the best; it shares no code with the planner.
"""

import random
from functools import cache
from itertools import combinations, pairwise
from math import inf, prod

import pytest

from penstock.errors import PlanError
from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.requests import Request
from penstock.values import Cluster, LayerProfile, Profile
from support.paper_plans import partition
from support.paths import PIPEDREAM

FILES = PIPEDREAM
MODELS = ("gnmt", "resnet18", "resnet50", "squeezenet1_0", "vgg16")
REDUCED = {"ring": lambda r, w: 2 * (r - 1) / r * w, "shared": lambda r, w: 2 * (r - 1) * w}


@cache
def load(model):
    return Profile.from_pipedream(FILES / model / "graph.txt")


def compositions(total):
    """All ways to write `total` as an ordered sum of positive numbers."""
    for count in range(total):
        for marks in combinations(range(1, total), count):
            yield [b - a for a, b in pairwise((0, *marks, total))]


def brute_force(profile, levels, allreduce, straight=False):
    """The least slowest seconds over all nested plans: at each level, blocks of layers on whole components."""
    layers = profile.layers
    times = [layer.forward_seconds + layer.backward_seconds for layer in layers]

    @cache
    def best(depth, start, stop):
        if depth < 0:
            return sum(times[start:stop])
        count, bandwidth = levels[depth]
        found = inf
        for replicas in compositions(count):
            if len(replicas) > stop - start or (straight and max(replicas) > 1):
                continue
            for marks in combinations(range(start + 1, stop), len(replicas) - 1):
                cuts = (start, *marks, stop)
                slowest = max((2 * layers[cut - 1].cut_bytes / bandwidth for cut in marks), default=0.0)
                for (i, j), r in zip(pairwise(cuts), replicas, strict=True):
                    weights = sum(layer.parameter_bytes for layer in layers[i:j])
                    reduced = REDUCED[allreduce](r, weights) / bandwidth
                    slowest = max(slowest, max(best(depth - 1, i, j), reduced) / r)
                found = min(found, slowest)
        return found

    return best(len(levels) - 1, 0, len(layers))


def objective(plan, profile, levels, allreduce):
    """The recurrence's value of a plan, worked out from its layers and ranks alone.

    At each level, neighbouring stages on the same components are one block; its replicas are these components.
    """

    def value(depth, stages):
        start, stop = stages[0][0], stages[-1][1]
        if depth < 0:
            assert len(stages) == 1 and len(stages[0][2]) == 1
            return sum(layer.forward_seconds + layer.backward_seconds for layer in profile.layers[start:stop])
        bandwidth = levels[depth][1]
        size = prod(count for count, _ in levels[:depth])
        blocks = {}
        for first, last, ranks in stages:
            blocks.setdefault(frozenset(rank // size for rank in ranks), []).append((first, last, ranks))
        assert sum(map(len, blocks)) == len(frozenset().union(*blocks))
        slowest = 0.0
        for components, block in blocks.items():
            first, last = block[0][0], block[-1][1]
            one = min(components)
            inner = [(i, j, [rank for rank in ranks if rank // size == one]) for i, j, ranks in block]
            weights = sum(layer.parameter_bytes for layer in profile.layers[first:last])
            reduced = REDUCED[allreduce](len(components), weights) / bandwidth
            slowest = max(slowest, max(value(depth - 1, inner), reduced) / len(components))
            if first > start:
                slowest = max(slowest, 2 * profile.layers[first - 1].cut_bytes / bandwidth)
        return slowest

    return value(len(levels) - 1, [(stage.start, stage.stop, stage.ranks) for stage in plan.stages])


def flattened(levels):
    return ((prod(count for count, _ in levels), min(speed for count, speed in levels if count > 1)),)


def random_profile(generator, layers):
    """Whole numbers, so that every order of summation gives the same; zeros and ties are common."""

    def number(most):
        return generator.choice((0, generator.randint(0, most)))

    rows = [(generator.randint(0, 9), generator.randint(0, 9), number(60), 0, number(60)) for _ in range(layers)]
    return Profile(tuple(LayerProfile(str(index), *row) for index, row in enumerate(rows)), 1)


@pytest.mark.parametrize("allreduce", ["ring", "shared"])
@pytest.mark.parametrize("seed", range(8))
def test_hierarchical_plans_are_the_best_of_all_nested_and_flat_ones(seed, allreduce):
    """Up to 40 random machines of at most 9 devices each."""
    generator = random.Random(seed)
    for _ in range(40):
        profile = random_profile(generator, generator.randint(1, 5))
        depth = generator.randint(2, 3)
        levels = tuple((generator.randint(1, 3), generator.choice((1, 4, 16, 64))) for _ in range(depth))
        if not 1 < prod(count for count, _ in levels) <= 9:
            continue
        plan = partition(profile, Cluster.hierarchical(levels), allreduce=allreduce)
        nested = brute_force(profile, levels, allreduce)
        best = min(nested, brute_force(profile, flattened(levels), allreduce))
        machine = levels if nested == best else flattened(levels)

        assert plan.predicted.bottleneck_seconds == pytest.approx(best, rel=1e-12)
        assert objective(plan, profile, machine, allreduce) == pytest.approx(best, rel=1e-12)


@pytest.mark.parametrize("seed", range(8))
def test_straight_plans_are_the_best_of_all_straight_ones(seed):
    """75 random machines and models each, 600 in all; the cut after stage s lies on the link of ranks s and s + 1."""
    generator = random.Random(seed)
    for _ in range(75):
        levels = tuple((generator.randint(1, 3), generator.choice((1, 4, 16))) for _ in range(2))
        devices = prod(count for count, _ in levels)
        profile = random_profile(generator, generator.randint(devices, devices + 4))
        plan = partition(profile, Cluster.hierarchical(levels), straight=True)
        best = brute_force(profile, levels, "ring", straight=True)

        assert [stage.ranks for stage in plan.stages] == [(rank,) for rank in range(devices)]
        assert plan.predicted.bottleneck_seconds == best == objective(plan, profile, levels, "ring")


def test_a_matrix_of_links_is_planned_link_by_link_when_straight():
    """The cut of 12 bytes goes over the fast link, whichever that is."""
    layers = [LayerProfile(str(index), 1, 1, cut, 0, 0) for index, cut in enumerate((12, 1, 12, 1))]
    fast_first = Cluster.from_matrix([[0, 12, 1], [12, 0, 1], [1, 1, 0]])
    fast_last = Cluster.from_matrix([[0, 1, 1], [1, 0, 12], [1, 12, 0]])

    def cuts(cluster):
        return [stage.stop for stage in partition(Profile(tuple(layers), 1), cluster, straight=True).stages]

    assert cuts(fast_first) == [1, 2, 4]
    assert cuts(fast_last) == [2, 3, 4]


def test_the_balance_decides_between_equal_straight_plans():
    """One layer of 10 decides; the four layers of 1 behind it are still shared evenly."""
    layers = [LayerProfile(str(index), seconds, 0, 0, 0, 0) for index, seconds in enumerate((10, 1, 1, 1, 1))]
    plan = partition(Profile(tuple(layers), 1), Cluster.uniform(3, 1.0), straight=True)

    assert [stage.stop for stage in plan.stages] == [1, 3, 5]


@pytest.mark.parametrize("allreduce", ["ring", "shared"])
@pytest.mark.parametrize("model", MODELS)
def test_the_first_layers_of_each_profile_are_planned_best(model, allreduce):
    profile = load(model).prefix(6)
    for levels in (((4, 1.25e9),), ((2, 12e9), (2, 1.25e9)), ((2, 12e9), (3, 1.25e9))):
        best = min(brute_force(profile, levels, allreduce), brute_force(profile, flattened(levels), allreduce))
        plan = partition(profile, Cluster.hierarchical(levels), allreduce=allreduce)

        assert plan.predicted.bottleneck_seconds == pytest.approx(best, rel=1e-12)


MACHINES = {
    4: (((4, 12e9),), ((2, 12e9), (2, 1.25e9))),
    8: (((8, 1.25e9),), ((4, 12e9), (2, 1.25e9))),
    16: (((16, 1.25e9),), ((4, 12e9), (4, 1.25e9)), ((8, 25e9), (2, 3.125e9))),
}


@pytest.mark.parametrize("allreduce", ["ring", "shared"])
@pytest.mark.parametrize("workers", MACHINES)
@pytest.mark.parametrize("model", MODELS)
def test_each_profile_is_planned_for_4_8_and_16_workers(model, workers, allreduce):
    profile = load(model)
    for levels in MACHINES[workers]:
        plan = partition(profile, Cluster.hierarchical(levels), allreduce=allreduce)
        # A plan may be nested or flat; its value is that of the reading that the planner chose.
        readings = [objective(plan, profile, flattened(levels), allreduce)]
        if is_nested(plan, levels):
            readings.append(objective(plan, profile, levels, allreduce))

        assert plan.ranks == workers
        assert plan.layers == len(profile)
        assert plan.predicted.bottleneck_seconds == pytest.approx(min(readings), rel=1e-12)
        data_parallel = sum(layer.seconds for layer in profile.layers) / workers
        assert plan.predicted.bottleneck_seconds >= data_parallel * (1 - 1e-12)


def is_nested(plan, levels):
    """Whether every stage takes whole components at the upper level, or lies in one."""
    size = levels[0][0]
    seen = {}
    for stage in plan.stages:
        servers = frozenset(rank // size for rank in stage.ranks)
        local = {frozenset(rank % size for rank in stage.ranks if rank // size == server) for server in servers}
        if len(local) != 1 or any(seen.setdefault(server, servers) != servers for server in servers):
            return False
    return len(levels) > 1


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_each_profile_is_cut_straight_for_4_8_and_16_workers(model, workers):
    profile = load(model)
    cluster = Cluster.hierarchical([(4, 12e9), (workers // 4, 1.25e9)])
    plan = partition(profile, cluster, straight=True)
    loads = [sum(layer.seconds for layer in profile.layers[stage.start : stage.stop]) for stage in plan.stages]
    sent = [
        2 * profile.layers[stage.stop - 1].cut_bytes / cluster.bandwidth(index, index + 1)
        for index, stage in enumerate(plan.stages[:-1])
    ]

    assert len(plan.stages) == workers
    assert plan.predicted.bottleneck_seconds == pytest.approx(max(*loads, *sent), rel=1e-12)


def shape(plan):
    return [len(stage.ranks) for stage in plan.stages]


@pytest.mark.parametrize(
    ("model", "cluster", "allreduce", "replicas", "slowest"),
    [
        ("vgg16", Cluster.uniform(16, 1.25e9), "shared", [15, 1], 0.08221),
        ("vgg16", Cluster.uniform(16, 1.25e9), "ring", [15, 1], 0.04416),
        ("vgg16", Cluster.uniform(16, 3.125e9), "shared", [15, 1], None),
        ("vgg16", Cluster.uniform(16, 3.125e9), "ring", [16], None),
        ("resnet50", Cluster.uniform(16, 1.25e9), "ring", [16], None),
        ("resnet50", Cluster.hierarchical([(4, 12e9), (4, 1.25e9)]), "ring", [16], None),
        ("resnet50", Cluster.hierarchical([(8, 25e9), (2, 3.125e9)]), "ring", [16], None),
        ("resnet50", Cluster.hierarchical([(8, 25e9), (2, 3.125e9)]), "shared", [16], None),
    ],
)
def test_published_plans_come_out(model, cluster, allreduce, replicas, slowest):
    """SOSP'19, table 1: VGG-16 as 15-1 and ResNet-50 as data parallelism; seconds from the data's README."""
    plan = partition(load(model), cluster, allreduce=allreduce)

    assert shape(plan) == replicas
    if slowest is not None:
        assert plan.predicted.bottleneck_seconds == pytest.approx(slowest, abs=5e-6)


def test_fifteen_and_one_is_out_of_reach_of_four_servers_of_four():
    """The hierarchy alone gives 0.06278 s as printed; flat at 10 Gbps gives 0.08221 s, so the hierarchy wins."""
    plan = partition(load("vgg16"), Cluster.hierarchical([(4, 12e9), (4, 1.25e9)]), allreduce="shared")

    assert plan.predicted.bottleneck_seconds == pytest.approx(0.06278, abs=5e-6)
    assert shape(plan)[0] == 12


def test_a_memory_limit_moves_the_cuts():
    """Four equal layers on two devices: stage 0 keeps two microbatches, stage 1 one, so 2 + 2 takes 40 and 20 bytes."""
    layers = tuple(LayerProfile(str(index), 1, 1, 0, 10, 0) for index in range(4))

    def cuts(memory_bytes):
        cluster = Cluster.uniform(2, 1.0, memory_bytes)
        return [stage.stop for stage in partition(Profile(layers, 1), cluster, straight=True).stages]

    assert cuts(40) == [2, 4]
    assert cuts(39) == [1, 4]
    assert find_pipedream(Profile(layers, 1), Cluster.uniform(2, 1.0, 29), Request("pipedream", straight=True)) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"straight": True}, "cannot cut 3 layers into 4 stages: .*Use fewer stages"),
        ({"stages": 5}, r"stages: expected at most 4 \(4 devices with 1 stages each\), found 5"),
        ({"stages": 0}, "stages: expected a whole number, 1 or more, found 0"),
        ({"schedule": "2bv"}, "schedule: expected one of .*Did you mean '2bw'"),
    ],
)
def test_a_request_that_cannot_be_met_says_why(options, message):
    with pytest.raises(PlanError, match=message):
        partition(load("vgg16").prefix(3), Cluster.uniform(4, 1e9), **options)
