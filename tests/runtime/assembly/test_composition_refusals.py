"""What composition refuses: each with its reason and the way out, on all processes alike, and without a hang.

The rows of the table in docs/composition.md are the keys of `ROWS`.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import penstock
from support import composition_refusals as jobs
from support.jobs.composition_jobs import Run
from support.paths import ROOT
from support.processes import Pool


class Foreseeing(penstock.UpdateHook):
    """Predicts weights also where no gradient is late."""

    def predicts(self, delay: int) -> bool:
        return True


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
    "another trace in evaluation within a layer": (
        "something else in evaluation",
        (TWO_TP_RANKS, "nothing", "traced within a layer"),
        {},
    ),
    "a trace in evaluation only": (
        "something else in evaluation",
        (TWO_TP_RANKS, "nothing", "traced in evaluation"),
        {},
    ),
    "other numbers for blocks in evaluation": (
        "something else in evaluation",
        (TWO_TP_RANKS, "nothing", "other numbers in evaluation"),
        {},
    ),
    "another order in evaluation": (
        "something else in evaluation",
        (TWO_TP_RANKS, "nothing", "another order in evaluation"),
        {},
    ),
    "another result in evaluation": (
        "Return the same in both modes",
        (TWO_TP_RANKS, "nothing", "returns less in evaluation"),
        {},
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
    "sharded, in low precision": (
        "MixedPrecisionPolicy",
        (TWO_REPLICAS, "shard"),
        {"autocast": torch.bfloat16, "version_dtype": torch.bfloat16},
    ),
    "sharded and predicted": ("MixedPrecisionPolicy", (TWO_REPLICAS, "shard"), {"update_hooks": [Foreseeing()]}),
    "sharded, odd microbatches": ("expected a multiple", (Run("", replicas=2, microbatches=3), "shard"), {}),
    "sharded, unequal replicas": ("of a pipeline with 3-1 replicas", (Run(""), "shard"), {"counts": (3, 1)}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_composed_is_refused(pool: Pool, case: str) -> None:
    text, arguments, options = REFUSED[case]
    for said in pool.run(4, _say, arguments, options):
        # Another process's error is reported with its traceback.
        assert said.startswith(("PlanError", "TransportError") if "one process" in case else "PlanError")
        assert text in said


def _say(arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    try:
        return jobs.said_of(*arguments, **options)
    except ValueError as error:
        return f"TransportError: {error}"


def test_a_list_with_shared_statistics_takes_a_hook(pool: Pool) -> None:
    assert pool.run(4, _say, (TWO_TP_RANKS, "nothing", "shared statistics"), {}) == ["nothing"] * 4


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
    assert all(
        "expected one stage without replicas. Measure with stages=1" in one for one in pool.run(4, jobs.measure_late)
    )


def test_tp_ranks_put_any_message_together(pool: Pool) -> None:
    """Sizes that do not divide, types of all kinds, absent tensors; and whether each requires a gradient."""
    found = pool.run(4, jobs.messages_over_tp_ranks)

    assert [wrong for wrong, _ in found] == [[]] * 4
    sizes = [8 + 4 + 1 + 1 + 0 + 12] * len(jobs.TYPES)
    expected = 2 * sum(size * kind.itemsize for size, kind in zip(sizes, jobs.TYPES, strict=True))
    assert [sent for _, sent in found] == [expected, expected, 0, 0]


class Counting(nn.Module):
    """Changes state in Python with every call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return 1.0 * x


def compile_and_spread() -> None:
    build(nn.Identity, compile=True, parallelize=lambda stage, mesh: None)


def build(kind: Callable[[], nn.Module], **options: Any) -> penstock.Pipeline:
    """Four layers in one process, two of them of this kind."""
    layers = [nn.Linear(4, 4), kind(), nn.Linear(4, 4), kind()]
    given = {"stages": 2, "microbatches": 2, **options}
    return penstock.Pipeline(
        layers, (torch.zeros(2, 4),), nn.functional.mse_loss, lambda p: torch.optim.SGD(p, lr=0.1), **given
    )


ALONE: dict[str, tuple[str, Callable[[], object]]] = {
    "compiled and spread": ("Leave compile= out", compile_and_spread),
    "compiled zb-h1": ("one function of a stage's backward", lambda: build(nn.Tanh, schedule="zb-h1", compile=True)),
    "layers of zb-h1": ("a third time", lambda: build(nn.Tanh, schedule="zb-h1", recompute="layers")),
    "compiled with graphs": (
        "expected a mode without graphs",
        lambda: build(nn.Tanh, compile={"mode": "max-autotune"}),
    ),
}


@pytest.mark.parametrize("case", ALONE)
def test_what_needs_one_process_is_refused(case: str) -> None:
    words, refused = ALONE[case]
    with pytest.raises(penstock.PenstockError, match=words):
        refused()


ROWS: dict[str, tuple[str | Callable[..., None], ...]] = {
    "`parallelize=` or `tensor_parallel` > 1 in a single process": (test_a_single_process_has_no_mesh,),
    "`tensor_parallel` > 1 without `parallelize=`": ("no hook",),
    "processes that are not ranks x `tensor_parallel`": ("too few processes",),
    "`tensor_parallel=` that differs from the plan's": ("another tensor-parallel size",),
    "a traced model whose code between blocks differs in evaluation, with a hook": (
        "another trace in evaluation",
        "another trace in evaluation within a layer",
        "a trace in evaluation only",
        "other numbers for blocks in evaluation",
        "another order in evaluation",
    ),
    "a model that returns something else in evaluation, with a hook": ("another result in evaluation",),
    "a hook that returns another module": ("another module",),
    "a hook that adds, removes or renames parameters, or changes their whole shape": (
        "more parameters",
        "half a weight",
    ),
    "`torch.compile` in the hook, or `compile=` with a hook": ("compiled", "compiled and spread"),
    "a weight shared by two modules of a stage, replaced in one": ("tied in a stage",),
    "weights shared by stages, with any hook": ("tied over a cut",),
    "a `DTensor` over `dp` that `fully_shard` did not make": ("DTensor over replicas",),
    '`fully_shard` over other processes than `mesh["dp"]`': ("sharded over tensor-parallel ranks", "sharded over all"),
    "`fully_shard` with `pipedream` or `2bw`": ("sharded with versions",),
    "`fully_shard` with `zb-h1` or `zb-v`": ("sharded, divided backwards",),
    "`fully_shard` with `version_dtype`, or with update hooks that predict under a flush": (
        "sharded, in low precision",
        "sharded and predicted",
    ),
    "`fully_shard` where stages have different numbers of replicas": ("sharded, unequal replicas",),
    "`fully_shard` with microbatches that the replicas do not share equally": (
        "sharded, odd microbatches",
        test_fully_sharded_replicas_evaluate_in_step,
    ),
    "a boundary tensor that is a `DTensor`, or differs between tensor-parallel ranks (*first step*)": (
        test_what_crosses_a_cut_must_be_the_same_on_all_tp_ranks,
    ),
    "`Pipeline.measure` after a hook, with several stages or replicas": (test_spread_layers_are_not_measured,),
    "`compile=` with `zb-h1` or `zb-v`": ("compiled zb-h1",),
    '`recompute="layers"` with `zb-h1` or `zb-v`': ("layers of zb-h1",),
    '`compile=` with CUDA graphs (`"reduce-overhead"`, `"max-autotune"`)': ("compiled with graphs",),
}


def test_the_table_in_the_docs_has_what_is_tested_here() -> None:
    page = (ROOT / "docs" / "composition.md").read_text()
    table = page[page.index("| combination | why | instead |") :]
    rows = re.findall(r"^\| (.*?) \| .+? \| .+? \|$", table, flags=re.MULTILINE)
    cases = [case for tested in ROWS.values() for case in tested if isinstance(case, str)]

    assert rows[1:] == list(ROWS)
    assert sorted(cases) == sorted([*REFUSED.keys() - {"an error on one process"}, *ALONE])
