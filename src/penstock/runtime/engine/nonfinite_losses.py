"""Losses that are not finite end the training, with the step and the layer that they come from.

On the CPU a loss is looked at as soon as it is computed, before its step has changed a weight. An accelerator would
have to be waited for: there a loss is looked at when it has been copied to the host, in one of the next calls.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.runtime.batches.results import Loss

_ADVICE = (
    "Lower the learning rate, clip gradients (clip_grad_norm=), leave such samples out, or pass on_nonfinite='skip', "
    "which leaves out updates with such gradients. Go on from the last checkpoint"
)


def is_nonfinite_now(loss: Tensor) -> bool:
    """Whether `loss` is on the CPU and not finite."""
    return loss.is_cpu and not math.isfinite(loss.item())


def nonfinite_loss(loss: Tensor, where: str, origin: str) -> PenstockError:
    """The error of a `loss` that is not finite. `where`: names the microbatch. `origin`: a sentence on the layer."""
    return PenstockError(
        f"the loss of {where} is {loss.item()}: expected a finite number, which the gradients could be computed from. "
        f"{origin}. No weight was changed with it. {_ADVICE}"
    )


def find_layer(
    stage: nn.Module, names: Sequence[str], received: Sequence[Tensor], run: Callable[[Callable[..., Any]], object]
) -> str:
    """A sentence on the first layer of `stage` whose output is not finite. ``run(layer_runner)`` runs the forward
    again; the buffers of `stage` are restored after it.
    """
    if not _are_finite(received):
        return "What this stage received from the stages before it is not finite already"
    found: list[int] = []
    count = iter(range(len(names) + 1))

    def watch(layer: nn.Module | None, call: Callable[..., tuple[Tensor, ...]], arguments: Sequence[Tensor]) -> Any:
        results, index = call(*arguments), next(count)
        if not found and not _are_finite(results):
            found.append(index)
        return results

    saved = [(buffer, buffer.detach().clone()) for buffer in stage.buffers()]
    # The diagnosis must not hide the error that it belongs to.
    with torch.no_grad():
        with suppress(Exception):
            run(watch)
        for buffer, copy in saved:
            buffer.copy_(copy)
    if not found or found[0] >= len(names):
        return "The outputs of the layers of the last stage are finite, so loss_fn made it"
    return f"The first layer of this stage whose output is not finite is {names[found[0]]}"


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


def _are_finite(tensors: Sequence[Tensor | None]) -> bool:
    return all(bool(each.isfinite().all()) for each in tensors if each is not None and each.is_floating_point())
