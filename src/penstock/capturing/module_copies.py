"""Copies of modules that hold the results of computations, which PyTorch refuses to copy.

`torch.nn.utils.weight_norm`, for example, keeps the weight of its last forward in an attribute.
"""

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copied"]

_Copied = TypeVar("_Copied")


def copied(model: _Copied, memo: dict[int, Any] | None = None) -> _Copied:
    """A deep copy of a module, or of a list of layers. In it, tensors that are no leaves of autograd are detached.

    `memo`: what is not copied, or has been, by id, as for `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    layers = [model] if isinstance(model, nn.Module) else model if isinstance(model, Iterable) else []
    for layer in layers:
        for module in layer.modules() if isinstance(layer, nn.Module) else ():
            for value in vars(module).values():
                for tensor in value if isinstance(value, list | tuple) else (value,):
                    if isinstance(tensor, Tensor) and not tensor.is_leaf:
                        memo.setdefault(id(tensor), tensor.detach().clone())
    return copy.deepcopy(model, memo)
