"""Watches, at run time, the objects of Python that blocks of several stages hold.

Capture judges them by the code of the blocks, and takes it that what only reads them writes nothing. A write that it
could not see shows here.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

from torch import nn

from penstock.capturing.chain import Layer
from penstock.capturing.module_state import ModuleState
from penstock.capturing.sequential import EagerLayer, bodies_of
from penstock.capturing.shared_writes import Held
from penstock.errors import PenstockError


def watch_shared(stages: Sequence[Sequence[Layer]]) -> None:
    """Has each forward of a block raise `PenstockError` if it changes an object that a block of another one of `stages`
    holds, too. That takes a copy of these objects in every forward.
    """
    held = [Held(bodies_of(layers)).reached for layers in stages]
    counts = Counter(key for each in held for key in each)
    for layers, own in zip(stages, held, strict=True):
        data = {key: named for key, named in own.items() if not isinstance(named[1], nn.Parameter | type)}
        shared = [named for key, named in data.items() if counts[key] > 1]
        for inner in (inner for layer in layers for inner in layer.module.modules() if shared):
            if isinstance(inner, EagerLayer):
                watch = _Watch(shared)
                inner.register_forward_pre_hook(watch.begin)
                inner.register_forward_hook(watch.end)


class _Watch:
    """Compares the objects `shared`, each with a name, before and after a forward."""

    def __init__(self, shared: Sequence[tuple[str, Any]]) -> None:
        self._shared = shared

    def begin(self, layer: EagerLayer, arguments: Any) -> None:
        self._state = ModuleState((), self._shared)

    def end(self, layer: EagerLayer, arguments: Any, results: Any) -> None:
        changed = next((path for path, _ in self._state.changes()), None)
        if changed is not None:
            raise PenstockError(
                f"the forward of {layer.name} ({type(layer.body).__name__}) changes {changed}, which blocks of another "
                "stage hold, too: expected no change, since a stage in another process does not see it, and "
                "microbatches come in another order than in a plain loop. Give every block an object of its own, or "
                "return what it hands on and pass it to the next block"
            )
