"""Copies of modules that hold what `copy.deepcopy` refuses to copy, or copies in another way than the rest.

Results of computations are such: `torch.nn.utils.weight_norm`, for example, keeps the weight of its last forward in an
attribute. Scripted modules are the others: their memory is copied without a look at what has been copied before, and
parameters come out as plain tensors.
"""

import copy
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import cache, cached_property, partial
from types import BuiltinMethodType, CellType, FunctionType, ModuleType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.capturing.fresh_objects import PLAIN
from penstock.errors import CaptureError
from penstock.torch_internals.modules import tensor_tables

_Copied = TypeVar("_Copied")


def copied(model: _Copied, memo: dict[int, Any] | None = None) -> _Copied:
    """A deep copy of a module, or of a list of layers. In it, tensors that are no leaves of autograd are detached.

    `memo`: what is not copied, or has been, by id, as for `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    layers = [model] if isinstance(model, nn.Module) else model if isinstance(model, Iterable) else []
    modules = [module for layer in layers if isinstance(layer, nn.Module) for module in layer.modules()]
    for value in _held(modules):
        if isinstance(value, Tensor) and not value.is_leaf:
            memo.setdefault(id(value), value.detach().clone())
        elif isinstance(value, torch.jit.ScriptFunction):
            # It is code, as a function of Python is.
            memo.setdefault(id(value), value)
    made = copy.deepcopy(model, memo)
    for module in modules:
        # The modules in a scripted one are copied with it, and are not in `memo`.
        if isinstance(module, torch.jit.ScriptModule) and id(module) in memo:
            _register_tensors(module, memo[id(module)], memo)
    return made


def _held(modules: Iterable[nn.Module]) -> Iterator[Any]:
    """The values in attributes of `modules`, and in lists, tuples and dictionaries there."""
    for module in modules:
        for value in vars(module).values():
            yield from value if isinstance(value, list | tuple) else (value,)
            if isinstance(value, dict):
                yield from value.values()


def _register_tensors(scripted: nn.Module, made: nn.Module, memo: dict[int, Any]) -> None:
    """Registers with `made`, the copy of a scripted module, the tensors that a copy of another module would have."""
    copies = dict(made.named_modules())
    for path, module in scripted.named_modules():
        for own, new in zip(tensor_tables(module), tensor_tables(copies[path]), strict=True):
            for name, tensor in own.items():
                new[name] = copy.deepcopy(tensor, memo)


class Copier:
    """Knows how to copy modules with all that they hold, so that a run of a copy changes nothing in the modules.

    Parameters are not copied, and what cannot be copied, such as a lock or a group of processes, is not either. Of
    functions in attributes and hooks, closures and default arguments are copied. `known`: what copies other modules,
    and will copy these as well; the modules must not have changed since.
    """

    def __init__(self, modules: Iterable[nn.Module], known: "Copier | None" = None) -> None:
        # What there is to copy is read once: the copies of a deep model take as long as its runs.
        self.shared: dict[int, Any] = {} if known is None else dict(known.shared)
        """What stands for itself, by id."""
        self.modules: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = [] if known is None else [*known.modules]
        """Those that are nothing but their attributes: those that are plain, and the others."""
        self.functions: list[FunctionType] = [] if known is None else [*known.functions]
        self.computed: list[Tensor] = [] if known is None else [*known.computed]
        """Tensors that are no leaves of autograd."""
        self._seen: set[int] = set() if known is None else set(known._seen)
        waiting: list[Any] = list(modules)
        while waiting:
            value = waiting.pop()
            value = value.func if isinstance(value, partial) else value
            if id(value) not in self._seen:
                self._seen.add(id(value))
                waiting += self._read(value)

    def copies(self) -> "Copies":
        """New copies. Raises `CaptureError` for a generator."""
        return Copies(self)

    def _read(self, value: Any) -> Iterable[Any]:
        """Notes how `value` is copied. Returns what it holds."""
        kind: type = type(value)
        if isinstance(value, nn.Module):
            if _is_ordinary(kind):
                # Without what ``module.compile()`` made: a copy is not compiled.
                held = nn.Module.__getstate__(value)  # type: ignore[no-untyped-call]
                plain = {name: each for name, each in held.items() if _is_fixed(each)}
                others = {name: each for name, each in held.items() if name not in plain}
                self.modules.append((value, plain, others))
                if isinstance(value, GraphModule):
                    self.shared[id(value.graph)] = value.graph
            # Those of a scripted module are in no attribute.
            return [*value.parameters(recurse=False), *(each for each in _held([value]) if not _is_fixed(each))]
        if isinstance(value, nn.Parameter) or _is_shared(kind):
            self.shared[id(value)] = value
        elif isinstance(value, Tensor) and not value.is_leaf:
            self.computed.append(value)
        elif isinstance(value, FunctionType) and not _is_plain_function(value):
            self.functions.append(value)
            return [_in_cell(cell) for cell in value.__closure__ or ()]
        return ()


class Copies:
    """Copies that a `Copier` has made."""

    def __init__(self, copier: Copier) -> None:
        self._memo: dict[int, Any] = dict(copier.shared)
        """What `copy.deepcopy` has for each object, by id."""
        self._originals: list[Any] = []
        for module, plain, _ in copier.modules:
            self._enter(module, object.__new__(type(module)))
            vars(self._memo[id(module)]).update(plain)
        for tensor in copier.computed:
            self._enter(tensor, tensor.detach().clone())
        for function in copier.functions:
            cells = tuple(CellType() for _ in function.__closure__ or ())
            name, names = function.__name__, function.__globals__
            self._enter(function, FunctionType(function.__code__, names, name, None, cells))
        # Those inside first: some classes ask the modules that they hold when they are made.
        for module, _, others in reversed(copier.modules):
            made = vars(self._memo[id(module)])
            for name, value in others.items():
                made[name] = self._copy(value, type(module), name)
        for function in copier.functions:
            self._fill(function)

    def of(self, module: _Copied) -> _Copied:
        """The copy of `module`, one of those that are copied or in one of these."""
        return self._copy(module, type(module), "")  # type: ignore[no-any-return]

    def own(self, value: _Copied) -> _Copied:
        """What `value` is a copy of; `value` if it is no copy."""
        return self._own.get(_identity(value), value)  # type: ignore[no-any-return]

    @cached_property
    def _own(self) -> dict[int, Any]:
        # `copy.deepcopy` keeps what it has copied alive there.
        originals = (*self._originals, *self._memo.get(id(self._memo), ()))
        return {_identity(self._memo[id(each)]): each for each in originals if id(each) in self._memo}

    def _enter(self, value: Any, made: Any) -> None:
        self._memo[id(value)] = made
        self._originals.append(value)

    def _copy(self, value: Any, kind: type, name: str) -> Any:
        """A copy of `value`, which an object of class `kind` holds as `name`."""
        if _is_fixed(value):
            return value
        found = self._memo.get(id(value))
        if found is not None:
            return found
        container = type(value)
        if container in (dict, OrderedDict) and all(type(key) is str or type(key) is int for key in value):
            made: dict[Any, Any] = container()
            self._enter(value, made)
            for key, entry in value.items():
                made[key] = self._copy(entry, kind, f"{name}.{key}")
            return made
        if container is ref and id(value()) in self._memo:
            return ref(self._memo[id(value())])
        if container is BuiltinMethodType and not isinstance(value.__self__, ModuleType | type | None):
            # `copy.deepcopy` takes a bound method of a class in C for a function.
            return getattr(self._copy(value.__self__, kind, name), value.__name__)
        try:
            if isinstance(value, nn.Module):
                return copied(value, self._memo)
            return copy.deepcopy(value, self._memo)
        except Exception as error:
            if "'generator'" in str(error):
                raise CaptureError(
                    f"{kind.__name__}.{name}: expected what copy.deepcopy can copy, found a generator ({error}). The "
                    "capture runs copies of the model, and a generator that is run has lost its first values. Use an "
                    "iterator that can be copied, such as itertools.count(), or an object with a __next__"
                ) from error
            inner = value.modules() if isinstance(value, nn.Module) else ()
            self._memo.update((id(each), each) for each in (value, *inner))
            return value

    def _fill(self, function: FunctionType) -> None:
        made, name = self._memo[id(function)], function.__qualname__
        made.__module__, made.__qualname__ = function.__module__, name
        for own, cell in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
            if (content := _in_cell(own)) is not _EMPTY:
                cell.cell_contents = self._copy(content, FunctionType, name)
        made.__defaults__ = self._copy(function.__defaults__, FunctionType, name)
        made.__kwdefaults__ = self._copy(function.__kwdefaults__, FunctionType, name)
        made.__dict__.update(self._copy(vars(function), FunctionType, name))


_FIXED = frozenset((*PLAIN, type, torch.Size))
_EMPTY = object()
_RULES = ("__new__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")


def _identity(value: Any) -> int:
    """By what `value` is known. While PyTorch traces, it puts other objects with the same attributes in the place of
    modules.
    """
    return id(vars(value)) if isinstance(value, nn.Module) else id(value)


def _is_shared(kind: type) -> bool:
    """Whether objects of this class are known by which they are, or hold the compiler of ``torch.compile``."""
    return kind is object or kind.__module__.startswith("torch._dynamo.")


def _is_fixed(value: Any) -> bool:
    return type(value) in _FIXED


@cache
def _is_ordinary(kind: type) -> bool:
    """Whether modules of this class are nothing but their attributes."""
    rules = all(getattr(kind, name, None) is getattr(nn.Module, name, None) for name in _RULES)
    slots = any(vars(base).get("__slots__") for base in kind.__mro__)
    return not slots and (issubclass(kind, GraphModule) or rules)


def _is_plain_function(function: FunctionType) -> bool:
    """Whether `function` holds nothing, or is PyTorch's."""
    held = function.__closure__ or function.__defaults__ or function.__kwdefaults__ or vars(function)
    return not held or function.__globals__.get("__name__", "").partition(".")[0] == "torch"


def _in_cell(cell: CellType) -> Any:
    """What `cell` of a closure holds; `_EMPTY` for nothing yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return _EMPTY
