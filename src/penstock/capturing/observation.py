"""What one run of a layer shows: whether it draws random numbers, what it writes in place, and which modules change.

Reading it off the code would mean to trust the code's annotations; a generator that moved, a version counter that rose
and a buffer that holds other numbers are facts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.capturing.chain import Layer
from penstock.capturing.module_state import ModuleState, same_content
from penstock.capturing.operators import OperatorCall, OperatorCounter
from penstock.torch_internals.tensors import storage_key, times_written

__all__ = ["Observation", "SharedModules", "memory_of", "observe", "observed"]


@dataclass(slots=True, eq=False)
class Observation:
    """What a layer was given, returned and did on the way."""

    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...] = ()
    random: bool = False
    mutated: tuple[int, ...] = ()
    """Positions of the `arguments` that it wrote in place."""
    mutated_buffers: tuple[Tensor, ...] = field(default=())
    changed_modules: tuple[nn.Module, ...] = ()
    """Modules of other layers, too, whose state in Python it changed."""
    operators: tuple[OperatorCall, ...] = ()

    def layer(self, name: str, module: nn.Module, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> Layer:
        """The layer with what was seen of it."""
        mutates = tuple(dict.fromkeys(inputs[position] for position in self.mutated))
        kinds = tuple((tuple(result.shape), result.dtype) for result in self.results)
        written = {memory_of(each) for each in self.mutated_buffers if each.layout == torch.strided}
        memories = [(name, memory_of(result)) for name, result in zip(outputs, self.results, strict=True)]
        pairs = zip(inputs, self.arguments, strict=True)
        given = {memory_of(argument): name for name, argument in pairs if argument.layout == torch.strided}
        return Layer(
            name,
            module,
            inputs,
            outputs,
            random=self.random,
            mutates=mutates,
            output_kinds=kinds,
            operators=self.operators,
            volatile=tuple(name for name, memory in memories if memory in written),
            views=tuple((name, given[memory]) for name, memory in memories if memory in given),
        )


class SharedModules:
    """Modules that several of `layers` hold, during one run of them."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        holders = Counter(id(inner) for layer in layers for inner in layer.modules())
        self._shared = {key for key, count in holders.items() if count > 1}
        self._called: set[nn.Module] = set()

    @contextmanager
    def watched(self, layer: nn.Module, observation: Observation) -> Iterator[None]:
        """Notes in `observation` which of them the body changes, a run of `layer`.

        What their first call changes does not count: a table that it makes, each process can make. What every call
        changes is a count, an average or a memory, and processes with a copy each would go apart.
        """
        states = [(each, ModuleState([each])) for each in self._outermost(layer)]
        yield
        observation.changed_modules = tuple(
            each for each, state in states if each in self._called and any(state.changes())
        )
        self._called.update(each for each, _ in states)

    def _outermost(self, module: nn.Module) -> Iterator[nn.Module]:
        if id(module) in self._shared:
            yield module
            return
        for child in module.children():
            yield from self._outermost(child)


def memory_of(tensor: Tensor) -> int:
    """A key of the memory of `tensor`."""
    return storage_key(tensor.untyped_storage())


@contextmanager
def observed(
    module: nn.Module, arguments: Sequence[Tensor], counter: OperatorCounter | None = None
) -> Iterator[Observation]:
    """Watches its body run `module` on `arguments`; the observation is complete after the body.

    `counter`: counts the operators, for all layers of a run.
    """
    buffers = list(module.buffers())
    versions = [times_written(argument) for argument in arguments]
    contents = [(buffer, times_written(buffer), buffer.detach().clone()) for buffer in buffers]
    devices = {tensor.device.index for tensor in (*arguments, *buffers, *module.parameters()) if tensor.is_cuda}
    generators = [torch.default_generator, *(torch.cuda.default_generators[index] for index in sorted(devices))]
    states = [generator.get_state() for generator in generators]
    observation = Observation(tuple(arguments))
    with counter.counting() if counter else nullcontext():
        yield observation
    observation.operators = counter.take() if counter else ()
    moved = [not torch.equal(g.get_state(), state) for g, state in zip(generators, states, strict=True)]
    observation.random = any(moved)
    observation.mutated = tuple(i for i, version in enumerate(versions) if times_written(arguments[i]) != version)
    observation.mutated_buffers = tuple(
        buffer
        for buffer, version, content in contents
        # BatchNorm writes its statistics without counting. What is written need not change.
        if times_written(buffer) != version or not same_content(buffer, content)
    )


def observe(
    layer: Layer, values: dict[str, Tensor], counter: OperatorCounter, shared: SharedModules
) -> tuple[Layer, Observation]:
    """Runs `layer` on `values`, adds its outputs to them, and completes it with what was seen."""
    arguments = tuple(values[name] for name in layer.inputs)
    with observed(layer.module, arguments, counter) as observation, shared.watched(layer.module, observation):
        observation.results = tuple(layer.module(*arguments))
    values.update(zip(layer.outputs, observation.results, strict=True))
    return observation.layer(layer.name, layer.module, layer.inputs, layer.outputs), observation
