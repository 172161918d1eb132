"""What composition refuses: each with its reason and the way out, on all processes alike, and without a hang."""

from typing import Any

import pytest
import torch

import penstock
from support import composition_refusals as jobs
from support.jobs.composition_jobs import Run
from support.processes import Pool

TWO_TP_RANKS, TWO_REPLICAS = Run("", tp=2), Run("", replicas=2)

REFUSED: dict[str, tuple[str, tuple[Any, ...], dict[str, Any]]] = {
    "no hook": ("there is no hook", (TWO_TP_RANKS, None), {}),
    "too few processes": ("the plan is for 6 rank", (Run("", stages=3, tp=2), "nothing"), {}),
    "another tensor-parallel size": (
        "tensor_parallel=4 contradicts",
        (TWO_TP_RANKS, "nothing"),
        {"tensor_parallel": 4},
    ),
    "another module": ("returned Sequential", (TWO_TP_RANKS, "wrap"), {}),
    "more parameters": ("other parameters", (TWO_TP_RANKS, "add"), {}),
    "half a weight": ("expected a DTensor", (TWO_TP_RANKS, "slice_by_hand"), {}),
    "compiled": ("Leave torch.compile out", (TWO_TP_RANKS, "compile_layers"), {}),
    "an error on one process": ("this hook is broken here", (TWO_TP_RANKS, "fail_on_one"), {}),
    "another trace in evaluation": ("something else in evaluation", (TWO_TP_RANKS, "nothing", "traced"), {}),
    "predicted": (
        "leave the one or the other out",
        (TWO_TP_RANKS, "nothing"),
        {"update_hooks": [penstock.WeightPrediction()]},
    ),
    "in low precision": (
        "leave the one or the other out",
        (TWO_TP_RANKS, "nothing"),
        {"autocast": torch.bfloat16, "version_dtype": torch.bfloat16},
    ),
    "tied over a cut": ("Untie the weights", (TWO_TP_RANKS, "nothing", "tied over a cut"), {}),
    "tied in a stage": ("is shared by several modules", (TWO_TP_RANKS, "split_shared", "tied in a stage"), {}),
    "DTensor over replicas": ("is a DTensor over dp", (TWO_REPLICAS, "spread_over_replicas"), {}),
    "sharded over tensor-parallel ranks": (
        "over other processes than its replicas",
        (TWO_TP_RANKS, "shard_over_tp_ranks"),
        {},
    ),
    "sharded over all": ("expected dp or tp", (TWO_REPLICAS, "shard_over_all"), {}),
    "sharded with versions": ("keeps several versions", (Run("", "2bw", replicas=2), "shard"), {}),
    "sharded, divided backwards": ("expected whole backwards", (Run("", "zb-h1", replicas=2), "shard"), {}),
    "sharded, odd microbatches": ("expected a multiple", (Run("", replicas=2, microbatches=3), "shard"), {}),
    "sharded, unequal replicas": ("of a pipeline with 3-1 replicas", (Run(""), "shard"), {"counts": (3, 1)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_composed_is_refused(pool: Pool, case: str) -> None:
    text, arguments, options = REFUSED[case]
    for said in pool.run(4, _say, arguments, options):
        # Another process's error is told with its traceback.
        assert said.startswith(("PlanError", "TransportError") if "one process" in case else "PlanError")
        assert text in said


def _say(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    try:
        return jobs.said_of(*arguments, **options)
    except ValueError as error:
        return f"TransportError: {error}"


def test_a_single_process_has_no_mesh() -> None:
    message = jobs.said_of(TWO_TP_RANKS, "nothing")
    hook = jobs.said_of(Run(""), "nothing")

    assert "this is a single process: expected 4 processes" in message
    assert "start it with torchrun" in hook


@pytest.mark.parametrize(
    ("kind", "text"), [("other", "is not the same on tensor-parallel ranks 0 and 1"), ("DTensor", "a DTensor (")]
)
def test_what_crosses_a_cut_must_be_the_same_on_all_tp_ranks(pool: Pool, kind: str, text: str) -> None:
    said = pool.run(4, jobs.said_in_a_step, kind)

    assert all(text in one for one in said)
    assert [one.partition(":")[0] for one in said] == ["PenstockError"] * 2 + ["TransportError"] * 2


def test_a_tp_rank_that_fails_ends_all(pool: Pool) -> None:
    """Also the one that waits for it in a sum inside of the stage, which PyTorch takes."""
    first, failed, *others = pool.run(4, jobs.said_when_a_tp_rank_fails)

    assert failed == "ValueError: this layer is broken here"
    assert first.startswith("TransportError: the connection to another process of stage 0 broke")
    assert all(said.startswith("TransportError") and "this layer is broken here" in said for said in others)


def test_fully_sharded_replicas_evaluate_in_step(pool: Pool) -> None:
    """Three samples of two a microbatch go to both replicas; one sample cannot."""
    said = pool.run(4, jobs.evaluate_one_sample)

    assert all("1 sample" in one for one in said)


def test_spread_layers_are_not_measured(pool: Pool) -> None:
    assert all("measure before" in one for one in pool.run(4, jobs.measure_late))


def test_tp_ranks_put_any_message_together(pool: Pool) -> None:
    """Sizes that do not divide, types of all kinds, absent tensors; and whether each requires a gradient."""
    found = pool.run(4, jobs.messages_over_tp_ranks)

    assert [wrong for wrong, _ in found] == [[]] * 4
    sizes = [8 + 4 + 1 + 1 + 0 + 12] * len(jobs.TYPES)
    expected = 2 * sum(size * kind.itemsize for size, kind in zip(sizes, jobs.TYPES, strict=True))
    assert [sent for _, sent in found] == [expected, expected, 0, 0]
