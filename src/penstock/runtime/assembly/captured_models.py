"""The captured model that a pipeline starts from.

A model on the meta device gets its weights later, and stages may be compiled later. A check runs the model several
times, so one rank makes the checks for all where all have captured the same chain. Else each checks its own.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch

from penstock.capturing.chain import LayerChain
from penstock.capturing.chain_checks import UncheckedChain
from penstock.capturing.chain_digests import digest_of
from penstock.capturing.doors import capture_unchecked
from penstock.capturing.initialization import InitFn
from penstock.capturing.weightless import Weightless, asks_for_weights, capture_weightless
from penstock.errors import CaptureError
from penstock.runtime.assembly.pipeline_options import PipelineOptions
from penstock.runtime.execution.compilation import compile_chain, read_compilation
from penstock.runtime.execution.recomputation import Granularity
from penstock.runtime.transport.collective_errors import agreed, gather_results
from penstock.runtime.transport.worlds import World
from penstock.torch_internals.tensors import accumulated_hooks, gradient_hooks
from penstock.training.losses import model_loss
from penstock.training.precisions import first_device
from penstock.values.plans import Plan, Stage

_GENERATORS = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """A captured model, its device, and the work that is left: weights to make, stages to compile."""

    chain: LayerChain
    device: torch.device
    weightless: Weightless | None
    """None for a model that has its weights."""
    init_fn: InitFn | None
    compilation: Mapping[str, Any] | None
    """The arguments of `torch.compile`; None compiles nothing."""
    communicates: bool
    """Whether the model waits for other processes in its forward."""

    def compile(self, chain: LayerChain, plan: Plan, granularities: Mapping[int, Granularity]) -> LayerChain:
        """`chain` with its stages compiled if the user asked for it. `granularities`: how stages recompute."""
        layerwise = [
            plan.stages[index].start for index, granularity in granularities.items() if granularity == "layers"
        ]
        return compile_chain(chain, self.compilation, layerwise)

    def materialize(self, world: World, stages: Iterable[Stage], seed: int | None) -> LayerChain:
        """The chain with weights for `stages`, those of this process. Collective if the weights have to be made.

        Raises `PenstockError` on every process if `init_fn` fails on one.
        """
        if self.weightless is None or self.init_fn is None:
            return self.chain
        layers = [layer for stage in stages for layer in range(stage.start, stage.stop)]
        with agreed(world, "while it made its weights"):
            return self.weightless.materialize(layers, self.init_fn, seed or 0)


def capture_for_training(world: World, options: PipelineOptions) -> CapturedModel:
    """Captures the model of `options` with its sample, in the types of the training. Collective.

    A model on the meta device needs ``init_fn=``; any other model must not have it. Raises on every rank what it raises
    on one.
    """
    model, sample, init_fn = options.model.model, options.model.sample, options.model.init_fn
    recipe, weightless = options.recipe, None
    with agreed(world, "while it captured the model"):
        compilation = read_compilation(options.run.compile, parallelized=options.run.parallelize is not None)
        if asks_for_weights(model, init_fn):
            weightless = capture_weightless(model, sample)
            device, unchecked = weightless.device, UncheckedChain(weightless.chain)
        else:
            device = first_device(model)
            # Code of the model that branches on types must see the types of autocast.
            with recipe.autocast_context(device):
                unchecked = capture_unchecked(model, sample)
        if recipe.reads_model_loss:
            # It raises if the output has none.
            output = unchecked.chain.output
            model_loss(output.build([torch.empty(()) for _ in output.values]))
    with recipe.autocast_context(device):
        chain = check_together(world, unchecked)
    made = init_fn if weightless else None
    return CapturedModel(chain, device, weightless, made, compilation, communicates=unchecked.communicates)


def check_together(world: World, unchecked: UncheckedChain) -> LayerChain:
    """The chain after its checks, which run the model several times: one rank makes them for all that have captured the
    same chain. Collective.

    Raises `CaptureError` on every rank if the chain must not be used.
    """
    with agreed(world, "while it captured the model"):
        digest = None if _runs_everywhere(unchecked) else digest_of(unchecked.chain)
    digests = world.gather(digest, "while they compared their captured models")
    if None in digests or len(set(digests)) > 1:
        with agreed(world, "while it checked its captured model"):
            return unchecked.checked()

    def run() -> list[bool] | str:
        if world.rank > 0:
            return []
        try:
            return unchecked.results()
        except CaptureError as error:
            return str(error)

    verdicts = gather_results(world, "while it checked the captured model", run)[0]
    if isinstance(verdicts, str):
        raise CaptureError(verdicts)
    return unchecked.after(verdicts)


def _runs_everywhere(unchecked: UncheckedChain) -> bool:
    """Whether every process has to run the checks: those of a model that waits for other processes in its forward, or
    might in the hooks of its parameters.
    """
    if unchecked.sampled is None:
        return False
    model = unchecked.sampled.model
    hooked = any(gradient_hooks(each) or accumulated_hooks(each) for each in model.parameters())
    return unchecked.communicates or hooked
