"""The cheapest plan in time is that of the cheapest part of the cluster that is fast enough."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from penstock import Cluster, DeviceKind, LayerProfile, PlanError, Profile, plan
from penstock.cli import main
from penstock.planning.planners import plan_in_time

PROFILE = Profile(
    tuple(
        LayerProfile(f"layer {n}", 1e-3, 2e-3, cut_bytes=1e5, saved_bytes=1e6, parameter_bytes=4e6) for n in range(4)
    ),
    microbatch_size=8,
)
FAST, SLOW = DeviceKind("fast", speed=4.0, price_per_hour=8.0), DeviceKind("slow", price_per_hour=1.0)
CLUSTER = Cluster.uniform(4, 1e9).with_kinds([FAST, FAST, SLOW, SLOW])
OPTIONS: dict[str, Any] = {"microbatches": 16, "progress": False}
EPOCH = 1e6


def seconds_and_cost(ranks: tuple[int, ...]) -> tuple[float, float]:
    """Seconds and cost of an epoch under the fastest plan of these devices, whose price is paid for the time."""
    part = CLUSTER.pick(ranks)
    found = plan(PROFILE, part, **OPTIONS)
    seconds = EPOCH / found.predicted.samples_per_second
    price = sum(part.kind_of(rank).price_per_hour for rank in found.devices or range(found.ranks))
    return seconds, seconds / 3600 * price


@cache
def parts() -> dict[tuple[int, ...], tuple[float, float]]:
    """Every part of the cluster, planned by the first test and not by each process that collects the tests."""
    return {ranks: seconds_and_cost(ranks) for ranks in ((0,), (0, 1), (2,), (2, 3), (0, 1, 2, 3))}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("patience", [1.001, 1.3, 2.0, 3.0, 5.0, 9.0])
def test_the_cheapest_part_that_is_fast_enough_is_taken(patience):
    deadline = patience * min(seconds for seconds, _ in parts().values())
    in_time = {ranks: cost for ranks, (seconds, cost) in parts().items() if seconds <= deadline}
    found = plan(PROFILE, CLUSTER, epoch_samples=EPOCH, deadline_seconds=deadline, **OPTIONS)
    seconds = EPOCH / found.predicted.samples_per_second
    price = CLUSTER.price_per_hour(found.devices or range(found.ranks))

    assert seconds <= deadline
    assert seconds / 3600 * price == pytest.approx(min(in_time.values()), rel=1e-9)
    assert set(found.devices or range(found.ranks)) <= set(min(in_time, key=lambda ranks: in_time[ranks]))
    assert ("too late" in found.explain()) == (len(in_time) < len(parts())) and "taken" in found.explain()


def test_every_number_of_devices_is_compared():
    """Three layers fit three devices best: they are fast enough, and cost less than four."""
    four = Cluster.uniform(4, 1e9).with_kinds([SLOW] * 4)
    profile = replace(PROFILE, layers=PROFILE.layers[:3])
    three = plan(profile, four.pick((0, 1, 2)), **OPTIONS)
    deadline = EPOCH / three.predicted.samples_per_second * (1 + 1e-9)
    found = plan(profile, four, epoch_samples=EPOCH, deadline_seconds=deadline, **OPTIONS)

    assert (found.devices or tuple(range(found.ranks))) == (0, 1, 2)


def test_of_many_devices_powers_of_two_are_compared():
    """A plan of many devices takes long."""
    sizes = []

    def refuse(part):
        sizes.append(part.devices)
        raise PlanError("refused")

    for count in (16, 17, 40):
        with pytest.raises(PlanError, match="refused"):
            plan_in_time(refuse, Cluster.uniform(count, 1e9).with_kinds([SLOW] * count), EPOCH, 1e9)
    assert sizes == [*range(1, 17), 1, 2, 4, 8, 16, 17, 1, 2, 4, 8, 16, 32, 40]


def test_time_costs_money():
    """Six seconds of one slow device cost less than what is faster, and a loose deadline finds it."""
    loose = plan(PROFILE, CLUSTER, epoch_samples=EPOCH, deadline_seconds=1e9, **OPTIONS)
    fastest = plan(PROFILE, CLUSTER, epoch_samples=EPOCH, **OPTIONS)

    assert loose.devices == (2,)
    assert "per epoch" in fastest.explain() and "per million" in fastest.explain()
    assert "per epoch" not in plan(PROFILE, CLUSTER, **OPTIONS).explain()


@pytest.mark.sampled(0)
def test_impossible_deadlines_say_what_is_possible():
    fastest = min(seconds for seconds, _ in parts().values())
    with pytest.raises(PlanError, match=f"deadline_seconds: expected {fastest:.6g} or more, .* on 2 x fast, found 1:"):
        plan(PROFILE, CLUSTER, epoch_samples=EPOCH, deadline_seconds=1, **OPTIONS)


def test_parts_do_the_same_minibatch():
    """The default is that of the whole cluster, so that a smaller part does not make smaller minibatches."""
    found = plan(PROFILE, CLUSTER, epoch_samples=EPOCH, deadline_seconds=1e9, progress=False)

    assert found.microbatches == 4 * CLUSTER.devices
    free = replace(SLOW, price_per_hour=0.0)
    unknown = plan(PROFILE, CLUSTER.with_kinds([FAST, FAST, free, free]), **OPTIONS, epoch_samples=EPOCH)
    assert unknown.predicted.samples_per_second > 0


def test_the_command_takes_a_deadline(tmp_path, capsys):
    PROFILE.save(tmp_path / "profile.json")
    CLUSTER.save(tmp_path / "cluster.yaml")
    words = ["plan", str(tmp_path / "profile.json"), str(tmp_path / "cluster.yaml")]
    assert main([*words, "--epoch-samples", "1e6", "--deadline-seconds", "1e9"]) == 0
    assert "The cheapest plan that ends an epoch in" in capsys.readouterr().out
    assert main([*words, "--epoch-samples", "1e6", "--deadline-seconds", "1e-3"]) == 1
    assert "give more time, or more devices" in capsys.readouterr().err
