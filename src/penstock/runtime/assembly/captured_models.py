"""The captured model that a pipeline starts from.

A model on the meta device gets its weights later, and stages may be compiled later.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch

from penstock.capturing.chain import LayerChain
from penstock.capturing.doors import draft
from penstock.capturing.drafts import Draft
from penstock.capturing.model_kinds import first_device
from penstock.capturing.weightless import Weightless, asks_for_weights, capture_weightless
from penstock.runtime.assembly.partial_models import old_numbers
from penstock.runtime.assembly.pipeline_options import PipelineOptions
from penstock.runtime.collectives.agreements import agreed, gather_results
from penstock.runtime.execution.compilation import read_compilation
from penstock.runtime.transport.worlds import World
from penstock.training.losses import model_loss


@dataclass(frozen=True, slots=True, eq=False)
class CapturedModel:
    """A captured model, its device, and the work that is left: weights to make, stages to compile."""

    chain: LayerChain
    device: torch.device
    weightless: Weightless | None
    """None for a model that has its weights."""
    compilation: Mapping[str, Any] | None
    """The arguments of `torch.compile`; None compiles nothing."""


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
            device, made = weightless.device, Draft(weightless.chain)
        else:
            device = first_device(model)
            # Code of the model that branches on types must see the types of autocast.
            with recipe.autocast_context(device):
                made = draft(model, sample)
        if recipe.reads_model_loss:
            # It raises if the output has none.
            model_loss(made.chain.output.build([torch.empty(()) for _ in made.chain.output.values]))
    with recipe.autocast_context(device):
        chain = _settled(world, made)
    # The first evaluation may come when the model is whole no more.
    chain = replace(chain, evaluation=cache(old_numbers(model)(chain.evaluation)))
    if device.type == "cuda":
        # Ranks compute on streams of their own, which cannot use what the allocator keeps for this thread's stream.
        torch.cuda.empty_cache()
    return CapturedModel(chain, device, weightless, compilation)


def _settled(world: World, made: Draft) -> LayerChain:
    """The chain of `made`; each question is asked on one of the processes, if all have captured the same model."""
    context = "while it compared its capture with the model"
    ask = partial(made.share_of, world.rank, world.processes)
    found = gather_results(world, context, lambda: (made.text, ask()))
    if len({text for text, _ in found}) > 1:
        with agreed(world, context):
            return made.alone()
    return made.settled({number: answer for _, own in found for number, answer in own.items()})
