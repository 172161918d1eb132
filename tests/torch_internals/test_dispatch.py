"""The dispatcher's private names, nested values and what CUDA libraries keep: what each gives, and where it is gone."""

import runpy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _python_dispatch, _pytree

from penstock.errors import PenstockError
from penstock.torch_internals import dispatch, pytrees, tensors
from penstock.torch_internals.dispatch import TorchDispatchMode, schema_of


class Names(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(schema_of(func).name)
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_every_operator() -> None:
    x = torch.ones(2, requires_grad=True)
    with Names() as mode:
        (x * 2).exp().sum().backward()  # type: ignore[no-untyped-call]

    named = [name for name in mode.names if name in ("aten::mul", "aten::exp", "aten::sum")]
    assert named == ["aten::mul", "aten::exp", "aten::sum", "aten::mul", "aten::mul"], "those of the backward, too"


def test_a_schema_says_what_is_written() -> None:
    schema = schema_of(torch.ops.aten.add_.Tensor)

    assert schema.is_mutable
    written = [argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments[:2]]
    assert written == [True, False]
    assert not schema_of(torch.ops.aten.add.Tensor).is_mutable
    assert schema_of(torch.ops.aten.view.default).returns[0].alias_info is not None


@pytest.mark.parametrize("target", [torch.add, Tensor.add_, "weight", torch.ops.aten.add, torch.cond, None])
def test_what_is_no_operator_has_no_schema(target: Any) -> None:
    assert schema_of(target) is None


def test_nested_values_are_opened_and_closed() -> None:
    tree = {"a": (torch.zeros(1), [2, None]), "b": torch.ones(1)}
    leaves, structure = pytrees.tree_flatten(tree)

    assert pytrees.tree_leaves(tree) == leaves
    assert isinstance(structure, pytrees.TreeSpec)
    assert pytrees.tree_unflatten(leaves, structure) == tree
    assert [pytrees.keystr(path) for path, _ in pytrees.tree_leaves_with_path(tree)][:2] == ["['a'][0]", "['a'][1][0]"]
    assert pytrees.tree_map_only(int, lambda number: number + 1, tree)["a"][1] == [3, None]


def test_dataclasses_that_export_knows_are_opened() -> None:
    """`torch.export.register_dataclass` registers with the same registry."""
    from dataclasses import make_dataclass

    kind = make_dataclass("Pair", ["first", "second"])
    assert len(pytrees.tree_leaves(kind(1, 2))) == 1

    torch.export.register_dataclass(kind)

    assert pytrees.tree_leaves(kind(1, 2)) == [1, 2]


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        (dispatch, _python_dispatch, "TorchDispatchMode"),
        (pytrees, _pytree, "tree_leaves_with_path"),
        (pytrees, _pytree, "TreeSpec"),
    ],
)
def test_a_class_that_is_gone_is_an_error(module: Any, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(owner, name)

    with pytest.raises(PenstockError, match=rf"has no {owner.__name__}.*: expected torch 2\.13, .*Install it"):
        runpy.run_path(str(module.__file__))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_workspaces_are_given_back() -> None:
    x = torch.ones(256, 256, device="cuda")
    (x @ x).sum().item()
    tensors.clear_cublas_workspaces()
    before = torch.cuda.memory_allocated()
    (x @ x).sum().item()
    assert torch.cuda.memory_allocated() > before

    tensors.clear_cublas_workspaces()

    assert torch.cuda.memory_allocated() == before
