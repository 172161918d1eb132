"""Comparing a chain with the model that it was made from.

A trace can differ from its model without any error: an `autograd.Function` loses its own backward, a Python side effect
happens once. So the chain is compared with the model on the sample before it is used: outputs and gradients must be
the same.
"""

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.lost_backwards import hooks_refused
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import same_content
from penstock.capturing.randomness import seed_all
from penstock.capturing.sampled_models import SampledModel, chain_of_copies
from penstock.capturing.samples import Call, flatten
from penstock.capturing.sequential import EagerLayer
from penstock.errors import CaptureError

__all__ = ["agrees", "check_chain", "checked_runs"]

_SEED = 20_011


def check_chain(sampled: SampledModel, chain: LayerChain, *, trains: bool) -> None:
    """Raises `CaptureError` naming the output or parameter in which `chain` differs from the model on the sample.

    Both run three times from the same state of the generators and buffers, so that dropout draws the same masks and
    what a run leaves behind shows in the next one. Buffers and generators are left as they were. Tolerance: that of
    `torch.testing` for the data type, since CUDA kernels may add in any order.

    `trains`: whether gradients are compared; a chain for evaluation is run without.
    """
    modules = [inner for layer in chain.layers for inner in layer.module.modules()]
    bodies = [inner.get_submodule("body") for inner in modules if isinstance(inner, EagerLayer)]
    with sampled.copied() as copies, hooks_refused(map(copies.of, bodies)):
        expected = _run(sampled, copies, _model_of(sampled, copies), trains)
    with sampled.copied(chain.layers) as copies:
        found = _run(sampled, copies, _whole(chain, copies), trains)
    for own, its in zip(expected, found, strict=True):
        _compare(own, its, sampled.name)


def agrees(sampled: SampledModel, chain: LayerChain, call: Call) -> bool:
    """Whether `chain` returns what the model does for `call`; so it does where the model itself fails."""
    try:
        with sampled.copied() as copies:
            expected = _results(call, _model_of(sampled, copies))
    except Exception:
        return True
    try:
        with sampled.copied(chain.layers) as copies:
            found = _results(call, _whole(chain, copies))
        for index, (own, its) in enumerate(zip(expected, found, strict=True)):
            _compare_tensors(f"output {index}", own, its, sampled.name)
    except Exception:
        return False
    return True


_Outcome: TypeAlias = tuple[list[Tensor], dict[str, Tensor | None], dict[str, Tensor]]
_RUNS = 3


def checked_runs(trains: bool) -> int:
    """How many runs `check_chain` takes as long as; a backward takes as long as two."""
    return 2 * _RUNS + (4 if trains else 0)


def _model_of(sampled: SampledModel, copies: Copies) -> Callable[[Call], Any]:
    model = copies.of(sampled.model)
    return lambda own: model(*own.args, **own.kwargs)


def _whole(chain: LayerChain, copies: Copies) -> Callable[[Call], Any]:
    """The `copies` of all layers of `chain`, one after the other."""
    stage = chain_of_copies(chain, copies).stage(0, len(chain.layers))
    return lambda own: chain.output.build(stage((), chain.inputs.bind(own.args, own.kwargs)))


def _compare(expected: _Outcome, found: _Outcome, name: str) -> None:
    outputs, gradients, buffers = expected
    for index, (own, its) in enumerate(zip(outputs, found[0], strict=True)):
        _compare_tensors(f"output {index}", own, its, name)
    for parameter, gradient in gradients.items():
        other = found[1][parameter]
        if (gradient is None) != (other is None):
            raise CaptureError(_message(f"whether parameter {parameter} has a gradient", name))
        if gradient is not None:
            _compare_tensors(f"the gradient of parameter {parameter}", gradient, other, name)
    for path, buffer in buffers.items():
        _compare_tensors(f"buffer {path}", buffer, found[2][path], name)


def _run(sampled: SampledModel, copies: Copies, function: Callable[[Call], Any], trains: bool) -> list[_Outcome]:
    """The output tensors and the buffers of `_RUNS` consecutive passes, and the gradients of the last one."""
    model = copies.of(sampled.model)
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    found = []
    with torch.set_grad_enabled(trains):
        for run in range(_RUNS):
            outputs = _outputs(function, sampled.call, run)
            gradients = _gradients(outputs, parameters, sampled.name) if trains and run == _RUNS - 1 else {}
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            found.append(([output.detach().clone() for output in outputs], gradients, buffers))
    return found


def _results(call: Call, function: Callable[[Call], Any]) -> list[Tensor]:
    with torch.no_grad():
        return [output.clone() for output in _outputs(function, call, 0)]


def _outputs(function: Callable[[Call], Any], call: Call, run: int) -> list[Tensor]:
    """The tensors that `function` returns. An object that pytree cannot open, such as a cache, is left out."""
    seed_all(_SEED + run)
    leaves, _ = flatten(function(call.copied()))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _gradients(outputs: list[Tensor], parameters: dict[str, nn.Parameter], name: str) -> dict[str, Tensor | None]:
    """The gradients of a sum over all outputs with weights that let no element cancel another."""
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not parameters:
        return dict.fromkeys(parameters)
    weights = [torch.linspace(0.5, 1.5, max(output.numel(), 1), device=output.device) for output in differentiable]
    seeds = [w[: o.numel()].reshape(o.shape).to(o.dtype) for w, o in zip(weights, differentiable, strict=True)]
    try:
        found = torch.autograd.grad(differentiable, list(parameters.values()), seeds, allow_unused=True)
    except RuntimeError as error:
        raise CaptureError(
            f"the backward of {name} fails on the sample: {str(error).splitlines()[0]}. Expected a model that "
            "torch.autograd.grad can differentiate; torch.utils.checkpoint needs use_reentrant=False for that"
        ) from error
    return dict(zip(parameters, found, strict=True))


def _compare_tensors(what: str, expected: Tensor, found: Tensor | None, name: str) -> None:
    # Nearly always the same, which is much faster to see.
    plain = found is not None and found.layout == torch.strided and found.device == expected.device
    if plain and found is not None and not found.is_meta and same_content(expected, found):
        return
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        reason = " ".join(str(error).split())
        raise CaptureError(f"{_message(what, name)} {reason[:300]}") from error


def _message(what: str, name: str) -> str:
    return (
        f"the trace of {name} differs from the model in {what}. Look there for a "
        "torch.autograd.Function (tracing drops its backward), for state in Python or in global variables, for a "
        "buffer or a training flag that it changes outside of a block. Move this into a block, or pass the model as "
        "nn.Sequential or as a list of layers, which run as they are."
    )
