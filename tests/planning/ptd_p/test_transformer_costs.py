"""Costs of the parts of a transformer, of rings, and of memory, against formulas of the papers."""

import math
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.planning.ptd_p.accelerator_models import A100
from penstock.planning.ptd_p.parallel_configs import (
    ParallelLinks,
    activation_bytes,
    boundary_seconds,
    checkpoint_count,
    stages_in_flight,
)
from penstock.planning.ptd_p.ring_links import Ring, data_ring, pipeline_ring, tensor_ring
from penstock.planning.ptd_p.transformer_costs import profile_of, tensor_parallel_costs
from penstock.scheduling.actions import Backward, Forward
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan, schedule
from support.transformer_arrangements import GPT_1B, GPT_1T, GPT_6B, GPT_175B, selene

# Accelerators, rings, modules.


def test_a_very_large_product_reaches_the_efficiency() -> None:
    seconds = A100.product_seconds(1e6, 1e6, 1e6)

    assert math.isclose(2e18 / seconds, A100.efficiency * A100.peak_operations, rel_tol=1e-5)


def test_a_group_leaves_a_server_over_the_cards_of_all_its_devices() -> None:
    cluster = selene(64)

    assert tensor_ring(cluster, 64, 8).bandwidth == 300e9
    assert tensor_ring(cluster, 64, 16).bandwidth == 8 * 25e9
    assert data_ring(cluster, 64, 1, 64).bandwidth == 8 * 25e9
    assert data_ring(cluster, 64, 4, 16).bandwidth == 2 * 25e9
    assert data_ring(cluster, 64, 8, 8).bandwidth == 25e9
    assert pipeline_ring(cluster, 64, 8).bandwidth == 25e9
    assert pipeline_ring(cluster, 64, 64).bandwidth == 25e9


def test_a_matrix_has_one_ring_over_its_neighbours() -> None:
    rows = [[0, 5, 1, 1], [4, 0, 7, 1], [1, 8, 0, 6], [9, 1, 5, 0]]
    cluster = Cluster.from_matrix(rows)

    # Around and back: 0-1-2-3-0 has 5, 7, 6, 9 and backwards 4, 8, 5, 1.
    assert tensor_ring(cluster, 4, 4) == Ring(4, 1)
    assert tensor_ring(cluster, 4, 2) == Ring(2, 4)
    assert data_ring(cluster, 4, 2, 2) == Ring(2, 1)


@pytest.mark.parametrize(("tensor", "b"), list(product([1, 2, 4, 8, 16], [1, 2, 4])))
def test_tensor_parallel_volume_is_8bsh_per_layer(tensor: int, b: int) -> None:
    costs = tensor_parallel_costs(GPT_175B, A100, Ring(tensor, 300e9), b)
    numbers = costs.layer.reduce_seconds * 300e9 / 2

    assert math.isclose(numbers, 8 * b * 2048 * 12288 * (tensor - 1) / tensor)


@pytest.mark.parametrize("b", [1, 2, 4])
def test_scatter_and_gather_sends_a_tth_and_is_never_slower(b: int) -> None:
    links = ParallelLinks(Ring(8, 300e9), Ring(1), Ring(12, 25e9))
    costs = tensor_parallel_costs(GPT_175B, A100, links.tensor, b)
    whole, none, all_bytes = boundary_seconds(costs, replace(links, scatter_gather=False))
    scattered, _, part_bytes = boundary_seconds(costs, links)

    assert (none, all_bytes) == (0.0, 2 * b * 2048 * 12288)
    assert part_bytes == all_bytes / 8
    assert math.isclose(scattered, part_bytes / 25e9 + 7 / 8 * all_bytes / 300e9)
    assert scattered < whole
    # Where the links between stages are as fast as those of the group, there is nothing to gain.
    fast = replace(links, pipeline=Ring(12, 300e9))
    assert boundary_seconds(costs, fast)[0] <= all_bytes / 300e9


def test_saved_bytes_are_those_of_korthikanti() -> None:
    for transformer, b, t in product([GPT_175B, GPT_1T, GPT_1B], [1, 3], [1, 2, 8]):
        s, h, a = transformer.sequence, transformer.hidden, transformer.heads
        found = tensor_parallel_costs(transformer, A100, Ring(t), b).layer.saved_bytes

        assert math.isclose(found, s * b * h * (10 + 24 / t + 5 * a * s / (h * t)))
        if t == 1:
            assert math.isclose(found, s * b * h * (34 + 5 * a * s / h))


def test_a_profile_has_the_parameters_and_seconds_of_the_parts() -> None:
    profile = profile_of(GPT_6B, A100, selene(8), microbatch_size=2)
    costs = tensor_parallel_costs(GPT_6B, A100, Ring(1), 2)
    table = GPT_6B.vocabulary * GPT_6B.hidden

    assert len(profile) == GPT_6B.layers + 2
    assert profile.microbatch_size == 2
    # The head has a copy of the table.
    assert math.isclose(profile.parameter_bytes, 2 * (GPT_6B.parameters + table))
    assert math.isclose(profile.seconds, 32 * costs.layer.seconds + costs.embedding.seconds + costs.head.seconds)


def test_a_profile_of_cut_layers_has_their_reductions_in_it() -> None:
    slow = profile_of(GPT_6B, A100, Cluster.uniform(8, 1e9), tensor_parallel=4)
    fast = profile_of(GPT_6B, A100, Cluster.uniform(8, 1e12), tensor_parallel=4)
    numbers = 8 * GPT_6B.sequence * GPT_6B.hidden * 3 / 4

    assert math.isclose(slow.layers[5].seconds - fast.layers[5].seconds, 2 * numbers * (1e-9 - 1e-12))
    assert slow.layers[5].cut_bytes == 2 * 2048 * 3840 / 4


# Memory.


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 200), st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(1, 200))
def test_the_checkpoint_count_is_the_best_of_all(layers: int, kept: float, layer: float, in_flight: int) -> None:
    def size(count: int) -> float:
        return in_flight * count * kept + math.ceil(layers / count) * layer

    found = checkpoint_count(layers, kept, layer, in_flight)

    assert found == min(range(1, layers + 1), key=lambda count: (size(count), count))


def test_activation_bytes_are_those_of_section_4_3_5() -> None:
    costs = tensor_parallel_costs(GPT_175B, A100, Ring(8), 1)
    kept, layer = costs.boundary_bytes, costs.layer.saved_bytes

    assert kept == 2 * 2048 * 12288
    assert activation_bytes(costs, 8, 1, 4) == 4 * kept + 2 * layer
    assert activation_bytes(costs, 8, 5, 4) == 20 * kept + 2 * layer
    assert activation_bytes(costs, 8, 5, None) == 40 * layer


@pytest.mark.parametrize(("p", "v", "rounds"), list(product([1, 2, 3, 4, 6], [1, 2, 3], [1, 2, 4])))
def test_stages_in_flight_are_those_of_the_schedule(p: int, v: int, rounds: int) -> None:
    if p == 1 and v > 1:
        return
    m = p * rounds
    name = "interleaved" if v > 1 else "1f1b-flush"
    program = schedule(Plan.of_cuts(range(p * v + 1), p, name, m)).step(0)

    for position, row in enumerate(program):
        held, most, first, most_first = 0, 0, 0, 0
        for action in row:
            change = {Forward: 1, Backward: -1}.get(type(action), 0)
            held += change
            first += change if change and action.stage == 0 else 0
            most, most_first = max(most, held), max(most_first, first)
        assert most == stages_in_flight(p, v, m, position)
        if position == 0:
            assert most_first <= min(m, p if v == 1 else 2 * p)
