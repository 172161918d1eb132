"""Running a model without leaving a trace in it.

Capture has to run the model: to see what its layers return, to trace it, to compare. A user who captures a model and
then trains it without Penstock must get the numbers that he would have got without the capture.
"""

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor, nn

from penstock.capturing.module_state import ModuleState
from penstock.capturing.shared_state import SharedState
from penstock.torch_internals.modules import is_persistent, tensor_tables

__all__ = ["SavedBuffers", "evaluating", "generator_states", "preserved", "python_generators"]


@contextmanager
def preserved(
    modules: Iterable[nn.Module], state: ModuleState | None = None, shared: SharedState | None = None
) -> Iterator[None]:
    """Gives back, after its body, what `modules` hold and the random generators as they were.

    Modules: training flags, buffers and all other attributes; see `ModuleState`. What their code keeps elsewhere, see
    `SharedState`. Generators: PyTorch's on the CPU and on the CUDA devices of `modules`, NumPy's and Python's global
    ones. `state` and `shared`: both, if they are known.
    """
    roots = list(modules)
    state, shared = state or ModuleState(roots), shared or SharedState(roots)
    generators = [torch.default_generator, *_cuda_generators(roots)]
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        with torch.no_grad():
            state.restore()
            shared.restore()
        for generator, found in zip(generators, states, strict=True):
            generator.set_state(found)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def generator_states(modules: Iterable[nn.Module]) -> list[object]:
    """The states of the generators that `preserved` gives back, to be compared."""
    generators = [torch.default_generator, *_cuda_generators(modules)]
    return [*(generator.get_state().tolist() for generator in generators), python_generators()]


def python_generators() -> dict[str, object]:
    """The states of the global random generators of Python and NumPy, by library, to be compared."""
    _, keys, *rest = numpy.random.get_state(legacy=True)
    return {"Python": random.getstate(), "NumPy": (numpy.asarray(keys).tobytes(), *rest)}


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Puts `modules` in evaluation mode for its body, and every submodule back as it was, whatever mode that was."""
    every = [inner for module in modules for inner in module.modules()]
    flags = [module.training for module in every]
    for module in every:
        module.training = False
    try:
        yield
    finally:
        for module, flag in zip(every, flags, strict=True):
            module.training = flag


class SavedBuffers(Mapping[str, Tensor]):
    """The buffers of the state dict of `model`, under all their names, as they are now: a forward may assign another
    tensor to one.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tables = {
            f"{path}.{name}" if path else name: (tensor_tables(module)[1], name)
            for path, module in model.named_modules(remove_duplicate=False)
            for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
            if is_persistent(module, name)
        }

    def __getitem__(self, name: str) -> Tensor:
        table, key = self._tables[name]
        buffer: Tensor | None = table[key]
        if buffer is None:
            raise KeyError(name)
        return buffer

    def __iter__(self) -> Iterator[str]:
        return iter(self._tables)

    def __len__(self) -> int:
        return len(self._tables)


def _cuda_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return []
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    return [torch.cuda.default_generators[index] for index in sorted({t.device.index for t in tensors if t.is_cuda})]
