"""What cannot be planned is refused, with the numbers that would be right."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

import penstock
from penstock import Cluster, DeviceKind, LayerProfile, Plan, PlanError, Profile, Stage, Transformer
from penstock.planning import find_order, limit_order, plan
from penstock.planning.pipedream.partitions import find_unequal
from penstock.planning.ptd_p.accelerator_models import A100, Precision
from penstock.planning.ptd_p.three_d import ThreeDRequest, plan_three_d, rank_three_d
from penstock.planning.ptd_p.transformer_costs import profile_of
from penstock.planning.requests import Request
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.tensor_groups import group_devices
from penstock.planning.spp.spp_search import propose_grouped, spp_candidates
from penstock.planning.two_bw.pipeline_searches import rank_pipelines
from penstock.simulating import evaluate
from support.paper_plans import partition
from support.transformer_arrangements import GPT_1B, GPT_1T, GPT_6B, TOY, best


def equal(layers: int, size: int = 1, degree: int = 1) -> Profile:
    layer = LayerProfile("", 1e-2, 2e-2, 16e6, 0.4e9, 1e8)
    named = tuple(replace(layer, name=str(index)) for index in range(layers))
    return Profile(named, size, tensor_parallel=degree)


SIX, EIGHT, TWO, FOUR = equal(6, 12), equal(8, 5), Cluster.uniform(2, 1e9), Cluster.uniform(4, 1e9)
FAST, HALF, SLOW = DeviceKind(), DeviceKind(speed=0.5), DeviceKind("slow", price_per_hour=1.0)
SMALL = Transformer(8, 64, 8, sequence=16, vocabulary=64)
SERVERS = Cluster.hierarchical([(4, 1e10), (2, 1e9)])
NAMED = Plan.uniform(8, 4, "zb-h1", 8)
LATE: dict[str, Any] = {"epoch_samples": 1e6, "deadline_seconds": 1e9}
V = [Stage(0, 1, (0,)), Stage(1, 2, (1,)), Stage(2, 3, (0,)), Stage(3, 4, (1,))]
UNEQUAL_V = (Stage(0, 1, (0, 1)), Stage(1, 2, (2,)), Stage(2, 3, (2,)), Stage(3, 4, (0, 1)))


def planned(profile: Any = EIGHT, cluster: Cluster = FOUR, **options: Any) -> Callable[[], object]:
    return lambda: plan(profile, cluster, **options)


def grid(**fixed: Any) -> Callable[[], object]:
    return lambda: plan_three_d(SMALL, Cluster.uniform(8, 1e9), batch_size=16, **fixed)


def three_d(batch: int = 16, **fixed: Any) -> Callable[[], object]:
    return lambda: ThreeDRequest(GPT_1B, Cluster.uniform(8, 1e9), batch, **fixed)


def spp(layers: int, devices: int, **options: Any) -> Callable[[], object]:
    return lambda: spp_candidates(equal(layers), Cluster.uniform(devices, 1.0), Request("spp", 4, **options))


def pipelines(schedule: str, **options: Any) -> Callable[[], object]:
    return lambda: rank_pipelines(EIGHT, FOUR, Request(schedule, **options))


def part(**options: Any) -> Callable[[], object]:
    return lambda: partition(equal(3), FOUR, **options)


def order(plan: Plan = NAMED, cluster: Cluster = FOUR, **options: Any) -> Callable[[], object]:
    return lambda: find_order(plan, EIGHT, cluster, **options)


def limit(plan: Plan = NAMED, **options: Any) -> Callable[[], object]:
    return lambda: limit_order(plan, EIGHT, FOUR, **options)


def groups(cluster: Cluster, degree: int, **options: Any) -> Callable[[], object]:
    return lambda: group_devices(cluster, degree, **options)


REFUSALS = [
    (planned(planner="pipdream"), r"planner: expected one of pipedream, 2bw, .*Did you mean 'pipedream'\?"),
    (planned(schedule="zb"), "schedule: expected one of gpipe"),
    (planned(microbatches=0), "microbatches: expected a whole number from 1 to 65536, found 0"),
    (planned(stages_per_rank=2, schedule="gpipe"), "schedule='gpipe', stages_per_rank=2: expected choices that go"),
    (planned(schedule="interleaved", stages=7), "stages: expected a multiple of 2 stages per rank, found 7"),
    (planned(stages=9), "stages: expected at most 4"),
    (planned(synchronous=True, asynchronous=True), "synchronous and asynchronous: expected one of them, found both"),
    (planned(asynchronous=1), "asynchronous=.: expected True or False, found 1"),
    (planned(synchronous=True, schedule="2bw"), "schedule='2bw', synchronous=True: expected choices that go"),
    (planned(microbatches=4, batch_size=8), "microbatches and batch_size: expected one of them"),
    (planned(batch_size=7), "batch_size: expected a multiple of the measured microbatch size, 5, found 7"),
    (planned(allreduce="tree"), "allreduce: expected one of ring, shared, released, found 'tree'"),
    (planned(SMALL), "batch_size: expected the samples of a minibatch for a transformer"),
    (planned(SMALL, batch_size=16, schedule="gpipe", straight=True), "schedule, straight: expected batch_size, stages"),
    (planned(SMALL, TWO.with_kinds([FAST, HALF]), batch_size=8), "expected equal devices of speed 1 for a transformer"),
    (planned([equal(3), equal(4, 8)]), r"profile\[1\]: expected the layers of profile\[0\]"),
    (planned([equal(3), equal(3)]), r"profile\[1\]: expected a microbatch size of its own, found 1 again"),
    (planned([3]), "expected a Profile, several, or a Transformer, found 3"),
    (planned([EIGHT, EIGHT, equal(8, 5, 2), equal(8, 5, 2)]), "one profile for each size"),
    (planned(microbatch_sizes=(0,)), r"microbatch_sizes\[0\]: expected a whole number"),
    (planned(equal(8, 1, 2), Cluster.uniform(1, 1e10)), "expected a cluster with 2 devices for the profile, found 1"),
    (planned(planner="order", schedule="2bw"), r"planner='order', .*expected choices that go together"),
    (planned(EIGHT, FOUR.with_memory(1e8), planner="order"), "expected an order that takes at most"),
    (planned(EIGHT, Cluster.uniform(1, 1e9), planner="order"), "expected a pipeline without replicas, found none"),
    (planned(**LATE), "expected a cluster with prices"),
    (planned(deadline_seconds=1e9), "expected epoch_samples beside it"),
    (planned(EIGHT, TWO.with_kinds(SLOW), **LATE, every_device=True), "expected no every_device beside it"),
    (planned(epoch_samples=0), "epoch_samples=.: expected a finite number of samples above 0"),
    (planned(EIGHT, TWO.with_kinds(SLOW).with_memory(1.0), **LATE), "nothing fits"),
    (planned(EIGHT, FOUR.with_memory(1e8), schedule="zb-h1", microbatches=8, straight=True), "nothing fits"),
    (planned(SIX, TWO.with_kinds([FAST, HALF]), stages=3), r"^no plan: stages: expected at most 2 \(2 devices"),
    (lambda: penstock.compare_clusters(SIX, {}), "expected a mapping of names to clusters"),
    (lambda: penstock.frontier(SIX, Cluster.uniform(1, 1e9)), "frontier: expected two devices and layers or more"),
    (lambda: penstock.frontier(SIX, TWO, limits=(0,)), r"frontier\(limits=\)"),
    (lambda: evaluate(plan(equal(8, 1, 2), TWO), equal(8), TWO), "are on 1 devices and those of the plan on 2"),
    (groups(SERVERS, 8), r"servers .* with a multiple of 8 devices for the profile, found 4"),
    (groups(SERVERS, 16), "expected a cluster with 16 devices for the profile, found 8"),
    (groups(Cluster.uniform(5, 1e9), 2, every_device=True), "a multiple of 2 devices"),
    (groups(FOUR.with_kinds([FAST, HALF, HALF, HALF]), 2), "found different kinds in a group"),
    (
        lambda: find_unequal(
            SIX, Cluster.uniform(32, 1e9).with_kinds([DeviceKind(speed=1 + k / 100) for k in range(32)]), Request()
        ),
        "32 devices of 32 classes are too many",
    ),
    (
        lambda: find_unequal(SIX, TWO.with_kinds([FAST, HALF]), Request(stages=3)),
        "2 devices with 1 stage each.*found 3",
    ),
    (part(straight=True), "cannot cut 3 layers into 4 stages: .*Use fewer stages"),
    (part(stages=5), r"stages: expected at most 4 \(4 devices with 1 stage each\), found 5"),
    (part(stages=0), "stages: expected a whole number, 1 or more, found 0"),
    (part(schedule="2bv"), "schedule: expected one of .*Did you mean '2bw'"),
    (pipelines("pipedream"), "schedule: expected one of 2bw, 1f1b-flush, gpipe"),
    (pipelines("2bw", stages=5), "stages: expected at most 4"),
    (pipelines("2bw", allreduce="released"), "allreduce: expected ring or shared"),
    (pipelines("2bw", stages=4, microbatches=3), "expected parallel pipelines under 2bw of at most 3 microbatches"),
    (spp(8, 4, stages=5), "at most 4"),
    (spp(3, 4, stages=4), "at most 3"),
    (spp(3, 4, straight=True), "one layer per stage"),
    (spp(2, 4096), "too many"),
    (
        lambda: list(propose_grouped(equal(1, 3), Cluster.uniform(64, 1e9), Request("spp", 256))),
        "expected groups of 64 devices that share 3 samples equally",
    ),
    (order(memory_bytes=1e8), r"at most 100 MB on every rank, found none; the named schedules take [0-9.]+ GB"),
    (order(memory_bytes=0), "memory_bytes=.: expected a finite number of bytes above 0, found 0"),
    (order(cluster=TWO), "the plan has 4 ranks and the cluster 2 devices"),
    (order(Plan((Stage(0, 8, (0, 1, 2, 3)),))), "expected stages without replicas, found .4,. replicas"),
    (limit(memory_bytes=1e8), "of zb-h1 that takes at most 100 MB on rank 0, found none; as it is it takes"),
    (limit(Plan.uniform(8, 4, "2bw", 8)), "limit_order: expected a schedule that flushes, found 2bw"),
    (limit(Plan((Stage(0, 8, (0, 1, 2, 3)),))), "limit_order: expected stages without replicas, found .4,. replicas"),
    (lambda: Request("zb-v"), "stages_per_rank: expected 2 under zb-v, found 1: give 2, or plan for zb-h1"),
    (lambda: Request("zb-h1", stages_per_rank=2), "stages_per_rank: expected 1 under zb-h1, found 2: only the"),
    (lambda: PlanConstraints(schedule="zb-v", stages_per_rank=4), "schedule='zb-v', stages_per_rank=4: expected"),
    (lambda: Plan(tuple(V), "zb-v"), r"stages\[2\].ranks: expected \[1\] \(zb-v: .*found \[0\] in layers \[2, 3\)"),
    (lambda: Plan((V[0], V[1]), "zb-v"), r"stages: expected 4 stages \(zb-v on 2 ranks\), found 2"),
    (lambda: Plan(UNEQUAL_V, "zb-v"), r"stages\[1\].ranks: expected 2 ranks \(zb-v: as many as stage 0 has\), found 1"),
    (grid(devices=7), "7 devices have no configuration .* use devices=4, the next smaller number that has"),
    (grid(tensor=5), "with tensor = 5: expected p t d = 8, t a divisor of 8 heads"),
    (grid(pipeline=3, data=2), "with pipeline = 3, data = 2"),
    (grid(microbatch_size=5), "d b of a batch of 16"),
    (three_d(10**18), r"^batch_size: expected at most 100000000, found 10\d+: give the samples of one"),
    (three_d(devices=9), "^devices: expected at most the 8 of the cluster, found 9"),
    (lambda: rank_three_d(ThreeDRequest(GPT_1B, TWO, 16), -1), "^simulated: expected a whole number, 0 or more"),
    (lambda: best(GPT_1T, 3072, 3072, recompute=False), "recompute=True, which needs"),
    (lambda: replace(TOY, peak_operations=0.0), "^peak_operations: expected"),
    (lambda: replace(TOY, memory_bandwidth=float("inf")), "^memory_bandwidth: expected"),
    (lambda: replace(TOY, efficiency=1.5), "^efficiency: expected"),
    (lambda: replace(TOY, half_wave=-1.0), "^half_wave: expected"),
    (lambda: Precision(gradient_bytes=-1), "^gradient_bytes: expected"),
    (lambda: profile_of(GPT_6B, A100, FOUR, tensor_parallel=3), "divisor of the model's 32 heads, found 3"),
    (lambda: profile_of(GPT_6B, A100, FOUR, tensor_parallel=16), "at most the 4 devices"),
]
for _name in ("pipeline", "tensor", "data", "microbatch_size", "stages_per_rank", "devices"):
    for _value in (0, -1, True, 1.5):
        _fixed: dict[str, Any] = {_name: _value}
        REFUSALS.append((three_d(**_fixed), f"^{_name}: expected"))


@pytest.mark.parametrize(("call", "says"), REFUSALS)
def test_refusals(call: Callable[[], object], says: str) -> None:
    with pytest.raises(PlanError, match=says):
        call()
