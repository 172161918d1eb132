"""Modules and optimizers: their hooks, compiled code, tables of buffers, and schedulers of schedulers."""

from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import batchnorm
from torch.optim.lr_scheduler import LRScheduler

from penstock.torch_internals.availability import missing

TENSOR_TABLES = frozenset(("_parameters", "_buffers", "_modules"))
"""The attributes of a module that hold what is registered with it, under names that are those of the state dict."""

HOOK_TABLES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
"""The attributes that hold what runs around the forward and the backward of a module itself."""


def is_hooked(module: nn.Module) -> bool:
    """Whether something runs around the forward or the backward of `module` itself."""
    return bool(hooks_of(module))


def hooks_of(module: nn.Module, *, backward: bool = False) -> list[Any]:
    """The hooks of `module` itself, on its forward and its backward, or only the latter. No public name lists them."""
    try:
        return [hook for table in _hook_tables(module)[2 * backward :] for hook in table.values()]
    except AttributeError as error:
        raise missing("torch.nn.Module._forward_hooks", "to see what a module runs besides its children") from error


def runs_plainly(module: nn.Module) -> bool:
    """Whether a call of `module` runs its forward and nothing else.

    Public: the call itself, which takes one or two microseconds to find that out.
    """
    try:
        hooked = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks
        return not hooked and not module._backward_pre_hooks and module._compiled_call_impl is None
    except AttributeError:
        return False


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any], *, hooks: bool = False) -> Iterator[None]:
    """Runs `forward` in place of what a call of `module` runs, for a block. `hooks`: whether it keeps its hooks."""
    tables = [] if hooks else _hook_tables(module)
    contents = [dict(table) for table in tables]
    own = vars(module).get("forward")
    for table in tables:
        table.clear()
    # Not `setattr`: a scripted module refuses it.
    vars(module)["forward"] = forward
    try:
        yield
    finally:
        del vars(module)["forward"]
        if own is not None:
            vars(module)["forward"] = own
        for table, content in zip(tables, contents, strict=True):
            table.update(content)


def _hook_tables(module: nn.Module) -> list[MutableMapping[int, Any]]:
    return [getattr(module, name) for name in HOOK_TABLES]


def is_compiled(module: nn.Module) -> bool:
    """Whether ``module.compile()`` was called. No public name says so."""
    try:
        return module._compiled_call_impl is not None
    except AttributeError as error:
        raise missing("torch.nn.Module._compiled_call_impl", "to refuse compiled modules") from error


def compiled_from(module: nn.Module) -> nn.Module | None:
    """The module that ``torch.compile`` wrapped in `module`; None if `module` is no such wrapper.

    The wrapper's class is private. Where its attribute is gone, it is captured as other modules are.
    """
    found = getattr(module, "_orig_mod", None)
    return found if isinstance(found, nn.Module) else None


def registered_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """A copy of the table of the buffers of `module` itself.

    Public: ``named_buffers(recurse=False)``, which leaves out the names that are registered as None and that a forward
    may fill.
    """
    try:
        return dict(module._buffers)
    except AttributeError as error:
        raise missing("torch.nn.Module._buffers", "to see which buffers a forward writes") from error


def registered_children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules that are registered with `module` itself, by name; one that stands twice, twice.

    Public: ``named_children()``, which leaves out the second, and ``named_modules(remove_duplicate=False)``, which goes
    through all modules inside of these, too. Without the private name, that.
    """
    table = getattr(module, "_modules", None)
    if table is None:
        every = module.named_modules(remove_duplicate=False)
        return [(name, inner) for name, inner in every if name and "." not in name]
    return [(name, child) for name, child in table.items() if child is not None]


def tensor_tables(module: nn.Module) -> tuple[MutableMapping[str, Any], MutableMapping[str, Any]]:
    """The tables of the parameters and of the buffers of `module` itself, which follow what is registered later. To
    write in one changes what the module reads, without the checks and the hooks of an assignment.

    Public: attributes. To read ``model.block.norm.weight`` makes three searches of modules, each time. With the tables
    and PyTorch's functions for operators, an action of `tiny` in benchmarks/overhead.py takes 11 % less (6 % of it by
    the tables).
    """
    try:
        return module._parameters, module._buffers
    except AttributeError as error:
        raise missing("torch.nn.Module._parameters", "to read the weights of a traced layer") from error


def is_persistent(module: nn.Module, name: str) -> bool:
    """Whether the buffer `name` of `module` itself is in its state dict.

    Without the private name: the state dict is made and asked, which runs the user's hooks on it.
    """
    outside = getattr(module, "_non_persistent_buffers_set", None)
    return name in module.state_dict(keep_vars=True) if outside is None else name not in outside


def loads_itself(module: nn.Module) -> bool:
    """Whether `module` loads more than tensors: by hooks, which no public name lists, or code of its own."""
    names = ("load_state_dict", "_load_from_state_dict", "set_extra_state")
    own = any(getattr(type(module), name) is not getattr(nn.Module, name) for name in names)
    return own or any(getattr(module, f"_load_state_dict_{when}_hooks", ()) for when in ("pre", "post"))


def is_batch_norm(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm. Its base class is private; without it, the public ones that inherit from it."""
    lazy = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
    public = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *lazy)
    return isinstance(module, getattr(batchnorm, "_BatchNorm", public))


def own_reset(module: nn.Module) -> Callable[[], Any] | None:
    """What gives `module` first weights: its ``reset_parameters()``; None if it has none.

    `nn.MultiheadAttention` and `nn.Transformer` have it under a private name only. Where that is gone they have none.
    """
    found = (getattr(module, name, None) for name in ("reset_parameters", "_reset_parameters"))
    return next((reset for reset in found if callable(reset)), None)


def step_hooks(optimizer: torch.optim.Optimizer) -> tuple[Callable[..., Any], ...]:
    """The hooks on the steps of `optimizer` that are not Penstock's own. No public name lists them.

    Without the private names: none, and Penstock does not see hooks that it would refuse.
    """
    pre = getattr(optimizer, "_optimizer_step_pre_hooks", None) or {}
    post = getattr(optimizer, "_optimizer_step_post_hooks", None) or {}
    hooks = (*pre.values(), *post.values())
    found = [hook for hook in hooks if not getattr(hook, "__module__", "").startswith("penstock.")] if hooks else ()
    return tuple(found)


def flat_schedulers(scheduler: LRScheduler) -> Iterator[LRScheduler]:
    """`scheduler`, or those that a `SequentialLR` or `ChainedScheduler` consists of, which no public name lists."""
    parts = getattr(scheduler, "_schedulers", None)
    if parts is None:
        yield scheduler
    else:
        for part in parts:
            yield from flat_schedulers(part)
