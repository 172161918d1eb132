"""Copies of modules that hold what `copy.deepcopy` refuses to copy, or copies in another way than the rest.

Results of computations are such: `torch.nn.utils.weight_norm`, for example, keeps the weight of its last forward in an
attribute. Scripted modules are the others: their memory is copied without a look at what has been copied before, and
parameters come out as plain tensors.
"""

import copy
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.torch_internals.modules import tensor_tables

__all__ = ["copied"]

_Copied = TypeVar("_Copied")


def copied(model: _Copied, memo: dict[int, Any] | None = None, *, shares_code: bool = False) -> _Copied:
    """A deep copy of a module, or of a list of layers. In it, tensors that are no leaves of autograd are detached.

    `memo`: what is not copied, or has been, by id, as for `copy.deepcopy`. `shares_code`: whether the copies of
    generated modules share their code, which fx would generate again. PyTorch caches compiled graphs by their code, so
    all of these use one graph.
    """
    memo = {} if memo is None else memo
    layers = [model] if isinstance(model, nn.Module) else model if isinstance(model, Iterable) else []
    modules = [module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()]
    for value in _held(modules):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo.setdefault(id(value), value.detach().clone())
        elif isinstance(value, torch.jit.ScriptFunction):
            # It is code, as a function of Python is.
            memo.setdefault(id(value), value)
    if shares_code:
        for layer in layers:
            _copy_generated(layer, memo)
    made = copy.deepcopy(model, memo)
    for module in modules:
        # The modules in a scripted one are copied with it, and are not in `memo`.
        if isinstance(module, torch.jit.ScriptModule) and id(module) in memo:
            _register_tensors(module, memo[id(module)], memo)
    return made


def _held(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The values in attributes of `modules`, and in lists and tuples there."""
    for module in modules:
        for value in vars(module).values():
            yield from value if isinstance(value, list | tuple) else (value,)


def _copy_generated(module: nn.Module, memo: dict[int, Any]) -> None:
    """Puts copies of the generated modules in `module` into `memo`."""
    for inner in module.children():
        if id(inner) not in memo:
            _copy_generated(inner, memo)
    if isinstance(module, GraphModule):
        made = memo[id(module)] = object.__new__(type(module))
        memo[id(module.graph)] = module.graph
        made.__dict__.update(copy.deepcopy(module.__dict__, memo))


def _register_tensors(scripted: nn.Module, made: nn.Module, memo: dict[int, Any]) -> None:
    """Registers with `made`, the copy of a scripted module, the tensors that a copy of another module would have."""
    copies = dict(made.named_modules())
    for path, module in scripted.named_modules():
        for own, new in zip(tensor_tables(module), tensor_tables(copies[path]), strict=True):
            for name, tensor in own.items():
                new[name] = copy.deepcopy(tensor, memo)
