"""The loss at the end of the last stage: computes it, keeps its value and metrics, and starts the backward from it.

A loss that is not finite ends the training, with the step that it comes from. On the CPU a loss is looked at as soon as
it is computed, before its step has changed a weight. An accelerator would have to be waited for: there a loss is looked
at when it has been copied to the host, in one of the next calls.

Laws of this file:
  1. Only the rank of a last stage has a loss head, one for all its microbatches.
  2. The loss is one layer more: it runs in the stage's forward, so a recomputation repeats it like a layer.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain, LayerRunner, StageModule
from penstock.errors import PenstockError
from penstock.runtime.batches.microbatches import Microbatch
from penstock.runtime.batches.results import BatchRun, Loss, MicrobatchResult
from penstock.runtime.execution.executor import Compute
from penstock.runtime.parameters.model_claims import is_claimed
from penstock.runtime.parameters.shards import whole
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.autograd import leaves_behind
from penstock.torch_internals.modules import tensor_tables
from penstock.torch_internals.unimported import PLAIN, compiled_code_runs_eagerly
from penstock.training.losses import LossFunction, compute_loss

_ADVICE = (
    "Lower the learning rate, clip gradients (clip_grad_norm=), leave such samples out, or pass on_nonfinite='skip', "
    "which leaves out updates with such gradients. Go on from the last checkpoint"
)


class LossHead:
    """Ends the forwards of `rank`, which holds the last stage of `chain`, with the loss.

    `weigh`: the weight of a microbatch's loss in the loss that its update minimizes, times the loss scale; None for its
    share of the minibatch. `checks`: a loss that is not finite is an error.
    """

    def __init__(
        self,
        rank: int,
        chain: LayerChain,
        loss_fn: LossFunction,
        weigh: Callable[[int, Microbatch], float] | None,
        *,
        checks: bool,
    ) -> None:
        self.loss_fn, self.checks = loss_fn, checks
        self._rank, self.chain, self._weigh = rank, chain, weigh
        self._batch = BatchRun(training=True)
        self._parameters: LossParameters | None = LossParameters(chain)
        """None after the first loss, whose parameters have been looked at."""
        self.gradients: dict[int, Tensor] = {}
        """By microbatch: the gradient that its backward starts from, until the backward takes it."""

    def begin(self, batch: BatchRun) -> None:
        self._batch = batch

    def follow(
        self,
        received: Sequence[Tensor],
        *,
        compute: Compute,
        microbatch: Microbatch,
        metrics: dict[str, Tensor],
        module: StageModule,
        layer_runner: LayerRunner | None,
    ) -> tuple[Tensor, ...]:
        """The loss of what ``compute(received)`` returns. `layer_runner` runs it like a layer of `module`."""
        outputs = compute(received)
        compute_loss = partial(self.compute, microbatch, metrics, module=module)
        return layer_runner(None, compute_loss, outputs) if layer_runner else compute_loss(*outputs)

    def compute(
        self, microbatch: Microbatch, metrics: dict[str, Tensor], *outputs: Tensor, module: StageModule | None = None
    ) -> tuple[Tensor]:
        """The loss of a forward that returned `outputs`; the metrics that `loss_fn` returned beside it go to
        `metrics`. At the first forward of `module` in training it raises `PenstockError` if the loss takes gradients of
        parameters that would be lost.
        """
        loss_fn, parameters = self.loss_fn, self._parameters
        if module is not None and parameters is not None:
            loss_fn = parameters.examined(loss_fn, module, outputs, microbatch.tensors)
        chain = self.chain if self._batch.training else self.chain.evaluation()
        loss, beside = compute_loss(loss_fn, chain.output.build(outputs), microbatch.target)
        metrics.update(beside)
        trains = loss.requires_grad and loss.is_floating_point()
        if not trains and self._batch.training and microbatch.amount:
            _check_trains(loss, outputs)
        if module is not None:
            self._parameters = None
        # A loss may be a DTensor where the layers before it are split over processes.
        return (loss if type(loss) in PLAIN else whole(loss),)

    def end_forward(
        self, k: int, microbatch: Microbatch, loss: Tensor, metrics: Mapping[str, Tensor], received: Sequence[Tensor]
    ) -> None:
        """Keeps `loss` and `metrics` of microbatch `k`, and the gradient that its backward starts from. `received`: by
        the stage. Raises `PenstockError` for a loss on the CPU that is not finite.
        """
        if self.checks and microbatch.amount and loss.is_cpu and not math.isfinite(loss.item()):
            raise _nonfinite_loss(loss, k, received)
        weight = microbatch.weight
        values = (loss.detach(), *map(whole, map(Tensor.detach, metrics.values())))
        self._batch.results[self._rank, k] = MicrobatchResult(tuple(metrics), values, weight)
        self.gradients[k] = torch.full_like(loss, weight if self._weigh is None else self._weigh(k, microbatch))

    def end_evaluation(self, k: int, microbatch: Microbatch, outputs: tuple[Tensor, ...]) -> None:
        """Keeps the outputs of an evaluation forward, or the loss and metrics of them."""
        if self._batch.keeps_outputs:
            self._batch.outputs[k] = tuple(map(whole, outputs))
        else:
            metrics: dict[str, Tensor] = {}
            (loss,) = self.compute(microbatch, metrics, *outputs)
            values = tuple([whole(value.detach()) for value in (loss, *metrics.values())])
            self._batch.results[self._rank, k] = MicrobatchResult(tuple(metrics), values, microbatch.weight)


def _check_trains(loss: Tensor, outputs: tuple[Tensor, ...]) -> None:
    """Raises `PenstockError` if `loss`, of which no gradient can be taken, should train `outputs`."""
    if not loss.is_floating_point():
        raise PenstockError(
            f"loss_fn returned a loss of {loss.dtype} in a step: expected a floating-point number, of which gradients "
            "can be taken. Return the loss as computed, and counts such as accuracy in a dict beside it"
        )
    if torch.is_grad_enabled() and any(output.requires_grad for output in outputs):
        raise PenstockError(
            "loss_fn returned a loss that does not depend on the model's output by autograd: expected one of which "
            "gradients can be taken, since the step would train nothing. Leave out .detach(), .item(), torch.tensor() "
            "and torch.no_grad() on the way from the output to the loss"
        )


def _nonfinite_loss(loss: Tensor, microbatch: int, received: Sequence[Tensor]) -> PenstockError:
    """The error of a `loss` that is not finite, of a forward of the last stage on what it `received`."""
    numbers = [each for each in received if each.is_floating_point() or each.is_complex()]
    # PyTorch does not ask types of one byte.
    known = [bool((each.float() if each.element_size() == 1 else each).isfinite().all()) for each in numbers]
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
    """The losses of steps that are not known on the host yet."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, int, Loss]] = deque()

    def add(self, step: int, first: int, loss: Loss) -> None:
        """Adds the `loss` of a step, whose microbatches are numbered from `first`."""
        self._waiting.append((step, first, loss))

    def check(self) -> None:
        """Raises `PenstockError` if one that has arrived is not finite. Does not wait."""
        while self._waiting and self._waiting[0][2].ready():
            step, first, loss = self._waiting.popleft()
            if not math.isfinite(value := float(loss)):
                raise PenstockError(
                    f"the loss of step {step} (counted from 0) is {value}, in its microbatch(es) "
                    f"{', '.join(str(k - first) for k in loss.nonfinite)}: expected a finite number. "
                    f"Weights have been updated with it since. {_ADVICE}"
                )


class LossParameters:
    """Looks at what the losses of `chain` take gradients of. It is made before the stages run.

    Only the process of the last stage runs the loss. The gradient of a parameter of another stage would not reach that
    stage. A parameter outside of the model is in no optimizer of the pipeline.
    """

    def __init__(self, chain: LayerChain) -> None:
        self._names = {id(parameter): name for name, parameter in chain.parameters.items()}
        self._places = [
            (self._names[id(parameter)], table, key)
            for layer in chain.layers
            for module in layer.module.modules()
            for table in tensor_tables(module)[:1]
            for key, parameter in table.items()
            if id(parameter) in self._names
        ]
        """Where each parameter is registered: the stages put other leaves there while they run."""

    def examined(
        self, loss_fn: LossFunction, stage: StageModule, outputs: Sequence[Tensor], given: Sequence[Tensor]
    ) -> LossFunction:
        """`loss_fn`, which also raises `PenstockError` if it takes a gradient that would be lost: of anything but the
        parameters of `stage`, the last one, its `outputs`, and the tensors `given` by the user.

        A metric may not depend on other parameters of the model either. Those of another pipeline's model may get
        gradients from the loss, as in adversarial training.
        """
        # Before the loss, which may write the outputs in place.
        ends = [output.grad_fn for output in outputs if output.grad_fn is not None]
        allowed = {id(tensor) for tensor in (*outputs, *stage.parameters())}
        allowed.update(id(leaf) for tensor in given for leaf in leaves_behind(tensor, ()))
        names = {**self._names, **{id(table[key]): name for name, table, key in self._places}}

        def examine(output: Any, target: Any) -> Any:
            # Compiled code would hide what it reads.
            with compiled_code_runs_eagerly():
                found = loss_fn(output, target)
            tensors = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
            for number, tensor in enumerate(tensors):
                for leaf in leaves_behind(tensor, ends):
                    if id(leaf) in allowed:
                        continue
                    if id(leaf) in names:
                        raise _of_the_model(names[id(leaf)])
                    if number == 0 and not (isinstance(leaf, nn.Parameter) and is_claimed(leaf)):
                        raise _of_no_model(loss_fn, leaf)
            return found

        return examine


def _of_the_model(name: str) -> PenstockError:
    return PenstockError(
        f"loss_fn (its loss or a metric) depends on the parameter {name}: expected the model's output, and parameters "
        "that a module of the last stage holds and loss_fn reads from that module, since the loss runs in the last "
        "stage. In another process it would see old weights of other stages, and gradients of them would be lost. "
        "Return what the loss needs of it from the model (a penalty as a part of its output), use weight_decay= of the "
        "optimizer, take norms of weights from pipe.parameters() after the step, or train with stages=1"
    )


def _of_no_model(loss_fn: LossFunction, leaf: Tensor) -> PenstockError:
    named = loss_fn.named_parameters() if isinstance(loss_fn, nn.Module) else ()
    name = next((f"its parameter {name}" for name, own in named if own is leaf), f"a tensor of {tuple(leaf.shape)}")
    return PenstockError(
        f"loss_fn takes a gradient of {name}, which is not in the model: expected gradients of the model's output "
        "only. If it is an activation or an input of a block, return from the model what the loss needs of it, or "
        "train with stages=1. If not, no optimizer of the pipeline has it and no checkpoint holds it. To train it, "
        "register it in the model and return it with the output, or compute the loss in the model "
        "(loss_fn=penstock.model_loss). If it is not to be trained here, call requires_grad_(False) on it, at least "
        "while the step runs"
    )
