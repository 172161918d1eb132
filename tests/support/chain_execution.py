"""Runs a captured chain stage by stage and compares the result with the model it was captured from.

Each stage runs on detached leaves, as on a rank of its own, and its backward takes the gradients of the stage after it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from penstock.capturing import LayerChain
from penstock.capturing.module_copies import Copies
from penstock.capturing.preservation import kept_generators
from penstock.capturing.sampled_models import chain_of_copies
from penstock.capturing.samples import Call, flatten


@dataclass(frozen=True)
class Outcome:
    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    structure: pytree.TreeSpec


def seeds_of(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [torch.cos(torch.arange(o.numel(), dtype=torch.float64)).reshape(o.shape).to(o.dtype) for o in outputs]


def differentiate(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None]) -> None:
    pairs = [(o, g) for o, g in zip(outputs, gradients, strict=True) if o.requires_grad and g is not None]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])


def run_model(model: nn.Module, call: Call) -> Outcome:
    with kept_generators():
        model = Copies([model]).of(model)
        clear(model.parameters())
        own = call.copied()
        leaves, structure = flatten(model(*own.args, **own.kwargs))
        # A chain's output omits a cache of keys and values, which pytree cannot flatten.
        known = [leaf if isinstance(leaf, Tensor | int | float | str) else None for leaf in leaves]
        leaves, structure = flatten(pytree.tree_unflatten(known, structure))
        outputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        differentiate(outputs, seeds_of(outputs))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        return outcome(
            outputs, structure, parameters, dict(model.named_buffers(remove_duplicate=False)), model.state_dict()
        )


def run_stages(
    chain: LayerChain, model: nn.Module, call: Call, bounds: Sequence[int], seed: int | None = None
) -> Outcome:
    """The chain cut at `bounds` (from 0 to the number of layers)."""
    with kept_generators():
        copies = Copies([model, *(layer.module for layer in chain.layers)])
        chain, model = chain_of_copies(chain, copies), copies.of(model)
        clear(chain.parameters.values())
        own = call.copied()
        inputs = chain.inputs.bind(own.args, own.kwargs)
        passes: list[tuple[list[Tensor], tuple[Tensor, ...]]] = []
        values: tuple[Tensor, ...] = ()
        names: tuple[str, ...] = ()
        for start, stop in pairwise(bounds):
            stage = chain.stage(start, stop)
            assert stage.received == names
            received = [value.detach().clone().requires_grad_(value.requires_grad) for value in values]
            values = stage(received, inputs, seed)
            names = stage.sent
            passes.append((received, values))
        result = chain.output.build(values)
        leaves, structure = flatten(result)
        outputs = tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
        differentiate(outputs, seeds_of(outputs))
        for (received, _), (_, sent) in zip(passes[:0:-1], passes[-2::-1], strict=True):
            differentiate(sent, [leaf.grad for leaf in received])
        buffers = dict(model.named_buffers(remove_duplicate=False))
        return outcome(outputs, structure, chain.parameters, buffers, model.state_dict())


def outcome(
    outputs: Sequence[Tensor],
    structure: pytree.TreeSpec,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Outcome:
    return Outcome(
        tuple(output.detach().clone() for output in outputs),
        {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        {name: buffer.clone() for name, buffer in buffers.items() if name in state},
        structure,
    )


def clear(parameters: Any) -> None:
    for parameter in parameters:
        parameter.grad = None


def assert_same(expected: Outcome, found: Outcome, summed: frozenset[str] = frozenset()) -> None:
    """Asserts equality bit for bit. The parameters `summed` are used three times or more: a cut between the uses
    changes the order in which their gradients are added, (a + b) + c or a + (b + c).
    """
    assert found.structure == expected.structure
    assert len(found.outputs) == len(expected.outputs)
    for a, b in zip(expected.outputs, found.outputs, strict=True):
        assert torch.equal(a, b)
    for kind, wanted, got in (
        ("gradient", expected.gradients, found.gradients),
        ("buffer", expected.buffers, found.buffers),
    ):
        assert got.keys() == wanted.keys()
        for name, tensor in wanted.items():
            other = got[name]
            assert (tensor is None) == (other is None), (kind, name)
            if name in summed and tensor is not None and other is not None:
                torch.testing.assert_close(other, tensor, rtol=1e-12, atol=1e-12)
                continue
            assert tensor is None or other is None or torch.equal(tensor, other), (kind, name)


def every_split(layers: int) -> list[tuple[int, ...]]:
    """The bounds of the stages for no cut, for each single cut, and for all cuts."""
    return [(0, layers), *((0, cut, layers) for cut in range(1, layers)), tuple(range(layers + 1))]


def assert_equals_model(chain: LayerChain, model: nn.Module, call: Call, summed: frozenset[str] = frozenset()) -> None:
    """Asserts for every split: outputs, gradients and buffers equal those of the model, bit for bit."""
    expected = run_model(model, call)
    for bounds in every_split(len(chain.layers)):
        assert_same(expected, run_stages(chain, model, call, bounds), summed)
