"""Comparing a chain with the model that it was made from.

A trace can differ from its model without any error: an `autograd.Function` loses its own backward, a Python side effect
happens once. So the chain is compared with the model on the sample before it is used: outputs and gradients must be
the same.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.chain import LayerChain
from penstock.capturing.lost_backwards import hooks_refused
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import same_content
from penstock.capturing.randomness import seed_all
from penstock.capturing.sampled_models import SampledModel, chain_of_copies
from penstock.capturing.samples import Call, flatten
from penstock.capturing.sequential import bodies_of
from penstock.errors import CaptureError

_SEED = 20_011
_RUNS = 3
_LEAST_BYTES = 8 * 2**20
"""Of the gradients of a part: to compute them in parts takes longer."""
_PARTS = 6
"""Gradients of the model and of the chain for one part of the parameters are held at a time."""
_ROUNDINGS = 8
"""By how many times the rounding that two backwards of a model have shown its chain may differ."""


@dataclass(frozen=True, slots=True, eq=False)
class _Passes:
    """What consecutive passes of a model, or of its chain, have returned and left in buffers."""

    model: nn.Module
    """The copy of the model that holds the buffers."""
    outputs: list[list[Tensor]]
    buffers: list[dict[str, Tensor]]
    last: list[Tensor]
    """The outputs of the last pass, with their history."""


def check_chain(sampled: SampledModel, chain: LayerChain, *, trains: bool) -> None:
    """Raises `CaptureError` naming the output or parameter in which `chain` differs from the model on the sample.

    Both run three times from the same state of the generators and buffers, so that dropout draws the same masks and
    what a run leaves behind shows in the next one. Buffers and generators are left as they were. Tolerance: that of
    `torch.testing` for the data type, since CUDA kernels may add in any order, or a few times the rounding of the
    model where this is more.

    `trains`: whether gradients are compared; a chain for evaluation is run without.
    """
    bodies = bodies_of(chain.layers)
    model, name = sampled.model, sampled.name
    trained = {key: parameter for key, parameter in model.named_parameters() if parameter.requires_grad and trains}

    @contextmanager
    def run_of_model() -> Iterator[_Passes]:
        with sampled.copied() as copies, hooks_refused(map(copies.of, bodies)):
            yield _run(sampled, copies, _model_of(sampled, copies, chain), trains=trains)

    with run_of_model() as expected:
        pass
    with sampled.copied(chain.layers) as copies:
        found = _run(sampled, copies, _whole(chain, copies), trains=trains)
        for own, its in zip(expected.outputs, found.outputs, strict=True):
            for index, pair in enumerate(zip(own, its, strict=True)):
                _compare_tensors(f"output {index}", *pair, name)
        different = _compare_gradients(trained, expected.last, found.last, name)
        # A backward that computes a forward again may write buffers.
        buffers = [[*passes.buffers, dict(passes.model.named_buffers())] for passes in (expected, found)]
    for side in (-1, 1):
        if different:
            some = {key: trained[key] for key in different}
            with run_of_model() as again:
                gradients = _gradients(again.last, some, name, side)
            different = {key: each for key, each in different.items() if not each.is_rounding(gradients[key])}
    for parameter, difference in different.items():
        raise CaptureError(f"{_message(f'the gradient of parameter {parameter}', name)} {difference.text}")
    for own_buffers, its_buffers in zip(*buffers, strict=True):
        for path, buffer in own_buffers.items():
            _compare_tensors(f"buffer {path}", buffer, its_buffers[path], name)


def agrees(sampled: SampledModel, chain: LayerChain, call: Call) -> bool:
    """Whether `chain` returns what the model does for `call`; so it does where the model itself fails."""
    try:
        with sampled.copied() as copies:
            expected = _results(call, _model_of(sampled, copies, chain))
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


def _model_of(sampled: SampledModel, copies: Copies, chain: LayerChain) -> Callable[[Call], Any]:
    model = copies.of(sampled.model)
    return lambda own: chain.output.tensors_of(model(*own.args, **own.kwargs))


def _whole(chain: LayerChain, copies: Copies) -> Callable[[Call], Any]:
    """The `copies` of all layers of `chain`, one after the other."""
    stage = chain_of_copies(chain, copies).stage(0, len(chain.layers))
    return lambda own: chain.output.build(stage((), chain.inputs.bind(own.args, own.kwargs)))


def _run(sampled: SampledModel, copies: Copies, function: Callable[[Call], Any], *, trains: bool) -> _Passes:
    passes = _Passes(copies.of(sampled.model), [], [], [])
    with torch.set_grad_enabled(trains):
        for run in range(_RUNS):
            # What autograd keeps for one pass is gone before the next one.
            passes.last.clear()
            passes.last.extend(_outputs(function, sampled.call, run))
            passes.outputs.append([output.detach().clone() for output in passes.last])
            passes.buffers.append({name: each.detach().clone() for name, each in passes.model.named_buffers()})
    return passes


def _results(call: Call, function: Callable[[Call], Any]) -> list[Tensor]:
    with torch.no_grad():
        return [output.clone() for output in _outputs(function, call, 0)]


def _outputs(function: Callable[[Call], Any], call: Call, run: int) -> list[Tensor]:
    """The tensors that `function` returns. An object that pytree cannot open, such as a cache, is left out."""
    seed_all(_SEED + run)
    leaves, _ = flatten(function(call.copied()))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


@dataclass(frozen=True, slots=True, eq=False)
class _Difference:
    """Two gradients of one parameter that are not equal."""

    text: str
    own: Tensor
    """That of the model."""
    distance: Tensor

    def is_rounding(self, again: Tensor | None) -> bool:
        """Whether it is no more than rounding, of which the gradient `again` of another backward of the model shows
        some. That is relative to the numbers that were summed, which may be much larger than their sum.
        """
        return again is not None and bool(self.distance <= _ROUNDINGS * _distance(self.own, again))


def _compare_gradients(
    parameters: Mapping[str, nn.Parameter], expected: list[Tensor], found: list[Tensor], name: str
) -> dict[str, _Difference]:
    """The parameters whose gradients differ. Raises `CaptureError` for one that has a gradient on one side only."""
    different: dict[str, _Difference] = {}
    parts = parts_of(parameters)
    for part in parts:
        own, its = (_gradients(outputs, part, name, retain=part is not parts[-1]) for outputs in (expected, found))
        for key, gradient in own.items():
            other = its[key]
            if (gradient is None) != (other is None):
                raise CaptureError(_message(f"whether parameter {key} has a gradient", name))
            if gradient is not None and other is not None and (text := _difference(gradient, other)):
                different[key] = _Difference(text, gradient, _distance(gradient, other))
        # Not beside those of the next part.
        del own, its, gradient, other
    return different


def parts_of(parameters: Mapping[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """`parameters` in parts of a sixth of their bytes, or of one parameter that has more."""
    limit = max(_bytes_of(parameters.values()) // _PARTS, _LEAST_BYTES)
    parts: list[dict[str, nn.Parameter]] = []
    for name, parameter in parameters.items():
        if not parts or _bytes_of((*parts[-1].values(), parameter)) > limit:
            parts.append({})
        parts[-1][name] = parameter
    return parts


def _gradients(
    outputs: list[Tensor], parameters: Mapping[str, nn.Parameter], name: str, side: int = 0, *, retain: bool = False
) -> dict[str, Tensor | None]:
    """The gradients of a sum over all `outputs` with weights that let no element cancel another, by parameter.

    What enters the backward is multiplied by a factor a little above or below 1, as `side` says, and the gradients are
    divided by it: they differ by their rounding, and by a little more if a hook clips them.
    """
    differentiable = [output for output in outputs if output.requires_grad]
    if not differentiable or not parameters:
        return dict.fromkeys(parameters)
    coarsest = max((output.dtype for output in differentiable), key=lambda dtype: torch.finfo(dtype).eps)
    factor = torch.tensor(1 + side * torch.finfo(coarsest).eps ** 0.5, dtype=coarsest).item()
    weights = [torch.linspace(0.5, 1.5, max(output.numel(), 1), device=output.device) for output in differentiable]
    seeds = [w[: o.numel()].reshape(o.shape).to(o.dtype) * factor for w, o in zip(weights, differentiable, strict=True)]
    try:
        found = torch.autograd.grad(
            differentiable, list(parameters.values()), seeds, retain_graph=retain, allow_unused=True
        )
    except RuntimeError as error:
        raise CaptureError(
            f"the backward of {name} fails on the sample: {str(error).splitlines()[0]}. Expected a model that "
            "torch.autograd.grad can differentiate: no forward may change requires_grad of a parameter, and "
            "torch.utils.checkpoint needs use_reentrant=False"
        ) from error
    if side:
        found = tuple(None if gradient is None else gradient / factor for gradient in found)
    return dict(zip(parameters, found, strict=True))


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _distance(one: Tensor, other: Tensor) -> Tensor:
    """The greatest difference of two elements."""
    return (one - other).abs().max()


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
        "buffer or a flag (training, requires_grad) that it changes outside of a block. Move this into a block, with "
        "its state in attributes of the block."
    )
