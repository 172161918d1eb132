"""The state of a training under the model's own names, so that it fits any number of stages.

The optimizer's state and options are kept by parameter name, not by position: positions depend on the plan. The files
are those of ``torch.distributed.checkpoint``.
"""

import shutil
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_files
from torch.distributed.checkpoint.state_dict_saver import save as save_files

from penstock.capturing.chain import LayerChain
from penstock.errors import CheckpointError
from penstock.runtime.parameters.shards import assign, distributed_like, whole
from penstock.runtime.transport.worlds import World
from penstock.torch_internals import pytrees as pytree
from penstock.training.update_hooks import HookStates
from penstock.values.stages import Stage

__all__ = ["held_tensors", "named_state", "read", "restore", "write"]


def held_tensors(chain: LayerChain, stages: Iterable[Stage]) -> dict[str, Tensor]:
    """The entries of the model's state dict that belong to `stages`.

    What no layer uses belongs to the first stage.
    """
    layers = [range(stage.start, stage.stop) for stage in stages]
    tensors: dict[str, Tensor] = {**chain.parameters, **chain.buffers}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if any(reader in span for span in layers for reader in chain.readers[name] or (0,))
    }


def named_state(
    optimizers: Iterable[torch.optim.Optimizer], parameters: Mapping[str, nn.Parameter], hooks: HookStates
) -> dict[str, Any]:
    """``{"state": {name: ...}, "options": {name: ...}}`` of the optimizers of `parameters`, and ``"hooks"`` if any of
    `hooks` keeps something: by name and by its number among the hooks.
    """
    result: dict[str, Any] = {"state": {}, "options": {}}
    names = {id(parameter): name for name, parameter in parameters.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            for parameter in group["params"]:
                if id(parameter) not in names:
                    continue
                name = names[id(parameter)]
                result["options"][name] = options
                if parameter in optimizer.state:
                    result["state"][name] = {key: whole(value) for key, value in optimizer.state[parameter].items()}
    kept: dict[str, dict[str, Tensor]] = {}
    for number, states in enumerate(hooks.states):
        for name, state in states.items():
            if state and name in parameters:
                kept.setdefault(name, {}).update({f"{number}.{key}": whole(value) for key, value in state.items()})
    return {**result, "hooks": kept} if kept else result


def restore(
    state: Mapping[str, Any],
    held: Mapping[str, Tensor],
    optimizers: Sequence[torch.optim.Optimizer],
    parameters: Mapping[str, nn.Parameter],
    hooks: HookStates,
) -> Mapping[str, Any]:
    """Copies ``state["model"]`` into the tensors of `held`, gives the optimizers and `hooks` of `parameters` what
    `named_state` collected, and returns ``state["pipeline"]``.

    `CheckpointError`, before anything is changed, if a part is missing or of another shape.
    """
    model, progress = _part(state, "model"), _part(state, "pipeline")
    _check_tensors(model, held)
    # All are laid out before one of them is changed.
    laid = [_by_position(_part(state, "optimizer"), optimizer, parameters) for optimizer in optimizers]
    for optimizer, own in zip(optimizers, laid, strict=True):
        # Through the optimizer's own loader, which moves and casts the state as this optimizer wants it.
        optimizer.load_state_dict(own)
    hooks.states = _by_number(state["optimizer"].get("hooks", {}), hooks, parameters)
    with torch.no_grad():
        for name, tensor in held.items():
            assign(tensor, model[name])
    return progress


def _check_tensors(model: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> None:
    for name, tensor in held.items():
        if name not in model:
            raise CheckpointError(
                f"the state dict has no {name!r}, which this rank holds: load the state of the same model, whole or of "
                "all ranks together"
            )
        if model[name].shape != tensor.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(model[name].shape)} in the state dict and {tuple(tensor.shape)} in the "
                "model: load the state of the same model"
            )


def _by_position(
    saved: Mapping[str, Any], optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]
) -> dict[str, Any]:
    """What `named_state` collected, as the optimizer's own state dict has it."""
    options, states = saved.get("options", {}), saved.get("state", {})
    names = {id(parameter): name for name, parameter in parameters.items()}
    current = optimizer.state_dict()
    position = 0
    for group, described in zip(optimizer.param_groups, current["param_groups"], strict=True):
        for parameter in group["params"]:
            name = names[id(parameter)]
            if name not in options:
                raise CheckpointError(
                    f"the optimizer's state has no {name!r}, which this rank trains: load the state of all ranks "
                    "together"
                )
            described.update(options[name])
            if name in states:
                # A copy: the optimizer would go on in the caller's tensors.
                cloned = pytree.tree_map_only(Tensor, torch.clone, dict(states[name]))
                current["state"][position] = {key: _laid_out(value, parameter) for key, value in cloned.items()}
            position += 1
    return current


def _by_number(
    saved: Mapping[str, Mapping[str, Tensor]], hooks: HookStates, parameters: Mapping[str, nn.Parameter]
) -> list[dict[str, dict[str, Tensor]]]:
    """What the hooks keep, out of what `named_state` collected."""
    states: list[dict[str, dict[str, Tensor]]] = [{} for _ in hooks.hooks]
    for name in parameters.keys() & saved.keys():
        for place, value in saved[name].items():
            number, _, key = place.partition(".")
            if int(number) < len(states):
                states[int(number)].setdefault(name, {})[key] = _laid_out(value.clone(), parameters[name])
    return states


def _laid_out(value: Any, parameter: nn.Parameter) -> Any:
    """An entry of the optimizer's state as the parameter is; what is not element by element stays whole."""
    alike = isinstance(value, Tensor) and value.shape == parameter.shape
    return distributed_like(value, parameter) if alike else value


def write(state: Mapping[str, Any], directory: str | Path, world: World) -> None:
    """Writes every process's part of `state` to `directory`, which it replaces only when all is written. Collective."""
    target = Path(directory)
    partial = target.with_name(target.name + ".partial")
    if world.rank == 0 and partial.exists():
        shutil.rmtree(partial)
    world.gather(None)
    with _alone_without_warning():
        save_files(dict(state), checkpoint_id=partial, process_group=world.group, no_dist=world.processes == 1)
    world.gather(None)
    if world.rank == 0:
        old = target.with_name(target.name + ".old")
        if target.exists():
            target.rename(old)
        partial.rename(target)
        if old.exists():
            shutil.rmtree(old)
    world.gather(None)


def read(directory: str | Path, held: Collection[str], trained: Collection[str], world: World) -> dict[str, Any]:
    """The parts of a state that `write` wrote which belong to the tensors `held` and the parameters `trained`.

    `CheckpointError` if there is no whole checkpoint in `directory`. Collective.
    """
    try:
        metadata = FileSystemReader(directory).read_metadata()
    except (OSError, CheckpointException) as error:
        raise CheckpointError(
            f"{directory}: there is no checkpoint ({error}). Expected a directory that Pipeline.save(...) wrote to its "
            f"end"
        ) from error
    state: dict[str, Any] = {}
    for key, path in (metadata.planner_data or {}).items():
        match path:
            case ("model", name) if name in held:
                pass
            case ("optimizer", _, name, *_) if name in trained:
                pass
            case ("history", "weights", name, *_) if name in trained:
                pass
            case ("history", "run" | "stages" | "buffers", *_) | ("pipeline", *_):
                pass
            case _:
                continue
        entry = metadata.state_dict_metadata[key]
        place = state
        for step in path[:-1]:
            place = place.setdefault(step, {})
        place[path[-1]] = (
            torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else None
        )
    with _alone_without_warning():
        load_files(state, checkpoint_id=directory, process_group=world.group, no_dist=world.processes == 1)
    state.setdefault("optimizer", {})
    return state


@contextmanager
def _alone_without_warning() -> Iterator[None]:
    """torch warns that it saves and loads in a single process, also where this is asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield


def _part(state: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    if name not in state:
        raise CheckpointError(
            f"the state dict has no part {name!r}: expected what Pipeline.state_dict() returns, found {sorted(state)}"
        )
    part: Mapping[str, Any] = state[name]
    return part
