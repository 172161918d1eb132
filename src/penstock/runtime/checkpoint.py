"""The state of a training under the model's own names, so that it fits any number of stages.

The optimizer's state and options are kept by parameter name, not by position: positions depend on the plan.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import CheckpointError

__all__ = ["load_named_state", "load_tensors", "named_state"]


def named_state(optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]) -> dict[str, Any]:
    """``{"state": {name: ...}, "options": {name: ...}}`` of the optimizer of `parameters`."""
    result: dict[str, Any] = {"state": {}, "options": {}}
    if optimizer is None:
        return result
    names = {id(parameter): name for name, parameter in parameters.items()}
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            name = names[id(parameter)]
            result["options"][name] = options
            if parameter in optimizer.state:
                result["state"][name] = dict(optimizer.state[parameter])
    return result


def load_tensors(state: Mapping[str, Any], held: Mapping[str, Tensor]) -> None:
    """Copies ``state["model"]`` into the tensors of `held`, by name, after checking them all."""
    model = _part(state, "model")
    for name, tensor in held.items():
        if name not in model:
            raise CheckpointError(
                f"the state dict has no {name!r}, which this rank holds: load the state of the same model, whole or of all "
                "ranks together"
            )
        if model[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(model[name].shape)} in the state dict and {tuple(tensor.shape)} in the model: load "
                "the state of the same model"
            )
    with torch.no_grad():
        for name, tensor in held.items():
            tensor.copy_(model[name])


def load_named_state(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer | None, parameters: Mapping[str, nn.Parameter]
) -> None:
    """Gives the optimizer of `parameters` what `named_state` collected."""
    if optimizer is None:
        return
    saved = _part(state, "optimizer")
    names = {id(parameter): name for name, parameter in parameters.items()}
    # Through the optimizer's own loader, which moves and casts the state as this optimizer wants it.
    current = optimizer.state_dict()
    position = 0
    for group, described in zip(optimizer.param_groups, current["param_groups"], strict=True):
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in saved["options"]:
                raise CheckpointError(f"the optimizer's state has no {name!r}, which this rank trains: load the state of all ranks")
            described.update(saved["options"][name])
            if name in saved["state"]:
                current["state"][position] = saved["state"][name]
            position += 1
    optimizer.load_state_dict(current)


def _part(state: Mapping[str, Any], name: str) -> Any:
    if name not in state:
        raise CheckpointError(
            f"the state dict has no part {name!r}: expected what Pipeline.state_dict() returns, found {sorted(state)}"
        )
    return state[name]
