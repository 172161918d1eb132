"""What a planner counts in memory is what the schedule promises, and what the thesis's formulas say."""

from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.planning import find_order, plan
from penstock.planning.memory import chunks_in_flight, live_counts, peak_bytes
from penstock.planning.stage_costs import chain_costs
from penstock.simulating import simulate
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage
from penstock.values.plans import schedule

FLUSHING = [("gpipe", False), ("1f1b-flush", False), ("spp", False), ("zb-h1", False)]
METHODS = [*FLUSHING, ("pipedream", False), ("pipedream", True), ("2bw", False)]


@pytest.mark.parametrize(("method", "vertical_sync"), METHODS)
def test_planner_and_schedule_agree_on_what_is_live(method, vertical_sync):
    for stages in range(1, 6):
        for microbatches in range(stages, 2 * stages + 1):
            made = schedule(Plan.uniform(stages, stages, method, microbatches, vertical_sync=vertical_sync))
            for stage in range(stages):
                promised = (made.in_flight(stage), made.versions(stage))
                behind = stages - stage

                assert promised == live_counts(method, microbatches, 1, behind, stages, vertical_sync=vertical_sync)


def pipeline(replicas, tensor_parallel=1, lengths=None):
    """Stages of one layer each (or of `lengths`) with these numbers of replicas."""
    stages, first, start = [], 0, 0
    for index, count in enumerate(replicas):
        ranks = tuple(range(first, first + count * tensor_parallel))
        stop = start + (1 if lengths is None else lengths[index])
        stages.append(Stage(start, stop, ranks))
        first, start = first + len(ranks), stop
    return tuple(stages)


@pytest.mark.parametrize("routing", ["round-robin", "split"])
@pytest.mark.parametrize(("method", "vertical_sync"), [pair for pair in METHODS if pair != ("pipedream", True)])
def test_planner_and_schedule_agree_on_replicated_stages(method, vertical_sync, routing):
    """All pipelines of up to three stages with up to three replicas; a layer saves 6 bytes and has 60 of weights."""
    for replicas in [shape for count in (1, 2, 3) for shape in product((1, 2, 3), repeat=count)]:
        plan = Plan(pipeline(replicas), method, 12, routing=routing)
        made = schedule(plan)
        profile = Profile(tuple(LayerProfile(str(index), 1, 1, 0, 6, 60) for index in replicas), 1)
        peaks = peak_bytes(plan, chain_costs(profile), 0.0)
        for index, stage in enumerate(plan.stages):
            share = len(stage.ranks) if routing == "split" else 1
            promised = made.in_flight(index) * 6 / share + (made.versions(index) + 1) * 60

            assert {peaks[rank] for rank in stage.ranks} == {promised}


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize(("ranks", "per_rank"), [(2, 2), (4, 2), (2, 3), (3, 1)])
def test_interleaved_ranks_keep_what_one_of_the_parallel_pipelines_does(ranks, per_rank, replicas):
    """d pipelines share the microbatches; the most that any moment of the schedule has is what is counted."""
    microbatches = 2 * ranks * replicas
    rows = [tuple(range(position, ranks * replicas, ranks)) for position in range(ranks)]
    stages = tuple(Stage(s, s + 1, rows[s % ranks]) for s in range(ranks * per_rank))
    plan = Plan(stages, "interleaved", microbatches)
    profile = Profile(tuple(LayerProfile(str(s), 1, 1, 0, 1, 0) for s in range(ranks * per_rank)), 1)
    peaks = peak_bytes(plan, chain_costs(profile), 0.0)

    for rank, actions in enumerate(schedule(plan).program(1)):
        live = most = 0
        for action in actions:
            live += {"Forward": 1, "Backward": -1}.get(type(action).__name__, 0)
            most = max(most, live)
        assert peaks[rank] == most == chunks_in_flight(ranks, per_rank, 2 * ranks)[0][rank % ranks]


def test_a_profile_with_tensor_parallelism_is_that_of_one_rank_of_a_group():
    layers = tuple(LayerProfile(str(index), 1, 1, 7, 40, 100) for index in range(2))
    shared = Plan(pipeline((1, 1), 2), "1f1b-flush", 4, tensor_parallel=2)

    assert peak_bytes(shared, chain_costs(Profile(layers, 1))) == (2 * 40 + 400,) * 2 + (40 + 400,) * 2


@pytest.mark.parametrize(
    ("schedule_name", "per_rank"), [("1f1b-flush", 1), ("2bw", 1), ("pipedream", 1), ("interleaved", 2)]
)
def test_what_is_frozen_is_held_once(schedule_name, per_rank):
    """Under no schedule has it versions, gradients or an optimizer's state."""
    plan = Plan.uniform(4, 4, schedule_name, 4, stages_per_rank=per_rank)
    trained, adapted = (
        Profile(tuple(LayerProfile(str(index), 1, 1, 0, 6, 60, frozen_bytes=frozen) for index in range(4)), 1)
        for frozen in (0, 1000)
    )
    more = 1000 * 4 / plan.ranks
    cluster = Cluster.uniform(plan.ranks, 1e3)

    counted = [peak_bytes(plan, chain_costs(profile)) for profile in (trained, adapted)]
    assert [b - a for a, b in zip(*counted, strict=True)] == [more] * plan.ranks
    timelines = [simulate(plan, profile, cluster) for profile in (trained, adapted)]
    peaks = [[each.peak_bytes for each in timeline.memory] for timeline in timelines]
    assert [b - a for a, b in zip(*peaks, strict=True)] == [more] * plan.ranks
    assert timelines[0].seconds == timelines[1].seconds


sizes = st.integers(0, 1000)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.integers(1, 24), sizes, sizes, sizes)
def test_equal_stages_take_the_thesis_s_formulas(stages, length, microbatches, weights, saved, entering):
    """Section 3.3, with p stages, weights W, all activations A and a stage's input I; the worst rank is the first.

    2BW: 2 W/p + p A/p; recomputing: 2 W/p + A/p + p I. GPipe: W/p + m A/p; recomputing: W/p + A/p + m I. Flush: 2BW's
    with W/p, where m is at least p. The thesis leaves out the gradients: W/p more. The first stage's input is the batch
    itself, which is no activation that is kept; so a stage that only makes the batch stands before the p stages.
    """
    assume(microbatches >= stages)
    layers = [LayerProfile(str(index), 1, 1, entering, saved, weights) for index in range(stages * length)]
    profile = Profile((LayerProfile("batch", 0, 0, entering, 0, 0), *layers), 1)
    p, m = stages, microbatches
    held, kept = length * weights, length * saved

    def worst(schedule_name, recompute):
        """The peak of the p stages; the stage of the batch is left out."""
        lengths = [1] + [length] * stages
        plan = Plan(pipeline((1,) * (stages + 1), lengths=lengths), schedule_name, m, recompute=recompute)
        return max(peak_bytes(plan, chain_costs(profile, recompute=recompute), 0.0)[1:])

    assert worst("2bw", False) == 2 * held + p * kept + held
    assert worst("2bw", True) == 2 * held + kept + p * entering + held
    assert worst("gpipe", False) == held + m * kept + held
    assert worst("gpipe", True) == held + kept + m * entering + held
    assert worst("1f1b-flush", False) == held + p * kept + held
    assert worst("1f1b-flush", True) == held + kept + p * entering + held


def test_what_libraries_keep_is_no_memory_of_a_plan():
    """Four gigabytes on a device of ten are as a device of six without: for every planner, and for found orders."""
    layers = tuple(LayerProfile(str(i), 1 + i % 3, 2 + i % 2, 1e6, 1e9 * (1 + i % 2), 2e8) for i in range(6))
    alone, beside = Profile(layers, 1), Profile(layers, 1, library_bytes=4e9)
    free, card = (Cluster.uniform(3, 1e9, memory_bytes) for memory_bytes in (6e9, 10e9))

    first, second = plan(alone, free), plan(beside, card)
    assert (first.stages, first.schedule, first.recompute) == (second.stages, second.schedule, second.recompute)
    both = zip(first.predicted.peak_bytes, second.predicted.peak_bytes, strict=True)
    assert [after - before for before, after in both] == [4e9] * first.ranks
    with pytest.raises(PlanError, match="nothing fits"):
        plan(beside, Cluster.uniform(3, 1e9, 4.1e9))
    given_plan = Plan.uniform(6, 3, "1f1b-flush", 6)
    one, other = find_order(given_plan, alone, free), find_order(given_plan, beside, card)
    assert (one.plan.order, one.bound) == (other.plan.order, other.bound)
