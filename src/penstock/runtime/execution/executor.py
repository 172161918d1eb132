"""Forward and backward of one stage, and what is kept between them.

A backward is done at once, or in two parts: `backward_input`, and later `backward_weight`.

Laws of this file:
  1. It knows no schedule, no version and no peer: it is told what to compute, on what, for which microbatch.
  2. What it hands out carries no autograd history: a cut between stages is a cut in the graph.
  3. Of a microbatch that is to be recomputed it keeps what the stage received and nothing that autograd saved. Its
     backward computes it again once, in the input part if there are two.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn, TypeAlias

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from penstock.errors import PenstockError
from penstock.runtime.execution.split_backward import WeightBackward, go_backward_to_inputs
from penstock.torch_internals.autograd import run_backward

__all__ = ["Compute", "StageExecutor"]

Compute: TypeAlias = Callable[[Sequence[Tensor]], tuple[Tensor, ...]]


class _Kept(NamedTuple):
    """Of a microbatch: what it received (leaves of autograd), and how to come by what it computed (with history)."""

    received: tuple[Tensor, ...]
    compute: Callable[[], tuple[Tensor, ...]]


@dataclass(slots=True)
class StageExecutor:
    """The microbatches of one stage that are in flight: forwarded and not yet gone backward, or not yet all the way."""

    in_flight: dict[int, _Kept | WeightBackward] = field(default_factory=dict)

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
        return tuple([output.detach().requires_grad_(output.requires_grad) for output in outputs])

    def backward(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """Adds the weights' gradients to their ``.grad`` and returns those of what was received.

        `gradients` belong to the results of `forward`, in order; None means that nothing depends on that one. So does a
        None that is returned.
        """
        kept = self._take(microbatch)
        outputs, given = _roots(kept, gradients)
        if outputs:
            run_backward(outputs, given)
        result = tuple([leaf.grad for leaf in kept.received])
        for leaf in kept.received:
            leaf.grad = None
        return result

    def backward_input(self, microbatch: int, gradients: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
        """As `backward`, but the weights' gradients are left to `backward_weight`."""
        kept = self._take(microbatch)
        result, self.in_flight[microbatch] = go_backward_to_inputs(*_roots(kept, gradients), kept.received)
        return result

    def backward_weight(self, microbatch: int, hooked: bool = False) -> None:
        """Adds the gradients that `backward_input` left to the weights' ``.grad``. `hooked`: these have hooks."""
        part = self.in_flight.pop(microbatch)
        assert isinstance(part, WeightBackward), "the weight part of a backward comes after its input part"
        part.run(hooked)

    def _take(self, microbatch: int) -> _Kept:
        kept = self.in_flight.pop(microbatch)
        assert isinstance(kept, _Kept), "the input part of a backward comes once, and instead of a whole one"
        return kept


def _roots(kept: _Kept, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
    """The outputs that a backward starts from, and the gradients of these."""
    outputs: list[Tensor] = []
    given: list[Tensor] = []
    if any([gradient is not None for gradient in gradients]):
        for output, gradient in zip(kept.compute(), gradients, strict=True):
            if gradient is not None and output.requires_grad:
                outputs.append(output)
                given.append(gradient)
    return outputs, given


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
