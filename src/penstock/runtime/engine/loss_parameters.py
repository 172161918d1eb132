"""The parameters that a loss takes gradients of, beside those behind the model's output, looked at once.

Only the process of the last stage runs the loss, with the newest weights of that stage. Of a parameter of another stage
it may have an old copy, and the gradient would not reach the stage. A parameter outside of the model is in no optimizer
of the pipeline.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from penstock.capturing.chain import LayerChain, StageModule
from penstock.errors import PenstockError
from penstock.runtime.parameters.model_claims import is_claimed
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.autograd import leaves_behind
from penstock.torch_internals.modules import tensor_tables
from penstock.training.losses import LossFunction


class LossParameters:
    """Looks at what the losses of `chain` take gradients of. It is made before the stages run."""

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
            found = loss_fn(output, target)
            tensors = [leaf for leaf in pytree.treeleaves_behind(found) if isinstance(leaf, Tensor)]
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
        "only, since no optimizer of the pipeline has it and no checkpoint holds it. To train it, register it in the "
        "model and return it with the output, or compute the loss in the model (loss_fn=penstock.model_loss). If it is "
        "not to be trained here, call requires_grad_(False) on it, at least while the step runs"
    )
