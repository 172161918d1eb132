"""What one run of a layer shows: whether it draws random numbers, what it writes in place, and which modules change.

Reading it off the code would mean to trust the code's annotations; a generator that moved, a version counter that rose
and a buffer that holds other numbers are facts.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from penstock.capturing.chain import Layer
from penstock.capturing.module_state import same_content
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
    shared: Mapping[int, str] = field(default_factory=dict)
    """By id, the objects that it and another layer hold and that code can write, with the place of the write."""
    bodies: Sequence[nn.Module] = ()
    """The user's modules that it calls."""
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
