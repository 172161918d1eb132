"""Copies of modules with all that they hold, and of objects that a model makes anew in every forward.

`copy.deepcopy` refuses some of what modules hold. Results of computations are such: `torch.nn.utils.weight_norm`, for
example, keeps the weight of its last forward in an attribute. It copies scripted modules differently: their memory is
copied without a look at what has been copied before, and parameters come out as plain tensors.
"""

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable
from functools import cache, cached_property, partial
from types import BuiltinMethodType, CellType, FunctionType, ModuleType
from typing import Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from penstock.capturing.module_state import FIXED_TYPES, PLAIN_TYPES, is_plain
from penstock.errors import CaptureError
from penstock.torch_internals.export import traced_constant
from penstock.torch_internals.modules import tensor_tables

_Copied = TypeVar("_Copied")
_Make = Callable[[], Any]
_EMPTY = object()
_TABLES = frozenset(name for name, table in vars(nn.Module()).items() if isinstance(table, dict | set))
"""Where every module keeps its tensors, submodules and hooks."""
_RULES = ("__new__", "__copy__", "__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__")
"""What says how a module is made and copied."""
_RULES_OF_OBJECTS = (*_RULES, "__setattr__", "__getnewargs__", "__getnewargs_ex__", "__setstate__")


def copied(model: _Copied) -> _Copied:
    """A deep copy of a module, or of a list of layers. In it, tensors that are no leaves of autograd are detached."""
    return Copies([model], parameters=True).of(model)


class Copies:
    """Copies of `values`, modules or lists of them, with all that they hold: a run of a copy changes nothing in these.

    Objects that cannot be copied, such as a lock or a group of processes, are shared. So are parameters, unless
    `parameters` says otherwise. Of functions in attributes and hooks, closures and default arguments are copied.
    Raises `CaptureError` for a generator.
    """

    def __init__(self, values: Iterable[Any], *, parameters: bool = False) -> None:
        self._memo: dict[int, Any] = {}
        """What `copy.deepcopy` has for each object, by id."""
        self._originals: list[Any] = []
        self._copies_parameters = parameters
        modules: list[tuple[nn.Module, dict[str, Any]]] = []
        functions: list[FunctionType] = []
        seen: set[int] = set()
        waiting: list[Any] = list(values)
        while waiting:
            value = waiting.pop()
            if id(value) in seen:
                continue
            seen.add(id(value))
            kind: type = type(value)
            if isinstance(value, dict):
                waiting += [each for each in value.values() if type(each) not in FIXED_TYPES]
            elif isinstance(value, (list, tuple)):
                waiting += [each for each in value if type(each) not in FIXED_TYPES]
            elif isinstance(value, partial):
                waiting.append(value.func)
            elif isinstance(value, nn.Module):
                ordinary = _is_ordinary(kind)
                # Without what ``module.compile()`` made: a copy is not compiled.
                held = nn.Module.__getstate__(value) if ordinary else vars(value)  # type: ignore[no-untyped-call]
                others = {name: each for name, each in held.items() if type(each) not in FIXED_TYPES}
                if ordinary:
                    # Most tables of most modules are empty.
                    empty = {name: type(each)() for name, each in others.items() if name in _TABLES and not each}
                    others = {name: each for name, each in others.items() if name not in empty}
                    modules.append((value, others))
                    made: Any = object.__new__(kind)
                    vars(made).update(
                        {name: empty.get(name, each) for name, each in held.items() if name not in others}
                    )
                    self._enter(value, made)
                    if isinstance(value, GraphModule):
                        self._memo[id(value.graph)] = value.graph
                else:
                    # Those in a scripted module are in no attribute.
                    waiting += value.parameters()
                waiting += others.values()
            elif _is_shared(kind) or (isinstance(value, nn.Parameter) and not parameters):
                self._memo[id(value)] = value
            elif isinstance(value, Tensor) and not value.is_leaf:
                self._enter(value, value.detach().clone())
            elif isinstance(value, FunctionType) and not _is_plain_function(value):
                functions.append(value)
                cells = tuple(CellType() for _ in value.__closure__ or ())
                self._enter(value, FunctionType(value.__code__, value.__globals__, value.__name__, None, cells))
                waiting += [_in_cell(cell) for cell in value.__closure__ or ()]
        # Those inside first: some classes ask the modules that they hold when they are made.
        for module, others in reversed(modules):
            made = vars(self._memo[id(module)])
            for name, value in others.items():
                made[name] = self._copy(value, type(module), name)
        for function in functions:
            self._fill(function)

    def of(self, value: _Copied) -> _Copied:
        """The copy of `value`, one of those that are copied or in one of these."""
        return self._copy(value, type(value), "")  # type: ignore[no-any-return]

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
        if type(value) in FIXED_TYPES:
            return value
        found = self._memo.get(id(value))
        if found is not None:
            return found
        container = type(value)
        if container in (dict, OrderedDict) and all(type(key) is str or type(key) is int for key in value):
            made: dict[Any, Any] = container()
            self._enter(value, made)
            for key, entry in value.items():
                made[key] = entry if type(entry) in FIXED_TYPES else self._copy(entry, kind, f"{name}.{key}")
            return made
        if container is ref and id(value()) in self._memo:
            return ref(self._memo[id(value())])
        if container is BuiltinMethodType and not isinstance(value.__self__, ModuleType | type | None):
            # `copy.deepcopy` takes a bound method of a class in C for a function.
            return getattr(self._copy(value.__self__, kind, name), value.__name__)
        try:
            return self._deep_copy(value)
        except Exception as error:
            if "'generator'" in str(error):
                raise CaptureError(
                    f"{kind.__name__}.{name}: expected what copy.deepcopy can copy, found a generator ({error}). The "
                    "capture runs copies of the model, and a generator that is run has lost its first values. Use an "
                    "iterator that can be copied, such as itertools.count(), or an object with a __next__"
                ) from error
            if self._copies_parameters and isinstance(value, nn.Module):
                raise
            inner = value.modules() if isinstance(value, nn.Module) else ()
            self._memo.update((id(each), each) for each in (value, *inner))
            return value

    def _deep_copy(self, value: Any) -> Any:
        made = copy.deepcopy(value, self._memo)
        for module in value.modules() if isinstance(value, nn.Module) else ():
            # The modules in a scripted one are copied with it, and have no copy in the memo.
            if isinstance(module, torch.jit.ScriptModule) and id(module) in self._memo:
                # The tensors that a copy of another module would have.
                inside = dict(self._memo[id(module)].named_modules())
                for path, own in module.named_modules():
                    for table, new in zip(tensor_tables(own), tensor_tables(inside[path]), strict=True):
                        for name, tensor in table.items():
                            new[name] = copy.deepcopy(tensor, self._memo)
        return made

    def _fill(self, function: FunctionType) -> None:
        made, name = self._memo[id(function)], function.__qualname__
        made.__module__, made.__qualname__ = function.__module__, name
        for own, cell in zip(function.__closure__ or (), made.__closure__ or (), strict=True):
            if (content := _in_cell(own)) is not _EMPTY:
                cell.cell_contents = self._copy(content, FunctionType, name)
        made.__defaults__ = self._copy(function.__defaults__, FunctionType, name)
        made.__kwdefaults__ = self._copy(function.__kwdefaults__, FunctionType, name)
        made.__dict__.update(self._copy(vars(function), FunctionType, name))


class Anew:
    """Makes copies of an object as it is now, such as an empty cache of keys and values.

    A block that is given one may write in it, so every call gets a copy of its own. A cache has an entry for every
    block: `copy.deepcopy` for every block of a deep model takes longer than the blocks compute. So what there is to
    copy is read once, and a copy makes nothing but the objects.
    """

    def __init__(self, value: Any) -> None:
        self.make: _Make
        """A copy: what `copy.deepcopy` returns."""
        try:
            self.make = _maker(value, set()) or (lambda: value)
        except _Unusual:
            kept = copy.deepcopy(value)
            self.make = lambda: copy.deepcopy(kept)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Anew":
        return self


class _Unusual(Exception):
    """Found an object that only `copy.deepcopy` knows how to copy."""


def _maker(value: Any, seen: set[int]) -> _Make | None:
    """What makes a copy of `value`; None if it needs no copy. `seen`: the ids of the objects around it and before it.

    Raises `_Unusual` for an object with rules of its own, and for one in two places, which are to have one copy.
    """
    if is_plain(value) or isinstance(value, type):
        return None
    if id(value) in seen:
        raise _Unusual
    seen.add(id(value))
    kind: type = type(value)
    if isinstance(value, Tensor) and (constant := traced_constant(value)) is not None:
        return constant.clone
    if kind is list:
        entries = _dict_maker(dict(enumerate(value)), seen)
        return lambda: [*entries().values()]
    if kind is dict and all(map(is_plain, value)):
        return _dict_maker(value, seen)
    if not _is_ordinary(kind):
        raise _Unusual
    attributes = _dict_maker(vars(value), seen)

    def make() -> Any:
        made: Any = object.__new__(kind)
        made.__dict__ = attributes()
        return made

    return make


def _dict_maker(value: dict[Any, Any], seen: set[int]) -> Callable[[], dict[Any, Any]]:
    # Most entries are plain, which their type says at once.
    others = [(key, entry) for key, entry in value.items() if type(entry) not in PLAIN_TYPES]
    makers = {key: made for key, entry in others if (made := _maker(entry, seen)) is not None}
    lasting = {key: None if key in makers else entry for key, entry in value.items()}
    if not makers:
        return lasting.copy

    def make() -> dict[Any, Any]:
        made = lasting.copy()
        for key, make_entry in makers.items():
            made[key] = make_entry()
        return made

    return make


def _identity(value: Any) -> int:
    """By what `value` is known. While PyTorch traces, it puts other objects with the same attributes in the place of
    modules.
    """
    return id(vars(value)) if isinstance(value, nn.Module) else id(value)


def _is_shared(kind: type) -> bool:
    """Whether objects of this class are compared by identity, are code, or hold what ``torch.compile`` needs."""
    return kind in (object, torch.jit.ScriptFunction) or kind.__module__.startswith("torch._dynamo.")


@cache
def _is_ordinary(kind: type) -> bool:
    """Whether objects of this class are nothing but their attributes."""
    base, names = (nn.Module, _RULES) if issubclass(kind, nn.Module) else (object, _RULES_OF_OBJECTS)
    rules = all(getattr(kind, name, None) is getattr(base, name, None) for name in names)
    slots = any(vars(each).get("__slots__") for each in kind.__mro__)
    return not slots and kind.__dictoffset__ != 0 and (issubclass(kind, GraphModule) or rules)


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
