"""Comparing a chain with the model that it was made from.

A trace can differ from its model without any error: an `autograd.Function` loses its own backward, a Python side effect
happens once. So the chain proves itself on the sample before anything trusts it: the same outputs, the same gradients.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.preservation import preserved
from penstock.capturing.samples import Call, flatten
from penstock.errors import CaptureError

__all__ = ["agrees", "check_chain"]

_SEED = 20_011


def check_chain(model: nn.Module, chain: LayerChain, call: Call) -> None:
    """Raises `CaptureError` naming the output or parameter in which `chain` differs from `model` on the sample.

    Both run three times from the same state of the generators and buffers, so that dropout draws the same masks and
    what a run leaves behind shows in the next one. Buffers and generators are left as they were. Tolerance: that of
    `torch.testing` for the data type, since CUDA kernels may add in any order.
    """
    _compare_with(_run_model(model, call, _RUNS), model, chain, call, _RUNS)


def agrees(model: nn.Module, chain: LayerChain, call: Call) -> bool:
    """Whether `chain` computes what `model` does on `call`; so it does where the model itself fails."""
    try:
        expected = _run_model(model, call, 1)
    except Exception:
        return True
    try:
        _compare_with(expected, model, chain, call, 1)
    except Exception:
        return False
    return True


_Outcome: TypeAlias = tuple[list[Tensor], dict[str, Tensor | None], dict[str, Tensor]]
_RUNS = 3


def _run_model(model: nn.Module, call: Call, runs: int) -> list[_Outcome]:
    return _run(lambda own: model(*own.args, **own.kwargs), model, call, runs)


def _compare_with(expected: list[_Outcome], model: nn.Module, chain: LayerChain, call: Call, runs: int) -> None:
    stage = chain.stage(0, len(chain.layers))

    def chained(own: Call) -> Any:
        results = stage((), chain.inputs.bind(own.args, own.kwargs))
        return chain.output.build(results)

    for (outputs, gradients, buffers), (found, got, left) in zip(
        expected, _run(chained, model, call, runs), strict=True
    ):
        for index, (a, b) in enumerate(zip(outputs, found, strict=True)):
            _compare(f"output {index}", a, b, model)
        for name, gradient in gradients.items():
            if (gradient is None) != (got[name] is None):
                raise CaptureError(_message(f"whether parameter {name} has a gradient", model))
            if gradient is not None:
                _compare(f"the gradient of parameter {name}", gradient, got[name], model)
        for name, buffer in buffers.items():
            _compare(f"buffer {name}", buffer, left[name], model)


def _run(function: Callable[[Call], Any], model: nn.Module, call: Call, runs: int) -> list[_Outcome]:
    """The output tensors, the gradients and the buffers of `runs` consecutive passes."""
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = []
    # The buffers are given back after the backward: BatchNorm's backward wants the ones of its forward.
    with preserved([model]), torch.enable_grad():
        for run in range(runs):
            torch.manual_seed(_SEED + run)
            leaves, _ = flatten(function(call.copied()))
            # Only tensors: an object that pytree cannot open, such as a cache, is left out of the chain's output.
            outputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            gradients = _gradients(outputs, parameters)
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            found.append(([output.detach().clone() for output in outputs], gradients, buffers))
    return found


def _gradients(outputs: list[Tensor], parameters: dict[str, nn.Parameter]) -> dict[str, Tensor | None]:
    """The gradients of a sum over all outputs with weights that let no element cancel another."""
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not parameters:
        return dict.fromkeys(parameters)
    weights = [torch.linspace(0.5, 1.5, max(output.numel(), 1), device=output.device) for output in differentiable]
    seeds = [w[: o.numel()].reshape(o.shape).to(o.dtype) for w, o in zip(weights, differentiable, strict=True)]
    found = torch.autograd.grad(differentiable, list(parameters.values()), seeds, allow_unused=True)
    return dict(zip(parameters, found, strict=True))


def _compare(what: str, expected: Tensor | None, found: Tensor | None, model: nn.Module) -> None:
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise CaptureError(f"{_message(what, model)} {reason[:300]}") from error


def _message(what: str, model: nn.Module) -> str:
    return (
        f"the trace of {type(model).__name__} differs from the model in {what}. Look there for a "
        "torch.autograd.Function (tracing drops its backward) or for state kept in Python; or pass the model as "
        "nn.Sequential or as a list of layers, which run as they are."
    )
