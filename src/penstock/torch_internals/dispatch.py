"""Operators as PyTorch dispatches them: the mode that sees each one, and their schemas.

Tried on torch 2.11 and 2.13.
"""

from typing import Any

import torch

from penstock.torch_internals.availability import missing

try:
    from torch.utils._python_dispatch import TorchDispatchMode
except ImportError as error:
    raise missing("torch.utils._python_dispatch.TorchDispatchMode", "to see the operators of a model") from error

__all__ = ["TorchDispatchMode", "schema_of"]
"""`TorchDispatchMode`: PyTorch's notes on extending it describe this class, and have it under its private name only."""

_Operator = type(torch.ops.aten.clone.default)


def schema_of(target: Any) -> Any:
    """The schema of the operator `target`: its arguments and results, and which of them it writes. None if `target` is
    no operator of PyTorch's dispatcher. No public name has the schema of an operator.
    """
    if not isinstance(target, _Operator):
        return None
    try:
        return target._schema
    except AttributeError as error:
        raise missing("torch._ops.OpOverload._schema", "to see what an operator writes") from error
