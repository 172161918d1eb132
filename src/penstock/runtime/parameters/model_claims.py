"""At most one pipeline trains a module: a pipeline that is built on it takes it from the one before.

Two would step the same parameters with optimizers that do not know of each other.
"""

import weakref
from collections.abc import Iterable

from torch import nn

from penstock.errors import PenstockError


class ModelClaim:
    """The claim of a pipeline to train `modules`, with all modules inside of them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._superseded = False
        for module in {inner for each in modules for inner in each.modules()}:
            if (earlier := _CLAIMS.get(module, lambda: None)()) is not None:
                earlier._superseded = True
            _CLAIMS[module] = weakref.ref(self)

    def check(self) -> None:
        """Raises `PenstockError` if another pipeline has claimed one of the modules since."""
        if self._superseded:
            raise PenstockError(
                "another Pipeline was built on this model, or on a part of it, and trains it now: expected one "
                "Pipeline for a model, since each has an optimizer and weight versions of its own. Go on with the "
                "newer one, or build each on a model of its own (copy.deepcopy before it is built)"
            )


def is_claimed(parameter: nn.Parameter) -> bool:
    """Whether `parameter` is registered in a module that a pipeline trains."""
    claimed = [module for module, claim in _CLAIMS.items() if claim() is not None]
    return any(own is parameter for module in claimed for own in module.parameters(recurse=False))


_CLAIMS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModelClaim]]" = weakref.WeakKeyDictionary()
"""The newest claim to every module."""
