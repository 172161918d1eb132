"""Cutting a minibatch and joining outputs."""

import pytest
import torch
from torch.utils import _pytree as pytree

from penstock.capturing.chain import ModelInputs
from penstock.errors import PenstockError
from penstock.runtime.microbatches import arguments, chunks, join, split


def form(*names: str, batched: tuple[str, ...]) -> ModelInputs:
    """The form of a model that takes `names` by position, captured with two samples."""
    structure = pytree.tree_flatten((tuple(names), {}))[1]
    return ModelInputs(names, structure, {}, frozenset(batched), microbatch_size=2)


SINGLE = form("x", batched=("x",))


def test_what_arguments_are() -> None:
    assert arguments((1, 2)) == ((1, 2), {})
    assert arguments({"x": 1}) == ((), {"x": 1})
    assert arguments([1, 2]) == (([1, 2],), {})


def test_ragged_parts_weigh_as_many_samples_as_they_have() -> None:
    x = torch.arange(7)
    parts = split(SINGLE, x, {"label": x * 2, "options": "keep"}, 3)

    assert [part.inputs["x"].tolist() for part in parts] == [[0, 1, 2], [3, 4], [5, 6]]
    assert [part.target["label"].tolist() for part in parts] == [[0, 2, 4], [6, 8], [10, 12]]
    assert [part.target["options"] for part in parts] == ["keep"] * 3
    assert [part.weight for part in parts] == [3 / 7, 2 / 7, 2 / 7]
    assert parts[1].signature == parts[2].signature != parts[0].signature
    assert parts[0].inputs["x"].data_ptr() == x.data_ptr()


def test_what_has_no_batch_dimension_goes_whole() -> None:
    x, mask = torch.arange(4), torch.tensor([3.0, 4.0])
    parts = split(form("x", "mask", batched=("x",)), (x, mask), x, 2)

    assert [part.inputs["mask"] is mask for part in parts] == [True, True]


@pytest.mark.parametrize(
    ("inputs", "target", "count", "message"),
    [
        (torch.arange(2), torch.arange(2), 3, "a minibatch of 2 sample(s) cannot be cut into 3 microbatches"),
        (torch.arange(4), torch.arange(3), 2, "the target has dimension 0 of [3] and the inputs hold 4 samples"),
    ],
)
def test_batches_that_cannot_be_cut(inputs: torch.Tensor, target: torch.Tensor, count: int, message: str) -> None:
    with pytest.raises(PenstockError) as caught:
        split(SINGLE, inputs, target, count)

    assert message in str(caught.value)


def test_inputs_that_disagree() -> None:
    with pytest.raises(PenstockError) as caught:
        split(form("x", "y", batched=("x", "y")), (torch.arange(4), torch.arange(5)), None, 2)

    assert "the inputs disagree on the number of samples (dimension 0): {'x': 4, 'y': 5}" in str(caught.value)


def test_chunks_are_of_the_captured_size_at_most() -> None:
    assert [chunks(SINGLE, torch.arange(samples)) for samples in (1, 2, 3, 4, 7)] == [1, 1, 2, 2, 4]


def test_outputs_are_joined_by_what_they_are() -> None:
    outputs = [
        {"logits": torch.tensor([[1.0], [2.0]]), "loss": torch.tensor(0.5), "name": "a"},
        {"logits": torch.tensor([[3.0]]), "loss": torch.tensor(0.25), "name": "a"},
    ]
    joined = join(outputs, [2, 1])

    assert joined["logits"].tolist() == [[1.0], [2.0], [3.0]]
    assert joined["loss"].tolist() == [0.5, 0.25]
    assert joined["name"] == "a"
