"""Where nothing fits, the message says what would be needed, and what it names does help: it is tried here too."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.planning.pipedream.least_memory import least_rank_bytes
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
@settings(max_examples=60, deadline=None)
@given(profiles(), st.sampled_from((1, 2)), requests, st.floats(0.3, 1))
def test_what_is_named_makes_a_plan_fit_and_what_is_not_does_not(profile, devices, request, share):
    least = least_rank_bytes(profile, devices, request)
    memory = least * share * 0.999
    if memory <= 0:
        return
    text = told(profile, devices, memory, request)

    memory_words, *changes = text.split("would be enough: ")[1].split("; ")
    assert memory_words == f"{bytes_text(least)} on each device"
    if request.schedule != "interleaved":
        assert plan_exists(profile, devices, least, request)
        flushing = replace(request, schedule="1f1b-flush")
        assert ("schedule='1f1b-flush'" in text) == (
            request.schedule != "1f1b-flush" and plan_exists(profile, devices, memory, flushing)
        )
    assert ("recompute=True" in text) == plan_exists(profile, devices, memory, replace(request, recompute=True))
    for samples, larger in ((4, 8), (2, 4), (1, 2)):
        named = f"microbatches of {samples} samples" in text
        before = larger < 8 and plan_exists(profile.scaled(larger), devices, memory, request)
        assert named == (not before and plan_exists(profile.scaled(samples), devices, memory, request))
    more = [count for count in (2, 4, 8) if plan_exists(profile, count * devices, memory, request)]
    assert all((f" {count * devices} devices" in text) == (more[:1] == [count]) for count in (2, 4, 8))
    known = ("recompute=True", "schedule=", "vertical_sync=False", "microbatches=", "microbatches of ", "")
    kinds = [next(kind for kind in known if change.startswith(kind)) for change in changes]
    assert len(set(kinds)) == len(kinds)
    assert all(change.endswith(" devices") for change, kind in zip(changes, kinds, strict=True) if not kind)


def test_the_message_reads_well():
    """A layer saves 8 bytes of 8 samples and has 100 of weights, 400 with gradients and Adam."""
    profile = Profile(tuple(LayerProfile(str(index), 1, 1, 2, 8, 100) for index in range(4)), 8)

    assert told(profile, 2, 860, Request("gpipe", 8)) == (
        "nothing fits: expected a plan under gpipe with at most 860 B on each of 2 devices, found none for 400 B of "
        "weights. Each of these would be enough: 928 B on each device; recompute=True; schedule='1f1b-flush'; "
        "microbatches=2; microbatches of 2 samples; 4 devices"
    )
    assert told(profile, 2, 100, Request("1f1b-flush", 8)) == (
        "nothing fits: expected a plan under 1f1b-flush with at most 100 B on each of 2 devices, found none for 400 B "
        "of weights. Each of these would be enough: 832 B on each device"
    )
