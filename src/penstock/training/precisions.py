"""The types that a model computes in: PyTorch's autocast around every forward and its loss."""

from contextlib import AbstractContextManager, nullcontext

import torch

from penstock.arguments import Rule, text_of
from penstock.errors import PenstockError

_KINDS = (torch.bfloat16, torch.float16)
AUTOCAST: Rule[torch.dtype | None] = Rule(
    "torch.bfloat16 or torch.float16",
    lambda value: isinstance(value, torch.dtype) and value in _KINDS,
    lambda value: value,
    "give one of them, or leave it out for the model's own types",
).optional


def check_version_dtype(dtype: torch.dtype | None, autocast: torch.dtype | None) -> None:
    """Raises `PenstockError` if weights are to be held in a type that the model does not compute in."""
    if dtype is not None and dtype != autocast:
        raise PenstockError(
            f"version_dtype=: expected the same type as autocast=, {autocast!r}, since operators need weights and "
            f"inputs of one type, found {text_of(dtype)}: pass both, or leave version_dtype= out"
        )


def autocasting(autocast: torch.dtype | None, device: torch.device) -> AbstractContextManager[None]:
    """The context that a forward on `device` computes in."""
    return nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
