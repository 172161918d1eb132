"""Repeated blocks are found in chains that were built from them, whatever the noise of the clock."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planning.two_bw.block_chains import TIME_TOLERANCE, RepeatedBlocks, cut_positions, find_blocks
from penstock.values import LayerProfile, Profile
from support.paths import PIPEDREAM

FILES = PIPEDREAM


def layer(seconds=1.0, weights=1.0, cut=1.0, saved=1.0, name="layer"):
    return LayerProfile(name, seconds, 2 * seconds, cut, saved, weights)


def gpt(blocks, noise=lambda: 1.0):
    """An embedding, blocks of norm, attention, norm and MLP as four layers, a norm and a head."""
    chain = [layer(0.1, 500, 4, 0)]
    for _ in range(blocks):
        chain += [layer(0.05 * noise(), 1, 8, 4), layer(1.0 * noise(), 40, 4, 30)]
        chain += [layer(0.05 * noise(), 1, 8, 4), layer(2.0 * noise(), 80, 4, 40)]
    chain += [layer(0.05, 1, 4, 4), layer(3.0, 500, 100, 100)]
    return Profile(tuple(chain), 1)


def test_blocks_of_a_gpt_are_found_layer_by_layer():
    assert find_blocks(gpt(6)) == RepeatedBlocks(1, 4, 6, 2)


def test_blocks_that_are_single_layers_are_found():
    chain = [layer(5, weights=9), *[layer()] * 8, layer(7, weights=3)]

    assert find_blocks(Profile(tuple(chain), 4)) == RepeatedBlocks(1, 1, 8, 1)


@pytest.mark.parametrize(("cheap", "begin"), [(0, 1), (1, 0)])
def test_blocks_begin_where_the_fewest_bytes_cross(cheap, begin):
    """A run of 9 layers with period 2 can begin at either phase; skip connections make one of them dear to cut."""
    pair = [layer(weights=1, cut=1 + 7 * cheap), layer(weights=2, cut=8 - 7 * cheap)]
    found = find_blocks(Profile((*pair * 4, pair[0]), 1))

    assert found == RepeatedBlocks(begin, 2, 4, 1 - begin)


def test_vgg_has_no_repetition_of_note():
    found = find_blocks(Profile.from_pipedream(FILES / "vgg16" / "graph.txt"))

    assert found.count == 0
    assert found.prefix == found.layers
    assert found.cuts == tuple(range(found.layers + 1))


def test_equal_sizes_with_other_times_are_other_layers():
    slow = [layer(1.0), layer(2.0)] * 4

    assert find_blocks(Profile(tuple(slow), 1)).length == 2


def test_one_byte_makes_another_layer():
    chain = [layer(weights=100), layer(weights=101)] * 3

    assert find_blocks(Profile(tuple(chain), 1)) == RepeatedBlocks(0, 2, 3, 0)


def test_a_chain_of_one_layer_has_no_blocks():
    assert find_blocks(Profile((layer(),), 1)) == RepeatedBlocks(1, 0, 0, 0)


@st.composite
def chains(draw):
    """(Blocks that the chain was built from, profile): layers of a block, prefix or suffix have sizes of their own."""
    length, count = draw(st.integers(1, 5)), draw(st.integers(2, 8))
    prefix, suffix = draw(st.integers(0, 3)), draw(st.integers(0, 3))
    # Neighbours in time differ by at most the tolerance: each is within half of it around the true time.
    noise = st.floats(1 - TIME_TOLERANCE / 2, 1.0)
    sizes = iter(range(1, 100))
    block = [(next(sizes), draw(st.floats(0.5, 2.0))) for _ in range(length)]
    rare = [(next(sizes), 0.01) for _ in range(prefix + suffix)]
    layers = [*rare[:prefix], *block * count, *rare[prefix:]]
    measured = tuple(layer(seconds * draw(noise), weights, cut=5) for weights, seconds in layers)
    return RepeatedBlocks(prefix, length, count, suffix), Profile(measured, 2)


@settings(max_examples=400, deadline=None)
@given(chains())
def test_blocks_that_a_chain_was_built_from_are_found(case):
    built, profile = case

    assert find_blocks(profile) == built


@settings(max_examples=200, deadline=None)
@given(chains(), st.integers(1, 8))
def test_equal_cuts_share_the_blocks_out(case, stages):
    blocks, _ = case
    cuts = blocks.equal_cuts(stages)

    if stages > 1 and blocks.count % stages:
        assert cuts is None
        return
    assert cuts is not None and set(cuts) <= set(blocks.cuts)
    lengths = [stop - start for start, stop in pairwise(cuts)]
    lengths[0] -= blocks.prefix
    lengths[-1] -= blocks.suffix
    assert lengths == [blocks.count // stages * blocks.length] * stages


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 5), st.integers(0, 9)), min_size=1, max_size=40), st.integers(2, 50))
def test_places_of_a_long_chain_are_few_and_cheap(rows, most):
    profile = Profile(tuple(layer(seconds, weights=i, cut=cut) for i, (seconds, cut) in enumerate(rows)), 1)
    blocks = find_blocks(profile)
    positions = cut_positions(profile, blocks, most)

    assert blocks.count == 0
    assert (positions[0], positions[-1]) == (0, len(rows))
    assert list(positions) == sorted(set(positions))
    if len(rows) < most:
        assert positions == blocks.cuts
        return
    assert len(positions) <= most + 2
    # Between two positions lie two shares at the most, and the layers that reach beyond them.
    share, longest = profile.seconds / most, max(row.seconds for row in profile.layers)
    for start, stop in pairwise(positions):
        assert sum(row.seconds for row in profile.layers[start:stop]) <= 2 * share + longest + 1e-9


def test_blocks_are_never_thinned_out():
    profile = gpt(30)

    assert cut_positions(profile, find_blocks(profile), 4) == find_blocks(profile).cuts
