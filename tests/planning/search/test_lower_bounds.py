"""The bounds of structures: no simulated plan is faster, and where nothing waits the bound is what is simulated."""

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError, ScheduleError
from penstock.planning.search.lower_bounds import LowerBounds, Structure
from penstock.planning.stage_costs import chain_costs
from penstock.scheduling.definitions import PipelineShape
from penstock.scheduling.orders import METHODS
from penstock.simulating.assumptions import Assumptions
from penstock.simulating.outcomes import evaluate
from penstock.values import Cluster, DeviceKind, LayerProfile, Plan, Profile, Stage

SINGLE = [definition for definition in METHODS if not definition.layout.has_several]


def bounds_of(profile: Profile, cluster: Cluster, *, recompute: bool = False) -> LowerBounds:
    return LowerBounds(profile, chain_costs(profile, cluster, recompute=recompute), cluster, Assumptions())


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    thousandths, sizes = st.integers(1, 50).map(lambda count: count / 1000), st.integers(0, 10**7)
    layers = [
        LayerProfile(str(index), draw(thousandths), draw(thousandths), draw(sizes), draw(sizes), draw(sizes))
        for index in range(draw(st.integers(1, 6)))
    ]
    return Profile(tuple(layers), 12)


@st.composite
def plans(draw: st.DrawFn, layers: int, devices: int) -> Plan:
    definition = draw(st.sampled_from(SINGLE))
    count = draw(st.integers(1, min(layers, devices)))
    cuts = [0, *sorted(draw(st.permutations(range(1, layers)))[: count - 1]), layers]
    ends = [0, *sorted(draw(st.permutations(range(1, devices)))[: count - 1]), devices]
    order = draw(st.permutations(range(devices)))
    stages = [
        Stage(cuts[index], cuts[index + 1], tuple(sorted(order[ends[index] : ends[index + 1]])))
        for index in range(count)
    ]
    microbatches = 1 if definition.updates_per_microbatch else draw(st.integers(1, 12))
    split = definition.name == "spp" and all(12 % len(stage.ranks) == 0 for stage in stages)
    return Plan(
        tuple(stages),
        definition.name,
        microbatches,
        microbatch_size=12,
        recompute=not definition.splits_backward and draw(st.booleans()),
        routing="split" if split else "round-robin",
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_no_plan_is_faster_than_the_bound_of_its_structure(data: st.DataObject) -> None:
    profile = data.draw(profiles())
    cluster = data.draw(
        st.sampled_from(
            [
                Cluster.uniform(4, 1e8),
                Cluster.uniform(6, 1e9),
                Cluster.hierarchical([(2, 1e10), (2, 1e8)], None, 1e-4),
                Cluster.uniform(4, 1e9).with_kinds([DeviceKind(str(own), speed=own) for own in (1, 0.3, 0.7, 0.3)]),
            ]
        )
    )
    made = data.draw(plans(len(profile), cluster.devices))
    try:
        made.definition.check(PipelineShape(made.placement, made.microbatches))
        simulated = evaluate(made, profile, cluster).minibatch_seconds
    except (PlanError, ScheduleError):
        assume(False)

    assert bounds_of(profile, cluster, recompute=bool(made.recompute)).least_seconds(
        Structure.of(made)
    ) <= simulated * (1 + 1e-9)


@pytest.mark.parametrize("method", ["gpipe", "1f1b-flush", "spp"])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_a_rank_with_one_microbatch_recomputes_nothing(method: str, microbatches: int) -> None:
    """Its backward directly follows its forward; of two microbatches those of the first stage do not."""
    layers = LayerProfile("0", 3e-3, 1e-3, 0, 0, 0), LayerProfile("1", 1e-3, 1e-3, 0, 0, 0)
    profile, cluster = Profile(layers, 12), Cluster.uniform(4, 1e8)
    made = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1, 2, 3))), method, microbatches, microbatch_size=12, recompute=True)

    simulated = evaluate(made, profile, cluster).minibatch_seconds

    assert simulated == pytest.approx({1: 6e-3, 2: 14e-3}[microbatches])
    assert bounds_of(profile, cluster, recompute=True).least_seconds(Structure.of(made)) == pytest.approx(simulated)


@pytest.mark.parametrize("method", ["1f1b-flush", "2bw", "zb-h1", "gpipe", "spp"])
def test_the_bound_of_one_stage_is_what_is_simulated(method: str) -> None:
    layers = tuple(LayerProfile(str(index), 1e-3, 2e-3, 1e6, 1e6, 4e7) for index in range(4))
    profile, cluster = Profile(layers, 4), Cluster.uniform(4, 1e9)
    made = Plan((Stage(0, 4, (0, 1, 2, 3)),), method, 8, microbatch_size=4)

    simulated = evaluate(made, profile, cluster).minibatch_seconds

    assert bounds_of(profile, cluster).least_seconds(Structure.of(made)) == pytest.approx(simulated, rel=1e-9)


def test_the_cuts_are_those_with_the_least_bound() -> None:
    """The link before layer 2 is the slowest by far."""
    crossing = (1e6, 1e9, 1e6, 0.0)
    layers = tuple(LayerProfile(str(index), 1e-3, 2e-3, size, 1e6, 0.0) for index, size in enumerate(crossing))
    profile, cluster = Profile(layers, 4), Cluster.uniform(2, 1e9)

    uniform = Plan.uniform(4, 2, "2bw", 8, microbatch_size=4)

    assert bounds_of(profile, cluster).cuts(Structure.of(uniform)) in {(0, 1, 4), (0, 3, 4)}
