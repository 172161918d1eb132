"""Finds out, in one run of a model, what the code outside of its blocks reads.

Python calls the tracer before each of its instructions. It looks up which expressions of the source end there, such as
``block.active`` or ``getattr(self, "scale", 1.0)``, and looks up the same values again, without calling anything. It
looks into the model's code and that of any library but PyTorch, down to the blocks, which are called as they are.
"""

import ast
import builtins
import linecache
import sys
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import CodeType, FrameType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from penstock.capturing.export.watched_runs import Watch
from penstock.capturing.module_copies import Copies
from penstock.capturing.module_state import FIXED_TYPES
from penstock.capturing.reads import NOTHING, Called, Reads, Table, content_of, note_module
from penstock.capturing.sampled_models import SampledModel
from penstock.errors import CaptureError
from penstock.torch_internals.modules import TENSOR_TABLES

_UNKNOWN = object()
"""What an expression has where it is not looked up: the result of a call, say."""
_LEFT_OUT = (sys.stdlib_module_names | {"torch", "penstock"}) - {"os", "collections"}
"""Packages whose code is not looked into."""
_Nodes = Mapping[int, list[ast.expr]]
_CONTAINERS = (list, tuple, dict, nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)
"""Types whose members can be looked up without a side effect."""


def trace_reads(sampled: SampledModel, blocks: Collection[str], by_forward: Collection[str]) -> Reads:
    """What a run of the model on its sample reads outside of the modules `blocks`. Raises `CaptureError` for what it
    reads and changes there. `by_forward`: as for `Watch`.
    """
    model = sampled.model
    inside = {id(inner) for path in blocks for inner in model.get_submodule(path).modules()}
    outside = {path: module for path, module in model.named_modules() if id(module) not in inside}
    with sampled.copied() as copies, torch.no_grad():
        watch = Watch(model, copies, blocks, by_forward=by_forward)
        before: Mapping[Any, Any] = {}
        changed = ""
        for run in range(3):
            tracer = _ReadTracer(model, copies, outside, watch)
            with tracer.tracing():
                watch.run(sampled.call.copied())
            changed = tracer.changed(before)
            # A cache is filled in the first run, and is the same in the two after it.
            if not changed and (run == 2 or not tracer.filled):
                # Weights that are made later are other tensors.
                weightless = any(parameter.is_meta for parameter in model.parameters())
                return tracer.reads.without(tensors=True) if weightless else tracer.reads
            before = tracer.read if run else {}
    raise CaptureError(
        f"{changed} is read outside of the model's blocks, where code is traced, and a forward changes it: expected "
        "what a forward leaves as it is, since the trace keeps what it read. Read it inside of a block, pass it on as "
        "a tensor, or pass the model as a list of layers"
    )


class _ReadTracer:
    """Traces a run of `watch`, of the copy of `model` among `copies`. `outside`: the modules in no block, by path."""

    def __init__(self, model: nn.Module, copies: Copies, outside: Mapping[str, nn.Module], watch: Watch) -> None:
        self.reads = Reads()
        self._own, self._watch = copies.own, watch
        self._names: dict[int, str] = {}
        """Of the objects that last, by id: those of the model, and what they hold."""
        self._kept: list[Any] = []
        self._classes: dict[type, Mapping[str, Any]] = {}
        self._functions: dict[CodeType, FunctionType] = {}
        self.filled = False
        """Whether the copy has something else than the model in a place that was read."""
        self.read: dict[Any, tuple[str, Table, Any, Any]] = {}
        """Places of the copy: the name, the table, the key, and the content when it was read."""
        for path, module in model.named_modules():
            self._lasts(path, module)
        for path, module in outside.items():
            note_module(self.reads, path, module)
            self._see(type(module).forward)
            self._see(vars(module).get("forward"))
        self.reads.note("torch.get_default_dtype()", Called(torch.get_default_dtype), torch.get_default_dtype)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called)
        try:
            yield
        finally:
            sys.settrace(before)

    def changed(self, before: Mapping[Any, Any]) -> str:
        """The name of something that the run, or one `before`, has changed; empty if there is nothing."""
        for place, (name, table, key, content) in self.read.items():
            now = content_of(table.get(key, NOTHING), self._own)
            if now != content or content != before.get(place, (content,))[-1]:
                return name
        return ""

    def _called(self, frame: FrameType, event: str, arg: Any) -> Callable[..., Any] | None:
        if event != "call" or self._watch.in_call:
            return None
        if frame.f_globals.get("__name__", "").partition(".")[0] in _LEFT_OUT:
            return None
        nodes = _nodes_of(frame.f_code)
        if not nodes:
            return None
        if (function := self._functions.get(frame.f_code)) is not None:
            self._note_defaults(function)
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        # Python 3.13 passes instructions only if this is set after the flag.
        frame.f_trace = partial(self._before_instruction, nodes)
        return frame.f_trace

    def _before_instruction(self, nodes: _Nodes, frame: FrameType, event: str, arg: Any) -> Callable[..., Any]:
        if event == "opcode":
            for node in nodes.get(frame.f_lasti, ()):
                # A property that fails here fails in the model's code, too, which may expect it.
                with suppress(Exception):
                    self._value(node, frame)
        return partial(self._before_instruction, nodes)

    def _value(self, node: ast.expr, frame: FrameType) -> Any:
        """What an expression has in `frame`; `_UNKNOWN` if that takes a call."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self._loaded(self._named(node.id, frame))
            case ast.Attribute():
                base = self._value(node.value, frame)
                return self._loaded(_UNKNOWN if base is _UNKNOWN else self._attribute(base, node.attr))
            case ast.Subscript():
                base, index = self._value(node.value, frame), self._value(node.slice, frame)
                if type(base) not in _CONTAINERS or type(index) not in FIXED_TYPES:
                    return _UNKNOWN
                return self._loaded(base[index])
            case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[first, second, *_]):
                base, name = self._value(first, frame), self._value(second, frame)
                if base is _UNKNOWN or not isinstance(name, str):
                    return _UNKNOWN
                return self._loaded(self._attribute(base, name))
            case _:
                return _UNKNOWN

    def _loaded(self, value: Any) -> Any:
        """Notes what a container of modules or parameters registers, and which function has which code."""
        if isinstance(value, nn.Module) and not isinstance(value, torch.jit.ScriptModule):
            own = self._own(value)
            if isinstance(own, _CONTAINERS) and id(own) in self._names:
                for key in sorted(TENSOR_TABLES):
                    self._note(self._names[id(own)], vars(own), key, vars(value))
        else:
            self._see(value)
        return value

    def _named(self, name: str, frame: FrameType) -> Any:
        code = frame.f_code
        if name in frame.f_locals:
            value = frame.f_locals[name]
            function = self._functions.get(code)
            if name in code.co_freevars and function is not None and not callable(value):
                index = code.co_freevars.index(name)
                cells = [(each.__closure__ or ())[index] for each in (self._own(function), function)]
                place, copied = (Called(partial(getattr, cell, "cell_contents")) for cell in cells)
                self._note(f"{name} in {code.co_qualname}", place, id(cells[0]), copied)
            return value
        if name in frame.f_globals:
            value = frame.f_globals[name]
            if not isinstance(value, ModuleType):
                self._note(f"{frame.f_globals.get('__name__')}.{name}", frame.f_globals, name)
            return value
        return getattr(builtins, name, _UNKNOWN)

    def _note_defaults(self, function: FunctionType) -> None:
        own = self._own(function)
        for key in ("__defaults__", "__kwdefaults__"):
            if getattr(own, key):
                place, copied = (Called(partial(getattr, each, key)) for each in (own, function))
                self._note(f"the defaults of {own.__qualname__}", place, (id(own), key), copied)

    def _attribute(self, base: Any, name: str) -> Any:
        """What ``base.name`` is, if that can be looked up without running code of the model but properties."""
        hidden = name.startswith("__") and name.endswith("__")
        if hidden or isinstance(base, Tensor | CodeType | torch.jit.ScriptModule) or type(base) in FIXED_TYPES - {type}:
            return _UNKNOWN
        own = self._own(base)
        if isinstance(base, ModuleType):
            if base.__name__.partition(".")[0] != "torch":
                self._note(f"{base.__name__}.{name}", vars(base), name)
            return vars(base).get(name, _UNKNOWN)
        if isinstance(base, type):
            return self._in_class(base, name)
        held = getattr(base, "__dict__", None)
        if id(own) not in self._names:
            if own is base and not isinstance(base, FunctionType):
                # It was made in this run.
                return _UNKNOWN if held is None else held.get(name, _UNKNOWN)
            self._lasts(type(base).__name__, own)
        where = f"{self._names[id(own)]}.{name}".lstrip(".")
        if isinstance(base, nn.Module) and name == "forward":
            # The watch has put one of its own there.
            self.reads.note(where, vars(own), name)
            return _UNKNOWN
        found = next((vars(each)[name] for each in type(base).__mro__ if name in vars(each)), _UNKNOWN)
        if getattr(type(found), "__set__", None) is not None:
            self._in_class(type(base), name)
            if isinstance(found, MemberDescriptorType):
                place, copied = (Called(partial(getattr, each, name)) for each in (own, base))
                self._note(where, place, (id(own), name), copied)
            return getattr(base, name, _UNKNOWN)
        if held is not None:
            self._note(where, vars(own), name, held)
            if name in held:
                return held[name]
        self._in_class(type(base), name, where)
        if found is not _UNKNOWN:
            return getattr(base, name, _UNKNOWN)
        for key in sorted(TENSOR_TABLES) if isinstance(base, nn.Module) else ():
            self._note(where, vars(own)[key], name, vars(base)[key])
            if name in vars(base)[key]:
                return vars(base)[key][name]
        return _UNKNOWN

    def _in_class(self, kind: type, name: str, where: str = "") -> Any:
        """What the class `kind` has as `name`, from the first of its bases that has it."""
        found = next((base for base in kind.__mro__ if name in vars(base)), None)
        # Where one would put another in its place, or where there was none.
        for base in dict.fromkeys((kind, found or kind)):
            if base.__module__.partition(".")[0] not in ("torch", "builtins"):
                # Each call of `vars` makes another view of a class.
                table = self._classes.setdefault(base, vars(base))
                self._note(where or f"{base.__qualname__}.{name}", table, name)
        if found is None:
            return _UNKNOWN
        self._see(vars(found)[name])
        return vars(found)[name]

    def _note(self, name: str, table: Table, key: Any, copied: Table | None = None) -> None:
        """Notes a place, unless a run before has changed what it has in the copy: that is a cache."""
        copied = table if copied is None else copied
        place = key if isinstance(copied, Called) else (id(copied), key)
        if place in self.read:
            return
        held = copied.get(key, NOTHING)
        content = content_of(held, self._own)
        self.read[place] = name, copied, key, content
        if content == content_of(table.get(key, NOTHING)):
            self.reads.note(name, table, key)
        else:
            self.filled = True
        self._lasts(name, self._own(held))
        self._last_inside(name, held)

    def _last_inside(self, name: str, value: Any) -> None:
        """Has the members of a container last."""
        entries = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
        )
        for key, each in entries:
            if type(each) not in FIXED_TYPES and id(self._own(each)) not in self._names:
                self._lasts(f"{name}[{key!r:.40}]", self._own(each))
                self._last_inside(f"{name}[{key!r:.40}]", each)

    def _lasts(self, name: str, own: Any) -> None:
        if type(own) not in FIXED_TYPES and not isinstance(own, Tensor):
            self._names.setdefault(id(own), name)
            self._kept.append(own)

    def _see(self, value: Any) -> None:
        """Notes the code of functions: what is in a closure is read by code, and Python does not tell of whom."""
        match value:
            case FunctionType() if value.__code__ not in self._functions:
                self._functions[value.__code__] = value
                for cell in value.__closure__ or ():
                    try:
                        self._see(cell.cell_contents)
                    except ValueError:
                        # It has no value yet.
                        continue
            case MethodType() | staticmethod() | classmethod():
                self._see(value.__func__)
            case property():
                self._see(value.fget)
            case partial():
                self._see(value.func)


_Span = tuple[int | None, int | None, int | None, int | None]


@cache
def _expressions_of(file: str, text: str) -> Mapping[_Span, list[ast.expr]]:
    """The expressions of a file that are looked up, by the lines and columns of each."""
    found: defaultdict[_Span, list[ast.expr]] = defaultdict(list)
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return found
    for node in ast.walk(tree):
        match node:
            case ast.Name(ctx=ast.Load()) | ast.Attribute(ctx=ast.Load()) | ast.Subscript(ctx=ast.Load()) | ast.Call():
                end, column = node.end_lineno, node.end_col_offset
                found[node.lineno, end, node.col_offset, column].append(node)
                if isinstance(node, ast.Attribute) and node.lineno != end:
                    # Of a method, Python gives the place of the name.
                    found[end, end, (column or 0) - len(node.attr), column].append(node)
    return found


@cache
def _nodes_of(code: CodeType) -> _Nodes:
    """The expressions that an instruction of `code` computes, by the place of the instruction."""
    lines = linecache.getlines(code.co_filename)
    spans = _expressions_of(code.co_filename, "".join(lines)) if lines else {}
    return {2 * number: found for number, span in enumerate(code.co_positions()) if (found := spans.get(span))}
