"""Kinds of devices: in clusters and their files, and the times of a profile on each of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ProfileError
from penstock.values import Cluster, DeviceKind, LayerProfile, LinkLevels, LinkMatrix, Profile
from support.strategies import clusters, profiles

FAST = DeviceKind("fast", memory_bytes=8e9, price_per_hour=2.5)
SLOW = DeviceKind("slow", speed=0.5)
LAYER = LayerProfile("h.0", 0.25, 0.5, 10, 20, 30, 40)


def test_every_device_has_its_kind():
    cluster = Cluster.uniform(3, 1e9, memory_bytes=4e9).with_kinds([FAST, SLOW, SLOW])

    assert [cluster.kind_of(rank) for rank in range(3)] == [FAST, SLOW, SLOW]
    assert [cluster.memory_of(rank) for rank in range(3)] == [8e9, 4e9, 4e9]
    assert cluster.least_memory_bytes == 4e9
    assert cluster.price_per_hour() == 2.5
    assert cluster.price_per_hour([1, 2]) == 0.0
    assert not cluster.is_equal


def test_devices_without_kinds_are_equal():
    plain = Cluster.uniform(2, 1e9, 4e9)

    assert plain.is_equal
    assert plain.kind_of(1) == DeviceKind()
    assert plain.memory_of(1) == plain.least_memory_bytes == 4e9


def test_a_price_makes_no_device_unequal_and_a_speed_does():
    cluster = Cluster.uniform(2, 1e9, 8e9)

    assert cluster.with_kinds([DeviceKind("fast"), FAST]).is_equal
    assert not cluster.with_kinds([DeviceKind("fast"), DeviceKind("fast", 0.9)]).is_equal
    assert not cluster.with_kinds([DeviceKind("fast"), DeviceKind("fast", memory_bytes=1e9)]).is_equal


def test_a_file_lists_the_kinds_in_rows(tmp_path):
    path = tmp_path / "machine.yaml"
    Cluster.uniform(3, 1e9).with_kinds([FAST, SLOW, SLOW]).save(path)

    assert path.read_text().splitlines()[2:5] == [
        "kinds: # of the devices, in the order of their ranks",
        '- {devices: 1, name: "fast", memory_bytes: 8000000000.0, price_per_hour: 2.5}',
        '- {devices: 2, name: "slow", speed: 0.5}',
    ]


@given(clusters(), st.data())
def test_picked_devices_keep_their_links_and_kinds(cluster, data):
    ranks = data.draw(st.lists(st.integers(0, cluster.devices - 1), min_size=1, max_size=8, unique=True))
    picked = cluster.pick(ranks)

    assert picked.devices == len(ranks)
    for a, rank in enumerate(ranks):
        assert picked.kind_of(a) == cluster.kind_of(rank)
        assert picked.memory_of(a) == cluster.memory_of(rank)
        for b, other in enumerate(ranks):
            assert picked.bandwidth(a, b) == cluster.bandwidth(rank, other)
            assert picked.latency(a, b) == cluster.latency(rank, other)


def test_whole_components_stay_levels():
    cluster = Cluster.hierarchical([(2, 100.0), (3, 10.0)])

    assert cluster.pick(range(4)).links == LinkLevels(((2, 100.0), (2, 10.0)))
    assert cluster.pick(range(2, 6)).links == LinkLevels(((2, 100.0), (2, 10.0)))
    assert cluster.pick((4, 5)).links == LinkLevels(((2, 100.0),))
    assert isinstance(cluster.pick((1, 2)).links, LinkMatrix)
    assert isinstance(cluster.pick((1, 0)).links, LinkMatrix)


def test_a_layer_takes_what_was_measured_on_its_kind():
    measured = LayerProfile("h.0", 1.0, 3.0, 10, 20, 30, weight_seconds=1.25)
    both = Profile((LAYER,), 1, device="fast").joined(Profile((measured,), 1, device="slow"))

    assert both.times_on(DeviceKind("slow")).backward_seconds == (3.0,)
    assert both.times_on(DeviceKind("slow")).weight_seconds == (1.25,)
    assert both.times_on(DeviceKind("slow", speed=2)).forward_seconds == (0.5,)
    assert both.times_on(DeviceKind("fast")).forward_seconds == (0.25,)
    assert both.on(DeviceKind("slow")).layers[0].saved_bytes == 20
    with pytest.raises(ProfileError, match="Did you mean 'slow'"):
        both.times_on(DeviceKind("slwo"))
    assert both.times_on(DeviceKind("slwo", speed=0.5)).forward_seconds == (0.5,)


@given(profiles())
def test_a_profile_on_its_own_device_is_itself(profile):
    alone = profile.on(DeviceKind(profile.device))

    assert alone.layers == profile.layers
    assert alone.others == ()


def test_every_number_of_seconds_is_scaled_and_nothing_else():
    layers = (LayerProfile("a", 1.0, 2.0, 3, 4, 5, weight_seconds=0.5), LayerProfile("b", 0.0, 4.0, 3, 4, 5))
    found = Profile(layers, 2, "model").on(DeviceKind("twice as fast", speed=2.0))

    assert found == Profile(
        (LayerProfile("a", 0.5, 1.0, 3, 4, 5, weight_seconds=0.25), LayerProfile("b", 0.0, 2.0, 3, 4, 5)), 2, "model"
    )
