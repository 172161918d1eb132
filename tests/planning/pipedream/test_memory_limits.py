"""PipeDream's partitioner under memory limits, against every plan there is: flat, nested, straight, interleaved.

The oracle enumerates plans and works out seconds and bytes from layers and ranks alone; it shares no code with the
planner, but what a schedule guarantees to have in flight. All sizes are whole numbers, so that ties and limits that are
just met are common.
"""

import random
from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise, product
from math import ceil, inf, prod
from operator import mul

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from penstock.planning.memory import chunks_in_flight
from penstock.planning.pipedream.interleaving import cut_interleaved
from penstock.planning.pipedream.partitions import find_pipedream
from penstock.planning.requests import Request
from penstock.planning.stage_costs import chain_costs
from penstock.scheduling import Schedule
from penstock.values import Cluster, LayerProfile, Profile

SCHEDULES = ("gpipe", "1f1b-flush", "spp", "pipedream", "2bw")
MODELS = ("ring", "shared", "released")


def compositions(total):
    """All ways to write `total` as an ordered sum of positive numbers."""
    for count in range(total):
        for marks in combinations(range(1, total), count):
            yield [b - a for a, b in pairwise((0, *marks, total))]


def replicated(allreduce, below, weights, r, bandwidth):
    """One stage on r components, seconds per microbatch."""
    if allreduce == "ring":
        return max(below, 2 * (r - 1) / r * weights / bandwidth) / r
    if allreduce == "shared":
        return max(below, 2 * (r - 1) * weights / bandwidth) / r
    return (below + 4 * (r - 1) * weights / (bandwidth * r)) / r


def live(request, r, behind, workers):
    """(Microbatches in flight, versions of weights) on each of r replicas."""
    m = ceil(request.microbatches / r)
    deep = ceil(behind / r)
    return {
        "gpipe": (m, 1),
        "1f1b-flush": (min(m, deep), 1),
        "spp": (min(m, 4 * deep - 3), 1),
        "pipedream": (deep, ceil(workers / r) if request.vertical_sync else deep),
        "2bw": (deep, 2),
    }[request.schedule]


def worst_bytes(profile, request, stages):
    """The bytes of the rank that needs most; `stages` are (start, stop, number of replicas)."""
    workers = behind = sum(r for _, _, r in stages)
    most = 0.0
    for start, stop, r in stages:
        in_flight, versions = live(request, r, behind, workers)
        saved = sum(layer.saved_bytes for layer in profile.layers[start:stop])
        weights = sum(layer.parameter_bytes for layer in profile.layers[start:stop])
        kept = in_flight * saved
        if request.recompute:
            kept = in_flight * (profile.layers[start - 1].cut_bytes if start else 0) + saved
        most = max(most, kept + (versions + 1 + request.optimizer_copies) * weights)
        behind -= r
    return most


def nested_plans(profile, levels, request):
    """(Slowest seconds, stages) of all plans in which a stage takes whole components, each with its replicas."""
    seconds = [layer.seconds + layer.forward_seconds * request.recompute for layer in profile.layers]
    weights = [layer.parameter_bytes for layer in profile.layers]
    sent = [2 * layer.cut_bytes for layer in profile.layers]

    @cache
    def plans(depth, start, stop):
        if depth < 0:
            return [(sum(seconds[start:stop]), ((start, stop, 1),))]
        count, bandwidth = levels[depth]
        found = []
        for replicas in [(1,) * count] if request.straight else compositions(count):
            for marks in combinations(range(start + 1, stop), len(replicas) - 1):
                cuts = (start, *marks, stop)
                links = max((sent[cut - 1] / bandwidth for cut in marks), default=0)
                blocks = []
                for (i, j), r in zip(pairwise(cuts), replicas, strict=True):
                    cost = sum(weights[i:j])
                    blocks.append(
                        [
                            (
                                replicated(request.allreduce, below, cost, r, bandwidth),
                                tuple((a, b, n * r) for a, b, n in inner),
                            )
                            for below, inner in plans(depth - 1, i, j)
                        ]
                    )
                for choice in product(*blocks):
                    slowest = max(links, *(one for one, _ in choice)) if choice else links
                    found.append((slowest, tuple(stage for _, stages in choice for stage in stages)))
        return found

    return plans(len(levels) - 1, 0, len(profile))


def best_of(profile, plans, request, memory):
    return min((slowest for slowest, stages in plans if worst_bytes(profile, request, stages) <= memory), default=inf)


def flattened(levels):
    return ((prod(count for count, _ in levels), min(speed for count, speed in levels if count > 1)),)


@st.composite
def profiles(draw, least=1, most=6):
    size = st.one_of(st.just(0), st.integers(0, 60))
    rows = draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2, *[size] * 3), min_size=least, max_size=most))
    return Profile(tuple(LayerProfile(str(index), *row) for index, row in enumerate(rows)), 1)


requests = st.builds(
    Request,
    schedule=st.sampled_from(SCHEDULES),
    microbatches=st.integers(1, 9),
    allreduce=st.sampled_from(MODELS),
    vertical_sync=st.booleans(),
    recompute=st.booleans(),
    optimizer_copies=st.sampled_from((0.0, 2.0)),
)
shares = st.one_of(st.none(), st.floats(0, 0.6), st.floats(0, 1))
bandwidths = st.sampled_from((1.0, 4.0, 16.0, 64.0))


def limits(profile, plans, request, share):
    """A limit that is just met by some plan: the one at this share of all, by what they need. None: no limit."""
    if share is None:
        return None
    needs = sorted({worst_bytes(profile, request, stages) for _, stages in plans} - {0.0})
    return float(needs[int(share * (len(needs) - 1))]) if needs else 1.0


def check(profile, cluster, request, plans):
    """The plan that is made is the best of `plans` that fits, also by what it says of itself."""
    limit = inf if cluster.memory_bytes is None else cluster.memory_bytes
    best = best_of(profile, plans, request, limit)
    if best == inf:
        event("nothing fits")
        assert find_pipedream(profile, cluster, request) is None
        return
    plan = find_pipedream(profile, cluster, request)
    assert plan.predicted.bottleneck_seconds == pytest.approx(best, rel=1e-12)
    stages = tuple((stage.start, stage.stop, len(stage.ranks)) for stage in plan.stages)
    assert min(slowest for slowest, shape in plans if shape == stages) == pytest.approx(best, rel=1e-12)
    needed = worst_bytes(profile, request, stages)
    assert max(plan.predicted.peak_bytes) == needed <= limit
    assert plan.ranks == cluster.devices


@settings(max_examples=100, deadline=None)
@given(profiles(), requests, st.integers(1, 6), bandwidths, shares)
def test_flat_plans_within_a_memory_limit_are_the_best_of_all(profile, request, devices, bandwidth, share):
    plans = nested_plans(profile, ((devices, bandwidth),), request)
    memory = limits(profile, plans, request, share)

    check(profile, Cluster.uniform(devices, bandwidth, memory), request, plans)


small = st.sampled_from(((2, 2), (2, 3), (3, 2), (1, 3), (2, 1)))


machines = st.one_of(
    st.sampled_from(((2, 2), (2, 3), (3, 2), (1, 3), (2, 1))).flatmap(
        lambda counts: st.tuples(*(st.tuples(st.just(count), bandwidths) for count in counts))
    ),
    st.tuples(*[st.tuples(st.just(2), bandwidths)] * 3),
)


@settings(max_examples=100, deadline=None)
@given(st.data(), requests, machines, shares)
def test_plans_on_levels_within_a_memory_limit_are_the_best_of_all(data, request, levels, share):
    profile = data.draw(profiles(most=5 if len(levels) == 2 else 4))
    plans = nested_plans(profile, levels, request) + nested_plans(profile, flattened(levels), request)
    memory = limits(profile, plans, request, share)

    check(profile, Cluster.hierarchical(levels, memory), request, plans)


@settings(max_examples=80, deadline=None)
@given(st.data(), requests, st.one_of(st.tuples(st.tuples(st.integers(1, 4), bandwidths)), machines), shares)
def test_straight_plans_within_a_memory_limit_are_the_best_of_all(data, request, levels, share):
    """The cut after stage s lies on the link of ranks s and s + 1."""
    devices = prod(count for count, _ in levels)
    profile = data.draw(profiles(devices, devices + 3))
    request = replace(request, straight=True)
    plans = nested_plans(profile, levels, request)
    memory = limits(profile, plans, request, share)

    check(profile, Cluster.hierarchical(levels, memory), request, plans)


def interleaved_plans(profile, ranks, per_rank, bandwidth, request):
    """(Slowest rank or link, worst bytes, cuts) of all ways to cut."""
    layers, stages = profile.layers, ranks * per_rank
    in_flight = Schedule("interleaved", ranks, request.microbatches, per_rank).guarantees.in_flight
    for marks in combinations(range(1, len(layers)), stages - 1):
        parts = list(pairwise((0, *marks, len(layers))))
        slowest = worst = 0.0
        for rank in range(ranks):
            own = parts[rank::ranks]
            slowest = max(slowest, sum(layer.seconds for i, j in own for layer in layers[i:j]))
            cuts = [j for i, j in own if j < len(layers)]
            if ranks > 1:
                slowest = max(slowest, sum(2 * layers[cut - 1].cut_bytes for cut in cuts) / bandwidth)
            ahead = min(2 * (ranks - rank - 1) + (per_rank - 1) * ranks + 1, request.microbatches * per_rank)
            each = [sum(layer.saved_bytes for layer in layers[i:j]) for i, j in own]
            kept = min(ahead * max(each), sum(map(mul, in_flight[rank::ranks], each)))
            weights = sum(layer.parameter_bytes for i, j in own for layer in layers[i:j])
            worst = max(worst, kept + (2 + request.optimizer_copies) * weights)
        yield slowest, worst, marks


shapes = st.sampled_from(((1, 1), (2, 1), (1, 2), (2, 2), (2, 3), (3, 2), (1, 3)))


@settings(max_examples=60, deadline=None)
@given(st.data(), shapes, st.integers(1, 3), bandwidths, st.floats(0, 1))
def test_interleaved_plans_balance_ranks_and_are_the_best_of_all(data, shape, groups, bandwidth, share):
    ranks, per_rank = shape
    profile = data.draw(profiles(ranks * per_rank, ranks * per_rank + 3))
    request = Request("interleaved", groups * ranks, stages_per_rank=per_rank)
    plans = list(interleaved_plans(profile, ranks, per_rank, bandwidth, request))
    needs = sorted(held for _, held, _ in plans)
    memory = max(needs[int(share * (len(needs) - 1))], 1.0)
    best = min(seconds for seconds, held, _ in plans if held <= memory)
    plan = find_pipedream(profile, Cluster.uniform(ranks, bandwidth, memory), request)

    assert plan.predicted.bottleneck_seconds == pytest.approx(best, rel=1e-12)
    assert max(plan.predicted.peak_bytes) <= memory


@pytest.mark.parametrize(("ranks", "per_rank"), [(1, 1), (2, 2), (2, 3), (3, 2), (4, 2)])
def test_moving_cuts_comes_near_the_best_of_all_interleaved_plans(ranks, per_rank):
    """60 random chains each: within the factor 1.25 that `pipedream.interleaving` states, and mostly 1."""
    generator = random.Random(ranks + per_rank)
    exact = 0
    for _ in range(60):
        stages = ranks * per_rank
        rows = [[generator.randint(0, 9) for _ in range(5)] for _ in range(stages + generator.randint(1, 5))]
        costs = chain_costs(Profile(tuple(LayerProfile(str(index), *row) for index, row in enumerate(rows)), 1))
        exchange = [costs.exchange_seconds(generator.choice((1.0, 4.0)))] * (stages - 1)
        in_flight = chunks_in_flight(ranks, per_rank, generator.randint(1, 3) * ranks)
        best, least = (cut_interleaved(costs, exchange, in_flight, room) for room in (inf, 0.0))
        found, small = (cut_interleaved(costs, exchange, in_flight, room, try_all=0) for room in (inf, 0.0))
        exact += best.seconds == found.seconds

        assert best.seconds <= found.seconds <= 1.25 * best.seconds
        assert least.worst_bytes <= small.worst_bytes <= 1.25 * least.worst_bytes
    assert exact >= 40
