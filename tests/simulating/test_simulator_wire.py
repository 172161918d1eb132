"""Links that carry fewer bytes than cross the cuts, as under `wire_dtype=`: time and messages, but not memory."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from penstock.planning.stage_costs import chain_costs
from penstock.simulating import evaluate, simulate
from penstock.values.clusters import Cluster
from penstock.values.crossings import Crossing
from penstock.values.plans import Plan
from penstock.values.profiles import LayerProfile, Profile

LAYERS = tuple(LayerProfile("", 1.0, 2.0, 8.0, 20.0, 4.0) for _ in range(6))
PROFILE = Profile(LAYERS, 1, crossings=(Crossing("early", 0, (1, 5), 4e6), Crossing("late", 3, (5,), 2.0)))
PLANS = [
    Plan.uniform(6, 3, schedule="1f1b-flush", microbatches=4),
    Plan.uniform(6, 3, schedule="2bw", microbatches=4),
    Plan.uniform(6, 6, schedule="zb-v", microbatches=4, stages_per_rank=2),
    Plan.uniform(6, 6, schedule="gpipe", microbatches=3),
]


def of_cuts(profile: Profile) -> Profile:
    """With cuts that are large enough for the skip beside them."""
    return replace(profile, layers=tuple(replace(layer, cut_bytes=5e6) for layer in profile.layers))


@given(st.sampled_from(PLANS), st.sampled_from([0.125, 0.25, 0.5, 1.0]))
def test_a_share_of_the_bytes_takes_as_long_as_all_over_a_faster_link(plan: Plan, share: float) -> None:
    profile = of_cuts(PROFILE)
    slow, fast = Cluster.uniform(6, 1e6, latency_seconds=0.5), Cluster.uniform(6, 1e6 / share, latency_seconds=0.5)
    found, expected = simulate(plan, profile.with_wire_share(share), slow), simulate(plan, profile, fast)

    assert [(s.rank, s.action, s.start_seconds, s.stop_seconds) for s in found.spans] == [
        (s.rank, s.action, s.start_seconds, s.stop_seconds) for s in expected.spans
    ]
    assert found.memory == expected.memory
    assert evaluate(plan, profile.with_wire_share(share), slow) == evaluate(plan, profile, fast)


@given(st.sampled_from(PLANS), st.sampled_from([0.125, 0.5]))
def test_messages_have_the_bytes_that_links_carry(plan: Plan, share: float) -> None:
    profile = of_cuts(PROFILE)
    cluster = Cluster.uniform(6, 1e6)
    found, whole = (simulate(plan, each, cluster) for each in (profile.with_wire_share(share), profile))
    pairs = list(zip(found.spans, whole.spans, strict=True))
    sent = [pair for pair in pairs if pair[0].size_bytes is not None]

    assert any(s.size_bytes for s, _ in sent)
    assert all(s.size_bytes == share * (w.size_bytes or 0.0) for s, w in sent)


def test_planners_exchange_what_links_carry_and_hold_what_crosses() -> None:
    whole, half = (chain_costs(each, recompute=True, buffers=2) for each in (PROFILE, PROFILE.with_wire_share(0.5)))

    assert (half.exchanged_bytes == whole.exchanged_bytes / 2).all()
    assert (half.working_bytes == whole.working_bytes).all()
    assert (half.saved_bytes == whole.saved_bytes).all()
