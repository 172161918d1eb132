"""Python values as JSON, and back: numbers, texts, containers and tensors, and nothing that could run.

Checkpoints keep them, and ranks tell them each other. `pickle` could carry them as well, but the bytes that it reads
may contain code, and any process that reaches the port of a store or of Gloo can send bytes.

JSON has no tuples, no keys but texts, no bytes and no infinity. Each of these becomes an object with the only key ``!``
and the name of its kind, ``{"!": ["tuple", [1, 2]]}``. Tensors are stored elsewhere; JSON has the keys that they are
stored under. Between ranks no tensors travel like this.

Law of this file: what `encode` accepts, `decode` gives back equal and of the same type, a tensor of a subclass as its
parts. All else is refused, with its place.
"""

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import Tensor

from penstock.errors import CheckpointError, PenstockError, TransportError
from penstock.torch_internals.subclasses import TensorParts, subclass_named, taken_apart

Json: TypeAlias = Any
"""What the module ``json`` writes: None, truth values, numbers, texts, lists, and dicts with texts as keys."""

_TAG = "!"
_TYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_NUMPY_KINDS = "biuf"
"""Of NumPy's types: truth values, integers and real numbers."""
_DEEPEST = 100


def name_of(dtype: torch.dtype) -> str:
    """The name of a type of PyTorch's, such as ``float32``."""
    return str(dtype).removeprefix("torch.")


def type_named(name: object) -> torch.dtype | None:
    """The type of PyTorch's that `name` names, such as ``float32``."""
    return _TYPES.get(name) if isinstance(name, str) else None


def encode(value: object, where: str, keep: Callable[[Tensor, str], str]) -> Json:
    """`value` as JSON. `where`: its name, for errors. ``keep(tensor, where)`` stores a tensor and returns its key.

    `CheckpointError` for a value of another kind, or one that contains itself.
    """
    return _Encoder(keep, CheckpointError).encode(value, where)


def encode_plain(value: object) -> bytes:
    """`value` as bytes, for another rank. `TransportError` for a value of another kind, or a tensor."""
    return json.dumps(_Encoder(_refuse_tensor, TransportError).encode(value, "between ranks")).encode("ascii")


def decode_plain(data: bytes) -> Any:
    """The value that `encode_plain` made `data` of. `TransportError` for any other bytes."""
    try:
        return decode(json.loads(data.decode("ascii")), _no_tensor)
    except (ArithmeticError, LookupError, ValueError, TypeError, RuntimeError) as error:
        shown = data[:40] + b"..." * (len(data) > 40)
        raise TransportError(
            f"a message between ranks cannot be read: expected a plain value of Penstock's as JSON, found {shown!r} "
            f"({error}). Start the same version of Penstock on every rank, and see that nothing else uses the port of "
            "its store"
        ) from error


def _refuse_tensor(tensor: Tensor, where: str) -> NoReturn:
    raise TransportError(f"{where}: expected numbers, texts and containers of these, found a tensor. Send its numbers")


def _no_tensor(key: str) -> NoReturn:
    raise ValueError("no tensor is sent like this")


@dataclass(frozen=True, slots=True)
class _Encoder:
    keep: Callable[[Tensor, str], str]
    error: type[PenstockError]

    def encode(self, value: object, where: str, depth: int = 0) -> Json:
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {_TAG: ["float", str(value)]}  # type: ignore[arg-type]
        if depth > _DEEPEST:
            raise self.error(
                f"{where[:200]}...: expected values nested at most {_DEEPEST} deep, found more: it may contain itself. "
                "Keep it out of the state"
            )

        def inside(step: object, inner: object) -> Json:
            return self.encode(inner, f"{where}/{step}", depth + 1)

        if isinstance(value, Tensor) and isinstance(value := taken_apart(value, where), Tensor):
            return {_TAG: ["tensor", self.keep(value.detach(), where)]}
        if isinstance(value, TensorParts):
            return {_TAG: ["parts", [inside("part", inner) for inner in value]]}
        if kind in (list, tuple, torch.Size, set, frozenset):
            found: Any = value
            if kind in (set, frozenset):
                # In an order of its own a set would differ from process to process.
                found = sorted(found, key=repr)
            items = [inside(number, inner) for number, inner in enumerate(found)]
            return items if kind is list else {_TAG: [kind.__name__, items]}
        if kind in (dict, OrderedDict, Counter, defaultdict):
            return _encode_mapping(value, kind, inside)
        return self._encode_other(value, where)

    def _encode_other(self, value: object, where: str) -> Json:
        match value:
            case np.ndarray() if value.dtype.kind in _NUMPY_KINDS and value.dtype.isnative:
                return {_TAG: ["ndarray", self.keep(torch.from_numpy(np.array(value)), where)]}
            case np.generic() if value.dtype.kind in _NUMPY_KINDS:
                return {_TAG: ["number", [value.dtype.name, self.encode(value.item(), where)]]}
            case complex() if type(value) is complex:
                return {_TAG: ["complex", [self.encode(value.real, where), self.encode(value.imag, where)]]}
            case bytes():
                return {_TAG: ["bytes", base64.b64encode(value).decode()]}
            case torch.dtype():
                return {_TAG: ["dtype", name_of(value)]}
            case torch.device():
                return {_TAG: ["device", str(value)]}
        raise self.error(
            f"{where}: expected numbers, texts, tensors and containers of these, found {value!r:.80}, of the type "
            f"{type(value).__module__}.{type(value).__qualname__}, which can be kept or sent only as code. Leave it "
            "out of the state, or give its state_dict() a form of these"
        )


def _encode_mapping(value: Any, kind: type, inside: Callable[[object, object], Json]) -> Json:
    if kind is dict and all(type(key) is str and key != _TAG for key in value):
        return {key: inside(key, inner) for key, inner in value.items()}
    pairs = [[inside(key, key), inside(key, inner)] for key, inner in value.items()]
    # The factory of a defaultdict is code; the user's object has it already.
    return {_TAG: ["dict" if kind is defaultdict else kind.__name__, pairs]}


def decode(value: Json, tensor_of: Callable[[str], Any]) -> Any:
    """What `encode` made `value` of. ``tensor_of(key)`` takes the place of a tensor, its ``numpy()`` that of an array.

    Raises `ValueError` or `KeyError` for anything that `encode` does not make.
    """
    if isinstance(value, list):
        return [decode(inner, tensor_of) for inner in value]
    if not isinstance(value, dict):
        return value
    if _TAG not in value:
        return {key: decode(inner, tensor_of) for key, inner in value.items()}
    kind, content = value[_TAG]
    if kind not in _DECODERS:
        raise ValueError(f"{kind!r} is no kind of value")
    return _DECODERS[kind](content, tensor_of)


_Decoder: TypeAlias = Callable[[Any, Callable[[str], Any]], Any]


def _items(make: Callable[[Any], Any]) -> _Decoder:
    return lambda content, tensor_of: make(decode(list(content), tensor_of))


def _pairs(make: Callable[[Any], Any]) -> _Decoder:
    return lambda content, tensor_of: make(
        {decode(key, tensor_of): decode(inner, tensor_of) for key, inner in list(content)}
    )


def _number(content: Any, tensor_of: Callable[[str], Any]) -> Any:
    name, inner = content
    kind = np.dtype(name)
    if kind.kind not in _NUMPY_KINDS:
        raise ValueError(f"{name!r} is no type of numbers")
    return kind.type(decode(inner, tensor_of))


def _complex(content: Any, tensor_of: Callable[[str], Any]) -> complex:
    real, imaginary = (decode(part, tensor_of) for part in content)
    return complex(real, imaginary)


def _parts(content: Any, tensor_of: Callable[[str], Any]) -> TensorParts:
    found = TensorParts(*(decode(part, tensor_of) for part in content))
    subclass_named(found.kind)
    return found


_DECODERS: Mapping[str, _Decoder] = {
    "tensor": lambda content, tensor_of: tensor_of(content),
    "ndarray": lambda content, tensor_of: tensor_of(content).numpy(),
    "number": _number,
    "float": lambda content, _: float(content),
    "complex": _complex,
    "bytes": lambda content, _: base64.b64decode(content, validate=True),
    "dtype": lambda content, _: _TYPES[content],
    "device": lambda content, _: torch.device(content),
    "parts": _parts,
    "tuple": _items(tuple),
    "Size": _items(torch.Size),
    "set": _items(set),
    "frozenset": _items(frozenset),
    "dict": _pairs(dict),
    "OrderedDict": _pairs(OrderedDict),
    "Counter": _pairs(Counter),
}
