"""A model with its sample, of which capture runs copies."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from penstock.capturing.chain import Layer, LayerChain, Results
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import ModuleState
from penstock.capturing.preservation import KeptObjects, KeptParameters, kept_generators
from penstock.capturing.samples import Call


@dataclass(frozen=True, slots=True, eq=False)
class SampledModel:
    """A model, and the arguments that it is captured with. `evaluates`: it is captured in evaluation mode."""

    model: nn.Module
    call: Call
    inputs: ModelInputs
    evaluates: bool = False
    _parameters: KeptParameters = field(init=False)
    _objects: KeptObjects = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parameters", KeptParameters([self.model]))
        object.__setattr__(self, "_objects", KeptObjects([self.model]))

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    def save_parameter(self, parameter: nn.Parameter) -> None:
        """Has `copied` give back the numbers of `parameter`, which a forward is about to write, as well."""
        self._parameters.save(parameter)

    @contextmanager
    def copied(self, layers: Iterable[Layer] = ()) -> Iterator[Copies]:
        """Copies of the model, and of the modules of `layers`, for the runs in a ``with`` block.

        Gives back, after it, what the copies share with the model: its parameters, objects that are their own copies,
        and the random generators.
        """
        with kept_generators(), self._parameters.kept(), self._objects.kept():
            copies = Copies([self.model, *(layer.module for layer in layers)])
            with self._parameters.evaluating([copies.of(self.model)]) if self.evaluates else nullcontext():
                yield copies


def chain_of_copies(chain: LayerChain, copies: Copies) -> LayerChain:
    """`chain` with the `copies` of its modules."""
    return replace(chain, layers=tuple(replace(layer, module=copies.of(layer.module)) for layer in chain.layers))


def gradients_of(
    sampled: SampledModel, chain: LayerChain, bodies: Sequence[Sequence[nn.Module]]
) -> list[tuple[list[str], str]]:
    """Finds, for each layer, those of its results that require a gradient in a pass on the sample; and an attribute
    of the user's modules in it, its `bodies`, that both its forward and its backward change, empty if there is none.
    """
    found: list[tuple[list[str], str]] = []

    def run(module: nn.Module | None, compute: Results, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # Detached, so that one layer's activations are held at a time.
        given = [*map(_detached, arguments)]
        own = [*map(copies.of, bodies[len(found)])]
        before = ModuleState(own)
        results = compute(*given)
        changed = {path for path, _ in before.changes()}
        outputs = chain.layers[len(found)].outputs
        names = [name for name, result in zip(outputs, results, strict=False) if result.requires_grad]
        both = changed and changed & _changed_by_backward(own, given, results)
        found.append((names, min(both, default="")))
        return tuple(map(_detached, results))

    with sampled.copied(chain.layers) as copies, torch.enable_grad():
        own = sampled.call.copied()
        stage = chain_of_copies(chain, copies).stage(0, len(chain.layers))
        stage((), chain.inputs.bind(own.args, own.kwargs), layer_runner=run)
    return found


def _changed_by_backward(bodies: Sequence[nn.Module], given: Sequence[Tensor], results: Sequence[Tensor]) -> set[str]:
    """Finds what a backward from `results` changes of `bodies`: `torch.utils.checkpoint` runs a forward again in it."""
    state = ModuleState(bodies)
    parameters = (parameter for body in bodies for parameter in body.parameters())
    leaves = [leaf for leaf in dict.fromkeys((*given, *parameters)) if leaf.requires_grad]
    roots = [result for result in results if result.requires_grad]
    # What a backward refuses, the comparison with the model explains.
    with suppress(RuntimeError):
        torch.autograd.grad(roots, leaves, [*map(torch.ones_like, roots)], allow_unused=True)
    return {path for path, _ in state.changes()}


def with_gradients(chain: LayerChain, found: Sequence[tuple[Sequence[str], str]]) -> LayerChain:
    """`chain` with the values noted that `gradients_of` found."""
    layers = zip(chain.layers, found, strict=True)
    noted = (replace(layer, differentiable=frozenset(names), rewrites=text) for layer, (names, text) in layers)
    return replace(chain, layers=tuple(noted))


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
