"""What the code of layers can write of the objects of Python that several of them hold, found without running it.

A write that data decide, or one of the same value, shows in no run on a sample. So every use of such an object is
followed from the attribute, the variable or the argument that holds it. What only reads, as nearly all code does with a
configuration, is free. A store, a method that is not known to read, and code that cannot be looked into are writes.
"""

import ast
import builtins
import linecache
import random
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from inspect import getattr_static
from itertools import chain
from types import BuiltinMethodType, CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any, TypeAlias, cast

import numpy
import torch
from torch import Tensor, nn

from penstock.capturing.module_state import FIXED_TYPES, dict_of
from penstock.capturing.observation import Observation
from penstock.capturing.read_names import closure_of, function_in, words_of
from penstock.torch_internals.modules import TENSOR_TABLES, hooks_of

_Place: TypeAlias = tuple[CodeType | None, str]
"""A name by which code reaches an object: ``.name`` of an attribute, in any code; or a variable of one function."""
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_NUMBERS = (Tensor, numpy.ndarray)
_DRAWN = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)
_CODE = (FunctionType, BuiltinMethodType, MethodType, partial, type)
_READERS = frozenset(
    ("get", "keys", "values", "items", "index", "count", "copy", "issubset", "issuperset", "isdisjoint")
)
"""Methods that write nothing."""
_LOOKING = frozenset(
    (
        *("len", "isinstance", "issubclass", "hasattr", "getattr", "callable", "type", "id", "hash"),
        *("bool", "int", "float", "str", "repr", "format", "print", "min", "max", "sum", "any", "all"),
        *("range", "sorted", "list", "tuple", "set", "dict", "enumerate", "zip"),
    )
)
"""Functions of Python that write nothing."""
_KNOWN = frozenset(("torch", "math", "copy", "warnings", "logging"))
"""Packages whose functions write nothing but tensors."""
_UNWRITTEN = frozenset((*_KNOWN, *sys.stdlib_module_names, "peft"))
"""Packages that are not looked into. Layers of PEFT write where adapters are merged, which no training does."""
_IMPLIED = (
    *("__getattr__", "__getattribute__", "__getitem__", "__next__"),
    *("__len__", "__contains__", "__bool__", "__call__"),
)
"""Methods that code runs without their names."""
_OWN = frozenset(vars(nn.Module()))
_OF_TENSORS = frozenset(dir(Tensor))
_UNKNOWN = object()


def note_writes(observations: Sequence[Observation], layers: Sequence[Sequence[nn.Module]]) -> None:
    """Notes in `observations` what each layer calls, and what code can write of what it shares with another one."""
    for observation, bodies, shared in zip(observations, layers, find_writes(layers), strict=True):
        observation.bodies, observation.shared = bodies, shared


def writes_arguments(modules: Sequence[nn.Module]) -> bool:
    """Whether code that `modules` run can write a tensor in place that a function of it is called with."""
    functions = Reached(modules).functions
    places = [
        (code, name) for code in functions for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    ]
    return bool(_Uses(functions, torch.empty(0), {}).write(places))


def find_writes(layers: Sequence[Sequence[nn.Module]]) -> list[dict[int, str]]:
    """Finds, for each layer, given by the modules that it calls, the objects, by id, that it and another layer hold
    and that code of a layer can write, each with a name and the code.
    """
    held = [Reached(modules) for modules in layers]
    counts = Counter(key for each in held for key in each.reached)
    shared = {key for key, count in counts.items() if count > 1}
    functions = {code: function for each in held for code, function in each.functions.items()}
    kinds: dict[type, list[nn.Module]] = defaultdict(list)
    for module in dict.fromkeys(module for each in held for module in each.modules):
        kinds[type(module)].append(module)
    written: dict[int, str] = {}
    for each in held:
        for top, places in each.tops.values():
            reached = shared.intersection(_reached(top)) - written.keys()
            if reached and (text := _Uses(functions, top, kinds).write(places)):
                written.update(dict.fromkeys(reached, f"{_name_of(places)} ({text})"))
    return [{key: written[key] for key in each.reached.keys() & written.keys()} for each in held]


class Reached:
    """What the code of `modules` reaches, with the functions that it may run."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self.functions: dict[CodeType, FunctionType] = {}
        self.tops: dict[int, tuple[Any, set[_Place]]] = {}
        """What attributes and variables hold, by id, and these."""
        for module in modules:
            self._note(module, None, f".{type(module).__name__}")
        inner = dict.fromkeys(inner for outer in modules for inner in outer.modules())
        self.modules = [each for each in inner if not isinstance(each, torch.jit.ScriptModule)]
        for module in self.modules:
            classes = [base for base in type(module).__mro__ if not _is_known(base)]
            own = {name: value for name, value in vars(module).items() if name not in _OWN}
            data = [
                {
                    name: value
                    for name, value in vars(base).items()
                    if not (callable(value) or "__get__" in dir(type(value)))
                }
                for base in classes
            ]
            for table in (own, *(vars(module).get(name) or {} for name in TENSOR_TABLES), *data):
                for name, value in table.items():
                    self._note(value, None, f".{name}")
            self._walk(
                module,
                [*hooks_of(module), vars(module).get("forward"), *[each.forward for each in [type(module)] if classes]],
            )

    @cached_property
    def reached(self) -> dict[int, tuple[str, Any]]:
        """By id, all that it reaches, each with a name."""
        return {
            key: (_name_of(places), value) for top, places in self.tops.values() for key, value in _reached(top).items()
        }

    def _note(self, value: Any, code: CodeType | None, name: str) -> None:
        known = isinstance(value, ModuleType) or _is_known(type(value), ("logging",))
        if not known and type(value) not in FIXED_TYPES:
            self.tops.setdefault(id(value), (value, set()))[1].add((code, name))

    def _walk(self, module: nn.Module, waiting: list[Any]) -> None:
        while waiting:
            function = function_in(waiting.pop())
            if function is None or function.__code__ in self.functions or _is_known(function):
                continue
            code, variables = function.__code__, _variables(function)
            self.functions[code] = function
            for name in {*words_of(code), *variables} - (function.__globals__.keys() - words_of(code)):
                if name in variables:
                    if variables[name] is not function.__globals__.get(name, _UNKNOWN):
                        self._note(variables[name], code, name)
                    waiting.append(variables[name])
                waiting += [table[name] for table in map(vars, (module, *type(module).__mro__)) if name in table]


@dataclass(frozen=True, slots=True, eq=False)
class _Use:
    """An object `value` that `function` has in the variable `name`, or reads from the attribute ``.name``."""

    function: FunctionType
    name: str
    value: Any
    owned: bool
    """Whether it is a write to hand it to code that cannot be looked into."""

    @property
    def escapes(self) -> bool:
        """The same, and it is no module, code, tensor or configuration: these are handed on by all code."""
        configures = type(self.value).__name__.endswith(("Config", "Configuration"))
        return self.owned and not configures and not isinstance(self.value, (nn.Module, *_NUMBERS, *_CODE))


class _Uses:
    """The uses of an object in the code of `functions`, which modules of `kinds` run."""

    def __init__(
        self, functions: Mapping[CodeType, FunctionType], top: Any, kinds: Mapping[type, Sequence[nn.Module]]
    ) -> None:
        self._functions, self._top, self._kinds = functions, top, kinds
        self._seen: set[tuple[CodeType, str, int]] = set()
        self._waiting: list[_Use] = []

    def write(self, places: Iterable[_Place]) -> str:
        """The first write of what it holds under the names `places`; empty if there is none."""
        for place, name in places:
            for code in [*self._functions] if place is None else [place]:
                # What a file holds is that of all its code: to hand it on is no sign of a write.
                function = self._functions[code]
                self._enter(_Use(function, name, self._top, name not in function.__globals__))
        kind = type(self._top)
        for name in [*chain(*map(vars, kind.__mro__))] if isinstance(self._top, nn.Module) else _IMPLIED:
            self._bind(getattr_static(kind, name, None), self._top, owned=False)
        while self._waiting:
            use = self._waiting.pop()
            code = use.function.__code__
            nodes, above = _source_of(code)
            if not above and use.escapes and use.name.lstrip(".") in (*words_of(code), *code.co_varnames):
                return f"{code.co_qualname}, which has no source"
            for node in nodes.get(use.name, ()):
                if not self._is_other(use, node) and (where := self._climb(use, node, above)):
                    return f"{ast.unparse(where)!r:.80} in {code.co_qualname}"
        return ""

    def _is_other(self, use: _Use, node: ast.AST) -> bool:
        """Whether `node` is an attribute of ``self`` in which all modules of the method hold another object."""
        match node:
            case ast.Attribute(value=ast.Name(id=own), attr=name) if own in use.function.__code__.co_varnames[:1]:
                kinds = [kind for kind in self._kinds if _has_method(kind, use.function)]
                held = (_held_as(each, name) for kind in kinds for each in self._kinds[kind])
                return bool(kinds) and all(
                    each is not use.value and each is not _UNKNOWN and getattr(each, "__get__", None) is None
                    for each in held
                )
        return False

    def _enter(self, use: _Use) -> None:
        key = use.function.__code__, use.name, id(use.value)
        if key not in self._seen and not _is_known(use.function):
            self._seen.add(key)
            self._waiting.append(use)

    def _bind(self, method: Any, value: Any, owned: bool = True) -> None:
        """Follows `value` in its `method`. That of a module is looked at if a forward may call it."""
        function = function_in(method)
        code = None if function is None else function.__code__
        if code and code.co_argcount and (code in self._functions or not isinstance(value, nn.Module)):
            self._enter(_Use(cast(FunctionType, function), code.co_varnames[0], value, owned))

    def _climb(self, use: _Use, node: ast.AST, above: Mapping[ast.AST, ast.AST]) -> ast.AST | None:
        """The write that is done with the result of the expression `node`, the value of `use`; None without one."""
        while True:
            outer = above[node]
            match outer:
                case ast.Attribute() | ast.Subscript() if outer.value is node:
                    call, name = above[outer], getattr(outer, "attr", "")
                    called = isinstance(call, ast.Call) and call.func is outer
                    if not isinstance(outer.ctx, ast.Load) or (called and self._changes(use, name)):
                        return outer
                    node = call if called else outer
                    use = self._part(use, name)
                    if type(use.value) in FIXED_TYPES or (called and not isinstance(use.value, _NUMBERS)):
                        return None
                case ast.IfExp() | ast.BoolOp() | ast.Await():
                    node = outer
                case ast.NamedExpr() if outer.value is node:
                    self._assigns(use, [outer.target])
                    node = outer
                case _:
                    return outer if self._ends(use, node, outer, above) else None

    def _ends(self, use: _Use, node: ast.AST, outer: ast.AST, above: Mapping[ast.AST, ast.AST]) -> bool:
        """Whether `use` ends in a write, since its expression `node` stands in `outer`."""
        value = use.value
        match outer:
            case ast.AugAssign() if outer.target is node:
                return isinstance(value, (*_NUMBERS, *_CONTAINERS))
            case ast.Call() if outer.func is node:
                return isinstance(value, BuiltinMethodType) and isinstance(value.__self__, Iterator)
            case ast.Call():
                return self._passes(use, outer, node)
            case ast.keyword() if isinstance(call := above[outer], ast.Call):
                return self._passes(use, call, node)
            case ast.Assign() if outer.value is node:
                return self._assigns(use, outer.targets)
            case ast.AnnAssign() if outer.value is node:
                return self._assigns(use, [outer.target])
            case ast.For() | ast.comprehension() | ast.YieldFrom() | ast.Starred():
                self._bind(getattr_static(type(value), "__iter__", None), value, use.owned)
                return use.escapes and isinstance(value, _CONTAINERS) and not _is_flat(value)
            case ast.Return() | ast.Yield() | ast.Tuple() | ast.List() | ast.Dict() | ast.Set() | ast.Lambda():
                return use.escapes
            case _:
                return False

    def _assigns(self, use: _Use, targets: Iterable[ast.expr]) -> bool:
        """Follows it into the variables among `targets`; whether it goes anywhere else."""
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        for name in names:
            self._enter(replace(use, name=name))
        return len(names) < len([*targets]) and use.escapes and not _is_flat(use.value)

    def _part(self, use: _Use, name: str) -> _Use:
        """What the attribute `name` of its value is, or an entry. To hand on what a class makes is no write."""
        value = use.value
        if isinstance(value, _NUMBERS) or name == "__dict__":
            return use
        held = _held_as(value, name) if name else None if _is_flat(value) else _UNKNOWN
        if isinstance(held, property):
            self._bind(held, value)
        made = isinstance(held, property) or (held is _UNKNOWN and bool(name or not isinstance(value, _CONTAINERS)))
        return replace(use, value=_UNKNOWN if made else held, owned=use.owned and not made)

    def _changes(self, use: _Use, method: str) -> bool:
        """Whether a call of the `method` of its value may write it."""
        value, in_place = use.value, method.endswith("_") and not method.endswith("__")
        if isinstance(value, _NUMBERS):
            return in_place
        if isinstance(value, nn.Module | type) or function_in(held := _held_as(value, method)) is not None:
            self._bind(getattr_static(type(value), method, None), value)
            return False
        if not method and isinstance(value, list | tuple | dict):
            # An entry is called. The code of modules that layers register is looked at where these are.
            entries = value.values() if isinstance(value, dict) else value
            if all(each in self._kinds.get(type(each), ()) for each in entries):
                return False
        reads = method in _READERS or (value is _UNKNOWN and method in _OF_TENSORS and not in_place)
        return (
            not reads
            and not isinstance(held, nn.Module)
            and (use.escapes or isinstance(value, (*_CONTAINERS, *_DRAWN)))
        )

    def _passes(self, use: _Use, call: ast.Call, node: ast.AST) -> bool:
        """Whether its value, an argument of `call`, is written there; it is followed into functions that are known."""
        root, *rest = name = ast.unparse(call.func).split(".")
        keyword = next((each.arg for each in call.keywords if each.value is node), None)
        if keyword == "out" or name in (["setattr"], ["delattr"]) or isinstance(use.value, _DRAWN):
            return True
        builtin = getattr(builtins, root, _UNKNOWN)
        found = _variables(use.function).get(root, builtin)
        for part in rest:
            found = vars(found).get(part, _UNKNOWN) if isinstance(found, ModuleType) else _UNKNOWN
        if (found is builtin and root in _LOOKING) or _is_known(found, _KNOWN):
            return False
        every = [found] if found is not _UNKNOWN else [f for f in self._functions.values() if f.__name__ == name[-1]]
        callees = [callee for callee in map(function_in, every) if callee is not None]
        place = next((index for index, each in enumerate(call.args) if each is node), len(call.args))
        for callee in callees:
            code = callee.__code__
            names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
            # The first one of a method is the object.
            taken = keyword or dict(enumerate(names)).get(place + (len(rest) > 0 and _is_method(callee)), "")
            if taken not in names:
                return use.escapes
            self._enter(replace(use, function=callee, name=taken))
        return use.escapes and not callees and not (found is _UNKNOWN and rest and rest[-1] in _OF_TENSORS)


def _variables(function: FunctionType) -> dict[str, Any]:
    """The defaults of its parameters, what it holds of the function that it was made in, and its file."""
    code, defaults = function.__code__, function.__defaults__ or ()
    parameters = code.co_varnames[code.co_argcount - len(defaults) : code.co_argcount]
    own = dict(zip(parameters, defaults, strict=True))
    return {**function.__globals__, **closure_of(function), **own, **(function.__kwdefaults__ or {})}


@lru_cache(maxsize=4096)
def _source_of(code: CodeType) -> tuple[dict[str, list[ast.AST]], dict[ast.AST, ast.AST]]:
    """The expressions in the source of `code` by the variable or the ``.attribute`` that they read; and what each node
    stands in. Both are empty if there is no source.
    """
    functions, above = _functions_of(code.co_filename)
    nodes: dict[str, list[ast.AST]] = defaultdict(list)
    for node in chain(*map(ast.walk, found := functions.get((code.co_name, code.co_firstlineno), ()))):
        match node:
            case ast.Attribute(attr=name):
                nodes[f".{name}"].append(node)
            case ast.Call(func=ast.Name(id="getattr"), args=[_, ast.Constant(value=str(name)), *_]):
                nodes[f".{name}"].append(node)
            case ast.Name(id=name):
                nodes[name].append(node)
    return nodes, above if found else {}


@lru_cache(maxsize=256)
def _functions_of(path: str) -> tuple[dict[tuple[str, int], list[ast.AST]], dict[ast.AST, ast.AST]]:
    """The functions of a file by name and first line, and what each node stands in."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return {}, {}
    above = {inner: outer for outer in ast.walk(tree) for inner in ast.iter_child_nodes(outer)}
    functions: dict[tuple[str, int], list[ast.AST]] = defaultdict(list)
    for node in above:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[node.name, min(node.lineno, *(each.lineno for each in node.decorator_list), node.lineno)].append(
                node
            )
        elif isinstance(node, ast.Lambda):
            functions["<lambda>", node.lineno].append(node)
    return functions, above


def _name_of(places: Iterable[_Place]) -> str:
    return min(name.lstrip(".") for _, name in places)


def _is_method(function: FunctionType) -> bool:
    return "." in function.__qualname__.rpartition("<locals>.")[2]


def _has_method(kind: type, function: FunctionType) -> bool:
    held = [vars(base).get(function.__name__) for base in kind.__mro__]
    return any(function_in(each) is function and not isinstance(each, staticmethod | classmethod) for each in held)


def _is_known(value: Any, packages: Collection[str] = _UNWRITTEN) -> bool:
    """Whether `value`, a class or a function, is one of `packages`, by default those that are not looked into."""
    return str(getattr(value, "__module__", None)).partition(".")[0] in packages


def _held_as(value: Any, name: str) -> Any:
    """What `value` holds as the attribute `name`; `_UNKNOWN` if its class decides."""
    if isinstance(value, nn.Module):
        for table in (vars(value).get(each) or {} for each in TENSOR_TABLES):
            if name in table:
                return table[name]
    held = getattr_static(value, name, _UNKNOWN)
    return getattr(value, name, _UNKNOWN) if isinstance(held, MemberDescriptorType) else held


def _is_flat(value: Any) -> bool:
    """Whether `value` is a container of values that no code can change."""
    entries = value.values() if isinstance(value, dict) else value
    return isinstance(value, _CONTAINERS) and all(type(each) in FIXED_TYPES for each in entries)


def _reached(top: Any) -> dict[int, Any]:
    """By id, `top` and the objects that it holds, but for modules and code."""
    found: dict[int, Any] = {}
    waiting = [top]
    while waiting:
        value = waiting.pop()
        if id(value) in found or type(value) in FIXED_TYPES or isinstance(value, ModuleType):
            continue
        found[id(value)] = value
        if isinstance(value, _CONTAINERS):
            waiting += value.values() if isinstance(value, dict) else value
        elif not isinstance(value, (*_NUMBERS, *_CODE, nn.Module)):
            waiting += dict_of(value).values()
    return found
