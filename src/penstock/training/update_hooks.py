"""What happens to a parameter beside the optimizer's step: corrections of staleness, and averages.

Under an asynchronous schedule an update is made with gradients that were taken at older weights. A hook sees every
update of every trained parameter, may change it, and may say that forwards read other weights than those that the
optimizer goes on from.

With W the weights before an update, W' after the optimizer's step, u = W' - W, and d the updates that were made since
the weights at which the gradient was taken:

- `WeightPrediction`: forwards read W' + d u, where the weights will be when the gradient comes back.
- `ErrorFeedback`: W' becomes W' + d (u - the optimizer's step before it).
- `LookAhead`: Nesterov's method around any optimizer.
- `WeightAverage`: keeps an exponential average, and changes nothing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from penstock.errors import PenstockError

__all__ = [
    "ErrorFeedback",
    "HookStates",
    "LookAhead",
    "UpdateHook",
    "WeightAverage",
    "WeightPrediction",
    "WeightUpdate",
    "check_hooks",
]


@dataclass(frozen=True, slots=True, eq=False)
class WeightUpdate:
    """One update of one parameter, after the optimizer's step."""

    name: str
    """In the model."""
    before: Tensor
    """The weights before it; not to be changed."""
    after: Tensor
    """The weights after it. What a hook writes into them is what the optimizer goes on from."""
    delay: int
    """Updates of the parameter's stage between the weights at which the gradient was taken and `before`, as it is when
    the pipeline is full: 0 under schedules that flush, 1 under `2bw`, p-1-s at stage s of `pipedream`."""
    state: dict[str, Tensor]
    """What the hook keeps of this parameter from update to update. It is part of checkpoints."""


class UpdateHook:
    """To be derived from: what to do at every update of every trained parameter that has a gradient.

    An update that a loss scale skips is none. Each stage comes to its updates by itself, on every process that holds
    it, so a hook must make of one update the same numbers everywhere.
    """

    def after_step(self, update: WeightUpdate) -> None:
        """Called after the optimizer's step, without gradients. May write into `update.after`."""

    def predicts(self, delay: int) -> bool:
        """Whether forwards of a stage with that delay read what `predict` returns. Costs one more set of weights."""
        return False

    def predict(self, update: WeightUpdate) -> Tensor:
        """What forwards read as the version that `update` made; `update.after` if it is not overridden.

        Evaluations, checkpoints and the first steps after a drain use the weights themselves.
        """
        return update.after


@dataclass(frozen=True, slots=True)
class WeightPrediction(UpdateHook):
    """Forwards read the weights as they are expected to be when their gradient comes back: W' + strength d u.

    The last step of the optimizer is taken to be the next ones. With SGD and momentum that is SpecTrain's prediction
    (Chen et al. 2018, arXiv 1809.02839), with Adam XPipe's (Guan et al. 2019, arXiv 1911.04610). For any optimizer;
    keeps no state.
    """

    strength: float = 1.0

    def predicts(self, delay: int) -> bool:
        return delay > 0

    def predict(self, update: WeightUpdate) -> Tensor:
        return update.after + (self.strength * update.delay) * (update.after - update.before)


@dataclass(frozen=True, slots=True)
class ErrorFeedback(UpdateHook):
    """Adds to every step of the optimizer the error of the one before it: W' + strength d (u - previous u).

    The step before was taken with the gradient of older weights; what it should have been is known by now, and the
    difference is the error that is fed back; the first step has none. Keeps one tensor per parameter.

    It follows the idea of the correction of Zmushko et al. (ICML 2026, arXiv 2606.30634), which works on updates, mixes
    the recent ones and suits any optimizer. The paper's own formula was not at hand: this one is derived here.
    """

    strength: float = 1.0

    def after_step(self, update: WeightUpdate) -> None:
        step = update.after - update.before
        if update.delay and "step" in update.state:
            update.after.add_(step - update.state["step"], alpha=self.strength * update.delay)
        update.state["step"] = step


@dataclass(frozen=True, slots=True)
class LookAhead(UpdateHook):
    """Nesterov's method with discounted steps, around an optimizer without momentum of its own.

    With z the weights that gradients are taken at and y those without the look-ahead: y' = z + (1 - momentum) u and
    z' = y' + momentum (y' - y). The weights of the model are z. Keeps y. Ajanthan et al. (ICML 2025, "Nesterov Method
    for Asynchronous Pipeline Parallel Optimization") use it with SGD; for Adam they take NAdam, which is an optimizer
    and needs no hook: ``torch.optim.NAdam(params, lr, betas=(0.99, 0.999))``.
    """

    momentum: float = 0.99

    def after_step(self, update: WeightUpdate) -> None:
        old = update.state.get("base", update.before)
        base = torch.lerp(update.before, update.after, 1 - self.momentum)
        update.after.copy_(torch.add(base, base - old, alpha=self.momentum))
        update.state["base"] = base


@dataclass(frozen=True, slots=True)
class WeightAverage(UpdateHook):
    """Keeps the exponential average decay A + (1 - decay) W', beginning with the weights before the first update.

    ``pipe.averages()`` returns it. Place it after hooks that change the weights.
    """

    decay: float = 0.999

    def after_step(self, update: WeightUpdate) -> None:
        if "average" not in update.state:
            update.state["average"] = update.before.clone()
        update.state["average"].lerp_(update.after, 1 - self.decay)


@dataclass(slots=True, eq=False)
class HookStates:
    """Hooks, in their order, with what they keep of every parameter."""

    hooks: tuple[UpdateHook, ...]
    states: list[dict[str, dict[str, Tensor]]] = field(init=False)
    """By hook and by name of the parameter."""

    def __post_init__(self) -> None:
        self.states = [{} for _ in self.hooks]

    @torch.no_grad()
    def after_step(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor], delay: int) -> dict[str, Tensor]:
        """The hooks' part of an update of the parameters in `before`; what forwards read where that is not `after`."""
        read: dict[str, Tensor] = {}
        for name, old in before.items():
            for hook, states in zip(self.hooks, self.states, strict=True):
                update = WeightUpdate(name, old, after[name].detach(), delay, states.setdefault(name, {}))
                hook.after_step(update)
            for hook, states in zip(self.hooks, self.states, strict=True):
                if hook.predicts(delay):
                    read[name] = hook.predict(WeightUpdate(name, old, after[name].detach(), delay, states[name]))
        return read


def check_hooks(hooks: Sequence[UpdateHook]) -> None:
    """Raises `PenstockError` if there is something else among `hooks`, or two that predict."""
    for hook in hooks:
        if not isinstance(hook, UpdateHook):
            raise PenstockError(
                f"update_hooks= has {hook!r}: expected objects of a class derived from penstock.UpdateHook, such as "
                "penstock.WeightPrediction()"
            )
    predicting = [hook for hook in hooks if hook.predicts(1)]
    if len(predicting) > 1:
        raise PenstockError(
            f"update_hooks= has {predicting[0]!r} and {predicting[1]!r}, which both say what forwards read: expected "
            "one that predicts. Leave one out, or derive a hook that does both"
        )
