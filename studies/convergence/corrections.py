"""Two hooks that change an optimizer's step against stale gradients: examples of `penstock.UpdateHook`."""

from dataclasses import dataclass

import torch

import penstock

__all__ = ["ErrorFeedback", "LookAhead"]


@dataclass(frozen=True, slots=True)
class ErrorFeedback(penstock.UpdateHook):
    """Adds to every step of the optimizer the error of the one before it: W' + strength d (u - previous u).

    The step before was taken with the gradient of older weights. The present step shows what it should have been, and
    the difference is the error that is fed back; the first step has none. The hook keeps one tensor per parameter.

    It follows the idea of the correction of Zmushko et al. (ICML 2026, arXiv 2606.30634), which works on updates, mixes
    the recent ones and suits any optimizer. The formula is derived here, not taken from the paper.
    """

    strength: float = 1.0

    def after_step(self, update: penstock.WeightUpdate) -> None:
        step = update.after - update.before
        if update.delay and "step" in update.state:
            update.after.add_(step - update.state["step"], alpha=self.strength * update.delay)
        update.state["step"] = step


@dataclass(frozen=True, slots=True)
class LookAhead(penstock.UpdateHook):
    """Applies Nesterov's method with discounted steps around an optimizer without momentum of its own.

    With z the weights that gradients are taken at and y those without the look-ahead: y' = z + (1 - momentum) u and z'
    = y' + momentum (y' - y). The weights of the model are z. The hook keeps y. Ajanthan et al. (ICML 2025, "Nesterov
    Method for Asynchronous Pipeline Parallel Optimization") use it with SGD; for Adam they take NAdam, which is an
    optimizer and needs no hook: ``torch.optim.NAdam(params, lr, betas=(0.99, 0.999))``.
    """

    momentum: float = 0.99

    def after_step(self, update: penstock.WeightUpdate) -> None:
        old = update.state.get("base", update.before)
        base = torch.lerp(update.before, update.after, 1 - self.momentum)
        update.after.copy_(torch.add(base, base - old, alpha=self.momentum))
        update.state["base"] = base
