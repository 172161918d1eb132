"""Habits of models that train with the numbers of a plain loop, or are refused: never other numbers without a word.

The plain loops know nothing of capture: that of ``2bw`` computes its gradients at the weights before the last update.
"""

import pytest
import torch

from model_cases.cases import Case
from model_cases.comparison import compare, compare_outputs
from model_cases.habit_blocks import CASES as IN_BLOCKS
from model_cases.habit_models import CASES as AROUND_BLOCKS
from model_cases.training import Batches, train_by_oracle, train_plainly, train_staged
from penstock.errors import PenstockError

HABITS = {case.name: case for case in (*IN_BLOCKS, *AROUND_BLOCKS)}
SIZES = [(2, 8), (5, 8), (6, 11), (4, 8)]
"""Samples and length: of the sample, and of the steps."""
SIZES_WITHOUT_MICROBATCHES = [(2, 8), (3, 8), (4, 11), (2, 8)]


def batches_of(case: Case) -> Batches:
    return Batches(SIZES if case.microbatches > 1 else SIZES_WITHOUT_MICROBATCHES, torch.float64)


@pytest.mark.sampled(9)
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        "VectorQuantizer", "Queue", "Stateful", "CumulativeNormed", "TorchDepth", "DropPath", "AfterAccumulation",
        "Spiking", "Penalized", "Halting", "PackedSequences", "Jacobian", "SpectralNormed", "WritesItsInput",
        "UnusedNorm", "AuxiliaryReturned", "UnetSkips", "ComplexBlocks", "frozen BatchNorm",
        "bn.momentum", "block.temperature", "model.temperature", "a hook on a block", "p.data = ...",
        "nn.Sequential, p.data = ...",
        "register_hook",
    ],
)  # fmt: skip
def test_a_habit_trains_with_the_numbers_of_a_plain_loop(name: str) -> None:
    case = HABITS[name]
    batches = batches_of(case)
    expected = train_plainly(case, batches)
    found = train_staged(case, batches, schedule="zb-h1", stages=3, predicts=name == "CumulativeNormed")

    # A sum of gradients where a block was skipped is added in another order.
    assert compare(expected, found).relative <= (1e-15 if name == "TorchDepth" else 0.0)
    if found.prediction is not None:
        assert compare_outputs(expected.prediction, found.prediction).relative == 0


@pytest.mark.parametrize("name", ["Checkpointed", "SpectralNormed", "Stateful", "PreBackward", "TiedWords"])
def test_a_habit_trains_under_2bw_with_the_numbers_of_a_delayed_loop(name: str) -> None:
    case = HABITS[name]
    batches = batches_of(case)
    expected = train_plainly(case, batches, delayed=True)
    found = train_staged(case, batches, schedule="2bw", stages=2)

    # The gradients of a tied weight are added stage by stage.
    assert compare(expected, found).relative <= (1e-13 if name == "TiedWords" else 0.0)


def test_the_oracle_takes_sparse_gradients() -> None:
    case = HABITS["SparseWords"]
    batches = batches_of(case)
    expected = train_by_oracle(case, batches, schedule="2bw", stages=2)
    found = train_staged(case, batches, schedule="2bw", stages=2)

    assert found.losses == expected.losses


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ParityOutside", r"args\[0\]"),
        ("a new nn.Parameter", r"it was replaced, renamed or removed"),
        ("a new block", r"blocks.\w+ was a .* and is another one since"),
        ("a hook on the model", r"hooks\[\d+\] was not there and is a function since"),
        ("requires_grad_(False)", r"requires_grad is False and was True"),
    ],
)
def test_a_habit_that_would_train_on_other_numbers_is_refused(name: str, message: str) -> None:
    with pytest.raises(PenstockError, match=message):
        train_staged(HABITS[name], batches_of(HABITS[name]), schedule="1f1b-flush", stages=2)
