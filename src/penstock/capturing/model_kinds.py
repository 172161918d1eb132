"""Which objects are models that can be captured: modules and lists of layers, but no wrappers around a module.

A wrapper that replicates, shards or compiles a module replaces its forward by something that cannot be cut into stages.
It holds the module itself, which can be.
"""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from penstock.arguments import text_of
from penstock.errors import CaptureError
from penstock.torch_internals.modules import compiled_from, registered_children, tensor_tables
from penstock.torch_internals.unimported import is_instance

_LISTS = ("named_parameters", "parameters", "named_buffers", "buffers", "named_modules", "modules")
_WRAPPERS = (nn.DataParallel, DistributedDataParallel)


def check_model(model: object, where: str = "capture") -> None:
    """Raises `CaptureError` unless `model` is a module with all its shapes, or a list of layers. `where`: the function
    that it was passed to.
    """
    if isinstance(model, nn.Module):
        found = _refusal(model) or _refusal_of_code(model)
    elif isinstance(model, list | tuple):
        wrong = next((layer for layer in model if not callable(layer) or isinstance(layer, type)), None)
        entry = None if wrong is None else ("a list of modules and functions", text_of(wrong), "make it a layer")
        found = entry or next(filter(None, map(_refusal, modules_in(model))), None)
    elif isinstance(model, type) and issubclass(model, nn.Module):
        found = "a module", f"the class {model.__name__}", f"call it to make one: {model.__name__}(...)"
    elif isinstance(model, Mapping):
        found = "a module", text_of(model), "load a state dict into the module that it is of, and pass that"
    else:
        found = "an nn.Module or a list of layers", text_of(model), "pass the module itself"
    if found is not None:
        expected, shown, fix = found
        raise CaptureError(f"{where}(model=): expected {expected}, found {shown}: {fix}")


def modules_in(model: nn.Module | Sequence[Any]) -> list[nn.Module]:
    """`model`, or those of its layers that are modules."""
    layers = [model] if isinstance(model, nn.Module) else model
    return [layer for layer in layers if isinstance(layer, nn.Module)]


def first_device(model: nn.Module | Sequence[Any]) -> torch.device:
    """The device of the first parameter of `model`, which may be a list of layers; the CPU if there is none."""
    return next((own.device for module in modules_in(model) for own in module.parameters()), torch.device("cpu"))


def _refusal(model: nn.Module) -> tuple[str, str, str] | None:
    """What was expected, what `model` is, and what to do; None for a module that can be captured."""
    kind = type(model).__name__
    if isinstance(model, _WRAPPERS) or is_instance(model, "torch.distributed.fsdp", "FullyShardedDataParallel"):
        return (
            "the module itself",
            f"{kind} around it",
            "pass model.module; a plan with several ranks in a stage has replicas, and parallelize= shards modules",
        )
    lazy = [name for name, tensor in chain(model.named_parameters(), model.named_buffers()) if is_lazy(tensor)]
    if lazy:
        return (
            "weights with shapes",
            f"{lazy[0]} without one in {kind}",
            "call the model once on a sample, which makes the weights of its lazy modules",
        )
    if (name := _unlisted(model)) is not None:
        return (
            "methods that list all weights under their names",
            f"a {kind} of which named_parameters, named_buffers, named_modules or parameters does not list {name}",
            "leave these methods as they are in nn.Module; requires_grad_(False) keeps a weight from being trained",
        )
    return None


def _unlisted(model: nn.Module) -> str | None:
    """The name of a parameter or buffer that methods of the model's own leave out or call something else."""
    waiting, held = [("", model)], list[tuple[str, int, Any]]()
    for path, module in waiting:
        # A scripted module has tables of another kind.
        tables = [table for table in tensor_tables(module) if isinstance(table, dict)]
        held += [(f"{path}{key}", kind, each) for kind, table in enumerate(tables) for key, each in table.items()]
        waiting += [(f"{path}{name}.", child) for name, child in registered_children(module)]
    if not any(getattr(type(module), name) is not getattr(nn.Module, name) for _, module in waiting for name in _LISTS):
        return None
    try:
        listed = [dict(each(remove_duplicate=False)) for each in (model.named_parameters, model.named_buffers)]
        weights = {id(each) for each in (*model.parameters(), *model.buffers())}
    except TypeError:
        # Such as one without ``remove_duplicate=``.
        listed, weights = [{}, {}], set[int]()
    for name, kind, tensor in held:
        if tensor is not None and not (listed[kind].get(name) is tensor and id(tensor) in weights):
            return name
    return None


def _refusal_of_code(model: nn.Module) -> tuple[str, str, str] | None:
    """The same for a whole model without code between its modules that could be cut; as a layer it is one."""
    kind = type(model).__name__
    if compiled_from(model) is not None:
        return (
            "the module itself",
            f"what torch.compile made of {type(compiled_from(model)).__name__}",
            "pass the module from before torch.compile; Pipeline(compile=True) compiles every stage",
        )
    if isinstance(model, torch.jit.ScriptModule):
        return (
            "a module of Python",
            f"{kind}, which torch.jit has made a program of",
            "pass the module from before torch.jit.script or torch.jit.trace",
        )
    return None
