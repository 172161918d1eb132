"""Running a model without leaving a trace in it.

Capture has to run the model: to see what its layers return, to trace it, to compare. A user who captures a model and
then trains it without Penstock must get the numbers that he would have got without the capture.
"""

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy
import torch
from torch import Tensor, nn

from penstock.torch_internals.modules import is_persistent, registered_buffers, restore_buffers

__all__ = ["evaluating", "preserved", "same_content", "saved_buffers"]


@contextmanager
def preserved(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Gives back, after its body, the training flags, the buffers and the random generators as they were.

    Generators: PyTorch's on the CPU and on the CUDA devices of `modules`, NumPy's and Python's global ones.
    """
    every = list(dict.fromkeys(inner for module in modules for inner in module.modules()))
    flags = [module.training for module in every]
    registered = [registered_buffers(module) for module in every]
    buffers = list(
        {id(buffer): buffer for found in registered for buffer in found.values() if buffer is not None}.values()
    )
    contents = [(buffer, buffer.detach().clone()) for buffer in buffers]
    generators = [torch.default_generator, *_cuda_generators(every)]
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        for module, flag, found in zip(every, flags, registered, strict=True):
            module.training = flag
            restore_buffers(module, found)
        with torch.no_grad():
            for buffer, content in contents:
                # BatchNorm writes its statistics behind the version counters; only the contents tell.
                if not same_content(buffer, content):
                    # Uncounted as well: whatever autograd saved of it before is good again.
                    buffer.data.copy_(content)
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


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


def same_content(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN in the same places included; meta tensors hold none."""
    return first.is_meta or torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def saved_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The buffers of the state dict of `model`, under all their names."""
    saved: dict[str, Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if is_persistent(module, name):
                saved[f"{path}.{name}" if path else name] = buffer
    return saved


def _cuda_generators(modules: Iterable[nn.Module]) -> list[torch.Generator]:
    tensors: list[Tensor] = []
    for module in modules:
        tensors += [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    return [torch.cuda.default_generators[index] for index in sorted({t.device.index for t in tensors if t.is_cuda})]
