"""Operators as PyTorch dispatches them: the mode that sees each one, and their schemas."""

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch

from penstock.torch_internals.availability import missing

try:
    from torch._ops import HigherOrderOperator
    from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
except ImportError as error:
    raise missing("torch.utils._python_dispatch.TorchDispatchMode", "to see the operators of a model") from error

__all__ = ["OperatorMode", "TorchDispatchMode", "modes_left", "schema_of"]
"""`TorchDispatchMode`: PyTorch's notes on extending it describe this class, and have it under its private name only."""

_Operator = type(torch.ops.aten.clone.default)


def modes_left() -> AbstractContextManager[Any]:
    """Leaves all dispatch modes, those of `torch.export` included, for its body. No public name does."""
    return _disable_current_modes()


class OperatorMode(TorchDispatchMode, ABC):  # type: ignore[no-untyped-call]
    """Sees each operator of PyTorch that is called in this block, also in the functions that `torch.cond` is given."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise the first operator that is seen imports PyTorch's compiler, which takes a second."""
        return False

    @abstractmethod
    def seen(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Returns what ``func(*args, **kwargs)`` returns. The mode is off meanwhile."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, HigherOrderOperator):
            return self.seen(func, args, kwargs or {})
        return func(*map(self._seeing, args), **(kwargs or {}))

    def _seeing(self, argument: Any) -> Any:
        """`argument`, or if it is a function one that runs it in the mode."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self:
                return argument(*args, **kwargs)

        return run if callable(argument) else argument


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
