"""The plans that SPP is compared with, against what their papers say and against brute force."""

import json
import random
from itertools import combinations, pairwise

import pytest

from penstock.errors import PlanError
from penstock.planning.requests import Request
from penstock.scheduling import verify
from penstock.values import Cluster, LayerProfile, Profile
from penstock.values.plans import schedule
from planners.baselines import plan_data_parallel, plan_gpipe, plan_hetpipe, plan_synchronous_pipedream, servers_of
from planners.profiles import read_piper
from planners.single_planners import partition, plan_spp

BASELINES = (plan_data_parallel, plan_gpipe, plan_synchronous_pipedream, plan_hetpipe)


def profile_of(layers, saved=1.0):
    """(forward, backward, bytes over the cut behind, weights) per layer."""
    rows = [LayerProfile(str(i), f, b, cut, saved, w) for i, (f, b, cut, w) in enumerate(layers)]
    return Profile(tuple(rows), 8)


def random_layers(generator, count):
    def number(most):
        return generator.choice((0, generator.randint(1, most)))

    return [(generator.randint(0, 9), generator.randint(1, 9), number(30), number(40)) for _ in range(count)]


def shape(plan):
    return [(stage.start, stage.stop, stage.ranks) for stage in plan.stages]


def test_data_parallelism_is_one_stage_on_all_devices():
    """10 microbatches of 3 seconds on 4 devices, and then 40 bytes around a ring of 2 bytes a second."""
    profile = profile_of([(1, 1, 9, 16), (0, 1, 9, 24)])
    plan = plan_data_parallel(profile, Cluster.uniform(4, 2.0), Request(microbatches=10))

    assert shape(plan) == [(0, 2, (0, 1, 2, 3))]
    assert (plan.schedule, plan.routing, plan.microbatches) == ("1f1b-flush", "split", 10)
    # Part of the all-reduce may hide behind the last backward.
    compute, reduce = 10 * 3 / 4, 2 * 3 / 4 * 40 / 2
    assert compute + reduce - 2 / 4 <= plan.predicted.minibatch_seconds <= compute + reduce


@pytest.mark.parametrize(
    ("layers", "devices", "stages", "lengths"),
    [(8, 4, None, [2, 2, 2, 2]), (9, 4, None, [3, 2, 2, 2]), (3, 5, None, [1, 1, 1]), (8, 4, 2, [4, 4])],
)
def test_gpipe_has_equally_many_layers_per_device(layers, devices, stages, lengths):
    profile = profile_of([(1, 2, 0, 0)] * layers)
    plan = plan_gpipe(profile, Cluster.uniform(devices, 1.0), Request(microbatches=6, stages=stages))

    assert plan.schedule == "gpipe"
    assert [stage.stop - stage.start for stage in plan.stages] == lengths
    assert plan.replicas == (1,) * len(lengths)
    if len(set(lengths)) == 1:
        assert plan.predicted.minibatch_seconds == pytest.approx((6 + len(lengths) - 1) * 3 * lengths[0])


def test_pipedream_keeps_its_partition_under_a_flush():
    generator = random.Random(1)
    for _ in range(60):
        profile = profile_of(random_layers(generator, generator.randint(1, 6)))
        cluster = Cluster.uniform(generator.randint(1, 5), generator.randint(1, 9))
        plan = plan_synchronous_pipedream(profile, cluster, Request("pipedream", 12))

        assert shape(plan) == shape(partition(profile, cluster))
        assert (plan.schedule, plan.routing) == ("1f1b-flush", "round-robin")
        assert schedule(plan).flushes


def hetpipe_oracle(layers, links, stages):
    """The least slowest stage or link over all cuts; ``links[s]``: the slowest link behind stage s."""
    least = float("inf")
    for marks in combinations(range(1, len(layers)), stages - 1):
        cuts = (0, *marks, len(layers))
        slowest = max(sum(f + b for f, b, _, _ in layers[i:j]) for i, j in pairwise(cuts))
        for mark, link in zip(marks, links, strict=True):
            slowest = max(slowest, 2 * layers[mark - 1][2] / link)
        least = min(least, slowest)
    return least


@pytest.mark.parametrize("seed", range(4))
def test_hetpipe_balances_its_stages(seed):
    generator = random.Random(seed)
    for _ in range(100):
        size, servers = generator.randint(1, 4), generator.randint(1, 3)
        inner, outer = generator.randint(5, 20), generator.randint(1, 5)
        cluster = Cluster.hierarchical([(size, inner), (servers, outer)])
        layers = random_layers(generator, generator.randint(size, 7))
        plan = plan_hetpipe(profile_of(layers), cluster, Request(microbatches=6))

        found = max(sum(f + b for f, b, _, _ in layers[stage.start : stage.stop]) for stage in plan.stages)
        found = max([found, *(2 * layers[stage.stop - 1][2] / inner for stage in plan.stages[:-1])])
        assert found == pytest.approx(hetpipe_oracle(layers, [inner] * (size - 1), size), rel=1e-12)
        assert (plan.schedule, plan.routing) == ("1f1b-flush", "round-robin")
        assert plan.replicas == (servers,) * size


def test_hetpipe_takes_the_devices_of_a_worker_from_one_server():
    """3 servers of 4."""
    profile, cluster = profile_of([(1, 1, 1, 1)] * 12), Cluster.hierarchical([(4, 9.0), (3, 1.0)])
    plan = plan_hetpipe(profile, cluster, Request(microbatches=12))

    assert [stage.ranks for stage in plan.stages] == [(0, 4, 8), (1, 5, 9), (2, 6, 10), (3, 7, 11)]
    assert servers_of(Cluster.hierarchical([(2, 5.0), (3, 1.0)])) == ((0, 1), (2, 3), (4, 5))
    assert servers_of(Cluster.uniform(3, 1.0)) == ((0, 1, 2),)


def test_the_last_stage_of_a_virtual_worker_has_nothing_to_recompute():
    """Forward 2, backward 1: 3 + 5 layers are as equal as can be, 15 and 15."""
    profile, cluster = profile_of([(2, 1, 0, 0)] * 8), Cluster.uniform(2, 1.0)
    for recompute, cut in ((False, 4), (True, 3)):
        plan = plan_hetpipe(profile, cluster, Request(microbatches=6, recompute=recompute))

        assert plan.stages[0].stop == cut


@pytest.mark.parametrize("planner", [*BASELINES, plan_spp])
def test_every_plan_can_be_proved_and_predicted(planner):
    generator = random.Random(11)
    for _ in range(15):
        size, servers = generator.randint(1, 3), generator.randint(1, 3)
        cluster = Cluster.hierarchical([(size, 9.0), (servers, 2.0)])
        profile = profile_of(random_layers(generator, generator.randint(size, 8)))
        request = Request(microbatches=generator.randint(cluster.devices, 16))
        plan = planner(profile, cluster, request)

        verify(schedule(plan), minibatches=2)
        assert plan.microbatches == request.microbatches
        assert plan.predicted.minibatch_seconds * plan.ranks >= request.microbatches * profile.seconds * (1 - 1e-9)
        assert plan.predicted.limit


@pytest.mark.parametrize("planner", [*BASELINES, plan_spp])
def test_a_memory_limit_is_kept_or_said_to_be_too_small(planner):
    profile = profile_of([(1, 2, 3, 40)] * 8, saved=5.0)
    request = Request(microbatches=8)
    needed = planner(profile, Cluster.uniform(4, 1.0), request).predicted.peak_bytes
    # The planner counts gradients as if they were always there; the simulator knows when they are.
    limit = max(needed) + (0.0 if planner in BASELINES else 2 * 40)
    enough = planner(profile, Cluster.uniform(4, 1.0, limit), request)

    assert max(enough.predicted.peak_bytes) <= limit
    with pytest.raises(PlanError, match="fit"):
        planner(profile, Cluster.uniform(4, 1.0, 200.0), request)


def test_recomputation_is_passed_on():
    """One stage has nothing to recompute: each backward directly follows its forward."""
    profile = profile_of([(1, 2, 3, 0)] * 4)
    for planner in BASELINES:
        plain, again = (
            planner(profile, Cluster.uniform(2, 1.0), Request(microbatches=4, recompute=recompute))
            for recompute in (False, True)
        )

        assert (plain.recompute, again.recompute) == (False, True)
        longer = len(again.stages) > 1
        assert (again.predicted.minibatch_seconds > plain.predicted.minibatch_seconds) is longer


@pytest.mark.parametrize(
    ("planner", "request_", "words"),
    [
        (plan_gpipe, Request(stages=5), "at most 4"),
        (plan_gpipe, Request(stages=4), "3 layers"),
        (plan_hetpipe, Request(), "3 layers"),
    ],
)
def test_what_cannot_be_planned_is_refused(planner, request_, words):
    with pytest.raises(PlanError, match=words):
        planner(profile_of([(1, 1, 1, 1)] * 3), Cluster.uniform(4, 1.0), request_)


@pytest.mark.parametrize("unit", [1.0, 1e-3], ids=["seconds", "milliseconds"])
def test_files_of_piper_are_in_seconds_or_in_milliseconds(tmp_path, unit):
    """A sample takes 0.3 seconds in 2 layers; the file does not say in what it counts."""

    def node(number):
        plain = {"id": "vanilla", "timePerSample": 0.15 / unit, "parameterSize": 4, "memoryUsageA": 8}
        again = {**plain, "id": "activation recomp", "timePerSample": 0.2 / unit}
        return {"id": number, "name": f"layer {number}", "TMPCs": {"1": [plain, again]}}

    path = tmp_path / "gnmt.json"
    edge = {"sourceId": 0, "destId": 1, "communicationCost": 16}
    path.write_text(json.dumps({"nodes": [node(0), node(1)], "edges": [edge]}))

    layers = read_piper(path).layers
    assert [layer.forward_seconds for layer in layers] == pytest.approx([0.05, 0.05])
    assert [layer.backward_seconds for layer in layers] == pytest.approx([0.1, 0.1])
