"""The headers of messages: the shapes, dtypes and gradient flags that both ends of an edge agree on.

Messages with the same shapes are of one kind. The header travels ahead of the first message of its kind, and both ends
remember it. Later messages of that kind carry only the elements.

Invariants of this file:
  1. All work that depends only on the kind is done once, at its first message.
  2. A tensor arrives with the memory order that it had when it was sent, without gaps. The results of a layer may
     depend on that order: dropout draws its mask in the order of memory, so with another order a pipeline would differ
     from one process.
"""

import pickle
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.transport.transport import Edge, Message

__all__ = ["SentKinds", "Spec", "Specs", "assemble", "contiguous_view", "read_header"]


@dataclass(frozen=True, slots=True)
class Spec:
    """One tensor of a message."""

    shape: torch.Size
    dtype: torch.dtype
    requires_grad: bool
    order: tuple[int, ...] = field(compare=False)
    """The dimensions from the outermost to the innermost in memory."""
    strides: tuple[int, ...] = field(compare=False)
    """The strides in that order, without gaps."""
    bytes: int = field(compare=False)

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        """Describes `tensor`."""
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        strides, step = [1] * tensor.ndim, 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= max(tensor.shape[dimension], 1)
        size = tensor.numel() * tensor.element_size()
        return cls(tensor.shape, tensor.dtype, tensor.requires_grad, tuple(order), tuple(strides), size)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the agreed shape, dtype and gradient flag."""
        same = tensor.shape == self.shape and tensor.dtype is self.dtype
        return same and tensor.requires_grad == self.requires_grad

    def flatten(self, tensor: Tensor) -> Tensor:
        """Returns the elements of `tensor` as they travel: contiguous in memory, in the agreed order."""
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides:
            return tensor
        return tensor.detach().permute(self.order).contiguous()

    @property
    def layout(self) -> Layout:
        """The memory layout of the tensor after it has arrived."""
        return self.shape, self.strides, self.dtype

    def empty(self) -> Tensor:
        """Allocates such a tensor on the CPU."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype, requires_grad=self.requires_grad)


Specs: TypeAlias = tuple[Spec | None, ...]
"""The tensors of a message; None stands for None."""


class SentKinds:
    """The kinds of messages that the sender of `edge` has agreed on with its receiver."""

    def __init__(self, edge: Edge) -> None:
        self._edge = edge
        self._agreed: dict[Hashable, Specs] = {}

    def agree(self, kind: Hashable, message: Sequence[Tensor | None]) -> tuple[bytes | None, list[Tensor]]:
        """Returns the header of `message` if it is the first of `kind`, and its tensors as they travel.

        `TransportError` if they differ from the agreed ones.
        """
        specs, header = self._agreed.get(kind), None
        if specs is None:
            specs = self._agreed[kind] = tuple(None if t is None else Spec.of(t) for t in message)
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
    """Reads the tensors of a kind from its header, on the receiver."""
    specs: Specs = pickle.loads(header)
    return specs


def assemble(specs: Specs, arrived: Iterable[Tensor]) -> Message:
    """Makes the message of `specs` from the tensors that have arrived."""
    tensors = iter(arrived)
    return tuple([None if spec is None else next(tensors).requires_grad_(spec.requires_grad) for spec in specs])


def contiguous_view(tensor: Tensor) -> Tensor:
    """Returns the memory of `tensor`, which has no gaps, as a contiguous tensor."""
    return tensor if tensor.is_contiguous() else tensor.detach().as_strided((tensor.numel(),), (1,))


def _describe(specs: Specs) -> str:
    texts = ["none" if spec is None else f"{tuple(spec.shape)} {spec.dtype}" for spec in specs]
    return "[" + ", ".join(texts) + "]"
