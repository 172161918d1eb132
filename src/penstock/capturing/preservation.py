"""Giving back what runs of a model change outside of its copies.

Capture has to run the model: to see what its layers return, to trace it, to compare. A user who captures a model and
then trains it without Penstock must get the numbers that he would have got without the capture. So it runs copies, and
gives back what these share with the model.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.capturing.module_state import ModuleState, is_plain_memory
from penstock.capturing.operators import OperatorCounter
from penstock.torch_internals.modules import is_persistent, tensor_tables
from penstock.torch_internals.tensors import set_times_written, times_written

_RULES = ("__deepcopy__", "__reduce__", "__reduce_ex__")
"""What says how an object is copied."""


class KeptParameters:
    """The parameters of `modules` as they are now: flags, memory, attributes, and the numbers of those that a forward
    writes. Quantized weights keep scales in attributes, and their layers pack or move them when they first run.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        own = dict.fromkeys(parameter for module in modules for parameter in module.parameters())
        self._flags = [(parameter, parameter.requires_grad) for parameter in own]
        self._memories = [(parameter, parameter.detach()) for parameter in own if is_plain_memory(parameter)]
        self._attributes = ModuleState(())
        for parameter in own:
            # The weights themselves are in attributes of other kinds of tensors.
            self._attributes.add(vars(parameter), deep=is_plain_memory(parameter))
        self._numbers: dict[nn.Parameter, tuple[Tensor, int]] = {}

    def save(self, parameter: nn.Parameter) -> None:
        """Saves the numbers of `parameter`, before they are written."""
        if parameter not in self._numbers:
            self._numbers[parameter] = parameter.detach().clone(), times_written(parameter)

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Gives them back after its body."""
        try:
            yield
        finally:
            for parameter, flag in self._flags:
                if parameter.requires_grad != flag:
                    parameter.requires_grad_(flag)
            for parameter, own in self._memories:
                if parameter.dtype != own.dtype or not parameter.data.is_set_to(own):
                    parameter.data = own
            self._attributes.restore()
            for parameter, (numbers, written) in self._numbers.items():
                parameter.data.copy_(numbers)
                # Autograd takes the parameter of the next run, after as many writes, for that of this run.
                set_times_written([parameter], [written])

    def evaluating(self, copies: Iterable[nn.Module]) -> AbstractContextManager[None]:
        """Evaluation mode for copies that share the parameters: what their ``train`` writes is saved before."""
        counter = OperatorCounter([parameter for parameter, _ in self._flags], self.save)
        return in_mode(copies, training=False, watched=counter.counting)


class KeptObjects:
    """The objects that `modules` hold and that `copy.deepcopy` does not copy, since they say so, as they are now:
    registries, say, of which there is one.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._state = ModuleState((), [("", each) for each in ModuleState(modules).holders() if _is_its_copy(each)])

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Gives back what they hold after its body."""
        try:
            yield
        finally:
            self._state.restore()


def _is_its_copy(value: Any) -> bool:
    kind = type(value)
    ruled = any(getattr(kind, name, None) is not getattr(object, name, None) for name in _RULES)
    if not ruled or kind.__module__.partition(".")[0] in ("builtins", "torch", "numpy", "collections"):
        return False
    try:
        return copy.deepcopy(value) is value
    except Exception:
        return False


@contextmanager
def kept_generators() -> Iterator[None]:
    """Gives back, after its body, the global random generators as they were: PyTorch's on the CPU and on CUDA devices,
    NumPy's and Python's.
    """
    generators = _torch_generators()
    states = [generator.get_state() for generator in generators]
    python_state, numpy_state = random.getstate(), numpy.random.get_state()
    try:
        yield
    finally:
        for generator, found in zip(generators, states, strict=True):
            generator.set_state(found)
        random.setstate(python_state)
        numpy.random.set_state(numpy_state)


def generator_states() -> list[object]:
    """The states of the generators that `kept_generators` gives back, to be compared."""
    return [*(generator.get_state().tolist() for generator in _torch_generators()), python_generators()]


@contextmanager
def kept_tensors(module: nn.Module) -> Iterator[None]:
    """Gives back, after its body, the numbers in buffers of `module`, and in tensors in its attributes."""
    tensors = [holder for holder in ModuleState([module]).holders() if isinstance(holder, Tensor)]
    numbers = [tensor.detach().clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, content in zip(tensors, numbers, strict=True):
            # Uncounted, so that what autograd saved before is valid again.
            tensor.data.copy_(content)


def python_generators() -> dict[str, object]:
    """The states of the global random generators of Python and NumPy, by library, to be compared."""
    _, keys, *rest = numpy.random.get_state(legacy=True)
    return {"Python": random.getstate(), "NumPy": (numpy.asarray(keys).tobytes(), *rest)}


@contextmanager
def in_mode(
    modules: Iterable[nn.Module], *, training: bool, watched: Callable[[], AbstractContextManager[object]] = nullcontext
) -> Iterator[None]:
    """Calls ``train()`` or ``eval()`` of `modules` before its body and ``train(mode)`` after it, as a loop does. All
    submodules get the modes back that they had. `watched`: the context of these calls.
    """
    outer = [(module, module.training) for module in modules]
    before = {id(inner): inner.training for module, _ in outer for inner in module.modules()}
    try:
        with watched():
            for module, _ in outer:
                # A module may have its own eval().
                module.train() if training else module.eval()
        yield
    finally:
        with watched():
            for module, mode in outer:
                module.train(mode)
                _give_back(module, mode, before)


def _give_back(module: nn.Module, mode: bool, before: dict[int, bool]) -> None:
    """Gives `module` and what it holds the modes `before`, after ``train(mode)``. A mode that an own ``train`` has
    chosen against `mode` stays.
    """
    had = before.pop(id(module), None)
    if had is None:
        return
    if module.training == mode != had:
        mode = had
        module.train(mode)
    for child in module.children():
        _give_back(child, mode, before)


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


def _torch_generators() -> list[torch.Generator]:
    used = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return [torch.default_generator, *(torch.cuda.default_generators if used else ())]
