"""A model with its sample, which capture runs many times without leaving a trace in it."""

from contextlib import AbstractContextManager
from dataclasses import dataclass, field

from torch import nn

from penstock.capturing.model_forms import ModelInputs
from penstock.capturing.module_state import ModuleState
from penstock.capturing.preservation import preserved
from penstock.capturing.samples import Call
from penstock.capturing.shared_state import SharedState

__all__ = ["SampledModel"]


@dataclass(frozen=True, slots=True, eq=False)
class SampledModel:
    """A model, the arguments that it is captured with, and what it held before the first run."""

    model: nn.Module
    call: Call
    inputs: ModelInputs
    _state: ModuleState = field(init=False)
    _shared: SharedState = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_state", ModuleState([self.model]))
        object.__setattr__(self, "_shared", SharedState([self.model]))

    @property
    def name(self) -> str:
        """The class of the model."""
        return type(self.model).__name__

    def state_now(self) -> ModuleState:
        """What the model holds now, to be compared later."""
        # Few models change in a run, and to save all that one holds takes as long as the run.
        return ModuleState([self.model]) if any(self._state.changes()) else self._state

    def save_parameter(self, parameter: nn.Parameter) -> None:
        """Has `preserved` give back the numbers of `parameter`, which a forward is about to write, as well."""
        self._state.save_content("", parameter)

    def preserved(self) -> AbstractContextManager[None]:
        """Gives back, after its body, what the model held before the first run, and the random generators."""
        return preserved([self.model], self._state, self._shared)
