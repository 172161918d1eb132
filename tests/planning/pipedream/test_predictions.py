"""What the closed form predicts is what the simulator says, where stages are equal and links are free."""

import pytest

from penstock.planning.predictions import predict, slowest_part, slowest_seconds
from penstock.planning.stage_costs import chain_costs
from penstock.simulating import simulate
from penstock.values import Cluster, LayerProfile, Plan, Profile, Stage


def equal_plan(schedule, positions, replicas, microbatches, per_rank=1, routing="round-robin", lengths=1):
    """Stages of as many layers each, every one on this number of replicas."""
    rows = [tuple(range(position * replicas, (position + 1) * replicas)) for position in range(positions)]
    stages = [Stage(s * lengths, (s + 1) * lengths, rows[s % positions]) for s in range(positions * per_rank)]
    return Plan(tuple(stages), schedule, microbatches, routing=routing)


def predicted(plan, profile, cluster, allreduce="ring"):
    costs = chain_costs(profile)
    return predict(plan, profile, costs, slowest_seconds(plan.stages, costs, cluster, allreduce))


def free_profile(layers):
    return Profile(tuple(LayerProfile(str(index), 1.0, 2.0, 0, 0, 0) for index in range(layers)), 5)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("positions", [1, 2, 4])
@pytest.mark.parametrize(("schedule", "per_rank"), [("gpipe", 1), ("1f1b-flush", 1), ("spp", 1), ("interleaved", 2)])
def test_equal_parallel_pipelines_take_what_the_simulator_says(schedule, per_rank, positions, replicas):
    """(m / d + (p - 1) / v) d t: 3 s a layer, d pipelines of p ranks with v stages."""
    each = 2 * positions
    plan = equal_plan(schedule, positions, replicas, each * replicas, per_rank)
    profile, cluster = free_profile(positions * per_rank), Cluster.uniform(positions * replicas, 1e9)
    found = predicted(plan, profile, cluster)

    assert found.bottleneck_seconds == pytest.approx(3.0 * per_rank / replicas)
    assert found.minibatch_seconds == pytest.approx(3.0 * per_rank * (each + (positions - 1) / per_rank))
    assert found.minibatch_seconds == pytest.approx(simulate(plan, profile, cluster, minibatches=1).seconds)
    assert found.bubble == pytest.approx((positions - 1) / (per_rank * each + positions - 1))
    assert found.samples_per_second == pytest.approx(5 * each * replicas / found.minibatch_seconds)


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b-flush", "spp"])
def test_replicas_that_split_microbatches_are_as_fast_as_one_rank_of_their_speed(schedule, replicas):
    """(m + p - 1) t with t a microbatch's share."""
    plan = equal_plan(schedule, 3, replicas, 8, routing="split")
    profile, cluster = free_profile(3), Cluster.uniform(3 * replicas, 1e9)
    found = predicted(plan, profile, cluster)

    assert found.minibatch_seconds == pytest.approx((8 + 2) * 3.0 / replicas)
    assert found.minibatch_seconds == pytest.approx(simulate(plan, profile, cluster, minibatches=1).seconds)


@pytest.mark.parametrize("microbatches", [4, 8, 9, 30])
def test_unequal_replicas_are_predicted_on_the_safe_side(microbatches):
    """15-1 in small: three replicas of 9 s and one of 3 s; both take a microbatch every 3 s."""
    profile = Profile(
        tuple(LayerProfile(str(i), seconds, 2 * seconds, 0, 0, 0) for i, seconds in enumerate((3.0, 1.0))), 1
    )
    plan = Plan((Stage(0, 1, (0, 1, 2)), Stage(1, 2, (3,))), "1f1b-flush", microbatches)
    cluster = Cluster.uniform(4, 1e9)
    found = predicted(plan, profile, cluster)
    rounds = max(-(-microbatches // 3) * 3 + 1, microbatches + 3)

    assert found.minibatch_seconds == pytest.approx(rounds * 3.0)
    assert found.minibatch_seconds >= simulate(plan, profile, cluster, minibatches=1).seconds * (1 - 1e-12)


@pytest.mark.parametrize(("schedule", "replicas"), [("pipedream", 1), ("pipedream", 3), ("2bw", 2)])
def test_asynchronous_schedules_have_no_fill(schedule, replicas):
    plan = equal_plan(schedule, 2, replicas, 12)
    found = predicted(plan, free_profile(2), Cluster.uniform(2 * replicas, 1e9))

    assert found.minibatch_seconds == pytest.approx(12 * 3.0 / replicas)
    assert found.bubble == pytest.approx(0.0, abs=1e-12)


def test_what_limits_a_plan_is_named():
    costs = chain_costs(Profile(tuple(LayerProfile(str(i), 1.0, 2.0, 0, 0, 8) for i in range(4)), 1))
    heavy = chain_costs(Profile(tuple(LayerProfile(str(i), 1.0, 2.0, 50, 0, 8) for i in range(4)), 1))
    cluster = Cluster.uniform(4, 10.0)
    straight = [Stage(0, 1, (0,)), Stage(1, 3, (1,)), Stage(3, 4, (2,))]
    dealt = [Stage(index, index + 1, (index % 2,)) for index in range(4)]

    assert slowest_part(straight, costs, cluster, "ring") == (6.0, "stage 1")
    assert slowest_part(straight, heavy, cluster, "ring") == (10.0, "link before stage 1")
    assert slowest_part(dealt, costs, cluster, "ring") == (6.0, "stages 0 and 2")
    assert slowest_part(dealt, heavy, cluster, "ring") == (20.0, "link before stages 1 and 3")
    reduced = slowest_part([Stage(0, 4, (0, 1))], costs, Cluster.uniform(2, 0.5), "ring")
    assert reduced == (32.0, "all-reduce of stage 0")
    assert slowest_part([Stage(0, 4, (0, 1))], costs, cluster, "ring") == (6.0, "stage 0")
