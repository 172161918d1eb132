"""What a pipeline begins with: the captured model, where it computes, and what is still to be done with it.

A model on the meta device is still to be given its weights, and stages may be still to be compiled.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from penstock.capturing import capture
from penstock.capturing.chain import LayerChain
from penstock.capturing.initialization import InitFn
from penstock.capturing.weightless import Weightless, asks_for_weights, capture_weightless
from penstock.runtime.assembly.restrictions import check_graphs
from penstock.runtime.execution.compilation import Compilation, compile_chain, read_compilation
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.transport.collective_errors import agreed
from penstock.runtime.transport.worlds import World
from penstock.scheduling.schedules import Schedule
from penstock.training.precisions import first_device
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan, Stage

__all__ = ["CapturedModel", "capture_for_training"]


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """A captured model."""

    chain: LayerChain
    device: torch.device
    weightless: Weightless | None
    """None for a model that has its weights."""
    init_fn: InitFn | None
    compilation: Compilation | None

    def compile(
        self, chain: LayerChain, plan: Plan, schedule: Schedule, grains: Mapping[int, Granularity]
    ) -> LayerChain:
        """`chain`, whose stages are compiled if they are to be; `grains`: how those of `plan` recompute, which runs as
        `schedule`.

        Raises `PlanError` if their work is to be recorded as CUDA graphs and cannot be.
        """
        if self.compilation is not None and self.compilation.graphed:
            check_graphs(schedule, chain, grains, self.device)
        apart = [plan.stages[index].start for index, grain in grains.items() if grain == "layers"]
        return compile_chain(chain, self.compilation, apart)

    def materialize(self, world: World, stages: Iterable[Stage], seed: int | None) -> LayerChain:
        """The chain, in which `stages`, those of this process, have weights. Collective where it makes them.

        Raises `PenstockError` on every process if `init_fn` fails on one.
        """
        if self.weightless is None or self.init_fn is None:
            return self.chain
        layers = [layer for stage in stages for layer in range(stage.start, stage.stop)]
        with agreed(world, "while it made its weights"):
            return self.weightless.materialize(layers, self.init_fn, seed or 0)


def capture_for_training(
    model: nn.Module | Sequence[nn.Module],
    sample: Any,
    *,
    init_fn: InitFn | None,
    recipe: Recipe,
    compile: bool | Mapping[str, Any] = False,
    parallelized: bool = False,
) -> CapturedModel:
    """Captures `model` with `sample`, in the types of `recipe`; one on the meta device only with `init_fn`, and another
    one only without. `compile`: False, True or the arguments of `torch.compile`; only where no hook has `parallelized`.
    """
    compilation = read_compilation(compile, parallelized)
    if asks_for_weights(model, init_fn):
        weightless = capture_weightless(model, sample)
        return CapturedModel(weightless.chain, weightless.device, weightless, init_fn, compilation)
    device = first_device(model)
    # What the model's code decides by types it must decide as it would under autocast.
    with recipe.computing(device):
        return CapturedModel(capture(model, sample), device, None, None, compilation)
