"""Likely causes of a difference, in the user's words: by the training that brings it in, and what differs first."""

from collections.abc import Iterator, Mapping
from enum import Enum

from torch import Tensor

from penstock.capturing.samples import flatten
from penstock.rehearsing.trainings import Setup, as_module
from penstock.torch_internals.modules import is_batch_norm
from penstock.training.losses import IGNORED


class Rung(Enum):
    """A training on the way from the user's loop to the pipeline: each does one thing more as the pipeline does it."""

    LOOP = "your loop"
    AGAIN = "your loop again"
    ACCUMULATION = "your loop in microbatches"
    CHAIN = "the captured layers"
    UNSEEDED = "one stage without a seed"
    ONE_STAGE = "one stage"
    STAGES = "the pipeline"
    DELAYED = "reference_train"
    AS_GIVEN = "the pipeline as given"


_CAPTURE = (
    "the capture, which runs the model before the first step and calls its blocks one by one. State in Python that "
    "these runs use up (iterators, random generators, what an object outside of the model counts), and weights held by "
    "another reference than the attribute of their module are not seen as in a plain loop. Keep state in buffers, and "
    "hand it on as arguments and results: docs/inputs.md"
)
SIDE_WAYS = (
    "what passes between stages by another way than arguments and results: an object that blocks of two stages both "
    "change or read. The order of microbatches then decides what a block sees. Return it from the block, and pass it "
    "to the next one"
)
_FAULT = "a fault of Penstock's: the pipeline must compute what reference_train does. Please report it"
_ACCEPT = "accumulation=True (--accumulation) compares with a loop in microbatches, and so leaves this out"
_CAUSES: Mapping[tuple[Rung, str], str] = {
    (Rung.AGAIN, "remade"): "the function that makes the training does not make it new every time: it keeps state in a "
    "global, a default argument or a closure, or draws from a generator of its own. Make all of that in the function",
    (Rung.AGAIN, ""): "state that copies of the model share: an object in a closure, a default argument, a global, "
    "a generator or an iterator. Pass a function that makes the model and everything around it anew, instead of the "
    "model",
    (Rung.ACCUMULATION, "batch norm"): "BatchNorm, which takes its mean and variance over a microbatch and not over "
    "the batch, in any accumulation of gradients. Use GroupNorm or LayerNorm, or fewer microbatches",
    (Rung.ACCUMULATION, "output"): "the model's output for a sample depends on the other samples of the batch "
    "(attention, a mean or a router over the batch), or samples are not in dimension 0 of every input "
    "(batch_first=False, packed sequences). Put samples first, or cut the batch yourself with penstock.Microbatches",
    (Rung.ACCUMULATION, "metric"): "the metric is no mean over samples (a ratio, a maximum, the exponential of a "
    "loss): a step returns its mean over microbatches. Return the numbers that it is made of",
    (Rung.ACCUMULATION, "loss of labels"): "the loss is a mean over the labels that count, not over samples. Pass "
    "loss_weight= with their number, such as loss_weight=lambda target: (target != -100).sum(), and with class weights "
    "the sum of these",
    (Rung.ACCUMULATION, "loss"): "the loss is no mean over samples: a sum, a mean over tokens or a mask, a ratio such "
    "as dice, or a comparison of samples with each other (contrastive). Where it is a mean over other items, pass "
    "loss_weight= with their number; no weight makes a ratio right: average it per sample",
    (Rung.ACCUMULATION, ""): "a gradient that does not follow the loss, which agrees. A gradient that an "
    "autograd.Function adds (an auxiliary loss), or a hook that changes gradients, counts once for each microbatch, "
    "while losses count by their share of the batch. Return the auxiliary loss with the model's output and add it in "
    "loss_fn",
    (Rung.STAGES, "update"): "the optimizer. The gradients agree, and the update differs: each process calls step() "
    "with the parameters of its own stages, so a norm of all gradients inside step() is the norm of these. Use an "
    "optimizer that updates each parameter by itself, and clip_grad_norm= for the norm",
    (Rung.STAGES, ""): SIDE_WAYS,
    (Rung.DELAYED, ""): _FAULT,
    (Rung.AS_GIVEN, ""): _FAULT,
}
"""By the training that brings a difference in, and by what `_conditions` says of it; empty for anything else."""


def explain(rung: Rung, kind: str, setup: Setup) -> str:
    """The likely cause of a difference that comes in at `rung` with a value of `kind`, and the way out."""
    found = (_CAUSES.get((rung, condition)) for condition in _conditions(kind, setup))
    cause = next(filter(None, found), _CAPTURE)
    return f"{cause}. {_ACCEPT}" if rung is Rung.ACCUMULATION else cause


def _conditions(kind: str, setup: Setup) -> Iterator[str]:
    """What holds for a difference that begins with a value of `kind`, the most special first."""
    options = setup.fresh()
    labels = [leaf for _, target in setup.batches for leaf in flatten(target)[0] if isinstance(leaf, Tensor)]
    weighted = getattr(options.recipe.loss_fn, "weight", None) is not None
    if setup.remade:
        yield "remade"
    if any(is_batch_norm(each) and each.training for each in as_module(options.model.model).modules()):
        yield "batch norm"
    if kind == "loss" and (weighted or any(bool(leaf.eq(IGNORED).any()) for leaf in labels)):
        yield "loss of labels"
    if kind in ("option", "state", "parameter"):
        yield "update"
    yield from (kind, "")
