"""What a trace by `torch.export` needs that `torch.export` does not offer."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from penstock.torch_internals.availability import missing


@contextmanager
def replaced_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Sets an attribute of a module, a class or an object for its body, and puts it back as it was."""
    own = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def is_data_dependent(number: torch.SymBool | torch.SymInt) -> bool:
    """Whether `number`, of a trace, follows from values of tensors and not from sizes alone.

    The function that tells is in a module without documentation. Where it is gone: no, and a trace that asks for the
    number raises.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
    except ImportError:
        return False
    return bool(free_unbacked_symbols(number))


@contextmanager
def fixed_sizes_noted(note: Callable[[str, FrameType], None]) -> Iterator[None]:
    """Calls `note` when a trace in this block fixes a free size: with the name that errors give to the size, such as
    ``L['tensors'][0].size()[1]``, and with the frame in which it happens.

    Public: ``TORCH_LOGS=dynamic``, which prints it. Where the private name is gone, nothing is noted.
    """
    try:
        from torch.fx.experimental.symbolic_shapes import ShapeEnv

        own = ShapeEnv._set_replacement
    except (ImportError, AttributeError):
        yield
        return

    def set_replacement(env: Any, symbol: Any, target: Any, *rest: Any, **options: Any) -> Any:
        if getattr(target, "is_Integer", False):
            for source in getattr(env, "var_to_sources", {}).get(symbol, ()):
                name = source.name() if callable(source.name) else source.name
                note(name, sys._getframe(1))
        return own(env, symbol, target, *rest, **options)

    with replaced_attribute(ShapeEnv, "_set_replacement", set_replacement):
        yield


def shape_guards(program: ExportedProgram) -> list[str]:
    """What the traced code asked about sizes beyond the bounds in `range_constraints`, as Python over ``L``, a
    dictionary of the forward's arguments.

    Public: ``program.module()`` raises if one does not hold. It runs a generated module and not the graph.
    """
    try:
        return list(program._guards_code or ())
    except AttributeError as error:
        raise missing("torch.export.ExportedProgram._guards_code", "to know the sizes a trace holds for") from error


def traced_constant(tensor: Tensor) -> Tensor | None:
    """A copy of the number that `tensor`, of a trace, was made of, as ``torch.tensor(8)``; None for other tensors.

    No public name has it. Where a private one is gone: None, and an object that holds such a tensor cannot be copied.
    """
    try:
        from torch.utils._mode_utils import no_dispatch

        constant: Tensor | None = tensor.constant  # type: ignore[attr-defined]
    except (ImportError, AttributeError):
        return None
    # The trace would note the copy, and the code that is traced may write in the constant later.
    with no_dispatch():
        return None if constant is None else constant.clone()


@contextmanager
def hidden_from_the_model() -> Iterator[list[str]]:
    """Answers code that is not PyTorch's, when it asks whether it is exported, with no; yields the modules that asked.

    A model that asks computes something else when it is exported: transformers then always gives attention a mask, in
    place of ``is_causal=True``, since an exported graph is used with caches and one token at a time. That is another
    kernel, a slower one, and another order of additions than in the eager model that is to be trained.

    No public name exports a model as it runs eagerly. This replaces the public function `torch.compiler.is_exporting`,
    so that a trace of another thread gets the same answers meanwhile.
    """
    asked: list[str] = []
    truth = torch.compiler.is_exporting

    def is_exporting() -> bool:
        # Not inspect.currentframe(): a frame in a variable of its own keeps the tensors of all callers alive.
        name = sys._getframe(1).f_globals.get("__name__", "")
        if name.partition(".")[0] == "torch":
            return truth()
        asked.append(name)
        return False

    with replaced_attribute(torch.compiler, "is_exporting", is_exporting):
        yield asked
