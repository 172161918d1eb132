"""Losses that are not finite end the training, with the step that they come from.

On the CPU a loss is looked at as soon as it is computed, before its step has changed a weight. An accelerator would
have to be waited for: there a loss is looked at when it has been copied to the host, in one of the next calls.
"""

import math
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.batches.results import Loss

_ADVICE = (
    "Lower the learning rate, clip gradients (clip_grad_norm=), leave such samples out, or pass on_nonfinite='skip', "
    "which leaves out updates with such gradients. Go on from the last checkpoint"
)


def is_nonfinite_now(loss: Tensor) -> bool:
    """Whether `loss` is on the CPU and not finite."""
    return loss.is_cpu and not math.isfinite(loss.item())


def nonfinite_loss(loss: Tensor, microbatch: int, received: Sequence[Tensor]) -> PenstockError:
    """The error of a `loss` that is not finite, of a forward of the last stage on what it `received`."""
    known = [bool(each.isfinite().all()) for each in received if each.is_floating_point()]
    origin = (
        "The last stage or loss_fn made it, since what they received is finite"
        if all(known)
        else "What this stage received from the stages before it is not finite already"
    )
    return PenstockError(
        f"the loss of microbatch {microbatch} since the last drain is {loss.item()}: expected a finite number, which "
        f"the gradients could be computed from. {origin}; forward hooks on the blocks show which of them. No weight "
        f"was changed with it. {_ADVICE}"
    )


class LateLosses:
    """The losses of steps that are not known on the host yet. Each loss is of a step of `microbatches`."""

    def __init__(self, microbatches: int) -> None:
        self._microbatches = microbatches
        self._waiting: deque[tuple[int, Loss]] = deque()

    def add(self, trained: int, loss: Loss) -> None:
        """Adds the `loss` of a step that came after `trained` microbatches."""
        self._waiting.append((trained, loss))

    def check(self) -> None:
        """Raises `PenstockError` if one that has arrived is not finite. Does not wait."""
        while self._waiting and self._waiting[0][1].ready():
            trained, loss = self._waiting.popleft()
            if not math.isfinite(value := float(loss)):
                step = trained // self._microbatches
                raise PenstockError(
                    f"the loss of step {step} (counted from 0) is {value}, in its microbatch(es) "
                    f"{', '.join(str(k % self._microbatches) for k in loss.nonfinite)}: expected a finite number. "
                    f"Weights have been updated with it since. {_ADVICE}"
                )
