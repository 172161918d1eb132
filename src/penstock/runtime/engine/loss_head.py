"""The loss at the end of the last stage: computes it, keeps its value and metrics, and starts the backward from it.

Laws of this file:
  1. Only the rank of a last stage has a loss head, one for all its microbatches.
  2. The loss is one layer more: it runs in the stage's forward, so a recomputation repeats it like a layer.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.capturing.chain import LayerChain, StageModule
from penstock.errors import PenstockError
from penstock.runtime.batches.batch_run import BatchRun
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import MicrobatchResult
from penstock.runtime.engine.loss_parameters import LossParameters
from penstock.runtime.parameters.shards import whole
from penstock.training.losses import LossFunction, compute_loss


class LossHead:
    """Ends the forwards of `rank`, which holds the last stage of `chain`, with the loss.

    `weigh`: the weight of a microbatch's loss in the loss that its update minimizes, times the loss scale.
    `checks`: a loss that is not finite is an error.
    """

    def __init__(
        self,
        rank: int,
        chain: LayerChain,
        loss_fn: LossFunction,
        weigh: Callable[[int, Microbatch], float],
        *,
        checks: bool,
    ) -> None:
        self.loss_fn, self.checks = loss_fn, checks
        self._rank, self._chain, self._weigh = rank, chain, weigh
        self._batch = BatchRun(training=True)
        self._parameters: LossParameters | None = LossParameters(chain)
        """None after the first loss, whose parameters have been looked at."""
        self._gradients: dict[int, Tensor] = {}
        """By microbatch: the gradient of its loss, from its forward to its backward."""

    def begin(self, batch: BatchRun) -> None:
        """Prepares for the forwards of `batch`."""
        self._batch = batch

    def discard(self) -> None:
        """Drops the gradients of losses whose backward will not come."""
        self._gradients.clear()

    def train(
        self, module: StageModule, microbatch: Microbatch, metrics: dict[str, Tensor], *outputs: Tensor
    ) -> tuple[Tensor]:
        """As `compute`, after a forward of `module` in training. Raises `PenstockError` at the first one if the loss
        takes gradients of parameters that would be lost.
        """
        if self._parameters is None:
            return self.compute(microbatch, metrics, *outputs)
        loss_fn = self.loss_fn
        self.loss_fn = self._parameters.examined(loss_fn, module, outputs, microbatch.tensors)
        try:
            loss = self.compute(microbatch, metrics, *outputs)
        finally:
            self.loss_fn = loss_fn
        self._parameters = None
        return loss

    def compute(self, microbatch: Microbatch, metrics: dict[str, Tensor], *outputs: Tensor) -> tuple[Tensor]:
        """The loss of a forward that returned `outputs`; the metrics that `loss_fn` returned beside it go to
        `metrics`.
        """
        chain = self._chain if self._batch.training else self._chain.evaluation()
        loss, beside = compute_loss(self.loss_fn, chain.output.build(outputs), microbatch.target)
        metrics.update(beside)
        if self._batch.training and microbatch.amount:
            _check_trains(loss, outputs)
        # A loss may be a DTensor where the layers before it are split over processes.
        return (whole(loss),)

    def end_forward(self, k: int, microbatch: Microbatch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        """Keeps `loss` and `metrics` of microbatch `k`, and the gradient that its backward starts from."""
        self._keep(k, microbatch, loss, metrics)
        self._gradients[k] = torch.full_like(loss, self._weigh(k, microbatch))

    def take_gradient(self, k: int) -> Tensor:
        """The gradient that the backward of microbatch `k` starts from; once."""
        return self._gradients.pop(k)

    def end_evaluation(self, k: int, microbatch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
        """Keeps the outputs of an evaluation forward, or the loss and metrics of them."""
        if self._batch.keeps_outputs:
            self._batch.outputs[k] = tuple(map(whole, outputs))
        else:
            metrics: dict[str, Tensor] = {}
            (loss,) = self.compute(microbatch, metrics, *outputs)
            self._keep(k, microbatch, loss, metrics)

    def _keep(self, k: int, microbatch: Microbatch, loss: Tensor, metrics: Mapping[str, Tensor]) -> None:
        values = tuple([whole(value.detach()) for value in (loss, *metrics.values())])
        self._batch.results[self._rank, k] = MicrobatchResult(tuple(metrics), values, microbatch.weight)


def _check_trains(loss: Tensor, outputs: tuple[Tensor, ...]) -> None:
    """Raises `PenstockError` if no gradient can be taken of `loss`, computed from `outputs`."""
    if not loss.is_floating_point():
        raise PenstockError(
            f"loss_fn returned a loss of {loss.dtype} in a step: expected a floating-point number, of which gradients "
            "can be taken. Return the loss as computed, and counts such as accuracy in a dict beside it"
        )
    if torch.is_grad_enabled() and not loss.requires_grad and any(output.requires_grad for output in outputs):
        raise PenstockError(
            "loss_fn returned a loss that does not depend on the model's output by autograd: expected one of which "
            "gradients can be taken, since the step would train nothing. Leave out .detach(), .item(), torch.tensor() "
            "and torch.no_grad() on the way from the output to the loss"
        )
