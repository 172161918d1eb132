"""What other libraries' loops leave to a pipeline: the steps of an optimizer, and methods that it does the work of."""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import PenstockError


class SteppedOptimizer(torch.optim.Optimizer):
    """Has the groups and the state of `own`, which a pipeline steps: its own `step` does nothing."""

    def __init__(self, own: torch.optim.Optimizer) -> None:
        self.own = own

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["own"], name)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing."""

    def state_dict(self) -> dict[str, Any]:
        """The options of the groups. The checkpoints of the pipeline have the rest."""
        return {"param_groups": [{key: group[key] for key in group.keys() - {"params"}} for group in self.param_groups]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for group, options in zip(self.param_groups, state_dict["param_groups"], strict=False):
            # Older checkpoints have the groups of another optimizer here.
            group.update({} if "params" in options else options)


def refuse_overrides(by: str, owner: object, remedies: Mapping[str, str], *bases: type) -> None:
    """Raises `PenstockError` if `owner` has one of the methods in `remedies` that is of none of the `bases`."""
    for name, remedy in remedies.items():
        own = getattr(owner, name, None)
        if own is not None and getattr(own, "__func__", own) not in [getattr(base, name, None) for base in bases]:
            raise PenstockError(
                f"{by} cannot follow {type(owner).__qualname__}.{name}: expected none, since a step of a pipeline is "
                f"forward, backward and update, and keeps no gradients. Instead, {remedy}"
            )
