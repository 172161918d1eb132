"""The state of modules in Python: attributes, containers and plain tensors, saved and compared.

A module may count its calls, keep a queue in a list, or assign a new tensor to a buffer. The comparison shows which
attributes a forward changes, and these cannot be kept where only operators on tensors are traced.
"""

import copy
import operator
import random
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import numpy
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from penstock.torch_internals.dispatch import schema_of
from penstock.torch_internals.modules import TENSOR_TABLES, registered_buffers
from penstock.torch_internals.subclasses import wraps_tensors
from penstock.torch_internals.unimported import is_dtensor

PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
PLAIN_TYPES = frozenset(PLAIN)
_VALUES = (*PLAIN, torch.Size, range)
FIXED_TYPES = frozenset((*_VALUES, type))
"""The types of what no code can change."""
_LOOKED_PAST = (*_VALUES, type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, torch.Stream)
_DEEPEST = 8
"""Objects that are nested deeper than this in an attribute are not looked at."""


def is_plain(leaf: Any) -> bool:
    """Whether `leaf` is a constant that two calls can be compared by."""
    return type(leaf) in PLAIN_TYPES or isinstance(leaf, PLAIN)


class ModuleState:
    """A copy of all that modules hold in Python, apart from the contents of parameters."""

    def __init__(self, modules: Iterable[nn.Module], objects: Iterable[tuple[str, Any]] = ()) -> None:
        """`objects`: what else is copied, with what they hold, each with a name."""
        self._saved: list[tuple[str, Any, Any]] = []
        """For every object that can change: how it is reached, the object, and a copy of its content."""
        self._seen: set[int] = set()
        for module in modules:
            for path, inner in module.named_modules():
                self._save(path, inner, 0)
        for name, each in objects:
            self._save(name, each, 0)

    def add(self, holder: Any, *, deep: bool = True) -> None:
        """Has `restore` give back `holder`, too; if `deep`, with all that it holds."""
        self._save("", holder, 0 if deep else _DEEPEST)

    def restore(self) -> None:
        """Gives the objects that hold something else now what they held, but for the states of generators."""
        for _, holder, content in self._saved:
            if not _unchanged(holder, content):
                _put_back(holder, content)

    def holders(self) -> Iterator[Any]:
        """The objects that can change, apart from parameters."""
        return (holder for _, holder, _ in self._saved)

    def changes(self) -> Iterator[tuple[str, bool]]:
        """The attributes that hold something else now, such as ``encoder.count``, and whether it is a tensor that was
        written in place.
        """
        for path, holder, content in self._saved:
            if _unchanged(holder, content):
                continue
            if not isinstance(content, dict):
                yield path, isinstance(holder, Tensor)
                continue
            now = dict_of(holder)
            for key in {**content, **now}:
                if key not in content or key not in now or not _same(content[key], now[key]):
                    yield _joined(path, key), False

    def _save(self, path: str, holder: Any, depth: int) -> None:
        if id(holder) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(holder))
        # A tuple cannot change, but what is in it can.
        fixed = isinstance(holder, tuple | frozenset)
        content = list(holder) if fixed else _content_of(holder)
        if content is None:
            return
        if not fixed:
            self._saved.append((path, holder, content))
        entries = dict(enumerate(content)) if isinstance(content, list) else content
        for key, inner in entries.items() if isinstance(entries, dict) else ():
            if type(inner) not in FIXED_TYPES:
                self._save(_joined(path, key), inner, 0 if isinstance(inner, nn.Module) else depth + 1)


def tensors_in(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors that `module` and its parameters hold, such as packed weights and the scales beside them, each
    once, and how it is reached. What tensors of subclasses wrap counts, and results of computations do not. Of modules
    that only an attribute names nothing counts.
    """
    waiting: list[tuple[str, Any, int]] = [
        (path, vars(inner), 0) for path, inner in module.named_modules() if not isinstance(inner, GraphModule)
    ]
    waiting += [(path, each, 0) for path, each in (*module.named_parameters(), *module.named_buffers())]
    seen: set[int] = set()
    while waiting:
        path, holder, depth = waiting.pop()
        if id(holder) in seen or depth > _DEEPEST or isinstance(holder, (*_LOOKED_PAST, nn.Module)):
            continue
        seen.add(id(holder))
        if isinstance(holder, Tensor) and not wraps_tensors(holder) and holder.is_leaf:
            yield path, holder
        listed = isinstance(holder, list | tuple | set | frozenset | deque)
        within = enumerate(holder) if listed else () if is_dtensor(holder) else dict_of(holder).items()
        waiting += [(_joined(path, key), each, depth + 1) for key, each in within]


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
    """Whether both hold the same objects, or plain values that are equal, in the same order."""
    return (
        len(now) == len(content) and all(map(_same, content.values(), now.values())) and all(map(_same, content, now))
    )


def dict_of(holder: Any) -> dict[Any, Any]:
    """The entries of a dictionary; the attributes of another object, those in slots included."""
    if isinstance(holder, dict):
        return holder
    slots = [name for base in type(holder).__mro__ for name in _names(vars(base).get("__slots__", ()))]
    held: dict[Any, Any] = getattr(holder, "__dict__", {})
    return {**held, **{name: getattr(holder, name, None) for name in slots}} if slots else held


def _names(slots: str | Iterable[str]) -> Iterable[str]:
    return (slots,) if isinstance(slots, str) else slots


def _content_of(holder: Any) -> Any:
    """A copy of what `holder` holds; None for what is not looked into."""
    match holder:
        case dict():
            return dict(holder)
        case nn.Parameter():
            return None
        case Tensor():
            return holder.detach().clone()
        case numpy.ndarray():
            return holder.copy()
        case list() | deque():
            return list(holder)
        case set() | bytearray() | array():
            return copy.copy(holder)
        case torch.Generator():
            return str(holder.get_state().tolist())
        case random.Random():
            return str(holder.getstate())
        case numpy.random.RandomState():
            return str(holder.get_state(legacy=False))
        case numpy.random.Generator():
            return str(holder.bit_generator.state)
        case _:
            return None if isinstance(holder, _LOOKED_PAST) else dict(dict_of(holder)) or None


def _unchanged(holder: Any, content: Any) -> bool:
    if isinstance(content, dict):
        return _holds(dict_of(holder), content)
    if isinstance(holder, Tensor):
        return same_content(holder, content)
    if isinstance(holder, numpy.ndarray):
        return bool(numpy.array_equal(holder, content))
    now = _content_of(holder)
    if isinstance(content, list):
        return len(now) == len(content) and all(map(_same, now, content))
    return bool(now == content)


def _put_back(holder: Any, content: Any) -> None:
    match holder:
        case dict() | set() | deque():
            holder.clear()
            (holder.extend if isinstance(holder, deque) else holder.update)(content)
        case list() | bytearray() | array():
            holder[:] = content
        case Tensor():
            # It may have been given other memory.
            holder.data = content.clone()
        case numpy.ndarray():
            holder[...] = content
        case _ if isinstance(content, dict):
            for name in dict_of(holder).keys() - content.keys():
                object.__delattr__(holder, name)
            for name, value in content.items():
                object.__setattr__(holder, name, value)


def _same(before: Any, now: Any) -> bool:
    return before is now or (isinstance(before, _VALUES) and type(before) is type(now) and before == now)


def _joined(path: str, key: Any) -> str:
    """``layer.count`` for an attribute; registered tensors and modules are named as in the state dict."""
    if not isinstance(key, str):
        return f"{path}[{key!r}]"
    if key in TENSOR_TABLES:
        return path
    return f"{path}.{key}" if path else key


Place: TypeAlias = tuple[nn.Module, str]
"""A module and the name under which it, and not one of its submodules, registers a buffer."""

SILENT_WRITERS = ("batch_norm", "instance_norm")
"""They write their statistics without declaring it, so that operators of these kinds count as writers."""


def find_writable(module: nn.Module) -> tuple[Place, ...]:
    """The buffers of `module` that its forward may write, each under every name that it is registered by: those that
    must be saved before one that is to be repeated.

    Of a traced layer its operators tell. A block that was not traced may write any of its buffers.
    """
    places: dict[Place, None] = {}
    waiting, seen = [module], set[nn.Module]()
    while waiting:
        current = waiting.pop()
        if current in seen:
            continue
        seen.add(current)
        if isinstance(current, GraphModule):
            places.update(dict.fromkeys(_written_by(current)))
            called = (str(node.target) for node in current.graph.find_nodes(op="call_module"))
            waiting += [current.get_submodule(target) for target in called]
        else:
            places.update(((current, name), None) for name in registered_buffers(current))
            waiting += current.children()
    return tuple(places)


def _written_by(module: GraphModule) -> list[Place]:
    places: list[Place] = []
    for node in module.graph.nodes:
        if node.op != "get_attr":
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = module.get_submodule(path)
        if name in registered_buffers(owner) and _is_written(node):
            places.append((owner, name))
    return places


def _is_written(node: Node) -> bool:
    """Whether an operator writes `node`, or what shares its memory."""
    return any(_writes(user, node) or (_is_view(user) and _is_written(user)) for user in node.users)


def _writes(user: Node, node: Node) -> bool:
    if user.target is operator.getitem:
        return False
    schema = schema_of(user.target)
    if schema is None:
        return True  # the result of the layer, which another one may write, or an operator with operators inside
    if any(kind in str(user.target) for kind in SILENT_WRITERS):
        return True
    arguments = schema.arguments
    given = [*zip(arguments, user.args, strict=False), *((a, user.kwargs.get(a.name)) for a in arguments)]
    return any(a.alias_info is not None and a.alias_info.is_write and value is node for a, value in given)


def _is_view(user: Node) -> bool:
    if user.target is operator.getitem:
        return True
    schema = schema_of(user.target)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
