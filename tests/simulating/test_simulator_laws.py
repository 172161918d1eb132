"""Laws of the simulator: closed forms of the papers, lower bounds, and folded replicas equal to played ones."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.schedules import Schedule
from penstock.simulating import Assumptions, plan_costs, simulate
from penstock.simulating.memory_traces import Sizes, trace_memory
from penstock.simulating.outcomes import evaluate
from penstock.simulating.simulator import find_symmetry, play
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage, schedule
from penstock.values.profiles import LayerProfile, Profile
from support.simulation_problems import number, speeds


def balanced(stages: int, cut: float = 0.0) -> Profile:
    return Profile(tuple(LayerProfile("", 1.0, 2.0, cut, 0.0, 0.0) for _ in range(stages)), 1)


@pytest.mark.parametrize(("stages", "spp", "one"), [(4, 111, 157), (8, 131, 185)])
def test_spp_hides_messages_that_stall_1f1b(stages: int, spp: int, one: int) -> None:
    """specs/spp.md, section 4: 32 microbatches, f = 1, b = 2, every message 1 s."""
    for method, expected in (("spp", spp), ("1f1b-flush", one)):
        timeline = simulate(Schedule(method, stages, 32), balanced(stages, 1.0), Cluster.uniform(stages, 1.0))

        assert timeline.seconds == expected


@pytest.mark.parametrize("stages", [1, 2, 4, 6])
@pytest.mark.parametrize("microbatches", [1, 5, 20])
def test_spp_is_as_fast_as_the_closed_form_where_links_are_instant(stages: int, microbatches: int) -> None:
    timeline = simulate(Schedule("spp", stages, microbatches), balanced(stages), Cluster.uniform(stages, float("inf")))

    assert timeline.seconds == 3 * (microbatches + stages - 1)


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[Plan, Profile, Cluster]:
    """Equal replicas of every stage, on equal links, any numbering of the ranks."""
    method = draw(st.sampled_from(["gpipe", "1f1b-flush", "pipedream", "2bw", "interleaved", "spp", "zb-h1", "zb-v"]))
    length, replicas = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    around = draw(st.integers(1, 2)) if method == "interleaved" else 1
    ranks = draw(st.permutations(range(length * replicas)))
    places = [tuple(ranks[replicas * i : replicas * (i + 1)]) for i in range(length)] * around
    places += places[::-1] if method == "zb-v" else []
    stages = tuple(Stage(index, index + 1, place) for index, place in enumerate(places))
    microbatches = replicas * length * draw(st.integers(1, 3))
    layers = draw(
        st.lists(st.tuples(number, number, number, number, number), min_size=len(stages), max_size=len(stages))
    )
    profile = Profile(tuple(LayerProfile("", *layer) for layer in layers), 1)
    cluster = Cluster.uniform(len(ranks), draw(speeds), latency_seconds=draw(number))
    return Plan(stages, method, microbatches, recompute=draw(st.booleans())), profile, cluster


@pytest.mark.slow
@settings(max_examples=50, deadline=None)
@given(pipelines(), st.integers(1, 3), st.booleans())
def test_replicas_that_are_not_played_do_what_they_would_do(
    problem: tuple[Plan, Profile, Cluster], minibatches: int, overlap: bool
) -> None:
    plan, profile, cluster = problem
    folded = simulate(plan, profile, cluster, minibatches, update_seconds_per_byte=1.0, overlap=overlap)
    made = schedule(plan)
    costs = plan_costs(
        plan, profile, cluster, made.placement, Assumptions(update_seconds_per_byte=1.0, overlap=overlap)
    )
    programs = made.program(minibatches)
    every = play(dict(enumerate(programs)), made.placement, costs)
    sizes = Sizes.of(costs, made.placement)

    assert (
        len(find_symmetry(made.placement, costs, made.microbatches).simulated) * len(plan.stages[0].ranks) == made.ranks
    )
    for rank, row in enumerate(programs):
        track = every.tracks[rank]
        spans = [span for span in folded.spans if span.rank == rank]
        assert [span.action for span in spans] == list(map(str, row))
        assert [(span.start_seconds, span.stop_seconds) for span in spans] == list(
            zip(track.starts, track.stops, strict=True)
        )
        assert folded.memory[rank] == trace_memory(track, sizes, costs, made)


def played_ranks(plan: Plan, cluster: Cluster, **options: bool) -> tuple[int, ...]:
    made = schedule(plan)
    costs = plan_costs(plan, balanced(plan.layers, 1.0), cluster, made.placement, Assumptions(**options))
    return find_symmetry(made.placement, costs, made.microbatches).simulated


def test_only_equal_pipelines_are_played_once() -> None:
    stages = (Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3)))
    plan = Plan(stages, "gpipe", 4)
    slow = [[4.0] * 4 for _ in range(4)]
    slow[3][1] = 1.0

    assert played_ranks(plan, Cluster.uniform(4, 1.0)) == (0, 2)
    assert played_ranks(plan, Cluster.from_matrix(slow)) == (0, 1, 2, 3)
    assert played_ranks(plan, Cluster.uniform(4, 1.0), shared_nic=True) == (0, 1, 2, 3)
    assert played_ranks(Plan(stages, "gpipe", 3), Cluster.uniform(4, 1.0)) == (0, 1, 2, 3)
    assert played_ranks(Plan(stages, "gpipe", 3, routing="split"), Cluster.from_matrix(slow)) == (0, 2)
    unequal = (Stage(0, 1, (0, 1)), Stage(1, 2, (2,)))
    assert played_ranks(Plan(unequal, "gpipe", 2), Cluster.uniform(3, 1.0)) == (0, 1, 2)


@pytest.mark.parametrize("method", ["pipedream", "2bw"])
@pytest.mark.parametrize("replicas", [1, 2, 3])
def test_asynchronous_steady_state_is_the_work_of_a_rank(method: str, replicas: int) -> None:
    """m (tf + tb) for m microbatches of a pipeline; r equal pipelines share them."""
    stages = tuple(Stage(s, s + 1, tuple(range(s * replicas, (s + 1) * replicas))) for s in range(3))
    plan = Plan(stages, method, 12 * replicas)
    outcome = evaluate(plan, balanced(3), Cluster.uniform(3 * replicas, float("inf")))

    assert outcome.minibatch_seconds == 12 * 3
    assert outcome.bubble == 0


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpipe", "1f1b-flush", "pipedream", "spp"]),
    st.permutations(range(6)),
    st.lists(number, min_size=9, max_size=9),
    st.booleans(),
)
def test_shared_link_serves_messages_in_the_order_in_which_they_are_ready(
    method: str, ranks: list[int], seconds: list[float], straight: bool
) -> None:
    """Servers of two; each message starts when it is made and the one before it on the link of its servers has left."""
    at = [(rank,) for rank in ranks] if straight else [tuple(ranks[2 * i : 2 * i + 2]) for i in range(3)]
    stages = tuple(Stage(index, index + 1, place) for index, place in enumerate(at))
    times = [(seconds[i % 3], seconds[3 + i % 3], 1 + seconds[6 + i % 3]) for i in range(len(at))]
    profile = Profile(tuple(LayerProfile("", f, b, cut, 0, 0) for f, b, cut in times), 1)
    cluster = Cluster.hierarchical([(2, float("inf")), (3, 2.0)])
    timeline = simulate(Plan(stages, method, 4), profile, cluster, shared_nic=True)
    made = {(s.rank, s.stage, s.number, s.kind): s.stop_seconds for s in timeline.spans if s.computes}
    links: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for span in timeline.spans:
        if span.kind == "send":
            peer = stages[span.reference].ranks[span.number % len(stages[span.reference].ranks)]
            ready = made[span.rank, span.stage, span.number, "forward" if span.reference > span.stage else "backward"]
            if span.rank // 2 != peer // 2:
                key = span.rank // 2, peer // 2
                links.setdefault(key, []).append((span.start_seconds, span.stop_seconds, ready))

    for messages in links.values():
        messages.sort()
        free = 0.0
        for start, stop, ready in messages:
            assert start == max(free, ready)
            free = stop
        assert [ready for _, _, ready in messages] == sorted(ready for _, _, ready in messages)
