"""The codecs of `wire_dtype=`: what passes from stage to stage in fewer bytes, and so rounded.

Every floating tensor that passes from one stage to another, activation or gradient, is encoded by the stage that makes
it and decoded by the one that reads it. Whether the two stages are on different ranks does not matter: the numbers of a
training depend on where its stages begin, and on nothing else of its plan. Integers, booleans and complex numbers stay
exact, and so does a tensor that the codec would make no smaller.

Laws of a codec, with round(x) = decode(encode(x)); `tests/training/test_wire_codecs.py` checks them for those here:
  1. round(round(x)) = round(x), bit for bit: a value that stages relay is rounded at every cut on its way.
  2. The samples (rows of dimension 0) are coded one by one, for replicas that split them.
  3. round(x) has the shape and the type of x, and its dimensions lie in memory in the same order.
  4. A number that is not finite does not become finite, since a loss scale looks for such numbers.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.arguments import Rule, integer, text_of
from penstock.errors import PenstockError


class WireCodec(ABC):
    """A base class: says how floating tensors are sent between stages. Derived codecs keep the laws of `RowInt8`.

    A codec keeps no state: what it makes of a tensor depends on that tensor alone. Rounding a rounded tensor changes
    nothing, the rows of dimension 0 (samples) are coded one by one, and what is not finite stays so.
    """

    @abstractmethod
    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """The tensors that are sent in place of `tensor`, without gradients; the same number for every tensor."""

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        """The tensor of `dtype` that `encode` made `parts` of, rounded."""

    @abstractmethod
    def sent_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """The bytes of what `encode` makes of a tensor of this shape and type.

        A tensor that they do not make smaller is sent as it is, and not encoded.
        """


@dataclass(frozen=True, slots=True)
class _DtypeCast(WireCodec):
    """Sends tensors in a type of fewer bytes."""

    dtype: torch.dtype

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor.to(self.dtype),)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        return parts[0].to(dtype)

    def sent_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        return math.prod(shape) * self.dtype.itemsize


_MOST = 127
"""Of the integers that a number of a row becomes; its negative is the least."""
_LEAST_EXPONENT = -100
"""That of rows of smaller numbers: powers of two below would leave the range of float32."""
_NOT_FINITE = 2**15 - 1
"""The exponent of a row with a number that is not finite."""


@dataclass(frozen=True, slots=True)
class RowInt8(WireCodec):
    """Sends each row (the last dimension) as integers of 8 bits and a power of two that they are multiplied with.

    A number differs from the one that was sent by at most 1/128 of the largest of its row. Tensors of fewer than two
    dimensions are sent as they are. A row with a number that is not finite becomes NaN.
    """

    def encode(self, tensor: Tensor) -> tuple[Tensor, ...]:
        values = tensor if tensor.dtype == torch.float64 else tensor.float()
        largest = values.abs().amax(dim=-1, keepdim=True)
        finite = largest.isfinite()
        # Times 2 ** (7 - exponent), the largest lies between 64 and 128. The next time it does again: law 1.
        exponents = torch.frexp(largest.masked_fill(~finite, 0.0)).exponent.clamp(min=_LEAST_EXPONENT)
        scaled = (values * _power_of_two(7 - exponents, values.dtype)).round().clamp(-_MOST, _MOST)
        numbers = scaled.nan_to_num(0.0).to(torch.int8)
        return numbers, exponents.masked_fill(~finite, _NOT_FINITE).to(torch.int16)

    def decode(self, parts: tuple[Tensor, ...], dtype: torch.dtype) -> Tensor:
        numbers, exponents = parts
        values = numbers.to(torch.float64 if dtype == torch.float64 else torch.float32)
        broken = exponents == _NOT_FINITE
        scales = _power_of_two(exponents.masked_fill(broken, 0) - 7, values.dtype)
        return (values * scales.masked_fill(broken, math.nan)).to(dtype)

    def sent_bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        if len(shape) < 2 or not shape[-1]:
            return math.prod(shape) * dtype.itemsize
        return math.prod(shape) + math.prod(shape[:-1]) * torch.int16.itemsize


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2 to these powers in float32 or float64, written as bits: a device's power function need not be exact."""
    if dtype == torch.float64:
        return ((exponents.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


WireDtype = torch.dtype | WireCodec
"""The values of ``wire_dtype=``."""

_TYPES = (torch.bfloat16, torch.float16, torch.float32)


def _advice(value: object) -> str:
    if isinstance(value, type) and issubclass(value, WireCodec):
        return f"make one of the class: {value.__name__}()"
    if isinstance(value, torch.dtype) and not value.is_floating_point:
        return "penstock.RowInt8() sends integers of 8 bits, with a scale for each row"
    if value == torch.float64:
        return "no tensor of a model has more bytes than that: leave it out"
    return "give torch.bfloat16, or leave it out to send tensors as they are"


_RULE: Rule[WireDtype | None] = Rule(
    "torch.bfloat16, torch.float16, torch.float32 or a penstock.WireCodec",
    lambda value: isinstance(value, WireCodec) or (isinstance(value, torch.dtype) and value in _TYPES),
    lambda value: value,
    _advice,
).optional


def read_wire_dtype(given: WireDtype | None, where: str = "wire_dtype") -> WireCodec | None:
    """The codec that ``wire_dtype=`` asks for; None if tensors are sent as they are. `PenstockError` for others."""
    found = _RULE.check(where, given)
    return _DtypeCast(found) if isinstance(found, torch.dtype) else found


def sent_bytes(codec: WireCodec | None, shape: Sequence[int], dtype: torch.dtype) -> int:
    """The bytes that a tensor of this shape and type is sent in."""
    whole = math.prod(shape) * dtype.itemsize
    if codec is None or not dtype.is_floating_point:
        return whole
    return min(
        whole, integer(0).check(f"wire_dtype={codec!r}: what sent_bytes returns", codec.sent_bytes(shape, dtype))
    )


def encodes(codec: WireCodec, shape: Sequence[int], dtype: torch.dtype) -> bool:
    """Whether a tensor of this shape and type is sent encoded."""
    return sent_bytes(codec, shape, dtype) < math.prod(shape) * dtype.itemsize


def encode(codec: WireCodec, tensor: Tensor) -> tuple[Tensor, ...]:
    """What `codec` makes of `tensor`. `PenstockError` if it is no tuple of tensors."""
    parts = codec.encode(tensor)
    if not isinstance(parts, tuple | list) or not all(isinstance(part, Tensor) for part in parts):
        raise PenstockError(
            f"wire_dtype={codec!r}: expected that encode returns a tuple of tensors, found {text_of(parts)}: correct "
            "the codec"
        )
    return tuple(parts)


def decode(codec: WireCodec, parts: tuple[Tensor, ...], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """What `codec` makes of `parts`. `PenstockError` if it has another shape or type than the tensor that was sent."""
    tensor = codec.decode(parts, dtype)
    if not isinstance(tensor, Tensor) or tensor.shape != torch.Size(shape) or tensor.dtype != dtype:
        found = f"{tuple(tensor.shape)} and {tensor.dtype}" if isinstance(tensor, Tensor) else text_of(tensor)
        raise PenstockError(
            f"wire_dtype={codec!r}: expected that decode returns the tensor that was encoded, of shape {tuple(shape)} "
            f"and {dtype}, found {found}: correct the codec"
        )
    return tensor


def round_to_wire(codec: WireCodec, tensor: Tensor) -> Tensor:
    """`tensor` as another stage receives it, without its history; it requires a gradient if `tensor` does."""
    with torch.no_grad():
        if not encodes(codec, tensor.shape, tensor.dtype):
            return tensor.detach().requires_grad_(tensor.requires_grad)
        rounded = decode(codec, encode(codec, tensor.detach()), tensor.shape, tensor.dtype)
    return rounded.detach().requires_grad_(tensor.requires_grad)
