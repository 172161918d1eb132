"""What both ends of an edge know of a message before it comes.

Shapes, types and what requires a gradient travel ahead of the first message of a form, as its header, and are
remembered at both ends; later messages of that form are the bare numbers.

Laws of this file:
  1. Whatever need be worked out of a form is worked out at its first message.
  2. A tensor arrives as it lay in memory, without gaps: what a layer computes may depend on that order. Dropout draws
     its mask in the order of memory, so that one process and many would differ.
"""

import pickle
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.transport.transport import Edge

__all__ = ["SentForms", "Spec", "Specs", "read_header"]


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of a message."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] = field(compare=False)
    """The dimensions from the outermost to the innermost in memory."""
    strides: tuple[int, ...] = field(compare=False)
    """In that order, without gaps."""
    bytes: int = field(compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        """What is to be known of `tensor`."""
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        strides, step = [1] * tensor.ndim, 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= max(tensor.shape[dimension], 1)
        size = tensor.numel() * tensor.element_size()
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad, tuple(order), tuple(strides), size)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` is what was agreed."""
        same = tensor.shape == self.shape and tensor.dtype is self.dtype
        return same and tensor.requires_grad == self.requires_grad

    def flatten(self, tensor: Tensor) -> Tensor:
        """`tensor` as it travels: its numbers follow each other in memory, in the agreed order."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides:
            return tensor
        return tensor.detach().permute(self.order).contiguous()

    @property
    def layout(self) -> Layout:
        """How it lies in memory when it has come."""
        return self.shape, self.strides, self.dtype

    def empty(self) -> Tensor:
        """A tensor like this, on the CPU."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, requires_grad=self.requires_grad)


Specs: TypeAlias = tuple[Spec | None, ...]
"""Of the tensors of a message; None stands for None."""


class SentForms:
    """The forms that the sender of `edge` has agreed on."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._agreed: dict[Hashable, Specs] = {}

    def agree(self, form: Hashable, message: Sequence[Tensor | None]) -> tuple[bytes | None, list[Tensor]]:
        """The header of `message` if it is the first of `form`, and its tensors as they travel.

        `TransportError` if they are not what was agreed on.
        """
        specs, header = self._agreed.get(form), None
        if specs is None:
            specs = self._agreed[form] = tuple(None if t is None else Spec.of(t) for t in message)
            header = pickle.dumps(specs)
        if len(specs) != len(message):
            raise self._error(specs, message)
        tensors = []
        for spec, tensor in zip(specs, message, strict=True):
            if tensor is None or spec is None:
                if tensor is not None or spec is not None:
                    raise self._error(specs, message)
            elif spec.fits(tensor):
                tensors.append(spec.flatten(tensor))
            else:
                raise self._error(specs, message)
        return header, tensors

    def _error(self, agreed: Specs, message: Sequence[Tensor | None]) -> TransportError:
        now = tuple(None if tensor is None else Spec.of(tensor) for tensor in message)
        return TransportError(
            f"{self._edge}: microbatches of the same input shapes must make tensors of the same shapes. Agreed at "
            f"the first one: {_describe(agreed)}; now: {_describe(now)}. The model's shapes or used outputs "
            "depend on its data: make them depend on the input shapes only"
        )


def read_header(header: bytes) -> Specs:
    """The tensors of a form, as its header tells them to the receiver."""
    specs: Specs = pickle.loads(header)
    return specs


def _describe(specs: Specs) -> str:
    parts = ["none" if spec is None else f"{tuple(spec.shape)} {spec.dtype}" for spec in specs]
    return "[" + ", ".join(parts) + "]"
