"""Backwards of the user's own, which a trace would lose: those of functions and of hooks on tensors.

A trace has the operators of forwards only. What clips, scales or reverses gradients may do so for none of those that
the sample has, so that no comparison with the model shows the loss.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CaptureError

__all__ = ["functions_refused", "hooks_refused"]


@contextmanager
def functions_refused() -> Iterator[None]:
    """Raises `CaptureError` if code in its body calls a `torch.autograd.Function` that is not PyTorch's.

    For a trace: no block runs there, so that what calls functions is the code between blocks.
    """
    own = vars(torch.autograd.Function)["apply"]

    def apply(kind: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if not _is_torch(kind.__module__):
            raise _refusal(f"calls {kind.__qualname__}.apply, a torch.autograd.Function")
        return own.__func__(kind, *args, **kwargs)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.autograd.Function.apply = own  # type: ignore[method-assign]


@contextmanager
def hooks_refused(blocks: Iterable[nn.Module]) -> Iterator[None]:
    """Raises `CaptureError` if code in its body registers a hook on a tensor while none of `blocks` runs.

    For a run: in a trace, tensors need no gradients, and code may ask whether they do before it registers one.
    """
    own, running = Tensor.register_hook, 0

    def enter(module: nn.Module, args: object) -> None:
        nonlocal running
        running += 1

    def leave(module: nn.Module, args: object, result: object) -> None:
        nonlocal running
        running -= 1

    def register_hook(tensor: Tensor, hook: Callable[[Tensor], Tensor | None]) -> Any:
        if not running and not _is_torch(sys._getframe(1).f_globals.get("__name__", "")):
            raise _refusal("calls register_hook of a tensor")
        return own(tensor, hook)  # type: ignore[no-untyped-call]

    with ExitStack() as stack:
        for block in dict.fromkeys(blocks):
            stack.callback(block.register_forward_pre_hook(enter, prepend=True).remove)
            stack.callback(block.register_forward_hook(leave, always_call=True).remove)
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        try:
            yield
        finally:
            Tensor.register_hook = own  # type: ignore[method-assign]


def _is_torch(name: str) -> bool:
    return name.partition(".")[0] == "torch"


def _refusal(what: str) -> CaptureError:
    return CaptureError(
        f"the code between the model's blocks {what}: what it does in a backward would be lost, since this code is "
        "traced. Expected operators only. Do it inside of a block, or pass the model as nn.Sequential or as a list of "
        "layers, which run as they are"
    )
