"""The forwards of a rank's stages, in training and in evaluation.

A training forward brings together what it depends on beside its input: the random seed, autocast and recomputation.
The worker decides which forward runs when, on which version of the weights.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.capturing.randomness import microbatch_seed, part_seed
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import BatchRun
from penstock.runtime.engine.local_stage import LocalStage
from penstock.runtime.engine.loss_head import LossHead
from penstock.runtime.execution.executor import Compute
from penstock.runtime.execution.offloading import Offloads
from penstock.runtime.execution.recomputation import Recomputation
from penstock.scheduling.actions import Action
from penstock.scheduling.direct_backwards import find_direct
from penstock.torch_internals.modules import runs_plainly

_Autocast: TypeAlias = Callable[[], torch.autocast]
"""Makes the context that forwards and losses are computed in."""


class Forwards:
    """Runs the forwards of `stages`, those of one rank; `heads` has the loss head of the last stage if it is there."""

    def __init__(
        self,
        stages: Mapping[int, LocalStage],
        heads: Mapping[int, LossHead],
        autocast: _Autocast | None,
        offloads: Offloads,
    ) -> None:
        self._stages, self._heads, self._autocast = stages, heads, autocast
        self.offloads = offloads
        """The copies of what these forwards saved."""
        self._offloaded: Collection[tuple[int, int]] = ()
        """The stages and microbatches of the present segment that will be offloaded."""
        self._recomputations = {
            index: Recomputation(stage.recomputes, heads[index].loss_fn if index in heads else None)
            for index, stage in stages.items()
            if stage.recomputes is not None
        }
        self._direct: frozenset[tuple[int, int]] = frozenset()
        """The stages and microbatches whose backward directly follows their forward, so that nothing is recomputed."""
        self._batch = BatchRun(training=True)
        self.read_modules()

    def read_modules(self) -> None:
        """Finds the stages with layers that draw random numbers."""
        self._random = frozenset(index for index, stage in self._stages.items() if any(stage.weights.stage.random))

    def begin(self, batch: BatchRun, program: Sequence[Action], offloaded: Collection[tuple[int, int]]) -> None:
        """`offloaded`: the stages and microbatches that `program` offloads."""
        self._batch, self._offloaded = batch, offloaded
        for head in self._heads.values():
            head.begin(batch)
        self._direct = find_direct(program) if self._recomputations else frozenset()

    def train(
        self, index: int, k: int, version: int, microbatch: Microbatch, received: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """The outputs of stage `index` with the weights of `version` for `microbatch`, which is number `k`.

        The last stage returns its loss alone.
        """
        stage, head = self._stages[index], self._heads.get(index)
        module = stage.weights.stage
        stage.weights.point(version)
        seed = self._batch.seed if index in self._random else None
        if seed is not None:
            seed = part_seed(microbatch_seed(seed, self._batch.microbatches_before + k), microbatch.slice_index)
        layer_runner = context = None
        recomputation = self._recomputations.get(index)
        if recomputation is not None and (index, k) not in self._direct:
            point = partial(stage.weights.point, version)
            layer_runner = recomputation.layer_runner(point)
            context = recomputation.context_for(point, module, (*received, *microbatch.tensors))
        # A module of ours around the user's: one without hooks need not look for them.
        run = module.forward if runs_plainly(module) else module
        compute: Compute = partial(run, inputs=microbatch.inputs, seed=seed, layer_runner=layer_runner)
        metrics: dict[str, Tensor] = {}
        if head is not None:
            end = partial(head.follow, compute=compute, module=module, layer_runner=layer_runner)
            compute = partial(end, microbatch=microbatch, metrics=metrics)
        if self._autocast is not None:
            compute = self._autocast()(compute)
        offloads = self.offloads if (index, k) in self._offloaded else None
        outputs = stage.executor.forward(k, received, compute, context, offloads=offloads)
        if head is not None:
            head.end_forward(k, microbatch, outputs[0], metrics, received)
        return outputs

    def evaluate(self, index: int, k: int, microbatch: Microbatch, received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs of stage `index` in evaluation mode, with the newest weights and without gradients."""
        with torch.no_grad(), self._autocast() if self._autocast else nullcontext():
            outputs = self._stages[index].evaluation()(received, microbatch.inputs)
            if index in self._heads:
                self._heads[index].end_evaluation(k, microbatch, outputs)
        return outputs
