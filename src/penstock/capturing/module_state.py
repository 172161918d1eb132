"""The state of modules in Python: attributes, containers and plain tensors, saved, compared and put back.

A module may count its calls, keep a queue in a list, or assign a new tensor to a buffer. Capture runs the model several
times, and the user's modules must be afterwards as they were. The same comparison shows which attributes a forward
changes, and these cannot be kept where only operators on tensors are traced.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from operator import is_
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from penstock.torch_internals.modules import TENSOR_TABLES

__all__ = ["ModuleState", "content_of", "is_plain_memory", "put_back", "same_content"]

_DEEPEST = 8
"""Objects that are nested deeper than this in an attribute are not looked at."""
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range)
_PLAIN_TYPES = frozenset(_PLAIN)
_CONTAINERS = frozenset((dict, OrderedDict, set))
_FIXED = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Generator, torch.Stream)
_LOOKED_PAST = (*_PLAIN, *_FIXED)


class ModuleState:
    """A copy of all that modules hold in Python, apart from the contents of parameters."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._saved: list[tuple[str, Any, Any]] = []
        """For every object that can change: how it is reached, the object, and a copy of its content."""
        self._empty: list[tuple[str, Any, dict[Any, Any] | set[Any]]] = []
        """The path and key of dictionaries and sets that hold nothing, as nearly all do: those of a module's hooks."""
        self._memories: list[tuple[nn.Parameter, Tensor]] = []
        """Parameters, and tensors over the memory that they had."""
        self._seen: set[int] = set()
        for module in modules:
            for path, inner in module.named_modules():
                self._save(path, inner, 0)

    def save_content(self, path: str, parameter: nn.Parameter) -> None:
        """Saves the numbers of a parameter, too, before a forward writes it."""
        if not any(holder is parameter for _, holder, _ in self._saved):
            self._saved.append((path, parameter, parameter.detach().clone()))

    def restore(self) -> None:
        """Puts all content back, in the very objects that held it."""
        for parameter, own in self._memories:
            if parameter.data_ptr() != own.data_ptr():
                parameter.data = own
        for _, _, empty in self._empty:
            if empty:
                empty.clear()
        for _, holder, content in self._saved:
            put_back(holder, content)

    def changes(self) -> Iterator[tuple[str, bool]]:
        """The attributes that hold something else now, such as ``encoder.count``, and whether it is a tensor that was
        written in place.
        """
        for path, name, empty in self._empty:
            if isinstance(empty, set):
                if empty:
                    yield _joined(path, name), False
                continue
            for key in empty:
                yield _joined(_joined(path, name), key), False
        for path, holder, content in self._saved:
            if isinstance(content, dict):
                now = _dict_of(holder)
                if _holds(now, content):
                    continue
                for key in {**content, **now}:
                    if key not in content or key not in now or not _same(content[key], now[key]):
                        yield _joined(path, key), False
            elif not _unchanged(holder, content):
                yield path, isinstance(holder, Tensor)

    def _save(self, path: str, holder: Any, depth: int) -> None:
        if id(holder) in self._seen or isinstance(holder, _LOOKED_PAST) or depth > _DEEPEST:
            return
        # A tuple cannot change, but what is in it can.
        if isinstance(holder, tuple | frozenset):
            for index, inner in enumerate(holder):
                self._save(f"{path}[{index}]", inner, depth + 1)
            return
        self._seen.add(id(holder))
        if isinstance(holder, nn.Parameter):
            if is_plain_memory(holder):
                self._memories.append((holder, holder.detach()))
            return
        content = content_of(holder)
        if content is None:
            return
        self._saved.append((path, holder, content))
        if isinstance(content, dict):
            for key, inner in content.items():
                kind = type(inner)
                if kind in _PLAIN_TYPES:
                    continue
                if kind in _CONTAINERS and not inner:
                    if id(inner) not in self._seen:
                        self._seen.add(id(inner))
                        self._empty.append((path, key, inner))
                    continue
                self._save(_joined(path, key), inner, 0 if isinstance(inner, nn.Module) else depth + 1)
        elif isinstance(content, list):
            for index, inner in enumerate(content):
                self._save(f"{path}[{index}]", inner, depth + 1)


def is_plain_memory(tensor: Tensor) -> bool:
    """Whether `tensor` lies in memory of its own kind, and is no tensor of several devices or without numbers."""
    if type(tensor.data) is not Tensor or tensor.layout != torch.strided or tensor.is_meta:
        return False
    try:
        tensor.untyped_storage()
    except RuntimeError:
        # Such as those inside of torch.vmap.
        return False
    return True


def same_content(first: Tensor, second: Tensor) -> bool:
    """Whether two tensors hold the same numbers, NaN in the same places included; meta tensors hold none."""
    if first.is_meta:
        return True
    if first.dtype != second.dtype or first.shape != second.shape:
        return False
    if first.is_quantized:
        return torch.equal(first, second)
    if first.layout != second.layout:
        return False
    if first.is_sparse:
        one, other = first.detach().coalesce(), second.detach().coalesce()
        return torch.equal(one.indices(), other.indices()) and same_content(one.values(), other.values())
    return torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True)


def _holds(now: dict[Any, Any], content: dict[Any, Any]) -> bool:
    """Whether both hold the same objects in the same order."""
    # Lists compare what is not the same object only: tensors, as keys, have no equality.
    return len(now) == len(content) and all(map(is_, now.values(), content.values())) and list(now) == list(content)


def _dict_of(holder: Any) -> dict[Any, Any]:
    return holder if isinstance(holder, dict) else vars(holder)


def content_of(holder: Any) -> Any:
    """A copy of what `holder` holds; None for what is not looked into."""
    match holder:
        case Tensor():
            return holder.detach().clone()
        case numpy.ndarray():
            return holder.copy()
        case dict():
            return dict(holder)
        case list() | deque():
            return list(holder)
        case set() | bytearray():
            return holder.copy()
        case _ if isinstance(getattr(holder, "__dict__", None), dict):
            return dict(vars(holder))
        case _:
            return None


def put_back(holder: Any, content: Any) -> None:
    """Makes `holder` hold what it held when `content` was copied from it."""
    # Nearly all are dictionaries that hold what they held.
    if type(content) is dict and _holds(_dict_of(holder), content):
        return
    match holder:
        case Tensor():
            # BatchNorm writes its statistics without raising their version counter: only the contents tell.
            if not same_content(holder, content):
                # Uncounted as well, so that what autograd saved before is valid again.
                target = holder if holder.is_sparse else holder.data
                target.copy_(content) if holder.shape == content.shape else holder.set_(content)
        case numpy.ndarray():
            holder[...] = content
        case list():
            holder[:] = content
        case bytearray():
            holder[:] = content
        case deque():
            holder.clear()
            holder.extend(content)
        case set():
            holder.clear()
            holder.update(content)
        case _:
            now = _dict_of(holder)
            now.clear()
            now.update(content)


def _unchanged(holder: Any, content: Any) -> bool:
    match holder:
        case Tensor():
            return same_content(holder, content)
        case numpy.ndarray():
            return bool(numpy.array_equal(holder, content))
        case list() | deque():
            return len(holder) == len(content) and all(map(_same, holder, content))
        case _:
            return bool(holder == content)


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, _PLAIN) and type(before) is type(now) and before == now)


def _joined(path: str, key: Any) -> str:
    """``layer.count`` for an attribute; registered tensors and modules are named as in the state dict."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    if key in TENSOR_TABLES:
        return path
    return f"{path}.{key}" if path else key
