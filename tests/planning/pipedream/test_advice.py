"""Where nothing fits, the message says what would be needed, and what it names does help: it is tried here too."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.planning.pipedream.advice import least_rank_bytes
from penstock.planning.pipedream.partitions import plan_pipedream
from penstock.planning.requests import Request
from penstock.values import Cluster, LayerProfile, Profile
from penstock.values.quantities import bytes_text


def plan_exists(profile, devices, memory, request):
    try:
        plan_pipedream(profile, Cluster.uniform(devices, 4.0, memory), request)
    except PlanError:
        return False
    return True


def told(profile, devices, memory, request):
    with pytest.raises(PlanError) as error:
        plan_pipedream(profile, Cluster.uniform(devices, 4.0, memory), request)
    return str(error.value)


@st.composite
def profiles(draw):
    rows = draw(st.lists(st.tuples(*[st.integers(0, 9)] * 2, *[st.integers(0, 60)] * 3), min_size=2, max_size=6))
    return Profile(tuple(LayerProfile(str(index), *row) for index, row in enumerate(rows)), 8)


requests = st.one_of(
    st.builds(
        Request,
        schedule=st.sampled_from(("gpipe", "1f1b-flush", "spp", "pipedream", "2bw")),
        microbatches=st.integers(1, 9),
        straight=st.booleans(),
        vertical_sync=st.booleans(),
    ),
    st.builds(
        Request, schedule=st.just("interleaved"), microbatches=st.sampled_from((4, 8, 12)), stages_per_rank=st.just(1)
    ),
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(profiles(), st.sampled_from((1, 2)), requests, st.floats(0.3, 1))
def test_what_is_named_makes_a_plan_fit_and_what_is_not_does_not(profile, devices, request, share):
    least = least_rank_bytes(profile, devices, request)
    memory = least * share * 0.999
    if memory <= 0:
        return
    text = told(profile, devices, memory, request)

    assert f"takes {bytes_text(least)} at the least" in text
    if request.schedule != "interleaved":
        assert plan_exists(profile, devices, least, request)
        flushing = replace(request, schedule="1f1b-flush")
        assert ("schedule='1f1b-flush'" in text) == (
            request.schedule != "1f1b-flush" and plan_exists(profile, devices, memory, flushing)
        )
    assert ("recompute=True" in text) == plan_exists(profile, devices, memory, replace(request, recompute=True))
    for samples, larger in ((4, 8), (2, 4), (1, 2)):
        named = f"{samples} instead of 8 samples" in text
        before = larger < 8 and plan_exists(profile.scaled(larger), devices, memory, request)
        assert named == (not before and plan_exists(profile.scaled(samples), devices, memory, request))
    more = [count for count in (2, 4, 8) if plan_exists(profile, count * devices, memory, request)]
    assert all((f" {count * devices} devices" in text) == (more[:1] == [count]) for count in (2, 4, 8))
    assert ("It would fit" in text) != ("No single change" in text)


def test_the_message_reads_well():
    """A layer saves 8 bytes of 8 samples and has 100 of weights, 400 with gradients and Adam."""
    profile = Profile(tuple(LayerProfile(str(index), 1, 1, 2, 8, 100) for index in range(4)), 8)

    assert told(profile, 2, 860, Request("gpipe", 8)) == (
        "nothing fits: expected a plan under gpipe with at most 860 B on each of 2 devices, found that the rank that "
        "needs most takes 928 B at the least. It would fit with recompute=True, or with schedule='1f1b-flush', or with "
        "microbatches=2, or with 2 instead of 8 samples, or with 4 devices"
    )
    assert told(profile, 2, 100, Request("1f1b-flush", 8)) == (
        "nothing fits: expected a plan under 1f1b-flush with at most 100 B on each of 2 devices, found that the rank "
        "that needs most takes 832 B at the least. No single change of recompute, schedule, microbatches or devices "
        "(up to 64) is enough: combine them, give devices of 832 B, or split the layers (the largest has 100 B of "
        "weights, and 4 times that with gradients and optimizer)"
    )
