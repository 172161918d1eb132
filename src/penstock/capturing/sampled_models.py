"""A model with its sample, of which capture runs copies."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from penstock.capturing.chain import Layer, LayerChain, Results
from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.module_copies import Copies
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


def gradients_of(sampled: SampledModel, chain: LayerChain) -> list[list[str]]:
    """The values that require a gradient in a pass on the sample, of the results of each layer."""
    found: list[list[str]] = []

    def run(module: nn.Module | None, compute: Results, arguments: Sequence[Tensor]) -> tuple[Tensor, ...]:
        # Detached, so that one layer's activations are held at a time.
        results = compute(*map(_detached, arguments))
        outputs = chain.layers[len(found)].outputs
        found.append([name for name, result in zip(outputs, results, strict=False) if result.requires_grad])
        return tuple(map(_detached, results))

    with sampled.copied(chain.layers) as copies, torch.enable_grad():
        own = sampled.call.copied()
        stage = chain_of_copies(chain, copies).stage(0, len(chain.layers))
        stage((), chain.inputs.bind(own.args, own.kwargs), layer_runner=run)
    return found


def with_gradients(chain: LayerChain, found: Sequence[Sequence[str]]) -> LayerChain:
    """`chain` with the values noted that `gradients_of` found."""
    layers = zip(chain.layers, found, strict=True)
    return replace(chain, layers=tuple(replace(layer, differentiable=frozenset(names)) for layer, names in layers))


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)
