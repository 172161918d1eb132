"""Forwards that are run again where an update is taken back: what they change beside their outputs is restored.

Buffers are restored. What else a module keeps would change twice, and is refused; it is looked at the first time.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from penstock.capturing.module_state import Place, find_writable
from penstock.errors import PenstockError
from penstock.runtime.execution.recomputation import PythonState


class RepeatedForwards:
    """Looks after forwards of `modules`, the stages of a rank."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._writable: list[Place] | None = None
        """The buffers that forwards write; None before the first ones."""
        self._buffers: list[tuple[Tensor, Tensor]] = []
        """With their values before the last forwards."""
        self._states: list[PythonState] = []

    def begin(self, runs: bool) -> None:
        """If there are forwards that may be run again (`runs`), they begin."""
        self._buffers = []
        if not runs:
            return
        if self._writable is None:
            self._writable = [place for module in self._modules for place in find_writable(module)]
            self._states = [PythonState(module) for module in self._modules]
        found = (getattr(*place) for place in self._writable)
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in found if buffer is not None]

    def check(self) -> None:
        """Raises `PenstockError` if the first forwards have changed what is in no buffer."""
        written = [buffer.detach().clone() for buffer, _ in self._buffers] if self._states else []
        if self._states:
            self.restore()
        changed = [name for state in self._states for name in state.changes()]
        self._states = []
        with torch.no_grad():
            for (buffer, _), values in zip(self._buffers, written, strict=False):
                buffer.copy_(values)
        if changed:
            raise PenstockError(
                f"a forward changes {changed[0]}, which would happen twice where post_validation=True runs it again: "
                "expected state in registered buffers. Keep it in a buffer, or leave post_validation= out"
            )

    def restore(self) -> None:
        """Gives the buffers the values that they had at the last `begin`."""
        with torch.no_grad():
            for buffer, values in self._buffers:
                buffer.copy_(values)
