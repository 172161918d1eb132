"""Autograd's private names: what each gives, and what stands in where it is gone."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Variable, profiler

from penstock.torch_internals.autograd import (
    gradient_shape,
    is_profiling,
    node_kinds,
    run_backward,
    saved_value,
    sequence_number,
)


def weights(*shape: int) -> Tensor:
    return torch.linspace(-1, 2, torch.Size(shape).numel(), dtype=torch.float64).reshape(shape).requires_grad_()


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("AddmmBackward0", lambda x: torch.addmm(x[0], x, x)),
        ("MmBackward0", lambda x: x @ x),
        ("BmmBackward0", lambda x: torch.bmm(x[None], x[None])),
        ("ConvolutionBackward0", lambda x: torch.conv1d(x[None], x[None])),
        ("EmbeddingBackward0", lambda x: torch.nn.functional.embedding(torch.tensor([1]), x)),
        ("TBackward0", lambda x: x.t()),
        ("TransposeBackward0", lambda x: x.transpose(0, 1)),
        ("PermuteBackward0", lambda x: x.permute(1, 0)),
        ("ViewBackward0", lambda x: x.view(-1)),
        ("UnsafeViewBackward0", lambda x: x[None] @ x),
        ("CloneBackward0", lambda x: x.clone()),
        ("ToCopyBackward0", lambda x: x.float()),
        ("SplitBackward0", lambda x: x.split(1)[0]),
        ("SplitWithSizesBackward0", lambda x: x.split([1, 1])[0]),
        ("UnbindBackward0", lambda x: x.unbind()[0]),
        ("SliceBackward0", lambda x: x[0:1]),
        ("SelectBackward0", lambda x: x[0]),
        ("UnsqueezeBackward0", lambda x: x.unsqueeze(0)),
        ("SqueezeBackward0", lambda x: x.squeeze()),
        ("SqueezeBackward1", lambda x: x.squeeze(0)),
        ("SqueezeBackward2", lambda x: x.squeeze((0, 1))),
        ("AccumulateGrad", lambda x: torch.autograd.graph.get_gradient_edge(x).node),
    ],
)
def test_a_kind_is_the_type_of_nodes_of_its_name(name: str, make: Callable[[Tensor], Any]) -> None:
    found = make(weights(2, 2))

    assert node_kinds(name) == (type(found.grad_fn if isinstance(found, Tensor) else found),)


def test_a_kind_that_is_not_there_is_left_out() -> None:
    assert node_kinds("NoSuchBackward0") == ()
    assert len(node_kinds("AddmmBackward0", "NoSuchBackward0", "MmBackward0")) == 2


def outcome(inner: Tensor, outer: Tensor) -> list[Tensor]:
    first, second = (inner * outer).sum(1), (inner.exp() @ outer).tanh()
    run_backward([first, second], [torch.ones_like(first), second.detach()])
    assert inner.grad is not None and outer.grad is not None
    return [inner.grad, outer.grad]


@pytest.mark.parametrize("engine", [True, False])
def test_a_backward_is_that_of_torch(engine: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not engine:
        # Where PyTorch itself has its engine by another name.
        monkeypatch.setattr(
            torch.autograd.graph, "Variable", SimpleNamespace(_execution_engine=Variable._execution_engine)
        )
        monkeypatch.delattr(Variable, "_execution_engine")
    expected = [weights(3, 3), weights(3, 3)]
    first, second = (expected[0] * expected[1]).sum(1), (expected[0].exp() @ expected[1]).tanh()
    torch.autograd.backward([first, second], [torch.ones_like(first), second.detach()])

    found = outcome(weights(3, 3), weights(3, 3))

    assert all(torch.equal(own, leaf.grad) for own, leaf in zip(found, expected, strict=True))  # type: ignore[arg-type]


def test_a_backward_adds_to_what_is_there() -> None:
    leaf = weights(2)
    leaf.grad = torch.ones_like(leaf)

    run_backward([leaf * 3], [torch.ones(2, dtype=torch.float64)])

    assert leaf.grad.tolist() == [4, 4]


def test_a_saved_value_is_what_the_operator_read() -> None:
    bias, x, w = weights(3), weights(2, 4), weights(4, 3)
    node = torch.addmm(bias, x, w, beta=2, alpha=3).grad_fn

    assert saved_value(node, "mat1") is x or torch.equal(saved_value(node, "mat1"), x)
    assert tuple(saved_value(node, "mat2_sym_sizes")) == (4, 3)
    assert tuple(saved_value(node, "mat2_sym_strides")) == (3, 1)
    assert (saved_value(node, "beta"), saved_value(node, "alpha")) == (2, 3)


def test_a_value_that_has_gone_is_torchs_own_error() -> None:
    found = weights(2) * weights(2)
    found.sum().backward()  # type: ignore[no-untyped-call]

    with pytest.raises(RuntimeError, match="already been freed"):
        saved_value(found.grad_fn, "self")


def test_the_shape_of_a_gradient_is_that_of_the_argument() -> None:
    leaf = weights(3)
    node = torch.addmm(leaf.view(1, 3), weights(2, 4), weights(4, 3)).grad_fn
    assert node is not None
    (view, number), _, (last, other) = node.next_functions

    assert tuple(gradient_shape(view, number)) == (1, 3)
    assert tuple(gradient_shape(last, other)) == (4, 3)


class BareLeaf:
    """A node of a PyTorch that has no shapes of gradients."""

    variable = torch.zeros(3, 2)


def test_the_shape_of_a_leaf_needs_no_private_name() -> None:
    assert gradient_shape(BareLeaf(), 0) == (3, 2)


def test_numbers_grow_with_the_forward() -> None:
    first = weights(2).exp()
    second = first.tanh()
    third = weights(2).neg()

    assert sequence_number(first.grad_fn) < sequence_number(second.grad_fn) < sequence_number(third.grad_fn)


def test_a_profiler_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_profiling()
    with profiler.profile():
        assert is_profiling()
    assert not is_profiling()
    # Without the name labels are recorded.
    monkeypatch.delattr(profiler, "_is_profiler_enabled")
    assert is_profiling()
