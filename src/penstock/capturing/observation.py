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
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import ModuleState, same_content
from penstock.capturing.operators import OperatorCall, OperatorCounter
from penstock.torch_internals.tensors import storage_key, times_written


@dataclass(slots=True, eq=False)
class Observation:
    """What a layer was given, returned and did on the way."""

    arguments: tuple[Tensor, ...]
    results: tuple[Tensor, ...] = ()
    random: bool = False
    mutated: tuple[int, ...] = ()
    """Positions of the `arguments` that it wrote in place."""
    mutated_buffers: tuple[Tensor, ...] = field(default=())
    shared: frozenset[int] = frozenset()
    """The ids of the modules and objects of Python that it holds and another layer holds, too."""
    changed: frozenset[int] = frozenset()
    """Those that it changed."""
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


class SharedObjects:
    """Modules, and objects of Python in attributes of modules, that several layers hold, during a run of `copies`.

    `layers`: of each layer, the modules that it calls.
    """

    def __init__(self, layers: Sequence[Sequence[nn.Module]], copies: Copies) -> None:
        self._layers, self._copies = layers, copies
        self._held = [frozenset(map(id, ModuleState(modules).holders())) for modules in layers]
        holders = Counter(key for held in self._held for key in held)
        self._shared = {key for key, count in holders.items() if count > 1}

    @contextmanager
    def watched(self, index: int, observation: Observation) -> Iterator[None]:
        """Notes in `observation` which of them layer `index` holds, and which the body changes, a run of its copy."""
        observation.shared = self._held[index] & self._shared
        state = ModuleState(map(self._copies.of, self._layers[index])) if observation.shared else None
        yield
        changed = () if state is None else (id(self._copies.own(holder)) for holder in state.changed_holders())
        observation.changed = observation.shared.intersection(changed)


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


def keep_lasting(observations: Iterable[Observation], again: Iterable[Observation]) -> None:
    """Removes from the first run's `observations` the changes that the next run has not made `again`.

    What only the first call changes, such as a table, each process can make. What every call changes is a count, an
    average or a memory, and processes with a copy each would go apart.
    """
    for first, next_run in zip(observations, again, strict=True):
        first.changed &= next_run.changed
