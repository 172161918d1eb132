"""PyTorch's own parallelism inside of stages: the numbers of one device, and 1/t of the bytes between stages."""

from dataclasses import replace
from functools import cache

import pytest
import torch

import penstock
from penstock.oracle.references import Reference
from support.jobs import composition_jobs as jobs
from support.jobs.composition_jobs import Outcome, Run
from support.processes import Pool

ROUNDING = 1e-14
"""Tensor parallelism adds the parts of a row-wise layer in another order than one device does. In float64 that is
1e-16 of a number of order one; four steps make it no more than this."""


@cache
def reference(run: Run) -> Reference:
    return penstock.reference_train(run.build(), jobs.TRAINED, **run.options)


@cache
def train(pool: Pool, run: Run) -> list[Outcome]:
    return pool.run(run.plan.ranks, jobs.train, run)


def farthest(run: Run, outcomes: list[Outcome]) -> float:
    """The largest difference from the oracle, of all losses and weights on all processes."""
    expected = reference(run)
    differences = [
        float((tensor - expected.state[name]).abs().max())
        for outcome in outcomes
        for name, tensor in outcome.state.items()
    ]
    assert {name for outcome in outcomes for name in outcome.state} == expected.state.keys()
    pairs = [pair for outcome in outcomes for pair in zip(outcome.losses, expected.losses, strict=True)]
    return max(*differences, *(abs(one - other) for one, other in pairs))


def activation_bytes(run: Run) -> int:
    """What crosses one cut in one direction in a whole training: all samples, once a step."""
    return len(jobs.TRAINED) * jobs.BATCHES[0][0].numel() * jobs.WIDTH * 8


SPLIT = (
    Run("split_columns_and_rows", tp=2, blocks=4),
    Run("split_columns_and_rows", "pipedream", tp=2, vertical_sync=True),
    Run("split_columns_and_rows", "2bw", tp=2, recompute="layers"),
    Run("split_sequence", "pipedream", tp=2),
    Run("split_logits", tp=2),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", SPLIT, ids=str)
def test_two_by_two_stages_and_tp_ranks_are_one_device(pool: Pool, run: Run) -> None:
    outcomes = train(pool, run)

    assert farthest(run, outcomes) < ROUNDING
    assert [outcome.sent_bytes for outcome in outcomes] == [activation_bytes(run) // 2] * 4
    for outcome in outcomes[1:]:
        assert outcome.evaluated == outcomes[0].evaluated
        assert torch.equal(outcome.predicted, outcomes[0].predicted)


def test_interleaved_stages_send_a_part_over_every_cut(pool: Pool) -> None:
    run = Run("split_columns_and_rows", "interleaved", stages=4, tp=2)
    outcomes = train(pool, run)

    assert farthest(run, outcomes) < ROUNDING
    # Three cuts, there and back, of which the processes at either end send one direction each.
    assert sum(outcome.sent_bytes for outcome in outcomes) == 3 * 2 * activation_bytes(run)


SHARDED = (
    Run("shard_blocks", replicas=2, optimizer="adamw", blocks=4),
    Run("shard_blocks", "spp", replicas=2, microbatches=3, split=True),
    Run("shard_blocks", replicas=2, recompute=True),
)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("run", SHARDED, ids=str)
def test_fully_sharded_replicas_are_one_device_bit_for_bit(pool: Pool, run: Run) -> None:
    """Two summands have one sum."""
    assert farthest(run, train(pool, run)) == 0


def test_replicas_of_several_stages_are_fully_sharded(pool: Pool) -> None:
    """The same ranks sum for two stages, of which each has sharded parameters and others."""
    run = Run("shard_some", "interleaved", stages=4, replicas=2)

    assert farthest(run, train(pool, run)) == 0


LANES_AND_REPLICAS = (
    Run("split_columns_and_rows", stages=1, tp=2, replicas=2),
    Run("split_sequence", "pipedream", stages=1, tp=2, replicas=2, microbatches=5),
    Run("split_columns_and_rows", "2bw", stages=1, tp=2, replicas=2, split=True),
    Run("split_columns_and_rows", stages=1, tp=2, replicas=2, shares=True, most=0.5),
    Run("split_and_shard", stages=1, tp=2, replicas=2),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", LANES_AND_REPLICAS, ids=str)
def test_replicas_of_several_tp_ranks_sum_their_shards(pool: Pool, run: Run) -> None:
    assert farthest(run, train(pool, run)) < ROUNDING


TRACED = (
    Run("split_own_blocks", "2bw", tp=2, recompute=True, traced=True),
    Run("split_own_blocks", "zb-h1", tp=2, traced=True),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", TRACED, ids=str)
def test_the_blocks_of_a_traced_model_are_split(pool: Pool, run: Run) -> None:
    outcomes = train(pool, run)

    assert farthest(run, outcomes) < ROUNDING
    for outcome in outcomes[1:]:
        assert outcome.evaluated == outcomes[0].evaluated


@pytest.mark.sampled(1)
@pytest.mark.parametrize("recompute", [None, True])
def test_the_blocks_of_a_traced_model_are_fully_sharded(pool: Pool, recompute: bool | None) -> None:
    run = Run("shard_own_blocks", replicas=2, recompute=recompute, traced=True)

    assert farthest(run, train(pool, run)) == 0


DIVIDED = (
    Run("split_sequence", "zb-h1", tp=2, recompute=True, most=0.5, scales=True),
    Run("split_sequence", "zb-h1", stages=1, tp=2, replicas=2),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", DIVIDED, ids=str)
def test_backwards_of_split_layers_are_divided(pool: Pool, run: Run) -> None:
    assert farthest(run, train(pool, run)) < ROUNDING


def test_weight_backwards_compute_the_gradients_of_shards(pool: Pool) -> None:
    """And the input backward does not."""
    for left, shares in pool.run(2, jobs.divide_backward):
        assert left == {"attention.query", "attention.key", "attention.value", "attention.out", "up", "down"}
        assert set(shares) == {True}


def test_split_layers_read_predicted_weights(pool: Pool) -> None:
    run = Run("split_sequence", "2bw", tp=2, predicted=True)

    assert farthest(run, train(pool, run)) < ROUNDING
    assert reference(run).losses != reference(replace(run, predicted=False)).losses


BFLOAT16_ROUNDING = 2**-8
"""The parts of a row-wise layer are rounded to bfloat16 before they are added; losses are of order one."""


def test_split_layers_read_low_versions(pool: Pool) -> None:
    run = Run("split_columns_and_rows", "2bw", tp=2, low=True)

    assert farthest(run, train(pool, run)) < BFLOAT16_ROUNDING


CLIPPED = (
    Run("split_columns_and_rows", tp=2, most=0.5),
    Run("split_sequence", "2bw", tp=2, most=0.5),
    Run("split_columns_and_rows", "2bw", tp=2, most=0.5, scales=True),
    Run("shard_blocks", replicas=2, most=0.5),
    Run("shard_some", "interleaved", stages=4, replicas=2, most=0.5, scales=True),
    Run("split_and_shard", stages=1, tp=2, replicas=2, most=0.5),
)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", CLIPPED, ids=str)
def test_norms_are_those_of_whole_gradients(pool: Pool, run: Run) -> None:
    """A norm of parts is rounded otherwise than the norm of the whole."""
    assert farthest(run, train(pool, run)) < ROUNDING
    assert reference(run).losses != reference(replace(run, most=None, scales=False)).losses


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "run",
    [Run("split_columns_and_rows", "2bw", tp=2, hooked=True), Run("shard_blocks", replicas=2, hooked=True)],
    ids=str,
)
def test_hooks_at_updates_see_whole_parameters(pool: Pool, run: Run) -> None:
    assert farthest(run, train(pool, run)) < ROUNDING
    assert reference(run).losses != reference(replace(run, hooked=False)).losses


def test_evaluations_use_the_newest_weights_in_evaluation_mode(pool: Pool) -> None:
    """The prediction is that of a model with the final weights, dropout off."""
    for run in (SPLIT[2], SHARDED[0]):
        outcomes = train(pool, run)
        model = run.build()
        model.load_state_dict({name: tensor for outcome in outcomes for name, tensor in outcome.state.items()})
        with torch.no_grad():
            expected = model.eval()(jobs.BATCHES[1][0])

        assert torch.allclose(expected, outcomes[0].predicted, rtol=0, atol=ROUNDING)


def test_the_hook_gets_names_and_processes(pool: Pool) -> None:
    """Without a plan: two stages of two processes each. Only one process of a rank reports what the rank did."""
    run = Run("split_columns_and_rows", tp=2)
    found = pool.run(4, jobs.look_around, run, None)

    reported = [entry for entries, _, _ in found for entry in entries]
    assert [names for names, *_ in reported] == [("0", "1")] * 2 + [("2", "3")] * 2
    assert [mesh for _, _, mesh, _ in reported] == [[[0, 1]]] * 2 + [[[2, 3]]] * 2
    assert {dimensions for _, dimensions, *_ in reported} == {("dp", "tp")}
    assert [tp_rank for *_, tp_rank in reported] == [0, 1, 0, 1]
    actions = [len(row) for row in penstock.schedule(run.plan).step(0)]
    assert [found[0][1].count(rank) for rank in (0, 1)] == actions
    assert farthest(run, [outcome for *_, outcome in found]) < ROUNDING


def test_a_hook_sees_a_shared_module_once(pool: Pool) -> None:
    assert pool.run(2, jobs.name_blocks) == [["0", "1"]] * 2


def test_stages_with_unequal_replicas_have_meshes_of_their_own(pool: Pool) -> None:
    plan = replace(Run("").plan, stages=(penstock.Stage(0, 2, (0, 1)), penstock.Stage(2, 4, (2,))))
    found = pool.run(3, jobs.look_around, Run(""), plan)
    expected = penstock.reference_train(Run("").build(), jobs.TRAINED, **{**Run("").options, "plan": plan})

    assert [reported[0][2] for reported, _, _ in found] == [[[0], [1]], [[0], [1]], [[2]]]
    for *_, outcome in found:
        assert outcome.losses == list(expected.losses)
        assert all(torch.equal(expected.state[name], tensor) for name, tensor in outcome.state.items())


def test_a_stage_without_replicas_may_be_sharded_too(pool: Pool) -> None:
    run = Run("shard_blocks", "interleaved", stages=4)

    assert farthest(run, train(pool, run)) == 0
