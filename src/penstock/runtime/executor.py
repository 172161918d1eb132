"""Forward and backward of one stage, and what is kept between them.

Laws of this file:
  1. It knows no schedule, no version and no peer: it is told what to compute, on what, for which microbatch.
  2. What it hands out carries no autograd history: a cut between stages is a cut in the graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["StageExecutor"]


@dataclass(slots=True)
class StageExecutor:
    """The microbatches of one stage that are in flight: forwarded and not yet gone backward."""

    in_flight: dict[int, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]] = field(default_factory=dict)
    """For every microbatch what it received (leaves of autograd) and what it computed (with history)."""

    def forward(
        self,
        microbatch: int,
        received: Sequence[Tensor],
        compute: Callable[[Sequence[Tensor]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """``compute(received)``, detached; each result requires a gradient if the computed one does.

        `received` are leaves: those that require a gradient get it in `backward`.
        """
        outputs = compute(received)
        self.in_flight[microbatch] = (tuple(received), outputs)
        return tuple(output.detach().requires_grad_(output.requires_grad) for output in outputs)

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Adds the weights' gradients to their ``.grad`` and returns those of what was received.

        `gradients` belong to the results of `forward`, in order; None means that nothing depends on that one. So does a
        None that is returned.
        """
        received, outputs = self.in_flight.pop(microbatch)
        roots = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if roots:
            torch.autograd.backward([output for output, _ in roots], [gradient for _, gradient in roots])
        result = tuple(leaf.grad for leaf in received)
        for leaf in received:
            leaf.grad = None
        return result
