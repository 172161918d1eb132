"""Plans whose weights are on the host: when they are made, that they fit, and what is said of them."""

import re
from dataclasses import replace

import pytest

import penstock
from penstock.errors import PlanError
from penstock.planning.search.constraints import PlanConstraints
from penstock.planning.search.streamed_plans import stream_plans
from penstock.scheduling.verification.verifier import verify
from penstock.simulating import evaluate
from penstock.values import Cluster, LayerProfile, Plan, Profile, schedule

# Twelve layers of 1 GB: weights, gradients and state of Adam take 48 GB.
LAYERS = tuple(
    LayerProfile(f"layer {index}", 0.1, 0.2, cut_bytes=5e7, saved_bytes=5e8, parameter_bytes=1e9, update_seconds=0.01)
    for index in range(12)
)
PROFILE, SHORT = Profile(LAYERS, 1), Profile(LAYERS[:4], 1)


def host(devices: int, memory_bytes: float | None, bandwidth: float | None = 25e9) -> Cluster:
    return replace(Cluster.uniform(devices, 50e9).with_memory(memory_bytes), host_bandwidth=bandwidth)


@pytest.mark.parametrize(("devices", "memory"), [(1, 7e9), (2, 6e9), (4, 6e9)])
def test_weights_are_streamed_where_nothing_fits_otherwise(devices: int, memory: float) -> None:
    cluster = host(devices, memory)
    made = penstock.plan(PROFILE, cluster, microbatches=8)

    assert made.streamed and made.recompute is True and made.ranks == devices
    verify(schedule(made))
    assert made.predicted == evaluate(made, PROFILE, cluster)
    assert max(made.predicted.peak_bytes) <= memory
    # What the links and the computation allow, with a forward more for each backward: at most a fifth above.
    assert made.predicted.minibatch_seconds < 1.2 * made.predicted.bottleneck_seconds * 8
    assert made.explanation.startswith("Weights are on the host: those of ")
    assert "Its time goes to: " in made.explanation
    if devices == 1:
        with pytest.raises(PlanError, match="nothing fits"):
            penstock.plan(SHORT, cluster, microbatches=8, streamed=False)


def test_where_plans_fit_weights_stay_unless_it_is_wished() -> None:
    cluster = host(2, 80e9)

    assert not penstock.plan(SHORT, cluster, microbatches=8).streamed
    wished = penstock.plan(PROFILE, cluster, microbatches=8, streamed=True, straight=True, stages_per_rank=3)
    assert wished.streamed and len(wished.stages) == 6


def test_no_slower_than_every_plan_of_its_kind_that_fits() -> None:
    """All numbers of stages and all that stay on the device, by hand, with one group of microbatches."""
    cluster = host(1, 9e9)
    options = PlanConstraints(microbatches=4)
    best = stream_plans([PROFILE], cluster, options).ranked[0].predicted
    assert best is not None
    found = []
    for stages in (1, 2, 3, 4, 6, 12):
        uniform = Plan.uniform(12, stages, "breadth-first", 4, stages, microbatch_size=1, recompute=True)
        for staying in range(stages):
            outcome = evaluate(replace(uniform, streamed=tuple(range(staying, stages))), PROFILE, cluster)
            found += [outcome.minibatch_seconds] if outcome.peak_bytes[0] <= 9e9 else []

    assert best.minibatch_seconds <= 1.01 * min(found)


def test_groups_of_microbatches_keep_fewer_inputs() -> None:
    """32 inputs of each of 12 stages take 19 GB."""
    made = penstock.plan(PROFILE, host(1, 7e9), microbatches=32)

    assert str(made.schedule).startswith("breadth-first in groups of ")
    assert max(made.predicted.peak_bytes) <= 7e9
    verify(schedule(made))


def test_layers_that_share_weights_stay() -> None:
    made = penstock.plan(PROFILE, host(1, 11e9), microbatches=4, tied_layers=[(0, 11)])

    first, last = 0, len(made.stages) - 1
    assert made.streamed and not made.streaming & {first, last}


def test_without_a_bandwidth_to_the_host_the_error_says_what_it_would_allow() -> None:
    with pytest.raises(PlanError, match="host_bandwidth of the cluster, with which weights can stay on the host"):
        penstock.plan(SHORT, host(1, 7e9, None), microbatches=4)
    with pytest.raises(PlanError, match=r"streamed: expected host_bandwidth of the cluster.*found None: measure"):
        penstock.plan(SHORT, host(1, 7e9, None), microbatches=4, streamed=True)


@pytest.mark.parametrize(("devices", "wish"), [(1, None), (2, True)])
def test_what_would_be_enough_is_the_least_that_streaming_needs(devices: int, wish: bool | None) -> None:
    def made(memory: float) -> Plan:
        return penstock.plan(SHORT, host(devices, memory), microbatches=2, streamed=wish)

    with pytest.raises(PlanError, match="nothing fits") as refused:
        made(1e9)
    enough = re.search(
        r"enough: (\S+) GB on each device \(for breadth-.* and weights on the host\)", str(refused.value)
    )
    assert enough
    assert made(1e9 * float(enough[1])).streamed
    with pytest.raises(PlanError, match="nothing fits"):
        made(0.99e9 * float(enough[1]))


def test_recomputation_is_enough_with_weights_on_the_host() -> None:
    with pytest.raises(PlanError, match=r"recompute=True \(for breadth-first .* and weights on the host\)"):
        penstock.plan(SHORT, host(1, 6e9), microbatches=2, recompute=False)
    with pytest.raises(PlanError, match="no plan: expected no other schedule than breadth-first beside streamed=True"):
        penstock.plan(PROFILE, host(1, 7e9), microbatches=4, schedule="gpipe", streamed=True)
