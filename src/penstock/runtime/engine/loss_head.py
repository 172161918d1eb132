"""The loss at the end of the last stage: computes it, keeps its value and metrics, and starts the backward from it.

Laws of this file:
  1. Only the rank of a last stage has a loss head, one for all its microbatches.
  2. The loss is one layer more: it runs in the stage's forward, so a recomputation repeats it like a layer.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from penstock.capturing.chain import LayerChain
from penstock.runtime.batches.batch_run import BatchRun
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import MicrobatchResult
from penstock.runtime.parameters.shards import whole
from penstock.training.losses import LossFunction, compute_loss

__all__ = ["LossHead"]


class LossHead:
    """Ends the forwards of `rank`, which holds the last stage of `chain`, with the loss.

    `weigh`: the weight of a microbatch's loss in the loss that its update minimizes, times the loss scale.
    `copies`: the stage returns memory that its next forward overwrites.
    """

    def __init__(
        self,
        rank: int,
        chain: LayerChain,
        loss_fn: LossFunction,
        weigh: Callable[[int, Microbatch], float],
        copies: bool,
    ) -> None:
        self.loss_fn = loss_fn
        self._rank, self._chain, self._weigh, self._copies = rank, chain, weigh, copies
        self._batch = BatchRun(training=True)
        self._gradients: dict[int, Tensor] = {}
        """By microbatch: the gradient of its loss, from its forward to its backward."""

    def begin(self, batch: BatchRun) -> None:
        """Prepares for the forwards of `batch`."""
        self._batch = batch

    def compute(self, microbatch: Microbatch, metrics: dict[str, Tensor], *outputs: Tensor) -> tuple[Tensor]:
        """The loss of a forward that returned `outputs`; the metrics that `loss_fn` returned beside it go to
        `metrics`.
        """
        chain = self._chain if self._batch.training else self._chain.evaluation()
        loss, beside = compute_loss(self.loss_fn, chain.output.build(outputs), microbatch.target)
        metrics.update(beside)
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
        if self._copies:
            values = tuple([value.clone() for value in values])
        self._batch.results[self._rank, k] = MicrobatchResult(tuple(metrics), values, microbatch.weight)
