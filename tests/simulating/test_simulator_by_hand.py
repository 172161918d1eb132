"""Small simulations with numbers worked out by hand: links, all-reduces, split microbatches, recomputation."""

from dataclasses import replace
from typing import Any

import pytest

from penstock.errors import PlanError
from penstock.scheduling.actions import parse, parse_programs
from penstock.scheduling.placements import Placement
from penstock.scheduling.residence import with_residence
from penstock.scheduling.schedules import Schedule
from penstock.simulating import Assumptions, Costs, execute, simulate
from penstock.simulating.transfer_times import find_route
from penstock.timelines.timelines import Timeline
from penstock.values.clusters import Cluster
from penstock.values.link_tables import FREE, LinkLevels, LinkMatrix, MessageCosts
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import LayerProfile, Profile


def make_profile(*layers: tuple[float, float, float, float]) -> Profile:
    """Layers of (forward seconds, backward seconds, cut bytes, parameter bytes)."""
    return Profile(tuple(LayerProfile("", f, b, cut, 0, weights) for f, b, cut, weights in layers), 8)


def times(timeline: Timeline, rank: int) -> dict[str, tuple[float, float]]:
    return {s.action: (s.start_seconds, s.stop_seconds) for s in timeline.spans if s.rank == rank}


SENDS = parse_programs("0F0@0 0S0>1 0F1@0 0S1>1\n1R0<0 1F0@0 1R1<0 1F1@0")


def test_a_message_takes_time_of_both_ranks() -> None:
    """0.5 s to hand a message over or to take it in, and 1.5 s for its 6 bytes; 3 s on the link, 5 s of latency.

    The first message is awaited: its bytes are copied as they arrive. The second one has arrived before rank 1 asks for
    it, and its bytes have taken time of the forward before.
    """
    cluster = Cluster.uniform(2, 2.0, latency_seconds=5.0).with_costs(
        message_seconds=0.5, message_seconds_per_byte=0.25
    )
    costs = Costs((1.0, 2.0), (0.0, 0.0), cut_bytes=(6.0,), cluster=cluster)
    timeline = execute(SENDS, Placement.straight(2), costs)

    assert times(timeline, 0) == {"0F0@0": (0, 1), "0S0>1": (1.5, 9.5), "0F1@0": (3, 4), "0S1>1": (4.5, 12.5)}
    assert times(timeline, 1) == {"1R0<0": (0, 10), "1F0@0": (10, 12), "1R1<0": (12, 14), "1F1@0": (14, 16)}


def test_without_overlap_costs_of_a_message_come_on_top() -> None:
    """The sender is busy for 0.5 s, for the 3 s of the link, and for 1.5 s; so is the receiver."""
    cluster = Cluster.uniform(2, 2.0).with_costs(message_seconds=0.5, message_seconds_per_byte=0.25)
    costs = Costs((1.0, 5.0), (0.0, 0.0), cut_bytes=(6.0,), cluster=cluster, assumptions=Assumptions(overlap=False))
    timeline = execute(SENDS, Placement.straight(2), costs)

    assert times(timeline, 0) == {"0F0@0": (0, 1), "0S0>1": (1.5, 4.5), "0F1@0": (6, 7), "0S1>1": (7.5, 10.5)}
    assert times(timeline, 1) == {"1R0<0": (0, 5), "1F0@0": (5, 10), "1R1<0": (10, 15), "1F1@0": (15, 20)}


@pytest.mark.parametrize(("share", "free"), [(0.0, 1), (0.5, 2.5), (1.0, 4)])
def test_a_link_says_how_long_its_messages_keep_their_ranks(share: float, free: float) -> None:
    """Both ends stand still for a share of the 3 s on the link; rank 1 takes the second message long after it came."""
    slow = Cluster.uniform(2, 2.0).with_costs(message_blocking=share)
    timeline = execute(SENDS, Placement.straight(2), Costs((1.0, 5.0), (0.0, 0.0), cut_bytes=(6.0,), cluster=slow))

    assert times(timeline, 0)["0F1@0"] == (free, free + 1)
    assert times(timeline, 1)["1F1@0"] == (9 + 3 * share, 14 + 3 * share)


def test_only_the_links_that_block_keep_their_ranks() -> None:
    """Two servers of two ranks: of the messages of one stage only that to the other server blocks."""
    cluster = Cluster(LinkLevels(((2, 2.0), (2, 2.0)), message_costs=(FREE, MessageCosts(blocking=1))))
    costs = Costs((1.0,) * 4, (0.0,) * 4, cut_bytes=(6.0,) * 3, cluster=cluster)
    rows = (
        "0F0@0 0S0>1 0F1@0 0S1>1\n1R0<0 1F0@0 1S0>2 1R1<0 1F1@0 1S1>2\n2R0<1 2F0@0 2S0>3 2R1<1 2F1@0 2S1>3\n3R0<2 3R1<2"
    )
    timeline = execute(parse_programs(rows), Placement.straight(4), costs)

    assert [times(timeline, 0)[each] for each in ("0S0>1", "0F1@0")] == [(1, 4), (1, 2)]
    assert [times(timeline, 1)[each] for each in ("1S0>2", "1R1<0", "1F1@0")] == [(5, 8), (8, 8), (8, 9)]
    assert [times(timeline, 2)[each] for each in ("2S0>3", "2R1<1", "2F1@0")] == [(9, 12), (9, 12), (12, 13)]


@pytest.mark.parametrize(("share", "seconds"), [(None, 2 + 3e-4), (0.25, 3.0), (0.0, 2.0)])
def test_a_profile_says_how_much_longer_a_split_backward_takes(share: float | None, seconds: float) -> None:
    profile = replace(make_profile((1, 4, 0, 1), (1, 4, 0, 1)), split_share=share)
    timeline = simulate(Plan.uniform(2, 2, "zb-h1", 2), profile, Cluster.uniform(2, float("inf")))

    weights = [span.seconds for span in timeline.spans if "W" in span.action]
    assert weights == pytest.approx([seconds] * len(weights)) and weights
    inputs = [span.seconds for span in timeline.spans if "I" in span.action]
    assert inputs == pytest.approx([2.0] * len(inputs))


def test_a_split_microbatch_costs_each_rank_a_message_for_every_partner() -> None:
    """Two senders, three receivers, 12 bytes: a sender has three messages of 2 bytes, a receiver two."""
    cluster = Cluster.uniform(5, 4.0).with_costs(message_seconds=0.5, message_seconds_per_byte=0.25)

    route = find_route(cluster, 12.0, (0, 1), (2, 3, 4), shared=False)
    assert (route.handling_seconds, route.copying_seconds) == (1.5, 1.5)
    assert route.legs == (((0, 2), 0.5),)


def test_links_carry_both_directions_at_once() -> None:
    """1 s forward and 1 s backward on rank 1; activations and gradients of 4 s pass each other."""
    profile = make_profile((0, 0, 4, 0), (1, 1, 0, 0))
    timeline = simulate(Schedule("1f1b-flush", 2, 2), profile, Cluster.uniform(2, 1.0))

    assert times(timeline, 0)["0S1>1"] == (4, 8)
    assert times(timeline, 1)["1S0>0"] == (6, 10)


def reducing(overlap_reduce: bool, parameters: tuple[float, float] = (0, 12), blocking: float = 0.0) -> Timeline:
    """Stage 0 on rank 0 (1 s, 1 s), stage 1 on ranks 1 and 2 (2 s, 4 s); the ring takes 12 bytes / 4 bytes/s + 2 s."""
    profile = make_profile((1, 1, 0, parameters[0]), (2, 4, 0, parameters[1]))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1, 2))), "gpipe", 2)
    costs = ((MessageCosts(blocking=blocking),) * 3,) * 3
    links = LinkMatrix(((4.0,) * 3,) * 3, ((1.0,) * 3,) * 3, costs)
    return simulate(plan, profile, Cluster(links), overlap_reduce=overlap_reduce)


def test_ring_overlaps_the_last_backward_of_the_last_replica() -> None:
    """It begins at 5 with the later backward, needs 5 s (3 of bytes, 2 of latency), and is there at 10."""
    timeline = reducing(overlap_reduce=True)

    assert times(timeline, 1)["1A1"] == (8, 10)
    assert times(timeline, 2)["1A1"] == (9, 10)
    assert times(reducing(overlap_reduce=True, blocking=1), 2)["1A1"] == (9, 14)
    # A short one ends no earlier than the last backward.
    assert times(reducing(overlap_reduce=True, parameters=(0, 0)), 1)["1A1"] == (8, 9)


@pytest.mark.parametrize(("overlap_reduce", "end"), [(True, 14.0), (False, 19.0)])
def test_messages_of_a_ring_take_time_of_the_replicas(overlap_reduce: bool, end: float) -> None:
    """Each replica sends and receives 2 messages of 6 bytes, which take (0.25 + 6/8) s each from its computation: 4 s.

    Replica 2 is done with its last backward at 10, since messages from rank 0 take time, too, and with the messages of
    the ring at 14. A ring that overlaps has its 5 s between 5.75 and 14; another one begins at 14.
    """
    profile = make_profile((1, 1, 0, 0), (2, 4, 0, 12))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1, 2))), "gpipe", 2)
    cluster = Cluster.uniform(3, 4.0, latency_seconds=1.0)
    costs = cluster.with_costs(message_seconds=0.25, message_seconds_per_byte=0.125)
    timeline = simulate(plan, profile, costs, overlap_reduce=overlap_reduce)

    assert times(timeline, 2)["1A1"] == (10, end)
    assert times(timeline, 1)["1A1"] == (8.75, end)


def test_split_microbatches_cost_each_replica_its_share() -> None:
    """SPP, section III: stage 0 on 2 replicas takes half its time; 12 bytes go over two links, 6 bytes each."""
    profile = make_profile((2, 4, 12, 8), (3, 5, 0, 0))
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2,))), "gpipe", 2, routing="split")
    timeline = simulate(plan, profile, Cluster.uniform(3, 2.0))

    assert times(timeline, 0) == times(timeline, 1)
    assert times(timeline, 0) == {
        "0F0@0": (0, 1),
        "0S0>1": (1, 4),
        "0F1@0": (1, 2),
        "0S1>1": (4, 7),
        "0R0<1": (2, 18),
        "0B0@0": (18, 20),
        "0R1<1": (20, 23),
        "0B1@0": (23, 25),
        "0A1": (25, 27),  # 8 bytes at 2 bytes/s, since 23
        "0U1<0": (27, 27),
    }
    assert times(timeline, 2)["1F0@0"] == (4, 7)
    assert times(timeline, 2)["1S0>0"] == (15, 18)


def test_norms_that_go_to_several_replicas_have_left_with_the_slowest() -> None:
    """Two norms of 8 bytes: at 2 bytes/s to the first replica, at 16 bytes/s to the second."""
    cluster = Cluster.from_matrix([[0, 2, 16], [2, 0, 9], [16, 9, 0]])
    costs = Costs((1.0, 1.0), (0.0, 0.0), cut_bytes=(0.0,), cluster=cluster)
    timeline = execute(parse_programs("0F0@0 0N1>1\n1N1<0\n1N1<0"), Placement(((0,), (1, 2))), costs)

    assert [(span.rank, span.stop_seconds) for span in timeline.spans[1:]] == [(0, 9.0), (1, 9.0), (2, 2.0)]


def test_ranks_of_a_server_share_its_link_if_it_is_shared() -> None:
    """Two servers of two: all four pairs carry 3 bytes each at 1 byte/s; together 12."""
    profile = make_profile((2, 2, 12, 0), (2, 2, 0, 0))
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))), "gpipe", 1, routing="split")
    cluster = Cluster.hierarchical([(2, 8.0), (2, 1.0)])

    assert times(simulate(plan, profile, cluster), 0)["0S0>1"] == (1, 4)
    assert times(simulate(plan, profile, cluster, shared_nic=True), 0)["0S0>1"] == (1, 13)


def test_two_pipelines_over_one_shared_link_take_turns() -> None:
    """Ranks 0 and 1 send at the same moment; the link between the servers takes one message, then the other."""
    profile = make_profile((1, 1, 4, 0), (1, 1, 0, 0))
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))), "gpipe", 2)
    cluster = Cluster.hierarchical([(2, 8.0), (2, 1.0)])
    alone = simulate(plan, profile, cluster)
    shared = simulate(plan, profile, cluster, shared_nic=True)

    assert [times(alone, rank)[f"0S{rank}>1"] for rank in (0, 1)] == [(1, 5), (1, 5)]
    assert [times(shared, rank)[f"0S{rank}>1"] for rank in (0, 1)] == [(1, 5), (5, 9)]


def test_shared_link_serves_the_first_sender() -> None:
    """Rank 1 has its message ready before rank 0, whose program is played first."""
    profile = make_profile((4, 0, 4, 0), (0, 0, 0, 0), (1, 0, 4, 0), (0, 0, 0, 0))
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (2,)), Stage(2, 3, (1,)), Stage(3, 4, (3,))), "gpipe", 1)
    cluster = Cluster.hierarchical([(2, float("inf")), (2, 1.0)])
    timeline = simulate(plan, profile, cluster, shared_nic=True)

    # 0 -> 2 is done at 8; 2 -> 1 takes nothing; rank 1 computes 8 to 9 and then has the link for itself.
    assert times(timeline, 0)["0S0>1"] == (4, 8)
    assert times(timeline, 1)["2S0>3"] == (9, 13)


def test_matrix_does_not_say_what_a_server_is() -> None:
    profile = make_profile((1, 1, 1, 0), (1, 1, 0, 0))
    cluster = Cluster.from_matrix([[0, 1], [1, 0]])

    with pytest.raises(PlanError, match="shared_nic: expected a cluster with servers, found links as a matrix"):
        simulate(Schedule("gpipe", 2, 1), profile, cluster, shared_nic=True)


def test_last_stage_recomputes_nothing_where_its_backward_follows_its_forward() -> None:
    profile = make_profile((1, 2, 0, 0), (1, 2, 0, 0))
    plan = Plan.uniform(2, 2, "1f1b-flush", 3, recompute=True)
    timeline = simulate(plan, profile, Cluster.uniform(2, 1.0))
    recomputed = [(span.action, span.seconds) for span in timeline.spans if span.kind == "recompute"]

    assert recomputed == [("0C0@0", 1), ("0C1@0", 1), ("0C2@0", 1)]
    assert {span.seconds for span in timeline.spans if span.kind == "backward"} == {2}


def test_group_of_tensor_parallel_ranks_is_one_replica() -> None:
    """Both lanes send side by side; a replica's peer is on the other server, so the ring goes there."""
    profile = replace(make_profile((1, 2, 4, 8), (1, 2, 0, 0)), tensor_parallel=2)
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (2, 3))), "gpipe", 1, tensor_parallel=2)
    cluster = Cluster.hierarchical([(2, 8.0), (2, 1.0)])
    timeline = simulate(plan, profile, cluster)

    assert timeline.ranks == len(timeline.memory) == 4
    assert times(timeline, 0) == times(timeline, 1)
    assert times(timeline, 0)["0S0>1"] == (1, 5)
    shared = simulate(plan, profile, cluster, shared_nic=True)
    assert times(shared, 0)["0S0>1"] == (1, 9)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"overlap": 1}, "overlap: expected True or False, found 1"),
        ({"update_seconds_per_byte": -1.0}, "update_seconds_per_byte: expected a finite number, 0 or more, found -1.0"),
        ({"allreduce": "rign"}, "allreduce: expected one of ring, shared, found 'rign'"),
    ],
)
def test_option_that_makes_no_sense_is_refused(option: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Assumptions(**option)  # type: ignore[arg-type]


def test_replica_that_never_comes_to_an_all_reduce_is_named() -> None:
    programs = parse_programs("0F0@0 0B0@0 0A1 0U1<0\n0F1@0 0B1@0")

    with pytest.raises(Exception, match=r"rank 0 waits in 0A1 \(its action 2\) for replicas that never reach it"):
        execute(programs, Placement(((0, 1),)), Costs.unit(1))


def test_spans_carry_bytes() -> None:
    timeline = reducing(overlap_reduce=True)

    assert {s.action: s.size_bytes for s in timeline.spans if s.rank == 1 and s.size_bytes is not None} == {"1A1": 12}
    two = simulate(Schedule("gpipe", 2, 1), make_profile((1, 1, 5, 3), (1, 1, 0, 3)), Cluster.uniform(2, 1.0))
    assert {s.action for s in two.spans if s.size_bytes == 5} == {"0S0>1", "1R0<0", "1S0>0", "0R0<1"}


def test_shared_medium_carries_what_all_replicas_reduce() -> None:
    profile = make_profile((1, 1, 0, 12))
    plan = Plan((Stage(0, 1, (0, 1, 2)),), "gpipe", 3)
    cluster = Cluster.uniform(3, 4.0)

    ring = simulate(plan, profile, cluster, overlap_reduce=False)
    shared = simulate(plan, profile, cluster, overlap_reduce=False, allreduce="shared")

    assert (ring.seconds, shared.seconds) == (2 + 4 / 3 * 3, 2 + 4 * 3)


def test_reduces_of_one_rank_follow_each_other() -> None:
    """Interleaved stages 0 and 1 of two replicas: both rings (4 s each) could overlap backwards, but not each other."""
    profile = make_profile((1, 1, 0, 4), (1, 1, 0, 4))
    plan = Plan((Stage(0, 1, (0, 1)), Stage(1, 2, (0, 1))), "interleaved", 2)
    spans = times(simulate(plan, profile, Cluster.uniform(2, 1.0)), 0)

    # Backwards of stage 1 at 2, of stage 0 at 3; stage 0 reduces first: 3 to 7, then stage 1 from 7.
    assert (spans["1B0@0"], spans["0B0@0"]) == ((2, 3), (3, 4))
    assert (spans["0A1"], spans["1A1"]) == ((4, 7), (7, 11))


@pytest.mark.parametrize(("weights", "groups", "seconds"), [(1.0, 1, 25.0), (1.0, 2, 25.0), (3.0, 1, 30.0)])
def test_streamed_stages_of_the_specification(weights: float, groups: int, seconds: float) -> None:
    """specs/residence.md: four stages of 1 s forward and 2 s backward, two microbatches, two places.

    With 3 s for each fetch, that of stage 1 waits for the place of stage 3 until 18 s, and that of stage 0 until 22 s.
    """
    every = range(4)
    words = [
        f"{stage}{letter}{microbatch}@0"
        for group in ((range(2),) if groups == 1 else ((0,), (1,)))
        for letter, stages in (("F", every), ("B", every[::-1]))
        for stage in stages
        for microbatch in group
    ]
    row = with_residence([parse(word) for word in words], frozenset(every), 2)
    cluster = replace(Cluster.uniform(1, 1.0), host_bandwidth=1.0)
    costs = Costs((1.0,) * 4, (2.0,) * 4, frozen_bytes=(weights,) * 4, streamed=frozenset(every), cluster=cluster)
    timeline = execute((row,), Placement.straight(1, 4), costs)

    assert timeline.seconds == seconds
    if weights == 3:
        assert [(s.action, s.start_seconds, s.stop_seconds) for s in timeline.spans if s.kind == "fetch"] == [
            *(("0G0", 0, 3), ("1G0", 3, 6), ("2G0", 6, 9), ("3G0", 9, 12), ("1G0", 18, 21), ("0G0", 22, 25))
        ]


def test_an_update_of_a_streamed_stage_passes_over_the_link_to_its_host() -> None:
    """Weights and state of 4 bytes, twice 4 bytes, and gradients: 16 bytes come and 12 go, for 3 s of computation.

    The gradients have left 4 s after the backward, and the weights of the next step are those that the update made.
    """
    layers = tuple(replace(layer, update_seconds=3.0) for layer in make_profile((1, 2, 0, 4)).layers)
    plan = Plan((Stage(0, 1, (0,)),), recompute=True, streamed=True)
    timeline = simulate(plan, Profile(layers, 8), replace(Cluster.uniform(1, 1.0), host_bandwidth=1.0), 2)

    assert {action: when for action, when in times(timeline, 0).items() if action[1] in "GQU"} == {
        **{"0G0": (0, 4), "0Q0": (7, 11), "0U1<0": (11, 27)},
        **{"0G1": (27, 31), "0Q1": (34, 38), "0U2<1": (38, 54)},
    }
    with pytest.raises(PlanError, match="0G0: the schedule streams weights, and host_bandwidth of the cluster is None"):
        simulate(plan, Profile(layers, 8), Cluster.uniform(1, 1.0))
    with pytest.raises(PlanError, match="expected at most 15 bytes on the host, host_bytes of the cluster, found 16"):
        simulate(plan, Profile(layers, 8), replace(Cluster.uniform(1, 1.0), host_bandwidth=1.0, host_bytes=15.0))
