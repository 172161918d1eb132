"""Makes optimizers with the user's `optimizer=`, and checks them."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.errors import PenstockError

__all__ = ["MakeOptimizer", "MakeScheduler", "NamedParameters", "make_optimizers"]


class NamedParameters(list[nn.Parameter]):
    """A list of the trained parameters of this process, for any optimizer, with their names in the model.

    `names`: in the order of the parameters. Every process makes groups by the same rules, so that schedulers see the
    same groups everywhere; on some processes a group may have no parameter.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        super().__init__(named.values())
        self.names = tuple(named)

    def items(self) -> Iterable[tuple[str, nn.Parameter]]:
        """Pairs of name and parameter."""
        return zip(self.names, self, strict=True)

    def where(self, rule: Callable[[str, nn.Parameter], bool]) -> "NamedParameters":
        """The parameters for which ``rule(name, parameter)`` holds, such as ``lambda name, p: p.ndim > 1``."""
        return NamedParameters({name: parameter for name, parameter in self.items() if rule(name, parameter)})


MakeOptimizer: TypeAlias = Callable[
    [NamedParameters], torch.optim.Optimizer | tuple[torch.optim.Optimizer, ...] | list[torch.optim.Optimizer]
]

MakeScheduler: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


def make_optimizers(make: MakeOptimizer, named: Mapping[str, nn.Parameter]) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that `make` returns for the trained ones among the `named` parameters; none if there are none.

    Raises `PenstockError` if it returns something else, two optimizers that step the same parameter, or one that steps
    a parameter which is not among `named`.
    """
    trained = NamedParameters({name: parameter for name, parameter in named.items() if parameter.requires_grad})
    if not trained:
        return ()
    made = make(trained)
    optimizers = tuple(made) if isinstance(made, tuple | list) else (made,)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PenstockError(
                f"optimizer= returned {optimizer!r}: expected a torch.optim.Optimizer, or several. Pass a function "
                "that takes the list of parameters, such as lambda params: torch.optim.SGD(params, lr=0.1)"
            )
    stepped = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    twice = [name for name, parameter in trained.items() if stepped[id(parameter)] > 1]
    if twice:
        raise PenstockError(f"optimizer= gave {twice[0]} to two optimizers: give each parameter to one of them")
    known = {id(parameter) for parameter in named.values()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) not in known:
                    raise PenstockError(
                        f"optimizer= gave {type(optimizer).__name__} a parameter of the shape {tuple(parameter.shape)} "
                        "which is not one of this process's stages: expected parameters of the list that it takes "
                        "only, since others have no gradients from the pipeline and no name in checkpoints. Make it a "
                        "parameter of the model, or step it with an optimizer of your own"
                    )
    return optimizers
