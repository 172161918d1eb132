"""Messages between stages that travel encoded, over any transport.

The tensors that the codec encodes leave as several tensors, or as one of another type. What the receiver must know to
decode them goes ahead of the first message of each kind, in a message of its own: it is the same for all of that kind.

Laws of this file:
  1. What another stage receives is rounded in the same way on this rank, on another one of this process, and behind a
     link.
  2. It changes neither the number nor the order of the messages, except for the one ahead of each kind.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.transport.message_headers import other_form
from penstock.runtime.transport.plain_values import decode_plain, encode_plain
from penstock.runtime.transport.transport import Edge, Message, PendingMessage, Transport
from penstock.training.wire_codecs import WireCodec, decode, encode, encodes, round_to_wire


class _Form(NamedTuple):
    """What one tensor is made of that travels in `parts` tensors."""

    parts: int
    dtype: torch.dtype
    requires_grad: bool
    shape: tuple[int, ...]


_Forms: TypeAlias = tuple[_Form | None, ...]
"""Of each tensor of a message; None for one that is sent as it is."""


@dataclass(slots=True)
class CodedMessages:
    """Encodes the messages of one rank, which computes on `device`, with `codec`."""

    transport: Transport
    codec: WireCodec
    device: torch.device
    _sent: dict[tuple[Edge, Hashable], _Forms] = field(default_factory=dict)
    _awaited: dict[tuple[Edge, Hashable], "_AwaitedForms"] = field(default_factory=dict)

    def send(self, edge: Edge, kind: Hashable, message: Message) -> None:
        parts: list[Tensor | None] = []
        forms: list[_Form | None] = []
        for tensor in message:
            own = () if tensor is None or not encodes(self.codec, tensor) else _encode(self.codec, tensor)
            if tensor is None or own == ():
                parts.append(tensor)
                forms.append(None)
                continue
            parts += own
            forms.append(_Form(len(own), tensor.dtype, tensor.requires_grad, tuple(tensor.shape)))
        known = self._sent.get((edge, kind))
        if known is None:
            known = self._sent[edge, kind] = tuple(forms)
            code = bytearray(encode_plain([form and tuple(form) for form in forms]))
            self.transport.send(edge, _ahead(kind), (torch.frombuffer(code, dtype=torch.uint8).to(self.device),))
        if known != tuple(forms):
            raise other_form(edge, _describe(known), _describe(forms))
        self.transport.send(edge, kind, tuple(parts))

    def post(self, edge: Edge, kind: Hashable) -> PendingMessage:
        """Posts the receive of the next message on `edge`, which is of `kind`."""
        if (edge, kind) not in self._awaited:
            self._awaited[edge, kind] = _AwaitedForms(edge, self.transport.post(edge, _ahead(kind)))
        return _CodedReceive(self.transport.post(edge, kind), self._awaited[edge, kind], self.codec)

    def pass_on(self, message: Message) -> Message:
        """`message` as another stage of this rank receives it."""
        return tuple(
            None if tensor is None or tensor.is_meta else round_to_wire(self.codec, tensor) for tensor in message
        )

    def discard(self) -> None:
        """Forgets what was agreed: messages may have been dropped."""
        self._sent.clear()
        self._awaited.clear()


@dataclass(slots=True, eq=False)
class _AwaitedForms:
    """The forms of the messages of one kind, which travel ahead of the first one."""

    edge: Edge
    receive: PendingMessage
    forms: _Forms | None = None

    def get(self) -> _Forms:
        if self.forms is None:
            (code,) = self.receive.wait()
            assert code is not None
            self.forms = _read(code, self.edge)
        return self.forms


@dataclass(slots=True, eq=False)
class _CodedReceive:
    receive: PendingMessage
    awaited: _AwaitedForms
    codec: WireCodec

    def ready(self) -> bool:
        return self.receive.ready()

    def wait(self) -> Message:
        forms, arrived = self.awaited.get(), self.receive.wait()
        if sum(1 if form is None else form.parts for form in forms) != len(arrived):
            raise _unlike(self.awaited.edge, f"{len(arrived)} tensors for {_describe(forms)}")
        tensors: list[Tensor | None] = []
        place = 0
        for form in forms:
            count = 1 if form is None else form.parts
            parts = [part for part in arrived[place : place + count] if part is not None and not part.is_meta]
            missing = len(parts) < count
            tensors.append(None if missing else parts[0] if form is None else self._decode(form, parts))
            place += count
        return tuple(tensors)

    def _decode(self, form: _Form, parts: Sequence[Tensor]) -> Tensor:
        with torch.no_grad():
            tensor = decode(self.codec, tuple(parts), form.shape, form.dtype)
        return tensor.detach().requires_grad_(form.requires_grad)


@torch.no_grad()
def _encode(codec: WireCodec, tensor: Tensor) -> tuple[Tensor, ...]:
    """The parts of `tensor`. Those of a missing gradient are missing, too; integers cannot be, so that it has none."""
    if not tensor.is_meta:
        return encode(codec, tensor.detach())
    parts = encode(codec, torch.zeros_like(tensor, device="cpu"))
    return tuple(part.to("meta") for part in parts) if all(part.is_floating_point() for part in parts) else ()


def _ahead(kind: Hashable) -> Hashable:
    return ("forms", kind)


def _read(code: Tensor, edge: Edge) -> _Forms:
    """The forms that `encode_plain` wrote. `TransportError` for other bytes."""
    data = code.cpu().numpy().tobytes()
    try:
        forms = tuple(None if form is None else _Form(*form) for form in decode_plain(data))
        # A form that is none of a tensor fails here.
        [torch.empty(form.shape, dtype=form.dtype, device="meta") for form in forms if form is not None]
    except (TransportError, TypeError, RuntimeError) as error:
        raise _unlike(edge, f"{data[:40]!r}") from error
    return forms


def _unlike(edge: Edge, found: str) -> TransportError:
    return TransportError(
        f"{edge}: expected the forms of encoded tensors, found {found}. The ranks make different calls, or their "
        "codecs differ: call the same methods of the Pipeline on every rank, with the same wire_dtype="
    )


def _describe(forms: Sequence[_Form | None]) -> str:
    texts = [
        "as it is" if form is None else f"{form.shape} {form.dtype}{' with a gradient' * form.requires_grad}"
        for form in forms
    ]
    return "[" + ", ".join(texts) + "]"
