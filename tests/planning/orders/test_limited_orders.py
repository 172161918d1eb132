"""A named order holds a limit in bytes per device: forwards wait until they fit, and ranks never wait for ever."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock
from penstock import Cluster, DeviceKind, LayerProfile, Plan, Profile
from penstock.planning import find_order, limit_order
from penstock.scheduling import define_by_programs
from penstock.simulating import evaluate
from support.directed_links import directed_cluster
from support.paper_plans import GB, language_model

PROFILE = language_model()
CLUSTER = Cluster.uniform(4, 12 * GB)
PER_RANK = {"gpipe": 1, "spp": 1, "zb-h1": 1, "interleaved": 2, "zb-v": 2, "v-half": 2, "v-min": 2}


def plan_of(name: str, ranks: int = 4, microbatches: int = 8) -> Plan:
    weights = [layer.forward_seconds for layer in PROFILE.layers]
    per_rank = PER_RANK.get(name, 1)
    return Plan.balanced(weights, per_rank * ranks, name, microbatches=microbatches, stages_per_rank=per_rank)


def peak_of(plan: Plan) -> float:
    return max(evaluate(plan, PROFILE, CLUSTER).peak_bytes)


LIMIT = peak_of(plan_of("1f1b-flush"))


@pytest.mark.parametrize(
    ("name", "times", "slower"),
    [("zb-h1", 1.0, 1.13), ("zb-v", 1.0, 1.45), ("v-half", 1.0, 1.06), ("interleaved", 1.0, 1.28), ("spp", 1.0, 1.01)],
)
def test_a_named_order_holds_a_limit(tmp_path: Path, name: str, times: float, slower: float) -> None:
    plan = plan_of(name)
    before = evaluate(plan, PROFILE, CLUSTER)
    held = limit_order(plan, PROFILE, CLUSTER, memory_bytes=times * LIMIT)

    assert max(before.peak_bytes) > times * LIMIT >= max(evaluate(held, PROFILE, CLUSTER).peak_bytes)
    assert held.predicted is not None
    assert held.predicted.minibatch_seconds <= slower * before.minibatch_seconds
    assert str(held.schedule) == f"{name}-limited" and held.stages == plan.stages
    held.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == held


def test_a_plan_that_fits_keeps_its_schedule() -> None:
    held = limit_order(plan_of("v-min"), PROFILE, CLUSTER, memory_bytes=LIMIT)

    assert held.schedule == "v-min" and held.order == () and held.planner == ""


def test_a_plan_for_a_named_schedule_holds_the_memory_of_its_devices() -> None:
    small = CLUSTER.with_memory(0.75 * LIMIT)
    found = penstock.plan(PROFILE, small, schedule="zb-h1", microbatches=8, straight=True, recompute=False)

    assert str(found.schedule) == "zb-h1-limited" and found.predicted is not None
    assert max(found.predicted.peak_bytes) <= 0.75 * LIMIT
    assert found.explain().endswith(
        "No plan fits in the usual order of zb-h1: here a forward waits until its bytes fit."
    )


def one_at_a_time(plan: Plan) -> Plan:
    """Its stages with one microbatch in flight."""
    rows = []
    for rank in range(plan.ranks):
        held = plan.placement.stages_of(rank)
        turns = [[f"{s}F{k}@0" for s in held] + [f"{s}B{k}@0" for s in held[::-1]] for k in range(plan.microbatches)]
        rows.append(" ".join([*(word for turn in turns for word in turn), *(f"{s}U1<0" for s in held)]))
    return replace(plan, schedule=define_by_programs("serial", "\n".join(rows)))


layers = st.tuples(
    st.integers(1, 9),
    st.integers(1, 9),
    st.sampled_from([0.0, 1e5, 1e6]),
    st.sampled_from([0.0, 1e6, 3e6, 2e7]),
    st.sampled_from([0.0, 1e6]),
    st.sampled_from([0.0, 1e6]),
)


@settings(max_examples=30)
@given(
    st.sampled_from(sorted(PER_RANK)),
    st.integers(1, 4),
    st.integers(1, 3),
    st.lists(layers, min_size=12, max_size=14),
    st.lists(st.floats(0, 1), min_size=4, max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_any_limit_holds_that_one_microbatch_at_a_time_leaves(
    name: str,
    ranks: int,
    rounds: int,
    rows: list[tuple[float, ...]],
    shares: list[float],
    recompute: bool,
    draw: Random,
) -> None:
    """Each device has between as much as that takes, and as much as the named order takes. Loading proves the order."""
    per_rank = 3 if name == "interleaved" and rounds == 3 else PER_RANK[name]
    profile = Profile(tuple(LayerProfile(str(index), *row) for index, row in enumerate(rows)), 1)
    plan = Plan.uniform(len(rows), per_rank * ranks, name, rounds * ranks, per_rank, recompute=recompute)
    free = directed_cluster(draw, ranks, bandwidth=1e9, latency=1e-3)
    most = evaluate(plan, profile, free).peak_bytes
    least = evaluate(one_at_a_time(plan), profile, free).peak_bytes
    memories = [low + share * max(0.0, high - low) + 1 for low, high, share in zip(least, most, shares, strict=False)]
    kinds = [DeviceKind(str(rank), memory_bytes=size) for rank, size in enumerate(memories)]

    held = limit_order(plan, profile, free.with_kinds(kinds))
    penstock.verify(penstock.schedule(held))
    peaks = evaluate(held, profile, free).peak_bytes
    assert all(peak <= memory for peak, memory in zip(peaks, memories, strict=True))


@pytest.mark.parametrize("seed", [2, 6, 8])
def test_an_order_is_found_wherever_one_is_limited_and_is_no_slower(seed: int) -> None:
    """Messages that take as much as what stages save: a rank that runs ahead of another fills it."""
    draw = Random(seed)
    ranks, per_rank = draw.choice([2, 3, 4]), draw.choice([1, 2])
    stages = ranks * per_rank
    rows = [(draw.uniform(0.5, 3), draw.uniform(1, 6), draw.choice([1.0, 4.0, 8.0])) for _ in range(stages)]
    profile = Profile(tuple(LayerProfile(str(i), f, b, cut, 4.0, 0.0) for i, (f, b, cut) in enumerate(rows)), 1)
    plan = Plan.uniform(stages, stages, "zb-v" if per_rank == 2 else "1f1b-flush", 2 * ranks, per_rank)
    cluster = Cluster.uniform(ranks, 5.0)
    least = max(evaluate(one_at_a_time(plan), profile, cluster).peak_bytes)
    for share in (1.0, 1.4):
        found = find_order(plan, profile, cluster, memory_bytes=share * least).plan.predicted
        limited = limit_order(plan, profile, cluster, memory_bytes=share * least).predicted

        assert found is not None and limited is not None
        assert max(found.peak_bytes) <= share * least * (1 + 1e-9)
        assert found.minibatch_seconds <= limited.minibatch_seconds * (1 + 1e-9)
