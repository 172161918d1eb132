"""Variants of a plan are timed together as the simulator times each."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.cut_variants import LayerSums, PlanVariants
from penstock.simulating.outcomes import evaluate
from penstock.values import Cluster, DeviceKind, LayerProfile, Plan, Profile
from penstock.values.plans import Routing, Stage

LAYERS = 12
METHODS = ("1f1b-flush", "gpipe", "spp", "zb-h1", "2bw", "pipedream")
CLUSTERS = (
    Cluster.uniform(6, 1e9, latency_seconds=1e-3),
    Cluster.hierarchical([(3, 1e10), (2, 5e8)], latency_seconds=[0.0, 2e-3]),
    replace(
        Cluster.uniform(6, 1e9).with_costs(action_seconds=1e-3, message_seconds=2e-3, message_seconds_per_byte=1e-9),
        step_seconds=5e-3,
    ),
)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    seconds, sizes = st.integers(1, 50).map(lambda count: count / 1000), st.integers(0, 10**7)
    layers = [
        LayerProfile(
            *(str(index), draw(seconds), draw(seconds), draw(sizes), draw(sizes), draw(sizes)),
            update_seconds=draw(seconds),
        )
        for index in range(LAYERS)
    ]
    profile = Profile(tuple(layers), 4, split_share=draw(st.sampled_from([None, 0.125])))
    return profile.with_wire_share(0.5) if draw(st.booleans()) else profile


@st.composite
def cuts_of(draw: st.DrawFn, stages: int) -> tuple[int, ...]:
    inner = draw(st.sets(st.integers(1, LAYERS - 1), min_size=stages - 1, max_size=stages - 1))
    return (0, *sorted(inner), LAYERS)


def arrange(cuts: tuple[int, ...], replicas: tuple[int, ...], method: str, recompute: bool | tuple[int, ...]) -> Plan:
    ends = np.cumsum((0, *replicas)).tolist()
    ranks = [tuple(range(*part)) for part in pairwise(ends)]
    stages = tuple(Stage(*cut, own) for cut, own in zip(pairwise(cuts), ranks, strict=True))
    routing: Routing = "split" if method == "spp" else "round-robin"
    return Plan(stages, method, 1 if method == "pipedream" else 12, 4, recompute=recompute, routing=routing)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(), st.data())
def test_each_variant_takes_as_long_as_its_simulation(profile: Profile, data: st.DataObject) -> None:
    replicas = data.draw(st.sampled_from([(1, 1, 1, 1), (2, 2, 2), (3, 1, 2), (6,), (2, 1), (3, 3)]))
    method = data.draw(st.sampled_from(METHODS))
    recompute = method != "zb-h1" and data.draw(st.booleans() | st.just((0,)))
    drawn = data.draw(st.lists(cuts_of(len(replicas)), min_size=3, max_size=3))
    plans = [arrange(cuts, replicas, method, recompute) for cuts in drawn]
    cluster, shares = data.draw(st.sampled_from(CLUSTERS)), data.draw(st.booleans())

    timed = PlanVariants(plans[0], cluster, Assumptions(shard_optimizer=shares)).minibatch_seconds(
        {0: LayerSums.of(profile)}, np.array(drawn)
    )
    simulated = [evaluate(plan, profile, cluster, shard_optimizer=shares).minibatch_seconds for plan in plans]

    assert timed == pytest.approx(simulated, rel=1e-9)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(), st.data())
def test_variants_on_devices_that_differ(profile: Profile, data: st.DataObject) -> None:
    """One of two replicas or equal pipelines may be slower; the devices of ranks are any of the cluster."""
    replicas = data.draw(st.sampled_from([(1, 1, 1), (2, 2), (2, 1), (1, 2), (3,), (2, 2, 1)]))
    method = data.draw(st.sampled_from(METHODS))
    speeds = data.draw(st.lists(st.sampled_from([0.25, 0.7, 1.0]), min_size=6, max_size=6))
    cluster = CLUSTERS[data.draw(st.integers(0, 2))].with_kinds([DeviceKind(str(own), speed=own) for own in speeds])
    devices = tuple(sorted(data.draw(st.permutations(range(6)))[: sum(replicas)]))
    recompute = method != "zb-h1" and data.draw(st.booleans() | st.just((0,)))
    drawn = data.draw(st.lists(cuts_of(len(replicas)), min_size=3, max_size=3))
    plans = [replace(arrange(cuts, replicas, method, recompute), devices=devices) for cuts in drawn]

    sums = LayerSums.by_kind(profile, cluster)
    timed = PlanVariants(plans[0], cluster, Assumptions()).minibatch_seconds(sums, np.array(drawn))

    assert timed == pytest.approx([evaluate(plan, profile, cluster).minibatch_seconds for plan in plans], rel=1e-9)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(), st.sampled_from(METHODS), st.lists(cuts_of(3), min_size=4, max_size=4))
def test_variants_that_cannot_be_faster_are_not_timed(
    profile: Profile, method: str, drawn: list[tuple[int, ...]]
) -> None:
    variants = PlanVariants(arrange(drawn[0], (2, 1, 1), method, False), CLUSTERS[0], Assumptions())
    every = variants.minibatch_seconds({0: LayerSums.of(profile)}, np.array(drawn))
    below = float(np.median(every))

    timed = variants.minibatch_seconds({0: LayerSums.of(profile)}, np.array(drawn), below)

    assert np.isfinite(timed[every < below]).all()
    assert timed[np.isfinite(timed)].tolist() == every[np.isfinite(timed)].tolist()


@pytest.mark.parametrize(("method", "per_rank"), [("interleaved", 2), ("interleaved", 3), ("zb-v", 2)])
def test_several_stages_of_a_rank(method: str, per_rank: int) -> None:
    layers = (LayerProfile(str(i), 1e-3 * (i % 3 + 1), 2e-3 * (i % 4 + 1), 1e5 * i, 1e6, 4e6) for i in range(LAYERS))
    profile = Profile(tuple(layers), 4)
    plan = Plan.uniform(LAYERS, 2 * per_rank, method, 8, per_rank, 4)
    cuts = [(0, *(stage.stop for stage in plan.stages)), (0, *range(1, 2 * per_rank), LAYERS)]
    others = [Plan.of_cuts(own, 2, method, 8, 4) for own in cuts]

    timed = PlanVariants(plan, CLUSTERS[0], Assumptions()).minibatch_seconds({0: LayerSums.of(profile)}, np.array(cuts))

    assert timed == pytest.approx([evaluate(each, profile, CLUSTERS[0]).minibatch_seconds for each in others], rel=1e-9)


def test_what_has_no_fixed_order_is_refused() -> None:
    with pytest.raises(PlanError, match="variants: expected overlap, no slowdowns"):
        PlanVariants(Plan.uniform(4, 2), Cluster.uniform(2, 1e9), Assumptions(overlap=False))
    blocking = Cluster.uniform(2, 1e9).with_costs(message_blocking=1)
    with pytest.raises(PlanError, match="variants: expected overlap, no slowdowns"):
        PlanVariants(Plan.uniform(4, 2), blocking, Assumptions())
