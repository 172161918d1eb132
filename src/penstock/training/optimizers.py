"""Makes optimizers with the user's `optimizer=`, and checks them."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from inspect import unwrap
from types import MethodType
from typing import TypeAlias

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from penstock.arguments import function, instance, text_of
from penstock.errors import PenstockError
from penstock.torch_internals.export import replaced_attribute


class NamedParameters(list[nn.Parameter]):
    """A list of the trained parameters of this process, for any optimizer, with their names in the model.

    `names`: in the order of the parameters. Every process makes groups by the same rules, so that schedulers see the
    same groups everywhere; on some processes a group may have no parameter.
    """

    def __init__(self, named: Mapping[str, nn.Parameter]) -> None:
        rule = instance(Mapping, "a dict from name to parameter", "pass dict(module.named_parameters())")
        super().__init__(rule.check("NamedParameters(named=)", named).values())
        self.names: tuple[str, ...] = tuple(named)

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
    try:
        # It is wrapped by what leaves it out when a step is compiled, and imports PyTorch's compiler for that.
        add = unwrap(torch.optim.Optimizer.add_param_group)
        with replaced_attribute(torch.optim.Optimizer, "add_param_group", add):
            made = make(trained)
    except ValueError as error:
        if "empty parameter list" not in str(error):
            raise
        raise PenstockError(
            "optimizer=: expected an optimizer of some of the parameters, found one of none: the function selects none "
            f"of the {len(trained)} that this process trains ({trained.names[0]}, ...). Pass a group, which may be "
            'empty, as in torch.optim.Adam([{"params": selected}]), or return [] where nothing is selected'
        ) from error
    optimizers = tuple(made) if isinstance(made, tuple | list) else (made,)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise PenstockError(
                f"optimizer=: expected a function that returns a torch.optim.Optimizer, or several, found that it "
                f"returned {text_of(optimizer)}. Pass one such as lambda params: torch.optim.SGD(params, lr=0.1)"
            )
    stepped = Counter(id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"])
    twice = [name for name, parameter in trained.items() if stepped[id(parameter)] > 1]
    if twice:
        raise PenstockError(
            f"optimizer=: expected each parameter in one optimizer, found {twice[0]} in two: give it to one of them"
        )
    known = {id(parameter) for parameter in named.values()}
    for optimizer in optimizers:
        _check_optimizer(optimizer, known)
    return optimizers


def _check_optimizer(optimizer: torch.optim.Optimizer, known: Collection[int]) -> None:
    """Raises `PenstockError` unless `optimizer` can step by itself, and steps no parameter but those of the ids `known`
    only.
    """
    kind = type(optimizer).__name__
    # Of the class: a scheduler has put a function of its own in the place of the method.
    if not function((), "").accepts(MethodType(type(optimizer).step, optimizer)):
        raise needs_closure(optimizer)
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        # Its processes would wait for each other in step(), each for weights of other shapes.
        raise PenstockError(
            f"optimizer=: expected an optimizer that steps the parameters of this process alone, found {kind}, which "
            "shares those of all processes out. Use the optimizer_class that it wraps, and shard_optimizer=True for "
            "optimizer states that replicas share"
        )
    foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in known]
    if foreign:
        raise PenstockError(
            f"optimizer=: expected the parameters that the function is called with, found {len(foreign)} other(s) in "
            f"{kind}, the first of shape {tuple(foreign[0].shape)}: nothing would compute their gradients or save them "
            "in a pipeline. Build it from the function's argument, as in lambda params: torch.optim.SGD(params, "
            "lr=0.1), and make a parameter of your own part of the model"
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> PenstockError:
    """The error for an `optimizer` whose step needs a closure."""
    return PenstockError(
        f"optimizer=: expected an optimizer whose step() needs no arguments, found {type(optimizer).__name__}, which "
        "computes the loss again by a closure: a pipeline cannot run forwards within an update. Use another optimizer"
    )


def make_scheduler(make: MakeScheduler, optimizer: torch.optim.Optimizer) -> LRScheduler:
    """The learning rate scheduler that `make` returns for `optimizer`.

    Raises `PenstockError` for anything else than a scheduler of this optimizer whose ``step()`` needs no arguments.
    """
    made: object = make(optimizer)
    if isinstance(made, torch.optim.lr_scheduler.ReduceLROnPlateau):
        raise PenstockError(
            "lr_scheduler=: expected a scheduler that steps with every update, found ReduceLROnPlateau, which needs a "
            "measured loss that updates do not have. Use another one, or leave lr_scheduler= out and step it yourself "
            "after an evaluation: plateau = ReduceLROnPlateau(pipe.optimizer), plateau.step(float(result.loss))"
        )
    if not isinstance(made, LRScheduler):
        raise PenstockError(
            f"lr_scheduler=: expected a function that returns a scheduler of torch.optim.lr_scheduler, found that it "
            f"returned {text_of(made)}. Pass one such as lambda optimizer: StepLR(optimizer, step_size=100)"
        )
    if made.optimizer is not optimizer:
        raise PenstockError(
            f"lr_scheduler=: expected a scheduler of the optimizer that the function is called with, found "
            f"{type(made).__name__} of another one. Build it from the function's argument"
        )
    if not function((), "").accepts(made.step):
        raise PenstockError(
            f"lr_scheduler=: expected a scheduler whose step() needs no arguments, found {type(made).__name__}: a "
            "pipeline calls it with every update, and has none. Use another one"
        )
    return made
