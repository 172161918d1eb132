"""Comparing a chain with the model that it was made from.

A trace can differ from its model without any error: an `autograd.Function` loses its own backward, a Python side effect
happens once. So the chain is compared with the model on the sample before it is used: outputs and gradients must be
the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.gradient_comparison import GradientComparison, Gradients, parts_of
from penstock.capturing.lost_backwards import hooks_refused
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import same_content
from penstock.capturing.randomness import seed_all
from penstock.capturing.sampled_models import SampledModel, chain_of_copies
from penstock.capturing.samples import Call, flatten
from penstock.capturing.sequential import EagerLayer
from penstock.errors import CaptureError

_SEED = 20_011


def check_chain(sampled: SampledModel, chain: LayerChain, *, trains: bool) -> None:
    """Raises `CaptureError` naming the output or parameter in which `chain` differs from the model on the sample.

    Both run three times from the same state of the generators and buffers, so that dropout draws the same masks and
    what a run leaves behind shows in the next one. Buffers and generators are left as they were. Tolerance: that of
    `torch.testing` for the data type, since CUDA kernels may add in any order, or a few times the rounding of the
    model where this is more.

    `trains`: whether gradients are compared; a chain for evaluation is run without.
    """
    modules = [inner for layer in chain.layers for inner in layer.module.modules()]
    bodies = [inner.get_submodule("body") for inner in modules if isinstance(inner, EagerLayer)]
    model, name = sampled.model, sampled.name
    left = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad and trains}

    def run_model(backward: _Backward) -> list[_Outcome]:
        with sampled.copied() as copies, hooks_refused(map(copies.of, bodies)):
            return _run(sampled, copies, _model_of(sampled, copies), trains=trains, backward=backward)

    again = False
    while left or not again:
        gradients = GradientComparison(left, _difference, again=again)
        expected = run_model(_Backward(left, gradients.keep))
        with sampled.copied(chain.layers) as copies:
            compared = _Backward(left, gradients.compare)
            found = _run(sampled, copies, _whole(chain, copies), trains=trains, backward=compared)
        _compare_outputs(expected, found, name)
        for parameter in gradients.one_sided:
            raise CaptureError(_message(f"whether parameter {parameter} has a gradient", name))
        if gradients.different:
            some = {key: left[key] for key in gradients.different}
            for side in (-1, 1):
                run_model(_Backward(some, gradients.note_rounding, side))
            gradients.allow_rounding()
        for parameter, text in gradients.different.items():
            raise CaptureError(f"{_message(f'the gradient of parameter {parameter}', name)} {text}")
        _compare_buffers(expected, found, name)
        left, again = {key: left[key] for key in gradients.unclear}, True


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


_Outcome: TypeAlias = tuple[list[Tensor], dict[str, Tensor]]
"""Outputs and buffers."""
_RUNS = 3


@dataclass(frozen=True, slots=True, eq=False)
class _Backward:
    """What a backward computes: the gradients of `parameters`, by name, which it gives to `take` part by part.

    What enters the backward is multiplied by a factor a little above or below 1, as `side` says, and the gradients are
    divided by it: they differ by their rounding, and by a little more if a hook clips them.
    """

    parameters: Mapping[str, nn.Parameter]
    take: Callable[[Gradients], None]
    side: int = 0


def _model_of(sampled: SampledModel, copies: Copies) -> Callable[[Call], Any]:
    model = copies.of(sampled.model)
    return lambda own: model(*own.args, **own.kwargs)


def _whole(chain: LayerChain, copies: Copies) -> Callable[[Call], Any]:
    """The `copies` of all layers of `chain`, one after the other."""
    stage = chain_of_copies(chain, copies).stage(0, len(chain.layers))
    return lambda own: chain.output.build(stage((), chain.inputs.bind(own.args, own.kwargs)))


def _compare_outputs(expected: Sequence[_Outcome], found: Sequence[_Outcome], name: str) -> None:
    for (own, _), (its, _) in zip(expected, found, strict=True):
        for index, pair in enumerate(zip(own, its, strict=True)):
            _compare_tensors(f"output {index}", *pair, name)


def _compare_buffers(expected: Sequence[_Outcome], found: Sequence[_Outcome], name: str) -> None:
    for (_, own), (_, its) in zip(expected, found, strict=True):
        for path, buffer in own.items():
            _compare_tensors(f"buffer {path}", buffer, its[path], name)


def _run(
    sampled: SampledModel, copies: Copies, function: Callable[[Call], Any], *, trains: bool, backward: _Backward
) -> list[_Outcome]:
    """The outputs and the buffers of `_RUNS` consecutive passes, of which the last one has a backward."""
    model, found = copies.of(sampled.model), []
    with torch.set_grad_enabled(trains):
        for run in range(_RUNS):
            outputs = _outputs(function, sampled.call, run)
            if run == _RUNS - 1:
                _differentiate(outputs, backward, sampled.name)
            buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
            found.append(([output.detach().clone() for output in outputs], buffers))
    return found


def _results(call: Call, function: Callable[[Call], Any]) -> list[Tensor]:
    with torch.no_grad():
        return [output.clone() for output in _outputs(function, call, 0)]


def _outputs(function: Callable[[Call], Any], call: Call, run: int) -> list[Tensor]:
    """The tensors that `function` returns. An object that pytree cannot open, such as a cache, is left out."""
    seed_all(_SEED + run)
    leaves, _ = flatten(function(call.copied()))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _differentiate(outputs: list[Tensor], backward: _Backward, name: str) -> None:
    """Computes the gradients of a sum over all outputs with weights that let no element cancel another."""
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not backward.parameters:
        backward.take(dict.fromkeys(backward.parameters))
        return
    coarsest = max((output.dtype for output in differentiable), key=lambda dtype: torch.finfo(dtype).eps)
    factor = torch.tensor(1 + backward.side * torch.finfo(coarsest).eps ** 0.5, dtype=coarsest).item()
    weights = [torch.linspace(0.5, 1.5, max(output.numel(), 1), device=output.device) for output in differentiable]
    seeds = [w[: o.numel()].reshape(o.shape).to(o.dtype) * factor for w, o in zip(weights, differentiable, strict=True)]
    *parts, last = parts_of(backward.parameters)
    for part in (*parts, last):
        try:
            found = torch.autograd.grad(
                differentiable, list(part.values()), seeds, retain_graph=part is not last, allow_unused=True
            )
        except RuntimeError as error:
            raise CaptureError(
                f"the backward of {name} fails on the sample: {str(error).splitlines()[0]}. Expected a model that "
                "torch.autograd.grad can differentiate; torch.utils.checkpoint needs use_reentrant=False for that"
            ) from error
        if backward.side:
            found = tuple(None if gradient is None else gradient / factor for gradient in found)
        backward.take(dict(zip(part, found, strict=True)))
        # Not beside those of the next part.
        del found


def _compare_tensors(what: str, expected: Tensor, found: Tensor, name: str) -> None:
    if text := _difference(expected, found):
        raise CaptureError(f"{_message(what, name)} {text}")


def _difference(expected: Tensor, found: Tensor) -> str:
    """The text of a difference that is more than `torch.testing` allows; empty if there is none."""
    # Nearly always the same, which is much faster to see.
    plain = found.layout == torch.strided and found.device == expected.device and not found.is_meta
    if plain and same_content(expected, found):
        return ""
    try:
        torch.testing.assert_close(found, expected, equal_nan=True)
    except AssertionError as error:
        return " ".join(str(error).split())[:300]
    return ""


def _message(what: str, name: str) -> str:
    return (
        f"the trace of {name} differs from the model in {what}. Look there for a "
        "torch.autograd.Function (tracing drops its backward), for state in Python or in global variables, for a "
        "buffer or a training flag that it changes outside of a block. Move this into a block, or pass the model as "
        "nn.Sequential or as a list of layers, which run as they are."
    )
