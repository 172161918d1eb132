"""Likely causes of a difference, in the user's words: by the step of the way that makes it, and what differs first."""

from enum import Enum
from typing import Any

from torch import Tensor

from penstock.capturing.samples import flatten
from penstock.rehearsing.differences import Difference
from penstock.rehearsing.first_looks import FirstLook
from penstock.rehearsing.setups import Setup
from penstock.rehearsing.trainings import as_module
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


_REMADE = (
    "the function that makes the training does not make it new every time: it keeps state in a global, a default "
    "argument or a closure, or draws from a generator of its own. Make all of that in the function"
)
_COPIED = (
    "state that copies of the model share: an object in a closure, a default argument, a global, a generator or an "
    "iterator. Pass a function that makes the model and everything around it anew, instead of the model"
)
_BATCH_NORM = (
    "BatchNorm, which takes its mean and variance over a microbatch and not over the batch, in any accumulation of "
    "gradients. Use GroupNorm or LayerNorm, or fewer microbatches"
)
_SAMPLES = (
    "the model's output for a sample depends on the other samples of the batch (attention, a mean or a router over the "
    "batch), or samples are not in dimension 0 of every input (batch_first=False, packed sequences). Put samples "
    "first, or cut the batch yourself with penstock.Microbatches"
)
_LISTED = (
    "the target holds a list with one entry for each sample. Tensors are cut into microbatches along dimension 0; "
    "other entries go whole to each of them. Make it a tensor (padded), or cut the batch yourself with "
    "penstock.Microbatches"
)
_IGNORED = (
    "the loss is a mean over the labels that count, not over samples. Pass loss_weight= with their number, such as "
    "loss_weight=lambda target: (target != -100).sum(), and with class weights the sum of these"
)
_NO_MEAN = (
    "the loss is no mean over samples: a sum, a mean over tokens or a mask, a ratio such as dice, or a comparison of "
    "samples with each other (contrastive). Where it is a mean over other items, pass loss_weight= with their number; "
    "no weight makes a ratio right: average it per sample"
)
_METRIC = (
    "the metric is no mean over samples (a ratio, a maximum, the exponential of a loss): a step returns its mean over "
    "microbatches. Return the numbers that it is made of"
)
_INJECTED = (
    "a gradient that does not follow the loss, which agrees. A gradient that an autograd.Function adds (an auxiliary "
    "loss), or a hook that changes gradients, counts once for each microbatch, while losses count by their share of "
    "the batch. Return the auxiliary loss with the model's output and add it in loss_fn"
)
_CAPTURE = (
    "the capture, which runs the model before the first step and calls its blocks one by one. State in Python that "
    "these runs use up (counters, iterators, random generators), values of Python that blocks return, attributes of "
    "parameters, and weights held by another reference than the attribute of their module are not seen as in a plain "
    "loop. Keep state in buffers, and hand it on as arguments and results: docs/inputs.md"
)
_GRADIENTS_BEFORE = (
    "gradients that were in .grad before the first step. A loop drops them by zero_grad(), and the pipeline adds to "
    "them. Call model.zero_grad() before"
)
_OPTIMIZER = (
    "the optimizer. The gradients agree, and the update differs: in a pipeline step() is called for each stage, with "
    "the parameters of that stage. A counter in a parameter group or in the optimizer moves once per stage then, and a "
    "norm of all gradients inside step() is the norm of one stage. Use an optimizer that keeps its state per parameter "
    "in state[p], and clip_grad_norm= for the norm"
)
_LOSS_READS = (
    "loss_fn reads parameters of the model, whose stages do not wait for the gradient that comes from the loss. Use "
    "weight_decay of the optimizer, or let the blocks compute the penalty and return it with the output"
)
SIDE_WAYS = (
    "what passes between stages by another way than arguments and results: an object that blocks of two stages both "
    "change or read. The order of microbatches then decides what a block sees. Return it from the block, and pass it "
    "to the next one"
)
_FAULT = "a fault of Penstock's: the pipeline must compute what reference_train does. Please report it"
_ACCEPT = "accumulation=True (--accumulation) compares with a loop in microbatches, and so leaves this out"


def explain(rung: Rung, difference: Difference, look: FirstLook, setup: Setup) -> str:
    """The likely cause of `difference`, which comes in at `rung`, and the way out."""
    match rung:
        case Rung.AGAIN:
            return _REMADE if setup.remade else _COPIED
        case Rung.ACCUMULATION:
            return f"{_explain_accumulation(difference, look, setup)}. {_ACCEPT}"
        case Rung.DELAYED | Rung.AS_GIVEN:
            return _FAULT
        case Rung.ONE_STAGE | Rung.STAGES if _has_gradients(setup):
            return _GRADIENTS_BEFORE
        case Rung.STAGES if difference.kind in ("option", "state", "parameter"):
            return _OPTIMIZER
        case Rung.STAGES:
            return _LOSS_READS if look.read_by_loss else SIDE_WAYS
        case _:
            return _CAPTURE


def _explain_accumulation(difference: Difference, look: FirstLook, setup: Setup) -> str:
    if look.batch_norms:
        return _BATCH_NORM
    if difference.kind == "output":
        return _SAMPLES
    if any(_has_list(target, look.samples) for _, target in setup.batches):
        return _LISTED
    if difference.kind == "metric":
        return _METRIC
    if difference.kind == "loss":
        return _IGNORED if _ignores_labels(setup) else _NO_MEAN
    return _INJECTED


def _has_list(target: Any, samples: int) -> bool:
    inner: Any = target.values() if isinstance(target, dict) else target if isinstance(target, list | tuple) else ()
    listed = isinstance(target, list | tuple) and len(target) == samples
    return listed or any(_has_list(each, samples) for each in inner)


def _ignores_labels(setup: Setup) -> bool:
    labels = [leaf for _, target in setup.batches for leaf in flatten(target)[0] if isinstance(leaf, Tensor)]
    weighted = getattr(setup.fresh()["loss_fn"], "weight", None) is not None
    return weighted or any(bool(leaf.eq(IGNORED).any()) for leaf in labels)


def _has_gradients(setup: Setup) -> bool:
    return any(parameter.grad is not None for parameter in as_module(setup.fresh()["model"]).parameters())
