"""Parts of PyTorch that take long to import and that most trainings do not need: asked about without importing them.

An object is of a class only if the module of that class was imported. `DTensor` and `fully_shard` take half a second of
processor time to import, and the compiler a second.
"""

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

PLAIN: tuple[type, ...] = (Tensor, nn.Parameter)
"""The classes of tensors that have no parts."""


def is_instance(value: object, module: str, name: str) -> bool:
    """Whether `value` is of the class `name` of `module`, which is not imported for that."""
    return isinstance(value, getattr(sys.modules.get(module), name, ()))


def is_dtensor(value: object) -> TypeGuard["DTensor"]:
    """Whether `value` is a `DTensor`. In a step the code asks whether its type is in `PLAIN` first, without a call."""
    return is_instance(value, "torch.distributed.tensor", "DTensor")


def is_fully_sharded(module: object) -> TypeGuard["FSDPModule"]:
    """Whether `fully_shard` was applied to `module` itself."""
    return is_instance(module, "torch.distributed.fsdp", "FSDPModule")


def compiled_code_runs_eagerly() -> AbstractContextManager[object]:
    """In this block what ``torch.compile`` has wrapped runs eagerly. Where the compiler is not imported, nothing is
    wrapped; what is wrapped inside of the block, as the first in this process, is compiled.
    """
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
