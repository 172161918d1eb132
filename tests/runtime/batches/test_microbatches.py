"""Reading a batch, cutting it into microbatches, and joining outputs."""

import re
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.samples import read_sample
from penstock.errors import CaptureError, PenstockError
from penstock.runtime.batches.microbatches import count_microbatches, join, split


def form(*names: str, batched: tuple[str, ...]) -> ModelInputs:
    """The form of a model that takes `names` by position, captured with two samples."""
    structure = pytree.tree_flatten((tuple(names), {}))[1]
    return ModelInputs(names, structure, {}, frozenset(batched), microbatch_size=2)


SINGLE = form("x", batched=("x",))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Labels:
    label: Tensor
    options: str


X, Y = torch.arange(2), torch.arange(2) + 5


@pytest.mark.parametrize(
    ("sample", "batches"),
    [
        ((X, Y), [(X, Y), [X, Y], Pair(X, Y)]),
        ([X, Y], [(X, Y), [X, Y]]),
        ({"x": X, "y": Y}, [{"y": Y, "x": X}, UserDict({"x": X, "y": Y})]),
        (([X, Y],), [[X, Y], ([X, Y],)]),
        (({"x": X, "y": Y},), [{"x": X, "y": Y}, ({"x": X, "y": Y},)]),
        (((X, Y),), [(X, Y), ((X, Y),)]),
        ((Pair(X, Y),), [Pair(X, Y), (Pair(X, Y),)]),
    ],
    ids=["arguments", "list", "keywords", "one list", "one dict", "one tuple", "one named tuple"],
)
def test_a_batch_is_read_as_the_sample_was(sample: Any, batches: list[Any]) -> None:
    _, captured = read_sample(sample)
    for batch in batches:
        assert [tensor.tolist() for tensor in captured.read(batch).values()] == [X.tolist(), Y.tolist()]


def test_one_tensor_is_the_one_argument() -> None:
    assert all(SINGLE.read(batch)["x"] is X for batch in (X, (X,), [X]))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (numpy.zeros(2), r"args\[1\] is a ndarray, .* pass torch.from_numpy\(...\) of it"),
        (UserDict(x=X), r"args\[1\] is a UserDict, .* pass dict\(...\) of it"),
    ],
)
def test_what_cannot_be_cut_is_refused(value: Any, message: str) -> None:
    with pytest.raises(CaptureError, match=message):
        read_sample((X, value))
    with pytest.raises(CaptureError, match=message.replace(r"args\[1\]", "the target, or a part of it,")):
        split(SINGLE, X, {"extra": value}, 2)


def test_a_target_may_be_a_dataclass() -> None:
    first, second = split(SINGLE, torch.arange(3), Labels(torch.arange(3), "all"), 2)

    assert (first.target.label.tolist(), second.target.label.tolist()) == ([0, 1], [2])
    assert (first.target.options, type(second.target)) == ("all", Labels)


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


FOUR, PAIR = torch.arange(4), form("x", "y", batched=("x", "y"))
WHOLE = read_sample((torch.zeros(2, 3), torch.zeros(4, 3)))[1]
"""Four patches for two samples."""
REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: split(SINGLE, X, X, 3), "a minibatch of 2 sample(s) cannot be cut into 3 microbatches"),
    (lambda: split(SINGLE, FOUR, FOUR[:3], 2), "the target has dimension 0 of [3] and the inputs hold 4 samples"),
    (
        lambda: split(PAIR, (FOUR, torch.arange(5)), None, 2),
        "the inputs disagree on the number of samples (dimension 0): {'x': 4, 'y': 5}",
    ),
    (
        lambda: join([torch.zeros(7, 2), torch.zeros(7, 1)], [2, 1]),
        "(7, 2) for 2 samples and (7, 1) for 1, which cannot be stacked",
    ),
    (lambda: split(SINGLE, X[:0], None, 1), "the batch is empty"),
    (lambda: count_microbatches(SINGLE, X[:0], 2), "the batch is empty"),
    (lambda: split(WHOLE, (FOUR, torch.zeros(8, 3)), FOUR, 2), "found 8: it grows"),
]


@pytest.mark.parametrize(("cut", "message"), REFUSED)
def test_batches_that_cannot_be_cut_are_refused(cut: Callable[[], object], message: str) -> None:
    with pytest.raises(PenstockError, match=re.escape(message)):
        cut()


def test_chunks_are_of_the_captured_size_at_most() -> None:
    assert [count_microbatches(SINGLE, torch.arange(samples), 2) for samples in (1, 2, 3, 4, 7)] == [1, 1, 2, 2, 4]


def test_outputs_are_joined_by_what_they_are() -> None:
    outputs = [
        {"logits": torch.tensor([[1.0], [2.0]]), "loss": torch.tensor(0.5), "name": "a"},
        {"logits": torch.tensor([[3.0]]), "loss": torch.tensor(0.25), "name": "a"},
    ]
    joined = join(outputs, [2, 1])

    assert joined["logits"].tolist() == [[1.0], [2.0], [3.0]]
    assert joined["loss"].tolist() == [0.5, 0.25]
    assert joined["name"] == "a"


@pytest.mark.parametrize(
    ("inputs", "count"),
    [
        ((torch.zeros(4, 3), torch.zeros(4, 3)), 2),
        ((torch.zeros(4, 3), torch.zeros(6, 3)), 2),
        ((torch.zeros(4, 8), torch.zeros(8, 8)), 2),
        ((torch.zeros(4, 3), torch.zeros(8, 3)), 1),
    ],
    ids=["of one size", "of another size", "of the length of the samples", "in one microbatch"],
)
def test_other_tensors_go_whole(inputs: tuple[Tensor, Tensor], count: int) -> None:
    assert {len(part.inputs["args[1]"]) for part in split(WHOLE, inputs, torch.zeros(4), count)} == {len(inputs[1])}
