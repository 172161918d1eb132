"""Tensor parallelism: profiles of layers on several devices are planned for groups, and ranked with all other plans."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ProfileError
from penstock.planning import PlanConstraints, compare_clusters, compare_plans, plan
from penstock.planning.planners import add_sizes
from penstock.planning.search.tensor_groups import group_devices, on_devices
from penstock.scheduling import verify
from penstock.simulating.outcomes import evaluate
from penstock.values import Cluster, DeviceKind, LayerProfile, Plan, Profile, Stage
from penstock.values.plans import schedule


def blocks(count: int = 8, *, degree: int = 1, seconds: float = 3e-3, size: int = 4) -> Profile:
    """Equal blocks that `degree` devices share: each has its part of the bytes, and all of what crosses a cut."""
    layer = LayerProfile("", seconds / 3, 2 * seconds / 3, 1e6, 4e6 / degree, 8e6 / degree)
    layers = (replace(layer, name=f"block {index}") for index in range(count))
    return Profile(tuple(layers), size, tensor_parallel=degree)


def test_groups_are_neighbours_on_a_server() -> None:
    servers = Cluster.hierarchical([(4, 1e10), (2, 1e9)], 5e9, [1e-6, 1e-5])

    assert group_devices(servers, 1) is servers
    assert group_devices(servers, 2) == Cluster.hierarchical([(2, 1e10), (2, 1e9)], 5e9, [1e-6, 1e-5])
    assert group_devices(servers, 4).devices == 2
    assert group_devices(servers, 4).bandwidth(0, 1) == 1e9


def test_devices_that_are_left_over_are_not_used() -> None:
    assert group_devices(Cluster.uniform(5, 1e9), 2) == Cluster.uniform(2, 1e9)


def test_groups_of_a_measured_matrix_have_the_links_of_their_first_devices() -> None:
    rows = [[0.0 if a == b else 1e9 + 10 * a + b for b in range(4)] for a in range(4)]
    grouped = group_devices(Cluster.from_matrix(rows), 2)

    assert (grouped.devices, grouped.bandwidth(0, 1), grouped.bandwidth(1, 0)) == (2, 1e9 + 2, 1e9 + 20)


def test_a_group_has_one_kind_of_device_and_the_price_of_all() -> None:
    fast, slow = DeviceKind("fast", 1.0, price_per_hour=3.0), DeviceKind("slow", 0.5, price_per_hour=1.0)
    cluster = Cluster.uniform(4, 1e9)

    assert group_devices(cluster.with_kinds([fast, fast, slow, slow]), 2).kinds == (
        replace(fast, price_per_hour=6.0),
        replace(slow, price_per_hour=2.0),
    )


def test_a_plan_of_groups_is_one_of_devices() -> None:
    grouped = Plan((Stage(0, 3, (0, 1)), Stage(3, 4, (2,))), "1f1b-flush", 6, 4, devices=(0, 3, 1))

    made = on_devices(grouped, 2)
    assert made.stages == (Stage(0, 3, (0, 1, 2, 3)), Stage(3, 4, (4, 5)))
    assert made.devices == (0, 1, 6, 7, 2, 3)
    assert (made.tensor_parallel, made.replicas) == (2, (2, 1))


def test_groups_are_taken_where_only_they_fit() -> None:
    """A block needs 8 MB of weights, as many of gradients and 16 of an optimizer: only half of it fits in 30 MB."""
    cluster = Cluster.uniform(4, 1e10, 30e6)
    whole, halves = blocks(2), blocks(2, degree=2, seconds=2e-3)

    assert compare_plans((whole,), cluster, PlanConstraints(microbatches=1)).ranked == ()
    chosen = plan([whole, halves], cluster, microbatches=1)
    assert chosen.tensor_parallel == 2
    assert ", t=2" in chosen.explain()
    assert chosen.predicted is not None
    assert evaluate(chosen, halves, cluster) == chosen.predicted
    assert max(chosen.predicted.peak_bytes) <= 30e6
    assert len(chosen.predicted.peak_bytes) == chosen.ranks


@pytest.mark.parametrize(("seconds", "degree"), [(1.6e-3, 2), (3.1e-3, 1)])
def test_groups_are_taken_where_they_are_faster(seconds: float, degree: int) -> None:
    """One microbatch, so that a pipeline does not help: more than half of the seconds, or more than all."""
    chosen = plan([blocks(), blocks(degree=2, seconds=seconds)], Cluster.uniform(2, 1e5), microbatches=1, stages=1)

    assert chosen.tensor_parallel == degree


def test_a_profile_of_groups_alone_is_planned_for_groups() -> None:
    found = plan(blocks(degree=2), Cluster.uniform(4, 1e10))

    assert found.tensor_parallel == 2
    assert found.ranks % 2 == 0
    assert "Without a pipeline" not in found.explain()


def test_groups_that_do_not_fit_the_cluster_are_listed() -> None:
    found = plan([blocks(), blocks(degree=2)], Cluster.hierarchical([(3, 1e10), (2, 1e9)]))

    assert found.tensor_parallel == 1
    assert "tensor_parallel=2, any schedule: tensor_parallel: expected servers" in found.explain()


def test_all_plans_have_the_same_minibatch() -> None:
    found = compare_plans((blocks(), blocks(degree=2)), Cluster.uniform(4, 1e10), PlanConstraints(synchronous=True))

    assert {plan.tensor_parallel for plan in found.ranked} == {1, 2}
    assert {plan.microbatches for plan in found.ranked} == {16}


def test_microbatch_sizes_are_scaled_for_each_degree() -> None:
    profiles = [blocks(size=4), blocks(size=4, degree=2)]
    every = add_sizes(tuple(profiles), [2, 4])

    assert [(each.microbatch_size, each.tensor_parallel) for each in every] == [(4, 1), (2, 1), (4, 2), (2, 2)]
    assert every[3] == profiles[1].scaled(2)


def test_clusters_are_compared_with_groups() -> None:
    options = {"two": Cluster.uniform(2, 1e9), "four": Cluster.uniform(4, 1e9)}

    assert "Without a pipeline" in str(compare_clusters([blocks(), blocks(degree=2)], options))
    assert "Without a pipeline" not in str(compare_clusters(blocks(degree=2), options))


def test_profiles_of_other_groups_are_not_joined() -> None:
    with pytest.raises(ProfileError, match=r"expected layers on 1 device \(tensor_parallel\)"):
        replace(blocks(), device="a").joined(replace(blocks(degree=2), device="b"))


@pytest.mark.sampled(0)
@settings(max_examples=4, deadline=None)
@given(
    count=st.integers(1, 5),
    share=st.sampled_from([0.4, 0.5, 0.6, 0.9, 1.1]),
    servers=st.integers(1, 2),
    size=st.sampled_from([2, 4]),
    memory=st.sampled_from([None, 40e6, 80e6]),
)
def test_a_second_profile_never_makes_the_answer_slower(
    count: int, share: float, servers: int, size: int, memory: float | None
) -> None:
    cluster = Cluster.hierarchical([(size, 1e10), (servers, 1e9)], memory)
    both = (blocks(count), blocks(count, degree=2, seconds=3e-3 * share))
    best = compare_plans(both, cluster, PlanConstraints(batch_size=64)).ranked
    alone = [compare_plans((profile,), cluster, PlanConstraints(batch_size=64)).ranked for profile in both]

    assert len(best) == sum(map(len, alone))
    for ranked in (best, *alone):
        for found in ranked:
            verify(schedule(found))
            profile = both[found.tensor_parallel - 1]
            assert evaluate(found, profile, cluster) == found.predicted
    rates = [found.predicted.samples_per_second for ranked in alone for found in ranked if found.predicted]
    if best:
        assert best[0].predicted is not None
        assert best[0].predicted.samples_per_second >= 0.999 * max(rates)
