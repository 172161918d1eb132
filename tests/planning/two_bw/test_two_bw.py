"""The planner of parallel pipelines finds what trying everything finds, without the traps of the printed algorithm."""

from dataclasses import replace
from itertools import combinations, pairwise
from math import inf, isclose

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.planning.memory import peak_bytes
from penstock.planning.requests import Request
from penstock.planning.stage_costs import chain_costs
from penstock.planning.two_bw.pipeline_chains import cut_positions
from penstock.planning.two_bw.pipeline_searches import rank_pipelines
from penstock.simulating.outcomes import evaluate
from penstock.values import Cluster, LayerProfile, Profile

SCHEDULES = ("2bw", "1f1b-flush", "gpipe")


def chain(*layers, size=1):
    """(forward, backward, cut, saved, weights) of each layer."""
    return Profile(tuple(LayerProfile(f"layer {i}", *layer) for i, layer in enumerate(layers)), size)


def gpt(blocks=8, *, block=(1.0, 2.0, 1.0, 10.0, 10.0), embedding=(0, 0, 1.0, 0, 0), head=(0, 0, 0, 0, 0.5), size=1):
    return chain(embedding, *[block] * blocks, head, size=size)


def request(schedule="2bw", **options):
    return Request(schedule=schedule, **options)


# What a configuration takes, from the definitions, one rank and one layer at a time.


def ranks_of(d, p, consecutive):
    return [[s * d + k if consecutive == "replicas" else k * p + s for k in range(d)] for s in range(p)]


def stage_seconds(profile, cluster, cuts, ranks, m, recompute, allreduce="ring"):
    """The slowest stage: compute + sending, or the all-reduce spread over m microbatches."""
    d = len(ranks[0])
    hops = []
    for s, cut in enumerate(cuts[1:-1]):
        size = profile.layers[cut - 1].cut_bytes
        pairs = [(ranks[s][k], ranks[s + 1][k]) for k in range(d)]
        there_and_back = [cluster.transfer_seconds(size, a, b) + cluster.transfer_seconds(size, b, a) for a, b in pairs]
        hops.append(max(there_and_back))
    times = []
    for s, (start, stop) in enumerate(pairwise(cuts)):
        own = profile.layers[start:stop]
        work = sum(layer.forward_seconds * (1 + recompute) + layer.backward_seconds for layer in own)
        work += (hops[s - 1] if s else 0) + (hops[s] if s < len(hops) else 0)
        weights = sum(layer.parameter_bytes for layer in own)
        rounds = 2 * (d - 1) * (1 if allreduce == "shared" else 1 / d)
        ring = [(ranks[s][k], ranks[s][(k + 1) % d]) for k in range(d)] if d > 1 else []
        links = [rounds * weights / cluster.bandwidth(a, b) + 2 * (d - 1) * cluster.latency(a, b) for a, b in ring]
        times.append(max(work, max(links, default=0) / m))
    return max(times)


def stage_bytes(profile, cuts, m, schedule, recompute, copies):
    p = len(cuts) - 1
    peaks = []
    for s, (start, stop) in enumerate(pairwise(cuts)):
        own = profile.layers[start:stop]
        in_flight = {"gpipe": m, "2bw": p - s, "1f1b-flush": min(m, p - s)}[schedule]
        saved = sum(layer.saved_bytes for layer in own)
        entering = profile.layers[start - 1].cut_bytes if start else 0
        kept = in_flight * entering + saved if recompute else in_flight * saved
        weights = sum(layer.parameter_bytes for layer in own)
        peaks.append(kept + ((2 if schedule == "2bw" else 1) + 1 + copies) * weights)
    return peaks


def configurations(profile, cluster, schedule, batch_size, copies, allreduce="ring"):
    """Algorithm 1 by brute force: (samples per second, d, p, m, recompute)."""
    layers = len(profile)
    for d in range(1, cluster.devices + 1):
        for p in range(1, min(cluster.devices // d, layers) + 1):
            ways = [(0, *inner, layers) for inner in combinations(range(1, layers), p - 1)]
            for recompute in (False, True):
                found = best(profile, cluster, schedule, batch_size, copies, allreduce, d, p, ways, recompute)
                if found is not None:
                    yield found


def best(profile, cluster, schedule, batch_size, copies, allreduce, d, p, ways, recompute):
    memory = cluster.memory_bytes or inf
    b = profile.microbatch_size
    counts = [m for m in range(1, batch_size // (d * b) + 1) if m % p == 0 or (m < p and schedule != "2bw")]
    for m in reversed(counts):
        fitting = [c for c in ways if max(stage_bytes(profile, c, m, schedule, recompute, copies)) <= memory]
        if fitting:
            seconds = min(
                stage_seconds(profile, cluster, cuts, ranks_of(d, p, consecutive), m, recompute, allreduce)
                for cuts in fitting
                for consecutive in ("replicas", "pipelines")
            )
            total = (m if schedule == "2bw" else m + p - 1) * seconds
            return d * m * b / total if total else inf, d, p, m, recompute
    return None


whole = st.integers(0, 8)


@st.composite
def models(draw):
    """The profile of a chain, of layers drawn one by one or of a repeated block."""
    layer = st.tuples(st.integers(1, 6), st.integers(1, 12), whole, whole, whole)
    block = draw(st.lists(layer, min_size=1, max_size=2))
    layers = draw(st.lists(layer, max_size=2)) + block * draw(st.integers(1, 2)) + draw(st.lists(layer, max_size=1))
    return chain(*layers, size=draw(st.sampled_from([1, 2, 4])))


memories = st.one_of(st.none(), st.integers(20, 250))
speeds = st.sampled_from([0.5, 1.0, 4.0, 64.0])
latencies = st.sampled_from([0.0, 0.0, 1.0])


@st.composite
def uniform_clusters(draw):
    return Cluster.uniform(draw(st.integers(1, 5)), draw(speeds), draw(memories), draw(latencies))


@st.composite
def other_clusters(draw):
    if draw(st.booleans()):
        counts = draw(st.sampled_from([(1, 2), (2, 2), (3, 2), (2, 3), (2, 1, 2), (1, 2, 2), (2, 2, 1), (5,)]))
        levels = [(count, draw(speeds)) for count in counts]
        return Cluster.hierarchical(levels, draw(memories), [draw(latencies) for _ in counts])
    size = draw(st.integers(1, 4))
    return Cluster.from_matrix([[draw(speeds) for _ in range(size)] for _ in range(size)], draw(memories))


def rank(profile, cluster, asked, batch_size):
    """All pipelines for minibatches of at most `batch_size` samples, also with recomputation."""
    asked = replace(asked, microbatches=batch_size // profile.microbatch_size)
    found = []
    for again in (True,) if asked.recompute else (False, True):
        try:
            found += rank_pipelines(profile, cluster, replace(asked, recompute=again))
        except PlanError:
            if again and not found:
                raise
    # Of equally fast ones the first, without recomputation.
    return sorted(found, key=lambda candidate: -float(f"{candidate.samples_per_second:.12g}"))


def plan_two_bw(profile, cluster, asked, batch_size):
    return rank(profile, cluster, asked, batch_size)[0].plan()


def ranked_or_none(profile, cluster, asked, batch_size):
    if batch_size < profile.microbatch_size:
        return None
    try:
        return rank(profile, cluster, asked, batch_size)
    except PlanError as error:
        assert "that fit in memory, found none" in str(error)
        return None


options = (st.sampled_from(SCHEDULES), st.integers(1, 24), st.sampled_from([0, 2]), st.sampled_from(["ring", "shared"]))


@settings(max_examples=60, deadline=None)
@given(models(), uniform_clusters(), *options)
def test_planner_finds_the_best_of_all_configurations(profile, cluster, schedule, batch_size, copies, allreduce):
    ranked = ranked_or_none(
        profile, cluster, request(schedule, optimizer_copies=copies, allreduce=allreduce), batch_size
    )
    everything = list(configurations(profile, cluster, schedule, batch_size, copies, allreduce))

    assert (ranked is None) == (not everything)
    if ranked is not None:
        assert isclose(ranked[0].samples_per_second, max(everything)[0], rel_tol=1e-9)
        # Not only the best: the best cuts for every d, p, m and recomputation.
        found = {(c.replicas, c.stages, c.microbatches, c.recompute): c.samples_per_second for c in ranked}
        assert found == pytest.approx({each[1:]: each[0] for each in everything})


@settings(max_examples=60, deadline=None)
@given(models(), other_clusters(), *options)
def test_candidates_take_what_the_definitions_say_on_any_cluster(
    profile, cluster, schedule, batch_size, copies, allreduce
):
    ranked = ranked_or_none(
        profile, cluster, request(schedule, optimizer_copies=copies, allreduce=allreduce), batch_size
    )
    everything = list(configurations(profile, cluster, schedule, batch_size, copies, allreduce))

    assert (ranked is None) == (not everything)
    if ranked is None:
        return
    for candidate in ranked:
        m, recompute = candidate.microbatches, candidate.recompute
        ranks = ranks_of(candidate.replicas, candidate.stages, candidate.orientation.consecutive)
        seconds = stage_seconds(profile, cluster, candidate.cuts, ranks, m, recompute, allreduce)

        assert isclose(candidate.microbatch_seconds, seconds, rel_tol=1e-9)
        filling = 0 if schedule == "2bw" else candidate.stages - 1
        assert isclose(candidate.minibatch_seconds, (m + filling) * seconds, rel_tol=1e-9)
        plan, peaks = candidate.plan(), stage_bytes(profile, candidate.cuts, m, schedule, recompute, copies)
        assert [plan.predicted.peak_bytes[own[0]] for own in ranks] == pytest.approx(peaks)
        assert max(peaks) <= (cluster.memory_bytes or inf)
        assert plan.microbatches * profile.microbatch_size <= batch_size
    assert ranked[0].samples_per_second <= max(everything)[0] * (1 + 1e-9)


@settings(max_examples=60, deadline=None)
@given(models(), other_clusters(), *options[:3])
def test_plan_says_what_its_candidate_says(profile, cluster, schedule, batch_size, copies):
    asked = request(schedule, optimizer_copies=copies)
    ranked = ranked_or_none(profile, cluster, asked, batch_size)
    if ranked is None:
        return
    plan, first = plan_two_bw(profile, cluster, asked, batch_size=batch_size), ranked[0]

    assert [(stage.start, stage.stop) for stage in plan.stages] == list(pairwise(first.cuts))
    ranks = ranks_of(first.replicas, first.stages, first.orientation.consecutive)
    assert [list(stage.ranks) for stage in plan.stages] == ranks
    assert (plan.microbatches, plan.schedule) == (first.replicas * first.microbatches, schedule)
    peaks = peak_bytes(plan, chain_costs(profile, recompute=plan.recompute), copies)
    assert plan.predicted.peak_bytes == pytest.approx(peaks)
    assert 0 <= plan.predicted.bubble < 1
    assert plan.predicted.limit == first.limit != ""
    if schedule == "2bw":
        assert first.microbatches >= first.stages and first.microbatches % first.stages == 0


# The traps of the printed algorithm, and claims of chapter 3.


@pytest.mark.parametrize("d", [1, 2, 4])
def test_replicas_that_fill_a_server_reduce_inside_it(d):
    """d equal to the devices of a server is inside it too, which the printed `d < GPUs` denies."""
    cluster = Cluster.hierarchical([(4, 100.0), (2, 1.0)])
    profile = gpt(8, block=(1.0, 2.0, 0.0, 10.0, 1000.0))
    ranked = rank(profile, cluster, request(stages=2), batch_size=2 * d)
    found = next(candidate for candidate in ranked if candidate.replicas == d)

    assert found.microbatch_seconds == max(12.0, 2 * (d - 1) / d * (4000.5 if d > 1 else 0) / 100.0 / 2)
    assert found.orientation.consecutive == "replicas"


def test_pipelines_stay_in_a_server_where_activations_are_the_larger_part():
    cluster = Cluster.hierarchical([(4, 100.0), (2, 1.0)])
    profile = gpt(8, block=(1.0, 2.0, 50.0, 10.0, 1.0))
    ranked = rank(profile, cluster, request(stages=4), batch_size=64)

    assert next(candidate for candidate in ranked if candidate.replicas == 2).orientation.consecutive == "pipelines"


def test_recomputation_costs_a_third_where_backwards_take_twice_the_forwards():
    ranked = rank(gpt(8), Cluster.uniform(2, inf), request(stages=2), batch_size=4)
    with_and_without = {candidate.recompute: candidate.microbatch_seconds for candidate in ranked}

    assert with_and_without[True] == pytest.approx(4 / 3 * with_and_without[False])


def test_pipelines_are_deeper_where_memory_is_tight():
    """Section 3.4.4: deeper pipelines hold larger models and microbatches."""
    profile = gpt(8, block=(1.0, 2.0, 1.0, 2.0, 10.0), embedding=(0, 0, 0, 0, 0), head=(0, 0, 0, 0, 0))
    depths = [
        plan_two_bw(profile, Cluster.uniform(8, 1e4, memory), request(), batch_size=64)
        for memory in (500, 250, 120, 70)
    ]

    assert [len(plan.stages) for plan in depths] == [1, 2, 4, 8]


def test_64_devices_are_few_configurations():
    """O(N^2) pairs, of which those with more stages than layers are none."""
    ranked = rank(gpt(24), Cluster.hierarchical([(8, 150.0), (8, 1.0)]), request(), batch_size=4096)
    pairs = {(candidate.replicas, candidate.stages) for candidate in ranked}

    assert pairs == {(d, p) for p in range(1, 27) for d in range(1, 64 // p + 1)}


# The simulator, and what is refused.


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_simulator_confirms_the_closed_form_where_nothing_is_sent(schedule):
    """Free links and equal stages, so that overlap and imbalance make no difference."""
    profile = gpt(8, block=(1.0, 2.0, 0.0, 10.0, 10.0), embedding=(0, 0, 0, 0, 0), head=(0, 0, 0, 0, 0))
    cluster = Cluster.uniform(8, 1e12)
    ranked = rank(profile, cluster, request(schedule), batch_size=32)
    candidates = [each for each in ranked if 8 % each.stages == 0]
    simulated = [evaluate(each.plan(), profile, cluster).samples_per_second for each in candidates]

    assert len(candidates) > 20
    for candidate, found in zip(candidates, simulated, strict=True):
        # A backward that directly follows its forward, as in the last stage, recomputes nothing in the simulator.
        assert found >= candidate.samples_per_second * (1 - 1e-9)
        assert candidate.recompute or found == pytest.approx(candidate.samples_per_second)


def test_batch_is_that_of_the_request_by_default():
    ranked = rank_pipelines(gpt(8, size=3), Cluster.uniform(2, 1e9), request(microbatches=4))

    assert max(candidate.plan().microbatches for candidate in ranked) == 4


def test_one_pipeline_only_if_straight():
    ranked = rank(gpt(8), Cluster.uniform(8, 1e9), request(straight=True), batch_size=64)

    assert {candidate.replicas for candidate in ranked} == {1}


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), min_size=1, max_size=40), st.integers(2, 50))
def test_places_of_a_long_chain_are_few_and_cheap(rows, most):
    profile = chain(*[(seconds, 2 * seconds, cut, 1.0, 1.0) for seconds, cut in rows])
    positions = cut_positions(profile, most)

    assert (positions[0], positions[-1]) == (0, len(rows))
    assert list(positions) == sorted(set(positions))
    if len(rows) < most:
        assert positions == tuple(range(len(rows) + 1))
        return
    assert len(positions) <= most + 2
    # Between two positions lie two shares at the most, and the layers that reach beyond them.
    share, longest = profile.seconds / most, max(row.seconds for row in profile.layers)
    for start, stop in pairwise(positions):
        assert sum(row.seconds for row in profile.layers[start:stop]) <= 2 * share + longest + 1e-9
