"""PipeDream's planner on devices that differ, against all cuts, orders, subsets and replicas."""

from itertools import combinations, permutations
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planning.memory import live_counts
from penstock.planning.pipedream.partitions import find_unequal
from penstock.planning.pipedream.unequal_machines import fastest_unequal
from penstock.planning.requests import Request
from penstock.planning.stage_costs import chain_costs
from penstock.values import Cluster, DeviceKind, LayerProfile, Profile

number = st.integers(0, 8).map(float)


@st.composite
def chains(draw):
    layers = draw(st.lists(st.tuples(st.integers(1, 8).map(float), number, number, number), min_size=2, max_size=5))
    return Profile(tuple(LayerProfile("", 0.0, t, cut, saved, weights) for t, cut, saved, weights in layers), 1)


@st.composite
def machines(draw, memories=(None,)):
    links = draw(
        st.sampled_from(
            [
                Cluster.uniform(3, 2.0),
                Cluster.hierarchical([(2, 4.0), (2, 0.5)]),
                Cluster.from_matrix([[0, 1, 4], [1, 0, 2], [4, 2, 0]]),
            ]
        )
    )
    known = [
        DeviceKind(speed=draw(st.sampled_from([0.25, 0.5, 1.0, 2.0])), memory_bytes=draw(st.sampled_from(memories)))
        for _ in range(2)
    ]
    return links.with_kinds([draw(st.sampled_from(known)) for _ in range(links.devices)])


def pipelines(layers, devices, *, straight):
    """All pipelines of `layers` layers on some of `devices`: (start, stop, devices) of every stage."""
    for used in range(1, devices + 1):
        for count in range(1, min(used, layers) + 1):
            if straight and count != used:
                continue
            for cuts in combinations(range(1, layers), count - 1):
                for sizes in combinations(range(1, used), count - 1):
                    widths = [b - a for a, b in zip((0, *sizes), (*sizes, used), strict=True)]
                    for order in permutations(range(devices), used):
                        taken = iter(order)
                        groups = [tuple(next(taken) for _ in range(width)) for width in widths]
                        # The order within a group makes no difference.
                        if all(list(group) == sorted(group) for group in groups):
                            yield list(zip((0, *cuts), (*cuts, layers), groups, strict=True))


def slowest(stages, profile, cluster, link=None):
    """The objective, written from the paper: the slowest stage, all-reduce or cut."""

    def speed(some, others):
        pairs = [(a, b) for a in some for b in others if a != b]
        return link or min(min(cluster.bandwidth(a, b), cluster.bandwidth(b, a)) for a, b in pairs)

    worst = 0.0
    for index, (start, stop, group) in enumerate(stages):
        own = profile.layers[start:stop]
        seconds = max(sum(layer.seconds for layer in own) / cluster.kind_of(device).speed for device in group)
        if len(group) > 1:
            weights = sum(layer.parameter_bytes for layer in own)
            seconds = max(seconds, 2 * (len(group) - 1) / len(group) * weights / speed(group, group))
        worst = max(worst, seconds / len(group))
        if index:
            worst = max(worst, 2 * profile.layers[start - 1].cut_bytes / speed(stages[index - 1][2], group))
    return worst


def least_and_found(profile, cluster, straight):
    """The least slowest time of all pipelines, which is what was found, and that of the stages that were found; None
    where all devices are equal, and other planners are asked.
    """
    found = fastest_unequal(chain_costs(profile, cluster), cluster, straight=straight, allreduce="ring")
    least = min(slowest(way, profile, cluster) for way in pipelines(len(profile), cluster.devices, straight=straight))
    if cluster.is_equal:
        return None
    seconds, stages = min(found.values(), key=lambda each: each[0])
    assert seconds == pytest.approx(least, rel=1e-12)
    return least, slowest([(s.start, s.stop, s.ranks) for s in stages], profile, cluster)


@settings(max_examples=20, deadline=None)
@given(chains(), machines())
def test_a_straight_pipeline_is_the_best_of_all_cuts_orders_and_subsets(profile, cluster):
    both = least_and_found(profile, cluster, straight=True)
    if both is None:
        return

    least, own = both
    assert own == pytest.approx(least, rel=1e-12)


@settings(max_examples=30, deadline=None)
@given(chains(), machines())
def test_with_replicas_nothing_is_faster(profile, cluster):
    """With few classes a stage may mix them, and links count as they are; a group's own links then are exact too."""
    both = least_and_found(profile, cluster, straight=False)
    if both is None:
        return

    least, own = both
    assert own <= least * (1 + 1e-12)


@settings(max_examples=25, deadline=None)
@given(chains(), machines(memories=(20.0, 45.0, 90.0)), st.sampled_from(["pipedream", "1f1b-flush", "gpipe"]))
def test_memory_leaves_out_what_does_not_fit(profile, cluster, schedule):
    request = Request(schedule, microbatches=2, straight=True, optimizer_copies=1.0)

    def fits(way):
        for index, (start, stop, (device,)) in enumerate(way):
            in_flight, versions = live_counts(schedule, 2, 1, len(way) - index, len(way))
            own = profile.layers[start:stop]
            held = in_flight * sum(layer.saved_bytes for layer in own)
            held += (versions + 2) * sum(layer.parameter_bytes for layer in own)
            if held > (cluster.memory_of(device) or inf):
                return False
        return True

    if cluster.is_equal:
        return
    fitting = [way for way in pipelines(len(profile), cluster.devices, straight=True) if fits(way)]
    found = find_unequal(profile, cluster, request)

    least = min((slowest(way, profile, cluster) for way in fitting), default=inf)
    best = min((plan.predicted.bottleneck_seconds for plan in found), default=inf)
    assert best == pytest.approx(least, rel=1e-12)
