"""What a forward may change beside buffers: attributes, lists and plain tensors of modules, and Python's generators."""

from torch import nn

from penstock.capturing.module_state import ModuleState
from penstock.capturing.preservation import python_generators
from penstock.capturing.sequential import EagerLayer


class PythonState:
    """The present state of the user's modules in `module` that is in Python, and of Python's random generators."""

    def __init__(self, module: nn.Module) -> None:
        bodies = {inner.name: inner.body for inner in module.modules() if isinstance(inner, EagerLayer)}
        self._states = {name: ModuleState([body]) for name, body in bodies.items()}
        self._generators = python_generators()

    def changes(self, in_place: bool) -> list[str]:
        """What is another object or number now, such as ``blocks.1.count``. `in_place`: tensors that were written,
        too.
        """
        names = [
            f"{name}.{path}"
            for name, state in self._states.items()
            for path, written in state.changes()
            if in_place or not written
        ]
        drawn = [name for name, state in python_generators().items() if state != self._generators[name]]
        return names + [f"the random numbers of {name}" for name in drawn]
