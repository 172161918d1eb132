"""The headers of messages: the shapes, dtypes and gradient flags that both ends of an edge agree on.

Messages with the same shapes are of one kind. The header travels ahead of the first message of its kind, and both ends
remember it. Later messages of that kind carry only the elements.

Invariants of this file:
  1. All work that depends only on the kind is done once, at its first message.
  2. A header is parsed, and its bounds are checked before memory is allocated for what it describes.
  3. A tensor arrives with the memory order that it had when it was sent, without gaps. The results of a layer may
     depend on that order: dropout draws its mask in the order of memory, so with another order a pipeline would differ
     from one process.
  4. Data may decide which gradients exist. A missing gradient travels with the size that was agreed on, filled with a
     NaN that no computation makes, and arrives as None. NCCL's ends are not read on the host, so they refuse that.
"""

import ctypes
import math
import os
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.files.plain_values import decode_plain, encode_plain, name_of
from penstock.runtime.transport.transport import Edge, Message, PendingMessage, Transport

MOST_HEADER_BYTES = 2**22
"""The size of the largest header: that of a message of more than fifty thousand tensors."""
_MOST_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
"""The size of the largest message: the memory of this host."""
_MOST_DIMENSIONS = 64
"""PyTorch's operators take no more."""
_MISSING = b"\xfd\x7f"
"""The bytes that fill a missing gradient: a NaN in each type of two, four or eight bytes, with a payload of our own."""
_MISSING_START_BYTES = 8
"""How many of its first bytes make a missing gradient known."""


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
    nbytes: int = field(compare=False)
    missing_start: bytes = field(compare=False)
    """The first bytes of a missing gradient; empty if the tensor is no gradient."""

    @classmethod
    def of(cls, tensor: Tensor) -> "Spec":
        """Describes `tensor`."""
        order = sorted(range(tensor.ndim), key=tensor.stride, reverse=True)
        return cls.ordered(tensor.shape, tensor.dtype, tensor.requires_grad, order)

    @classmethod
    def ordered(cls, shape: torch.Size, dtype: torch.dtype, requires_grad: bool, order: Sequence[int]) -> "Spec":
        """Describes a tensor that lies in memory in `order`."""
        strides, step = [1] * len(shape), 1
        for dimension in reversed(order):
            strides[dimension] = step
            step *= max(shape[dimension], 1)
        size = math.prod(shape) * dtype.itemsize
        may_miss = not requires_grad and (dtype.is_floating_point or dtype.is_complex)
        start = (_MISSING * (_MISSING_START_BYTES // 2))[:size] if may_miss else b""
        return cls(shape, dtype, requires_grad, tuple(order), tuple(strides), size, start)

    def fits(self, tensor: Tensor) -> bool:
        """Whether `tensor` has the agreed shape and dtype, and requires no gradient if that was agreed.

        The gradient of a tensor that requires none, against the agreement, is dropped where it arrives.
        """
        same = tensor.shape == self.shape and tensor.dtype is self.dtype
        return same and (self.requires_grad or not tensor.requires_grad)

    def flatten(self, tensor: Tensor) -> Tensor:
        """Returns the elements of `tensor` as they travel: contiguous in memory, in the agreed order."""
        if tensor.is_meta:
            return self.missing()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.detach().resolve_conj().resolve_neg()
        if tensor.stride() == self.strides:
            return tensor
        return tensor.detach().permute(self.order).contiguous()

    def missing(self) -> Tensor:
        """Makes what travels in place of a gradient that does not exist."""
        tensor = self.empty()
        ctypes.memmove(tensor.data_ptr(), _MISSING * (self.nbytes // 2), self.nbytes // 2 * 2)
        return tensor

    @property
    def layout(self) -> Layout:
        """The memory layout of the tensor after it has arrived."""
        return self.shape, self.strides, self.dtype

    def empty(self) -> Tensor:
        """Allocates such a tensor on the CPU, which requires no gradient."""
        return torch.empty_strided(self.shape, self.strides, dtype=self.dtype)


Specs: TypeAlias = tuple[Spec | None, ...]
"""The tensors of a message; None stands for None."""


class SentKinds:
    """The kinds of messages that the sender of `edge` has agreed on with its receiver. `on_host`: whether the receiver
    sees messages in host memory, so that gradients may be missing in some of a kind.
    """

    def __init__(self, edge: Edge, on_host: bool = True) -> None:
        self.edge = edge
        self._on_host = on_host
        self._agreed: dict[Hashable, Specs] = {}

    def agree(self, kind: Hashable, message: Sequence[Tensor | None]) -> tuple[bytes | None, list[Tensor]]:
        """Returns the header of `message` if it is the first of `kind`, and its tensors as they travel.

        `TransportError` if they differ from the agreed ones.
        """
        if not self._on_host:
            message = [None if tensor is None or tensor.is_meta else tensor for tensor in message]
        specs, header = self._agreed.get(kind), None
        if specs is None:
            specs = tuple(None if t is None else Spec.of(t) for t in message)
            header = write_specs(specs, self.edge)
            self._agreed[kind] = specs
        _require_fit(specs, message, self.edge)
        tensors = []
        for spec, tensor in zip(specs, message, strict=True):
            if spec is not None and tensor is not None:
                tensors.append(spec.flatten(tensor))
        return header, tensors


class ReceivedKinds:
    """The kinds of messages that the receiver of `edge` has agreed on with its sender."""

    def __init__(self, edge: Edge) -> None:
        self.edge = edge
        self._agreed: dict[Hashable, Specs] = {}

    def specs(self, kind: Hashable) -> Specs | None:
        """The tensors of `kind`; None as long as its header has not been read."""
        return self._agreed.get(kind)

    def read(self, kind: Hashable, header: bytes) -> Specs:
        """Reads the tensors of `kind` from its `header`. `TransportError` if it is none."""
        specs = self._agreed[kind] = parse_specs(header, self.edge)
        return specs


T = TypeVar("T")


class SpecsAhead(Generic[T]):
    """Carries the specs of messages that travel in another form over `transport`, encoded or in slices.

    They are sent ahead of the first message of each kind on an edge, in a message of their own, from `device`. `read`
    makes of them what the receiver needs, once for each kind.
    """

    def __init__(self, transport: Transport, device: torch.device, read: Callable[[Specs, Edge], T]) -> None:
        self._transport, self._device, self._read = transport, device, read
        self._sent: dict[tuple[Edge, Hashable], Specs] = {}
        self._awaited: dict[tuple[Edge, Hashable], Awaited[T]] = {}

    def send(self, edge: Edge, kind: Hashable, message: Sequence[Tensor | None]) -> bool:
        """Sends the specs of `message` if it is the first of `kind`. Returns whether it is.

        `TransportError` if they differ from the agreed ones.
        """
        known = self._sent.get((edge, kind))
        if known is not None:
            _require_fit(known, message, edge)
            return False
        specs = self._sent[edge, kind] = tuple(None if tensor is None else Spec.of(tensor) for tensor in message)
        code = torch.frombuffer(bytearray(write_specs(specs, edge)), dtype=torch.uint8)
        self._transport.send(edge, ("specs", kind), (code.to(self._device),))
        return True

    def post(self, edge: Edge, kind: Hashable) -> "Awaited[T]":
        """What `read` makes of the specs of `kind`; a receive is posted for the first message of it."""
        if (edge, kind) not in self._awaited:
            self._awaited[edge, kind] = Awaited(edge, self._transport.post(edge, ("specs", kind)), self._read)
        return self._awaited[edge, kind]


@dataclass(slots=True, eq=False)
class Awaited(Generic[T]):
    """Specs that travel ahead of the first message of their kind."""

    edge: Edge
    receive: PendingMessage
    read: Callable[[Specs, Edge], T]
    found: T | None = None

    def get(self) -> T:
        if self.found is None:
            (code,) = self.receive.wait()
            assert code is not None
            specs = parse_specs(code.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes(), self.edge)
            self.found = self.read(specs, self.edge)
        return self.found


def _require_fit(specs: Specs, message: Sequence[Tensor | None], edge: Edge) -> None:
    """Raises `TransportError` if the tensors of `message` are not those of `specs`."""
    fits = len(specs) == len(message)
    for spec, tensor in zip(specs, message, strict=False):
        fits &= tensor is None if spec is None else tensor is not None and spec.fits(tensor)
    if fits:
        return
    now = tuple(None if tensor is None else Spec.of(tensor) for tensor in message)
    raise TransportError(
        f"{edge}: microbatches of the same input shapes must make tensors of the same shapes. Agreed at the first one: "
        f"{_describe(specs)}; now: {_describe(now)}. The model's shapes or used outputs depend on its data: make them "
        "depend on the input shapes only. If data decide which values have a gradient, pass a sample= for which they "
        "have one"
    )


def write_specs(specs: Specs, edge: Edge) -> bytes:
    """Returns the text of a header, which `parse_specs` reads. `TransportError` for a dtype that cannot be sent."""
    for spec in specs:
        if spec is not None and not _can_send(spec.dtype):
            raise TransportError(
                f"{edge}: a tensor of {spec.dtype} cannot be sent: expected numbers or truth values. Convert it in the "
                "layer before the cut"
            )
    return encode_plain([spec and (spec.shape, spec.dtype, spec.requires_grad, spec.order) for spec in specs])


def parse_specs(header: bytes, edge: Edge) -> Specs:
    """Reads what `write_specs` has written. `TransportError` if it is anything else, or larger than this host."""
    try:
        specs = tuple([None if row is None else _parse_spec(*row) for row in decode_plain(header)])
        total = sum(spec.nbytes for spec in specs if spec is not None)
        if total > _MOST_BYTES:
            raise ValueError(f"tensors of {total} bytes together, on a host of {_MOST_BYTES}")
    except (TransportError, TypeError, ValueError) as error:
        raise TransportError(
            f"{edge}: expected a header with the shapes of a message's tensors, found {len(header)} bytes that are "
            f"none: {error}. Either the ranks make different calls, so that one reads what was sent for something "
            "else: call the same methods of the Pipeline on every rank, in the same order. Or the ranks run different "
            "versions of Penstock, or another program writes to this connection: see docs/trust.md"
        ) from error
    return specs


def _parse_spec(shape: object, dtype: object, requires_grad: object, order: object) -> Spec:
    """The tensor that a header describes so. `ValueError` or `TypeError` if there is none."""
    if not (isinstance(shape, torch.Size) and isinstance(dtype, torch.dtype) and isinstance(order, tuple)):
        raise ValueError(f"{shape!r:.80}, {dtype!r:.80} and {order!r:.80} as shape, dtype and order of a tensor")
    if not _can_send(dtype) or not isinstance(requires_grad, bool) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"a tensor of {dtype} with gradient flag {requires_grad!r:.80} and {len(shape)} dimensions")
    if sorted(order) != list(range(len(shape))) or any(type(dimension) is not int for dimension in order):
        raise ValueError(f"{order!r:.80} as the order of {len(shape)} dimensions in memory")
    if requires_grad and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"a gradient of {dtype}")
    # Strides are products of sizes, in which a size of zero counts as one.
    if min(shape, default=0) < 0 or math.prod(max(size, 1) for size in shape) * dtype.itemsize > _MOST_BYTES:
        raise ValueError(f"a tensor of {tuple(shape)} numbers of {dtype}, on a host of {_MOST_BYTES} bytes")
    return Spec.ordered(shape, dtype, requires_grad, order)


def _can_send(dtype: torch.dtype) -> bool:
    """Whether `dtype` is one of numbers that need no more data, such as the scales of quantized ones."""
    return not name_of(dtype).startswith(("q", "bits"))


def assemble(specs: Specs, arrived: Iterable[Tensor]) -> Message:
    """Makes the message of `specs` from the tensors that have arrived. A missing gradient is None."""
    tensors, message = iter(arrived), list[Tensor | None]()
    for spec in specs:
        tensor = None if spec is None else next(tensors)
        if tensor is not None and spec is not None:
            if spec.requires_grad:
                tensor.requires_grad_()
            elif (start := spec.missing_start) and tensor.is_cpu:
                tensor = None if ctypes.string_at(tensor.data_ptr(), len(start)) == start else tensor
        message.append(tensor)
    return tuple(message)


def contiguous_view(tensor: Tensor) -> Tensor:
    """Returns the memory of `tensor`, which has no gaps, as a contiguous tensor."""
    return tensor if tensor.is_contiguous() else tensor.detach().as_strided((tensor.numel(),), (1,))


def _describe(specs: Specs) -> str:
    texts = [
        "none" if spec is None else f"{tuple(spec.shape)} {spec.dtype}{' with a gradient' * spec.requires_grad}"
        for spec in specs
    ]
    return "[" + ", ".join(texts) + "]"
