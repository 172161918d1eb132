"""Messages between stages that travel encoded, over any transport.

The tensors that the codec encodes leave as several tensors, or as one of another type. What the receiver must know to
decode them, their specs, goes ahead of the first message of each kind: it is the same for all of that kind.

Laws of this file:
  1. What another stage receives is rounded in the same way on this rank, on another one of this process, and behind a
     link.
  2. It changes neither the number nor the order of the messages, except for the one ahead of each kind.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeAlias

import torch
from torch import Tensor

from penstock.errors import TransportError
from penstock.runtime.transport.message_headers import Awaited, Spec, Specs, SpecsAhead
from penstock.runtime.transport.transport import Edge, Message, PendingMessage, Transport
from penstock.training.wire_codecs import WireCodec, decode, encode, encodes, round_to_wire

_Forms: TypeAlias = Sequence[tuple[Spec | None, bool]]
"""The tensors of a message before they were encoded, and which of them were."""


class CodedMessages:
    """Encodes the messages of one rank, which computes on `device`, with `codec`."""

    def __init__(self, transport: Transport, codec: WireCodec, device: torch.device) -> None:
        self.transport, self.codec = transport, codec
        self._specs = SpecsAhead(transport, device, self._forms)

    def send(self, edge: Edge, kind: Hashable, message: Message) -> None:
        parts: list[Tensor | None] = []
        described: list[Tensor | None] = []
        for tensor in message:
            coded = tensor is not None and encodes(self.codec, tensor.shape, tensor.dtype)
            own = _encode(self.codec, tensor) if tensor is not None and coded else (tensor,)
            parts += own or (None,)
            described.append(tensor if own else None)
        self._specs.send(edge, kind, described)
        self.transport.send(edge, kind, tuple(parts))

    def post(self, edge: Edge, kind: Hashable) -> PendingMessage:
        """Posts the receive of the next message on `edge`, which is of `kind`."""
        forms = self._specs.post(edge, kind)
        return _CodedReceive(self.transport.post(edge, kind), forms, self.codec)

    def pass_on(self, message: Message) -> Message:
        """`message` as another stage of this rank receives it."""
        return tuple(
            None if tensor is None or tensor.is_meta else round_to_wire(self.codec, tensor) for tensor in message
        )

    def _forms(self, specs: Specs, edge: Edge) -> _Forms:
        return [(spec, spec is not None and encodes(self.codec, spec.shape, spec.dtype)) for spec in specs]


@dataclass(slots=True, eq=False)
class _CodedReceive:
    receive: PendingMessage
    forms: Awaited[_Forms]
    codec: WireCodec

    def ready(self) -> bool:
        return self.receive.ready()

    def wait(self) -> Message:
        forms, arrived = self.forms.get(), self.receive.wait()
        # A codec makes the same number of parts of every tensor.
        coded = sum(is_coded for _, is_coded in forms)
        left = len(arrived) - (len(forms) - coded)
        count = left // max(coded, 1)
        if left != count * coded or left < coded:
            raise TransportError(
                f"{self.forms.edge}: expected encoded tensors, {coded} of {len(forms)}, found {len(arrived)} tensors. "
                "The ranks make different calls, or their codecs differ: call the same methods of the Pipeline on "
                "every rank, with the same wire_dtype="
            )
        tensors, travelled = list[Tensor | None](), iter(arrived)
        for spec, is_coded in forms:
            parts = [*islice(travelled, count if is_coded else 1)]
            found = tuple(part for part in parts if part is not None and not part.is_meta)
            if len(found) < len(parts):
                tensors.append(None)
            else:
                tensors.append(self._decode(spec, found) if is_coded and spec is not None else found[0])
        return tuple(tensors)

    def _decode(self, spec: Spec, parts: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            tensor = decode(self.codec, parts, spec.shape, spec.dtype)
        return tensor.detach().requires_grad_(spec.requires_grad)


@torch.no_grad()
def _encode(codec: WireCodec, tensor: Tensor) -> tuple[Tensor, ...]:
    """The parts of `tensor`. Those of a missing gradient are missing, too; integers cannot be, so that it has none."""
    if not tensor.is_meta:
        return encode(codec, tensor.detach())
    parts = encode(codec, torch.zeros_like(tensor, device="cpu"))
    return tuple(part.to("meta") for part in parts) if all(part.is_floating_point() for part in parts) else ()
