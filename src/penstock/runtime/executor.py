"""Forward and backward of one stage, and what is kept between them.

Laws of this file:
  1. It knows no schedule, no version and no peer: it is told what to compute, on what, for which microbatch.
  2. What it hands out carries no autograd history: a cut between stages is a cut in the graph.
  3. Of a microbatch that is to be recomputed it keeps what the stage received and nothing that autograd saved.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PenstockError

__all__ = ["Compute", "StageExecutor"]

Compute: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """Of a microbatch: what it received (leaves of autograd), and how to come by what it computed (with history)."""

    received: tuple[Tensor, ...]
    compute: Callable[[], tuple[Tensor, ...]]


@dataclass(slots=True)
class StageExecutor:
    """The microbatches of one stage that are in flight: forwarded and not yet gone backward."""

    in_flight: dict[int, _Kept] = field(default_factory=dict)

    def forward(
        self,
        microbatch: int,
        received: Sequence[Tensor],
        compute: Compute,
        again: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> tuple[Tensor, ...]:
        """``compute(received)``, detached; each result requires a gradient if the computed one does.

        `received` are leaves: those that require a gradient get it in `backward`. With `again` the backward computes a
        second time, inside of ``again()``, instead of keeping what autograd saves.
        """
        leaves = tuple(received)
        if again is None:
            outputs = compute(leaves)
            self.in_flight[microbatch] = _Kept(leaves, lambda: outputs)
        else:
            # With gradients, although they are not kept: PyTorch computes some operators differently without.
            with saved_tensors_hooks(_forget, _refuse):
                outputs = compute(leaves)
            self.in_flight[microbatch] = _Kept(leaves, lambda: _repeat(compute, leaves, again))
        return tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Adds the weights' gradients to their ``.grad`` and returns those of what was received.

        `gradients` belong to the results of `forward`, in order; None means that nothing depends on that one. So does a
        None that is returned.
        """
        kept = self.in_flight.pop(microbatch)
        if any(gradient is not None for gradient in gradients):
            _go_backward(kept.compute(), gradients)
        result = tuple(leaf.grad for leaf in kept.received)
        for leaf in kept.received:
            leaf.grad = None
        return result


def _go_backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    roots = [
        (output, gradient)
        for output, gradient in zip(outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if roots:
        torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])


def _repeat(
    compute: Compute, received: Sequence[Tensor], again: Callable[[], AbstractContextManager[None]]
) -> tuple[Tensor, ...]:
    with again():
        return compute(received)


def _forget(tensor: Tensor) -> None:
    """Autograd keeps nothing in place of `tensor`."""


def _refuse(_: None) -> NoReturn:
    raise PenstockError(
        "a stage that is to be recomputed asked for gradients in its forward (torch.autograd.grad): expected them in "
        "the backward only, since what autograd saves is not kept. Leave this stage out of recompute="
    )
