"""Targets in containers: what has one entry for every sample is cut, all else is passed whole."""

import copy
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import penstock
from penstock.capturing.samples import read_sample
from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import split, take_slice

INPUTS = read_sample((torch.zeros(2, 4),))[1]


@dataclass
class Labels:
    texts: list[str]
    rows: Tensor


def parts(target: Any, samples: int = 4, count: int = 2, slices: int = 1) -> list[Any]:
    return [each.target for each in split(INPUTS, torch.zeros(samples, 4), target, count, slices)]


RAGGED = [torch.ones(3), torch.ones(1), torch.ones(2), torch.ones(5)]


@pytest.mark.parametrize(
    ("target", "first"),
    [
        (["a", "b", "c", "d"], ["a", "b"]),
        (("a", "b", "c", "d"), ("a", "b")),
        ([0, 1, 2, 3], [0, 1]),
        ([None, "b", None, 1.5], [None, "b"]),
        ([[1, 2], [], [3], [4]], [[1, 2], []]),
        ({"texts": ["a", "b", "c", "d"], "name": "task"}, {"texts": ["a", "b"], "name": "task"}),
        ((["a", "b", "c", "d"], [0, 1, 2, 3]), (["a", "b"], [0, 1])),
        ([{"id": 1}, {"id": 2}, {"id": 3}, {"id": 4}], [{"id": 1}, {"id": 2}]),
        (["a", "b", "c"], ["a", "b", "c"]),
    ],
    ids=["texts", "tuple", "ints", "missing", "lists", "dict of lists", "tuple of lists", "dicts", "another length"],
)
def test_lists_of_one_entry_per_sample_are_cut(target: Any, first: Any) -> None:
    assert parts(target)[0] == first


def test_tensors_and_arrays_in_such_lists_stay_whole() -> None:
    assert [len(tensor) for tensor in parts(RAGGED)[1]] == [2, 5]
    boxes = tuple({"boxes": tensor} for tensor in RAGGED)
    assert [len(each["boxes"]) for each in parts(boxes)[0]] == [3, 1]
    arrays = [numpy.ones(length) for length in (3, 4, 2, 5)]
    assert [len(array) for array in parts(arrays)[1]] == [2, 5]
    labels = parts(Labels(["a", "b", "c", "d"], torch.arange(4)))[1]
    assert (labels.texts, labels.rows.tolist()) == (["c", "d"], [2, 3])


def test_a_list_of_tensors_with_all_samples_is_no_list_of_samples() -> None:
    heads = parts([torch.arange(4) + 10 * head for head in range(4)])[1]
    assert [head.tolist() for head in heads] == [[2, 3], [12, 13], [22, 23], [32, 33]]
    labels, name = parts((torch.arange(2), "task"), samples=2)[1]
    assert (labels.tolist(), name) == ([1], "task")


@pytest.mark.parametrize(
    "target",
    [
        [torch.ones(3), torch.ones(4), torch.ones(2), torch.ones(5)],
        {"boxes": tuple({"box": torch.ones(length, 4)} for length in (4, 1, 2, 3))},
        [torch.ones(4), torch.ones(4), torch.ones(4), torch.ones(())],
    ],
    ids=["tensors", "dicts", "a number"],
)
def test_a_tensor_in_such_a_list_is_not_cut_by_its_length(target: Any) -> None:
    with pytest.raises(PenstockError, match=r"of 4 entries for 4 samples, in which . of 4 tensors .*Microbatches"):
        parts(target)
    assert len(parts(target, count=1)) == 1


def test_arrays_of_objects_are_refused() -> None:
    with pytest.raises(PenstockError, match=r"is a ndarray, which cannot be cut into microbatches: pass .tolist\(\)"):
        parts(numpy.array(["a", None, "c", "d"], dtype=object))


def test_a_slice_cuts_what_the_batch_was_cut_by() -> None:
    target = {"rows": torch.arange(8), "whole": torch.arange(2), "names": ["a", "b"], "texts": list("abcdefgh")}
    first = split(INPUTS, torch.zeros(8, 4), target, 4, slices=2)[0]
    found = take_slice(INPUTS, first, 1, 2).target
    assert (found["rows"].tolist(), found["whole"].tolist()) == ([1], [0, 1])
    assert (found["names"], found["texts"]) == (["a", "b"], ["b"])


def by_sample(output: Tensor, target: list[str]) -> Tensor:
    return sum((row - len(text)).pow(2).mean() for row, text in zip(output, target, strict=True)) / len(output)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_step_on_texts_is_that_of_a_plain_loop(replicas: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x, texts = torch.randn(4, 4).double(), ["a", "bb", "cccc", "dddddddd"]
    plain = copy.deepcopy(model)
    loss = by_sample(plain(x), texts)
    loss.backward()

    stages = [penstock.Stage(0, 2, (0,)), penstock.Stage(2, 3, tuple(range(1, 1 + replicas)))]
    plan = penstock.Plan(tuple(stages), "1f1b-flush", 2)
    pipe = penstock.Pipeline(model, (x[:2],), by_sample, lambda p: torch.optim.SGD(p, lr=1.0), plan=plan)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    assert float(pipe.step(x, texts).loss) == pytest.approx(loss.item(), rel=1e-12)  # another order of sums
    for was, own, expected in zip(before, model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(was - own, expected.grad, rtol=1e-9, atol=1e-12)


def test_the_oracle_cuts_lists_alike() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    x, texts = torch.randn(5, 4).double(), ["a", "bb", "cccc", "dddddddd", ""]
    options: dict[str, Any] = {"schedule": "gpipe", "microbatches": 2, "stages": 2}
    options |= {"loss_fn": by_sample, "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "sample": (x[:2],)}
    expected = penstock.reference_train(copy.deepcopy(model), batches=[(x, texts)] * 3, **options)
    pipe = penstock.Pipeline(model, **options)
    assert [float(pipe.step(x, texts).loss) for _ in range(3)] == [float(loss) for loss in expected.losses]
