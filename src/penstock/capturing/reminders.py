"""Reminds a user who calls a model, or takes its state dict, that this process trains only a part of it.

A reminder is a hook on the user's own module, before its forward and before its state dict. Capture has to call the
module as well, and refuses hooks that it could not run in every step. So reminders are lifted meanwhile.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from penstock.errors import PenstockError
from penstock.torch_internals.modules import hooks_of

__all__ = ["Reminder", "lifted"]


class Reminder:
    """Warns with `text`, once, before the forward or the state dict of the module that it is put on. It is the error of
    a forward that a part without weights would end.

    Copies and pickles of the module have a reminder of their own.
    """

    def __init__(self, text: str) -> None:
        self._text, self._warns = text, True
        self._handles: list[RemovableHandle] = []

    def put_on(self, model: nn.Module) -> None:
        """Adds its hooks to `model`, in place of those of another reminder."""
        for other in _reminders(model):
            other.remove()
        before_state_dict = model.register_state_dict_pre_hook(self)  # type: ignore[no-untyped-call]
        self._handles = [model.register_forward_pre_hook(self), before_state_dict]

    def remove(self) -> None:
        """Removes its hooks, if there are any."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, model: nn.Module, *arguments: Any) -> None:
        """Is the hook. A forward, whose hook has one argument, fails where this process has no weights of a part."""
        if len(arguments) == 1 and any(parameter.is_meta for parameter in model.parameters()):
            raise PenstockError(self._text)
        if self._warns:
            self._warns = False
            warnings.warn(self._text, stacklevel=2)


@contextmanager
def lifted(model: object) -> Iterator[None]:
    """Takes reminders off `model` for its body."""
    found = _reminders(model) if isinstance(model, nn.Module) else []
    for reminder in found:
        reminder.remove()
    try:
        yield
    finally:
        for reminder in found:
            reminder.put_on(model)  # type: ignore[arg-type]  # a module, if it has reminders


def _reminders(model: nn.Module) -> list[Reminder]:
    return [hook for hook in hooks_of(model) if isinstance(hook, Reminder)]
