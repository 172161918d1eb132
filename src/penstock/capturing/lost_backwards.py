"""Backwards of the user's own, which a trace would lose: those of functions and of hooks on tensors.

A trace has the operators of forwards only. What clips, scales or reverses gradients may do so for none of those that
the sample has, so that no comparison with the model shows the loss.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CaptureError
from penstock.torch_internals.export import replaced_attribute


@contextmanager
def functions_refused() -> Iterator[None]:
    """Raises `CaptureError` if code in this block calls a `torch.autograd.Function` that is not PyTorch's.

    For a trace: no block runs there, so that what calls functions is the code between blocks.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not _is_torch(kind.__module__):
            raise _refusal(f"calls {kind.__qualname__}.apply, a torch.autograd.Function")
        return own.__func__(kind, *args, **kwargs)

    with replaced_attribute(torch.autograd.Function, "apply", classmethod(apply)):
        yield


@contextmanager
def hooks_refused(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Raises `CaptureError` if code in this block registers a hook on a tensor while none of `blocks` runs.

    For a run: in a trace, tensors need no gradients, and code may ask whether they do before it registers one.
    """
    own, bodies = Tensor.register_hook, {id(block) for block in blocks}

    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        frame = inspect.currentframe()
        caller = None if frame is None else frame.f_back
        if caller is not None and not _is_torch(caller.f_globals.get("__name__", "")) and not _runs_in(bodies, caller):
            raise _refusal("calls register_hook of a tensor")
        return own(tensor, hook)  # type: ignore[no-untyped-call]

    with replaced_attribute(Tensor, "register_hook", register_hook):
        yield


def _runs_in(bodies: Collection[int], frame: FrameType | None) -> bool:
    """Whether `frame` is called by the call of one of the modules `bodies`, by id.

    Not by hooks on them, which `torch.compile` would compile with a module that it compiles.
    """
    while frame is not None:
        if id(frame.f_locals.get("self")) in bodies:
            return True
        frame = frame.f_back
    return False


def _is_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _refusal(what: str) -> CaptureError:
    return CaptureError(
        f"the code between the model's blocks {what}: what it does in a backward would be lost, since this code is "
        "traced. Expected operators only. Do it inside of a block, or pass the model as nn.Sequential or as a list of "
        "layers, which run as they are"
    )
