"""The laws of the architecture as functions of source text: each returns a line for every breach that it finds.

`test_architecture.py` gives each law the sources of the library, where it finds nothing, and a planted breach, which it
finds.
"""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from typing import TypeAlias

Sources: TypeAlias = Mapping[str, str]
"""Source text by the name of its module."""
Flow: TypeAlias = Mapping[str, str]
"""By room, the other rooms that it may import."""
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

parse = cache(ast.parse)


@cache
def nodes_of(text: str) -> tuple[ast.AST, ...]:
    """All nodes of `text`, which most laws look at."""
    return tuple(ast.walk(parse(text)))


def room_of(module: str, flow: Flow) -> str:
    """The innermost room of `flow` that `module` is in; if it is in none, the part of its name behind `penstock`, which
    is empty for the package itself.
    """
    parts = module.split(".")[1:]
    inner = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in inner if name in flow), parts[0] if parts else "")


@cache
def imported_names(module: str, text: str) -> frozenset[tuple[str, str]]:
    """Every import in `text`, also inside a function, as (module, name); without a name for a whole module."""
    found: list[tuple[str, str]] = []
    for node in nodes_of(text):
        if isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively: name the whole path"
            found += [(str(node.module), alias.name) for alias in node.names]
    return frozenset(found)


def imported_modules(module: str, text: str, known: Iterable[str]) -> set[str]:
    """The `known` modules that `module` imports."""
    known, names = frozenset(known), imported_names(module, text)
    inner = {f"{source}.{name}" for source, name in names} & known
    return inner | {source for source, name in names if source in known and f"{source}.{name}" not in inner}


def cycle(sources: Sources) -> list[str]:
    """Modules that import each other in a circle; empty if there are none."""
    graph = {module: imported_modules(module, text, sources) for module, text in sources.items()}
    graph.pop("penstock", None)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def unknown_rooms(sources: Sources, flow: Flow) -> set[str]:
    """Rooms that `flow` does not name."""
    return {room_of(module, flow) for module in sources} - flow.keys() - {""}


def imports_against_flow(sources: Sources, flow: Flow) -> list[str]:
    """Imports that `flow` does not allow."""
    return [
        f"{module} imports {target}"
        for module, text in sources.items()
        if (room := room_of(module, flow))
        for target in imported_modules(module, text, sources)
        if room_of(target, flow) not in {room, *flow[room].split()}
        # The version is the package's own.
        and (room, target) != ("cli", "penstock")
    ]


def imports_of_torch(sources: Sources) -> list[str]:
    """Imports by modules of the pure half of anything but plain Python, numpy and yaml."""
    allowed = {*sys.stdlib_module_names, "numpy", "penstock", "yaml"}
    return [
        f"{module} imports {source}"
        for module, text in sources.items()
        for source, _ in imported_names(module, text)
        if source.partition(".")[0] not in allowed
    ]


def classes_of(text: str) -> set[str]:
    """The names of the classes that `text` defines."""
    return {node.name for node in parse(text).body if isinstance(node, ast.ClassDef)}


def action_readers(sources: Sources, actions: set[str]) -> set[str]:
    """The modules that import one of `actions`."""
    return {module for module, text in sources.items() if actions & {name for _, name in imported_names(module, text)}}


def makers_of_messages(sources: Sources, messages: set[str]) -> set[str]:
    """The modules that call one of the classes `messages`."""
    return {
        module
        for module, text in sources.items()
        for node in nodes_of(text)
        if isinstance(node, ast.Call) and _last_name(node.func) in messages
    }


def _last_name(node: ast.expr) -> str:
    """The name that ``a.b.name`` or ``name`` ends with; empty for another expression."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def incomplete_matches(sources: Sources, actions: set[str]) -> list[str]:
    """Each `match` on actions that does not end with `assert_never`, so that a new action could be forgotten there."""
    return [
        f"{module}:{node.lineno}"
        for module, text in sources.items()
        for node in nodes_of(text)
        if isinstance(node, ast.Match)
        and actions & {ast.unparse(part.cls) for part in ast.walk(node) if isinstance(part, ast.MatchClass)}
        and "assert_never" not in ast.unparse(node.cases[-1])
    ]


def strange_imports_of_orders(sources: Sources) -> list[str]:
    """Imports by an order of a schedule of more than actions, definitions, and what orders in a V share."""
    beside = ("actions", "definitions", "placements", "v_blocks")
    allowed = {"penstock.errors", *(f"penstock.scheduling.{name}" for name in beside)}
    return [
        f"{module} imports {target}"
        for module, text in sources.items()
        if module.startswith("penstock.scheduling.orders.")
        for target in imported_modules(module, text, sources)
        if target not in allowed
    ]


def meaningless_names(modules: Iterable[str]) -> set[str]:
    """Parts of the names of `modules` that say nothing."""
    parts = {part for module in modules for part in module.split(".")}
    return parts & {"base", "common", "core", "helper", "helpers", "misc", "shared", "util", "utils"}


def shared_names(sources: Sources) -> dict[str, str]:
    """Public functions that have the name of a module, with the modules that define them."""
    modules = {module.rpartition(".")[2] for module in sources}
    return {
        node.name: module
        for module, text in sources.items()
        for node in parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name in modules
    }


def shared_classes(sources: Sources) -> dict[str, list[str]]:
    """The names that several public classes have, with the modules of these classes."""
    homes: dict[str, list[str]] = {}
    for module, text in sources.items():
        for name in classes_of(text):
            if not name.startswith("_"):
                homes.setdefault(name, []).append(module)
    return {name: modules for name, modules in homes.items() if len(modules) > 1}


def fragments(sources: Sources) -> set[str]:
    """The modules of fewer than 80 lines that one other module imports. Orders, policies, commands and the faces of
    rooms are one idea each, however short.
    """
    importers = {module: 0 for module in sources}
    for module, text in sources.items():
        for imported in imported_modules(module, text, sources) - {module}:
            importers[imported] += 1
    rooms = {module.rpartition(".")[0] for module in sources}
    return {
        module
        for module, count in importers.items()
        if count == 1 and len(sources[module].splitlines()) < 80 and module not in rooms
        if not {"orders", "policies", "commands"} & set(module.split("."))
    }


def functions_in(text: str, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """All functions and methods of `text`, also those inside others, with their qualified names."""

    def visit(node: ast.AST, name: str) -> Iterator[tuple[str, Function]]:
        for child in ast.iter_child_nodes(node):
            inner = f"{name}.{child.name}" if isinstance(child, Function | ast.ClassDef) else name
            if isinstance(child, Function):
                yield inner, child
            yield from visit(child, inner)

    return visit(parse(text), prefix)


def _values(call: ast.Call) -> int:
    """How many positional arguments `call` writes out."""
    return sum(
        len(argument.value.elts)
        if isinstance(argument, ast.Starred) and isinstance(argument.value, ast.Tuple | ast.List)
        else 1
        for argument in call.args
    )


def count_positional(sources: Sources, most: int) -> dict[str, int]:
    """By module, how many calls pass more than `most` arguments by position, and how many functions let them (beside
    `self` and `cls`; the constructors of data classes are not written out).
    """
    found: Counter[str] = Counter()
    for module, text in sources.items():
        for node in nodes_of(text):
            if isinstance(node, ast.Call):
                found[module] += _values(node) > most
            elif isinstance(node, Function):
                names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
                found[module] += len([name for name in names if name not in ("self", "cls")]) > most
    return {module: count for module, count in found.items() if count}


BAGS = {"arguments", "choices", "given", "named", "options", "settings"}
"""Names of parameters that take the arguments of something, in an untyped mapping by name."""


def argument_bags(sources: Sources) -> list[str]:
    """Calls of ``locals()``, and the parameters that take arguments in a mapping of unknown values: neither a search
    for text nor a type checker can follow these.
    """
    found = []
    for module, text in sources.items():
        for node in nodes_of(text):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "locals":
                found.append(f"{module}: locals()")
        for name, function in functions_in(text, module):
            taken = function.args
            for parameter in (*taken.posonlyargs, *taken.args, *taken.kwonlyargs):
                kind = ast.unparse(parameter.annotation) if parameter.arg in BAGS and parameter.annotation else ""
                if re.search(r"(?i)(mapping|dict)\[str, (any|object)\]", kind):
                    found.append(f"{name}({parameter.arg})")
    return found


def exported(text: str) -> list[str] | None:
    """The names in the `__all__` of `text`, if it has one that is a plain list."""
    for node in parse(text).body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if [ast.unparse(target) for target in targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def needless_lists(sources: Sources) -> list[str]:
    """The modules whose `__all__` passes on no name of another module.

    What a module defines itself is offered if its name has no underscore in front.
    """
    found = []
    for module, text in sources.items():
        names = exported(text)
        imports = [node for node in nodes_of(text) if isinstance(node, ast.Import | ast.ImportFrom)]
        passed_on = {alias.asname or alias.name for node in imports for alias in node.names}
        lazy = "__getattr__" in text
        if names is not None and not (lazy or passed_on.intersection(names)):
            found.append(module)
    return found


def hidden(sources: Sources) -> list[str]:
    """The places of `hasattr` (an attribute is there, or the type is wrong) and of `NotImplementedError`."""
    return [
        f"{module}:{node.lineno}: {node.id}"
        for module, text in sources.items()
        for node in nodes_of(text)
        if isinstance(node, ast.Name) and node.id in {"hasattr", "NotImplementedError"}
    ]


NAMES = (
    *("1f1b", "1f1b-flush", "2bw", "breadth-first", "gpipe", "interleaved", "pipedream", "spp"),
    *("v-half", "v-min", "zb-h1", "zb-v"),
)
UNMISTAKABLE = re.compile(r"(?<![\w-])(1f1b-flush|1f1b|2bw|breadth-first|v-half|v-min|zb-h1|zb-v)(?![\w-])")
FOR_ALL = ("AMBIGUOUS_NAMES", "DEFAULT_SCHEDULE", "INFERENCE", "METHODS", "STREAMED_INFERENCE")


def naming_breaches(module: str, source: str) -> list[str]:
    """Where `source`, as the file of `module`, names a schedule to decide something, or lists schedules by hand.

    A string that is a schedule's name, a text other than a docstring that has one of the names that are no common word,
    and an import of a definition. What reads the facts of a definition instead needs no change for a new schedule.
    """
    bodies = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    # A string that stands alone is a docstring, of a function or of what is above it.
    documented = {
        id(statement.value)
        for node in nodes_of(source)
        if isinstance(node, bodies)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    }
    found = []
    for node in nodes_of(source):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("penstock.scheduling.orders"):
            found += [
                f"{module}:{node.lineno} imports {alias.name}" for alias in node.names if alias.name not in FOR_ALL
            ]
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str) or id(node) in documented:
            continue
        if node.value in NAMES or UNMISTAKABLE.search(node.value):
            found.append(f"{module}:{node.lineno} says {node.value!r}")
    return found
