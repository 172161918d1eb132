"""Where the time of a minibatch goes: cases worked out by hand, and parts that add up to the whole."""

from dataclasses import replace

import pytest
from hypothesis import given, settings

from penstock.simulating import evaluate
from penstock.simulating.lost_time import Losses, find_losses
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, Stage
from penstock.values.profiles import LayerProfile, Profile
from support.simulation_problems import problems


def make_profile(*layers: tuple[float, float, float, float]) -> Profile:
    """Layers of (forward seconds, backward seconds, cut bytes, parameter bytes)."""
    return Profile(tuple(LayerProfile("", f, b, cut, 0, weights) for f, b, cut, weights in layers), 8)


def test_every_part_of_one_microbatch_through_two_stages() -> None:
    """Stages of 1 + 2 and 2 + 4 s; 6 bytes at 2 bytes/s each way, 5 s of latency, 0.5 s to hand a message over or to
    take it in, and 1.5 s for its bytes.

    A microbatch takes 9 s of computation, one rank after the other: 4.5 s a rank, 6 s on the second one, which waits
    for 3 s. Each message takes 3 s and 5 s, and twice 0.5 s of the ranks. No computation waits for
    the copying of bytes: the sender has nothing else to do, and the receiver copies while they arrive.
    """
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1,))), "gpipe", 1)
    cluster = Cluster.uniform(2, 2.0, latency_seconds=5.0).with_costs(
        message_seconds=0.5, message_seconds_per_byte=0.25
    )
    losses = find_losses(plan, make_profile((1, 2, 6, 0), (2, 4, 0, 0)), cluster)

    assert losses == Losses(4.5, 3.0, 1.5, 0.0, transfer=6.0, latency=10.0, handling=2.0)
    begun = find_losses(plan, make_profile((1, 2, 6, 0), (2, 4, 0, 0)), replace(cluster, step_seconds=3.0))
    assert begun == replace(losses, start=3.0) and begun.seconds == 30.0
    assert str(losses) == (
        "27 s of a minibatch, in the mean of the ranks: computation 4.5 s (16.7%), waits of the schedule 3 s (11.1%), "
        "imbalance 1.5 s (5.6%), transfer 6 s (22.2%), latency 10 s (37.0%), handling 2 s (7.4%)"
    )


def test_imbalance_and_an_all_reduce() -> None:
    """Two microbatches; stages of 3 and 9 s on one and two ranks, which take turns; 24 bytes of weights.

    The ranks have 6, 9 and 9 s to compute, 8 s on average. Rank 1 computes until 10 s and rank 2 until 11 s; the last
    backward on rank 0 ends at 14 s. The ring of 24 bytes at 4 bytes/s takes 6 s: from the start of the last backward,
    at 5 s, nothing waits for it; from its end it takes until 17 s.
    """
    plan = Plan((Stage(0, 1, (0,)), Stage(1, 2, (1, 2))), "gpipe", 2)
    profile = make_profile((1, 2, 0, 0), (3, 6, 0, 24))

    hidden = find_losses(plan, profile, Cluster.uniform(3, 4.0))
    assert hidden.parts == pytest.approx(
        dict(computation=8, bubble=5, imbalance=1, all_reduce=0, transfer=0, latency=0, handling=0, host=0, start=0)
    )
    shown = find_losses(plan, profile, Cluster.uniform(3, 4.0), overlap_reduce=False)
    assert shown.parts == pytest.approx(hidden.parts | {"all_reduce": 3})


@settings(max_examples=30, deadline=None)
@given(problems())
def test_the_parts_add_up_to_the_minibatch(problem: tuple) -> None:
    _, plan, profile, cluster, _ = problem
    losses = find_losses(plan, profile, cluster)

    assert losses.seconds == pytest.approx(evaluate(plan, profile, cluster).minibatch_seconds)
    assert min(losses.computation, losses.bubble, losses.imbalance) >= -1e-9 * losses.seconds
