"""PipeDream's partitioner by hand, and straight on the profiles that its authors measured."""

from functools import cache

import pytest

from penstock.values import Cluster, LayerProfile, Profile
from support.paper_plans import partition
from support.paths import PIPEDREAM

MODELS = ("gnmt", "resnet18", "resnet50", "squeezenet1_0", "vgg16")


@cache
def load(model):
    return Profile.from_pipedream(PIPEDREAM / model / "graph.txt")


def test_a_matrix_of_links_is_planned_link_by_link_when_straight():
    """The cut of 12 bytes goes over the fast link, whichever that is."""
    layers = [LayerProfile(str(index), 1, 1, cut, 0, 0) for index, cut in enumerate((12, 1, 12, 1))]
    fast_first = Cluster.from_matrix([[0, 12, 1], [12, 0, 1], [1, 1, 0]])
    fast_last = Cluster.from_matrix([[0, 1, 1], [1, 0, 12], [1, 12, 0]])

    def cuts(cluster):
        return [stage.stop for stage in partition(Profile(tuple(layers), 1), cluster, straight=True).stages]

    assert cuts(fast_first) == [1, 2, 4]
    assert cuts(fast_last) == [2, 3, 4]


def test_the_balance_decides_between_equal_straight_plans():
    """One layer of 10 decides; the four layers of 1 behind it are still shared evenly."""
    layers = [LayerProfile(str(index), seconds, 0, 0, 0, 0) for index, seconds in enumerate((10, 1, 1, 1, 1))]
    plan = partition(Profile(tuple(layers), 1), Cluster.uniform(3, 1.0), straight=True)

    assert [stage.stop for stage in plan.stages] == [1, 3, 5]


@pytest.mark.parametrize("workers", [4, 8, 16])
@pytest.mark.parametrize("model", MODELS)
def test_each_profile_is_cut_straight_for_4_8_and_16_workers(model, workers):
    profile = load(model)
    cluster = Cluster.hierarchical([(4, 12e9), (workers // 4, 1.25e9)])
    plan = partition(profile, cluster, straight=True)
    loads = [sum(layer.seconds for layer in profile.layers[stage.start : stage.stop]) for stage in plan.stages]
    sent = [
        2 * profile.layers[stage.stop - 1].cut_bytes / cluster.bandwidth(index, index + 1)
        for index, stage in enumerate(plan.stages[:-1])
    ]

    assert len(plan.stages) == workers
    assert plan.predicted.bottleneck_seconds == pytest.approx(max(*loads, *sent), rel=1e-12)
