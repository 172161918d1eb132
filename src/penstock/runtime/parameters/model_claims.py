"""At most one pipeline trains a module: a pipeline that is built on it takes it from the one before.

Two would step the same parameters with optimizers that do not know of each other. An optimizer of the user's that holds
them steps nothing.
"""

import gc
import logging
import weakref
from collections.abc import Iterable, Sequence

from torch import nn
from torch.optim import Optimizer

from penstock.errors import PenstockError


class ModelClaim:
    """The claim of a pipeline to train `modules`, with all modules inside of them, by its `optimizers`."""

    def __init__(self, modules: Iterable[nn.Module], optimizers: Sequence[Optimizer]) -> None:
        self._superseded = False
        _OPTIMIZERS.update(optimizers)
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


def hint_at_other_optimizers(own: Sequence[Optimizer]) -> None:
    """Warns of an optimizer that no pipeline has made and that holds parameters of a pipeline's `own` ones."""
    lists = [each.param_groups for each in own]
    held = {id(parameter) for groups in lists for group in groups for parameter in group["params"]}
    for each in gc.get_objects():
        # An object that stands for another one must not be asked for its class, nor a half-made one for its groups.
        if not issubclass(type(each), Optimizer) or each in _OPTIMIZERS:
            continue
        groups = vars(each).get("param_groups", [])
        # One that is put around an own one has its groups.
        if not any(groups is one for one in lists) and any(id(p) in held for group in groups for p in group["params"]):
            logging.getLogger("penstock").warning(
                f"an optimizer that the pipeline has not made ({type(each).__name__}) holds its parameters: its step() "
                "and its learning rates change nothing. Leave it out, set rates in pipe.optimizer.param_groups, and "
                "pass lr_scheduler= for a schedule"
            )
            return


_OPTIMIZERS: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()
"""Those of all pipelines."""
_CLAIMS: "weakref.WeakKeyDictionary[nn.Module, weakref.ref[ModelClaim]]" = weakref.WeakKeyDictionary()
"""The newest claim to every module."""
