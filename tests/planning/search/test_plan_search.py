"""The search: it keeps to what is fixed, ranks by simulation, fits in memory, and explains itself."""

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.planning import PlanConstraints, compare_plans, plan
from penstock.planning.search.explanations import rate_text
from penstock.scheduling import verify
from penstock.simulating.outcomes import evaluate
from penstock.values import SCHEDULES, Cluster, DeviceKind, LayerProfile, Plan, Profile
from penstock.values.plans import schedule
from support.paper_plans import partition
from support.paths import PIPEDREAM

thousandths = st.integers(1, 50).map(lambda count: count / 1000)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    sizes = st.integers(0, 10**7)
    layers = [
        LayerProfile(str(index), draw(thousandths), draw(thousandths), draw(sizes), draw(sizes), draw(sizes))
        for index in range(draw(st.integers(1, 7)))
    ]
    return Profile(tuple(layers), draw(st.sampled_from([4, 8, 12])))


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    memory = draw(st.one_of(st.none(), st.integers(10**7, 3 * 10**8)))
    if draw(st.booleans()):
        return Cluster.uniform(draw(st.integers(1, 3)), draw(st.sampled_from([1e8, 1e9, 1e10])), memory, 1e-5)
    return Cluster.hierarchical([(2, 1e10), (draw(st.integers(1, 2)), 1e9)], memory)


def equal_layers(count: int, cut_bytes: float = 0.0, size: int = 4) -> Profile:
    layers = (LayerProfile(str(index), 1e-3, 2e-3, cut_bytes, 1e6, 4e6) for index in range(count))
    return Profile(tuple(layers), size)


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(), clusters())
def test_what_is_ranked_verifies_and_is_predicted_as_simulated_and_nothing_by_hand_is_better(
    profile: Profile, cluster: Cluster
) -> None:
    """By hand: equal layer counts, and one device."""
    found = compare_plans((profile,), cluster, PlanConstraints(synchronous=False))

    best = found.ranked[:1]
    for made in found.ranked:
        verify(schedule(made))
        outcome = evaluate(made, profile, cluster)
        assert made.predicted == outcome
        assert made.planner
        assert made.predicted.samples_per_second <= best[0].predicted.samples_per_second * 1.001 + 1e-9
        assert cluster.memory_bytes is None or max(made.predicted.peak_bytes) <= cluster.memory_bytes
    if not best:
        return
    microbatches, size = 4 * cluster.devices, profile.microbatch_size
    by_hand = [Plan.uniform(len(profile), 1, "1f1b-flush", microbatches, microbatch_size=size)]
    if cluster.devices <= len(profile):
        by_hand += [
            Plan.uniform(len(profile), cluster.devices, method, microbatches, microbatch_size=size)
            for method in ("gpipe", "1f1b-flush", "2bw")
        ]
    for other in by_hand:
        outcome = evaluate(other, profile, cluster)
        if cluster.memory_bytes is None or max(outcome.peak_bytes) <= cluster.memory_bytes:
            assert best[0].predicted.samples_per_second >= 0.999 * outcome.samples_per_second


@st.composite
def machines(draw: st.DrawFn) -> Cluster:
    """`clusters`, or devices of unequal memory."""
    cluster = draw(clusters())
    limit = cluster.memory_bytes
    if limit is None or draw(st.booleans()):
        return cluster
    shares = st.sampled_from([0.5, 1.0, 2.0])
    return cluster.with_kinds([DeviceKind(memory_bytes=draw(shares) * limit) for _ in range(cluster.devices)])


@st.composite
def wishes(draw: st.DrawFn, most_stages: int) -> dict[str, Any]:
    """One to three of the choices that may be fixed."""
    every: dict[str, st.SearchStrategy[Any]] = {
        "schedule": st.sampled_from(SCHEDULES),
        "straight": st.just(True),
        "recompute": st.booleans(),
        "stages": st.integers(1, most_stages),
        "whole_backwards": st.just(True),
        "synchronous": st.just(True),
        "memory": st.sampled_from([0.95, 0.8, 0.6]),
    }
    chosen = draw(st.sets(st.sampled_from(sorted(every)), min_size=1, max_size=3))
    return {name: draw(every[name]) for name in sorted(chosen)}


def less_memory(cluster: Cluster, share: float) -> Cluster:
    kinds = [
        replace(kind, memory_bytes=None if kind.memory_bytes is None else share * kind.memory_bytes)
        for kind in cluster.kinds
    ]
    limit = cluster.memory_bytes
    return replace(cluster, memory_bytes=None if limit is None else share * limit, kinds=tuple(kinds))


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(profiles(), machines(), st.data())
def test_it_keeps_to_what_is_fixed_and_loses_no_more_by_it(
    profile: Profile, cluster: Cluster, data: st.DataObject
) -> None:
    microbatches = 4 * cluster.devices
    free = compare_plans((profile,), cluster, PlanConstraints(microbatches=microbatches, synchronous=False)).ranked
    fixed = data.draw(wishes(min(len(profile), cluster.devices)))
    smaller = less_memory(cluster, fixed.pop("memory", 1.0))
    try:
        wished = PlanConstraints(microbatches=microbatches, **{"synchronous": False, **fixed})
        found = compare_plans((profile,), smaller, wished)
    except PlanError:  # contradictory wishes, or too few layers for several stages per rank
        reject()
    assume(found.ranked)

    best = found.ranked[0]
    assert all(wished.accepts(each) for each in found.ranked)
    assert fixed.get("schedule", best.schedule) == best.schedule
    assert fixed.get("recompute", best.recompute) == best.recompute
    assert fixed.get("stages", len(best.stages)) == len(best.stages)
    assert best.ranks == len(best.stages) // best.stages_per_rank or "straight" not in fixed
    assert best.definition.flushes or "synchronous" not in fixed
    assert free and best.predicted.samples_per_second <= free[0].predicted.samples_per_second * 1.001
    assert best.microbatches <= microbatches


@pytest.mark.parametrize(
    ("wish", "stale"),
    [
        ({}, False),
        ({"stages": 4}, False),
        ({"asynchronous": True}, True),
        ({"schedule": "2bw"}, True),
        ({"planner": "pipedream"}, True),
        ({"vertical_sync": True}, True),
        ({"planner": "pipedream", "synchronous": True}, False),
    ],
)
def test_stale_weights_are_for_those_who_ask_for_them(wish: dict[str, Any], stale: bool) -> None:
    """Here they are faster: four stages without fill and drain."""
    made = plan(equal_layers(8), Cluster.uniform(4, 1e9), straight=True, **wish)

    assert made.definition.flushes is not stale
    assert ("stale" in made.explain()) is stale


def test_the_planner_2bw_is_asked_by_name_and_where_the_planner_pipedream_takes_too_long() -> None:
    def asked(devices: int, **fixed: Any) -> set[str]:
        trials = PlanConstraints(**fixed).trials((equal_layers(8),), Cluster.uniform(devices, 1e9))
        return {query.planner for query in trials}

    assert asked(128) == {"pipedream", "spp", "interleaved"}
    assert asked(129) == {"2bw", "spp", "interleaved"}
    assert asked(129, straight=True) == {"2bw"}
    assert asked(129, vertical_sync=True, stages=4) == {"pipedream"}
    assert asked(4, planner="2bw") == {"2bw"}
    assert asked(4, planner="spp") == {"spp"}


def test_of_equally_fast_plans_the_one_without_stale_weights_is_taken() -> None:
    made = plan(equal_layers(1), Cluster.uniform(1, 1e9), asynchronous=True)

    assert made.definition.flushes


def test_recompute_is_chosen_where_memory_asks_for_it() -> None:
    profile = Profile(tuple(LayerProfile(str(i), 1e-3, 2e-3, 10, 1e6, 4e3) for i in range(4)), 4)
    tight = Cluster.uniform(2, 1e9, memory_bytes=3e6)

    assert not plan(profile, Cluster.uniform(2, 1e9), straight=True, synchronous=True).recompute
    assert plan(profile, tight, straight=True, synchronous=True).recompute


def test_recomputation_is_not_named_where_a_plan_fits_without() -> None:
    """Three devices have room for a stage each; of one stage on all of them, only one microbatch is in flight."""
    profile = equal_layers(6, size=12)
    peak = max(plan(profile, Cluster.uniform(3, 1e9), schedule="1f1b-flush").predicted.peak_bytes)
    cluster = Cluster.uniform(3, 1e9, memory_bytes=peak)
    again = []
    for options in (PlanConstraints(), PlanConstraints(planner="2bw")):
        found = compare_plans((profile,), cluster, options).ranked
        again += [made for made in found if made.recompute]
        assert len(set(found)) == len(found)

    for made in again:
        plain = evaluate(replace(made, recompute=False, predicted=None), profile, cluster)
        assert max(plain.peak_bytes) > peak
    wished = compare_plans((profile,), cluster, PlanConstraints(recompute=True)).ranked
    assert wished
    assert all(made.recompute for made in wished)


def test_the_microbatch_size_is_chosen_among_measured_profiles() -> None:
    """Four samples take hardly longer than one: larger microbatches are better until they do not fit."""
    small, large = (
        Profile(tuple(LayerProfile(str(i), 1e-3, 2e-3, 10.0, 1e6 * size, 4e6) for i in range(4)), size)
        for size in (1, 4)
    )
    cluster = Cluster.uniform(2, 1e9)

    assert plan([small, large], cluster, batch_size=32).microbatch_size == 4
    assert plan([small, large], cluster, batch_size=32).microbatches == 8
    tight = Cluster.uniform(2, 1e9, memory_bytes=38e6)
    assert plan([small, large], tight, batch_size=32, recompute=False, straight=True).microbatch_size == 1


@pytest.mark.parametrize("memory", [3e6, 5e6])
def test_what_would_be_enough_is_enough(memory: float) -> None:
    profile = equal_layers(4, cut_bytes=1e5, size=2)
    with pytest.raises(PlanError) as caught:
        plan(profile, Cluster.uniform(2, 1e9, memory))
    text = str(caught.value)

    needed, unit = re.search(r"enough: ([\d.]+) ([MG])B on each device", text).groups()
    enough = 1.005 * float(needed) * {"M": 1e6, "G": 1e9}[unit]  # the text has three digits
    assert plan(profile, Cluster.uniform(2, 1e9, enough)).predicted
    with pytest.raises(PlanError):
        plan(profile, Cluster.uniform(2, 1e9, 0.95 * enough))


def test_as_many_devices_as_would_be_enough_are_enough() -> None:
    profile = equal_layers(8, size=2)
    with pytest.raises(PlanError) as caught:
        plan(profile, Cluster.uniform(2, 1e9, 25e6), synchronous=True)

    devices = int(re.search(r"(\d+) devices \(for", str(caught.value)).group(1))
    assert plan(profile, Cluster.uniform(devices, 1e9, 25e6), synchronous=True).ranks <= devices
    with pytest.raises(PlanError):
        plan(profile, Cluster.uniform(devices // 2, 1e9, 25e6), synchronous=True)


def test_messages_count_where_memory_is_tight() -> None:
    """VGG-16: by its planner's own count a plan fits that does not with its messages; another one does."""
    vgg = Profile.from_pipedream(PIPEDREAM / "vgg16" / "graph.txt")
    cluster = Cluster.uniform(4, 12e9, 16e9)
    wishes = {"straight": True, "schedule": "1f1b-flush", "recompute": False}

    blind = partition(vgg, cluster, straight=True, schedule="1f1b-flush", microbatches=16)
    assert max(evaluate(blind, vgg, cluster).peak_bytes) > 16e9
    assert max(plan(vgg, cluster, **wishes).predicted.peak_bytes) <= 16e9


def test_links_carry_both_directions_at_once() -> None:
    """One second each way per microbatch, 1.5 s of work on either side: the cut is free, though 2 s are exchanged."""
    layers = tuple(LayerProfile(str(index), 0.5, 1.0, 1e9, 0, 0) for index in range(2))
    made = plan(Profile(layers, 1), Cluster.uniform(2, 1e9), straight=True, schedule="2bw", microbatches=8)

    assert len(made.stages) == 2
    assert made.predicted.bottleneck_seconds == pytest.approx(1.5)


def test_the_explanation_ranks_and_says_why_the_runner_up_lost() -> None:
    made = plan(equal_layers(8, cut_bytes=1e5), Cluster.uniform(4, 1e9), microbatches=16)
    text = made.explain()

    assert f"\n\n{made}\n" in f"\n\n{text}"
    head = next(line for line in text.splitlines() if "limited by" in line and "cut by" in line)
    columns = "cut by, schedule, replicas, m x b, minibatch, samples/s, bubble, peak, limited by"
    assert ", ".join(re.split(r" {2,}", head.strip())) == columns
    assert re.search(r"\n 1  \S+ +" + re.escape(str(made.schedule)), text)
    assert "The best is limited by: " in text
    assert "Its time goes to: " in text
    assert re.search(r"The runner-up \(.*\) is (as fast|[\d.]+% slower)", text)


FAST, SLOW = 1e15, 1.0
ROW: dict[str, Any] = {"stages": 4, "schedule": "1f1b-flush"}


@pytest.mark.parametrize(
    ("bandwidth", "options", "first"),
    [
        (FAST, {}, "A pipeline gains nothing here: the fastest plan is data parallelism on 4 devices."),
        (SLOW, {}, "A pipeline gains nothing here: the fastest plan is one device alone."),
        (
            FAST,
            {"stages": 4},
            "Training without a pipeline is faster, by a formula: data parallel, 5333 samples/s where",
        ),
        (SLOW, ROW, "Training without a pipeline is faster, by a formula: one device, 1333 samples/s where"),
        (1e7, ROW, ""),
    ],
)
def test_the_first_line_says_what_is_faster_than_a_pipeline(
    bandwidth: float, options: dict[str, Any], first: str
) -> None:
    """A microbatch of 4 samples takes 3 ms on one device; a cut has few bytes, and the weights have many."""
    layers = tuple(LayerProfile(str(index), 0.25e-3, 0.5e-3, 10.0, 1e6, 4e6) for index in range(4))
    made = plan(Profile(layers, 4), Cluster.uniform(4, bandwidth), **options)

    assert made.explain().startswith(first or str(made))
    assert len(made.stages) == options.get("stages", 1)


def test_what_does_not_fit_is_not_said_to_be_faster() -> None:
    profile, cluster = equal_layers(4), Cluster.uniform(4, FAST)
    made = plan(profile, cluster, **ROW, recompute=False)
    assert made.predicted is not None
    tight = plan(profile, cluster.with_memory(max(made.predicted.peak_bytes)), **ROW, recompute=False)

    assert made.explain().startswith("Training without")
    assert "data parallel" not in tight.explain().splitlines()[0]


def test_a_plan_made_by_hand_says_so() -> None:
    assert Plan.uniform(4, 2).explain().endswith("compares plans and says why")


def test_the_explanation_says_what_messages_of_half_the_bytes_would_gain() -> None:
    profile = Profile(tuple(LayerProfile(str(i), 1e-3, 2e-3, 3e6, 4e6, 5e8) for i in range(4)), 4)
    slow, fast = Cluster.uniform(2, 1e9), Cluster.uniform(2, 1e12)
    made = plan(profile, slow, stages=2)
    half = profile.with_wire_share(0.5)
    gained = evaluate(made, half, slow).samples_per_second

    assert made.predicted is not None
    gain = gained / made.predicted.samples_per_second - 1
    assert gain > 0.02
    assert f"this plan would make {rate_text(gained)} samples/s, {gain:.1%} more." in made.explain()
    for subject, cluster in ((half, slow), (profile, fast)):
        assert "With wire_dtype=torch.bfloat16" not in plan(subject, cluster, stages=2).explain()
