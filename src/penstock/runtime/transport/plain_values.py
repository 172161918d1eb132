"""Plain values as bytes that are parsed when they arrive, and never run as code.

What processes tell each other beside tensors is made of None, booleans, integers, floats, texts, bytes, tuples, lists,
sets and mappings of these. It travels as JSON; what JSON does not have is an object with one key, which names the type.
`pickle` could carry them as well, but the bytes that it reads may contain code, and any process that reaches the port
of a store or of Gloo can send bytes.
"""

import json
from typing import Any

from penstock.errors import TransportError

_MOST_NESTED = 64
"""The most containers around a value."""


def encode_plain(value: Any) -> bytes:
    """Returns `value` as bytes. `TransportError` if a part of it is of another type than those above."""
    return json.dumps(_tagged(value, 0), separators=(",", ":")).encode("ascii")


def decode_plain(data: bytes) -> Any:
    """Returns the value that `encode_plain` made `data` of. `TransportError` for any other bytes."""
    try:
        return _untagged(json.loads(data.decode("ascii")), 0)
    except (ValueError, TypeError, RecursionError) as error:
        shown = data[:40] + b"..." * (len(data) > 40)
        raise TransportError(
            f"a message between ranks cannot be read: expected a plain value of Penstock's as JSON, found {shown!r} "
            f"({error}). Start the same version of Penstock on every rank, and see that nothing else uses the port of "
            "its store"
        ) from error


def _tagged(value: Any, depth: int) -> Any:
    """`value` as JSON has it."""
    if depth > _MOST_NESTED:
        raise _unsuitable(value, f"at most {_MOST_NESTED} containers inside each other")
    inner = depth + 1
    match value:
        case None | bool():
            return value
        case float():
            # Also NumPy's, which is a float.
            return float(value)
        case int() | str() if type(value) in (int, str):
            return value
        case bytes():
            return {"bytes": value.hex()}
        case list() if type(value) is list:
            return [_tagged(part, inner) for part in value]
        case tuple() if type(value) is tuple:
            return {"tuple": [_tagged(part, inner) for part in value]}
        case set() | frozenset():
            # In one order, so that equal sets are equal bytes.
            return {"set": sorted((_tagged(part, inner) for part in value), key=json.dumps)}
        case dict() if type(value) is dict:
            return {"dict": [[_tagged(key, inner), _tagged(part, inner)] for key, part in value.items()]}
        case _:
            raise _unsuitable(value, "None, bool, int, float, str, bytes, tuple, list, set or dict")


def _untagged(found: Any, depth: int) -> Any:
    """The value that `_tagged` made `found` of. `ValueError` or `TypeError` if it made no such thing."""
    if depth > _MOST_NESTED:
        raise ValueError("too many containers inside each other")
    inner = depth + 1
    if isinstance(found, list):
        return [_untagged(part, inner) for part in found]
    if not isinstance(found, dict):
        return found
    ((tag, content),) = found.items()
    match tag:
        case "bytes":
            return bytes.fromhex(content)
        case "tuple":
            return tuple([_untagged(part, inner) for part in _parts(content)])
        case "set":
            return {_untagged(part, inner) for part in _parts(content)}
        case "dict":
            return {_untagged(key, inner): _untagged(part, inner) for key, part in _parts(content)}
        case _:
            raise ValueError(f"no type is called {tag!r}")


def _parts(content: Any) -> list[Any]:
    if not isinstance(content, list):
        raise ValueError(f"expected a list, found {type(content).__name__}")
    return content


def _unsuitable(value: Any, expected: str) -> TransportError:
    return TransportError(
        f"a value of type {type(value).__name__} cannot be sent to other ranks: expected {expected}. Send its fields "
        "as a tuple or a dict"
    )
