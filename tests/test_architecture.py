"""The laws of the house, held by reading the source: who may import whom, who may do what, and how large things may be.

A law that nothing holds is a wish. Each test below is one law; its message lists every place that breaks it.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "penstock").rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

# Who may import whom, room by room: the flow from a model to a running pipeline. A room may also import itself.
FLOW = {
    "errors": "",
    "values": "errors",
    "progress": "",
    "planning": "errors values progress scheduling simulating",
    "scheduling": "errors values",
    "simulating": "errors values scheduling",
    "rendering": "errors values scheduling simulating",
    "capturing": "errors",
    # The probe measures the links through the transport that the pipeline will use.
    "profiling": "errors values progress capturing training runtime",
    "training": "errors",
    "data": "errors capturing",
    "oracle": "errors values capturing training",
    "runtime": "errors values scheduling capturing training",
    "autoplans": "errors values planning capturing profiling runtime",
    "pipeline": "errors values autoplans scheduling capturing profiling training runtime",
    "commands": "errors values planning scheduling simulating rendering capturing profiling",
    "cli": "errors commands",
}
PURE = ("errors", "progress", "values", "planning", "scheduling", "simulating", "rendering")
STRANGERS = ("executor", "replicas", "transport", "weights")
ACTIONS = {node.name for node in TREES["penstock.scheduling.actions"].body if isinstance(node, ast.ClassDef)}
PUBLIC = """
    CaptureError CheckpointError Cluster LayerProfile NamedParameters PenstockError Pipeline Plan PlanError Profile
    ProfileError Schedule ScheduleError Stage Timeline Transformer TransportError capture plan probe profile
    reference_train render schedule simulate verify
"""


def room(module: str) -> str:
    """The room of a module: the part of its name behind `penstock`; empty for the package itself."""
    return module.partition(".")[2].partition(".")[0]


def imported_names(module: str) -> Iterator[tuple[str, str]]:
    """Every import in the source of `module`, wherever it stands, as (module, name); no name for a whole module."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} imports relatively: name the whole path"
            yield from ((str(node.module), alias.name) for alias in node.names)


def imported_modules(module: str) -> set[str]:
    """The modules of Penstock that `module` imports."""
    names = set(imported_names(module))
    inner = {f"{source}.{name}" for source, name in names} & MODULES.keys()
    return inner | {source for source, name in names if source in MODULES and f"{source}.{name}" not in inner}


def functions(module: str) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions and methods of `module`, also those inside others."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def code_lines(module: str, function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of `function` that are neither blank nor comment nor docstring."""
    lines = dict(enumerate(MODULES[module].read_text().splitlines(), start=1))
    counted = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    if ast.get_docstring(function) is not None:
        docstring = function.body[0]
        counted -= set(range(docstring.lineno, (docstring.end_lineno or docstring.lineno) + 1))
    return sum(not re.fullmatch(r"\s*(#.*)?", lines[number]) for number in counted)


def exported(module: str) -> list[str] | None:
    """The names in the module's `__all__`, if it has one that is a plain list."""
    for node in TREES[module].body:
        targets = [node.target] if isinstance(node, ast.AnnAssign) else getattr(node, "targets", [])
        if [ast.unparse(target) for target in targets] == ["__all__"]:
            return list(ast.literal_eval(node.value))
    return None


def in_order(names: Iterable[str]) -> list[str]:
    """Sorted as ruff's RUF022 sorts: CONSTANTS, then Classes, then functions."""
    return sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[0].isupper() else 2, name))


def test_import_graph_has_no_cycle() -> None:
    graph = {module: imported_modules(module) for module in MODULES if module != "penstock"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other in a circle: {' -> '.join(error.args[1])}")


def test_imports_follow_the_flow() -> None:
    unknown = {room(module) for module in MODULES} - FLOW.keys() - {""}

    assert unknown == set(), "a new room: say in FLOW what it may import"

    broken = [
        f"{module} imports {target}"
        for module in MODULES
        if room(module) in FLOW
        for target in imported_modules(module)
        if room(target) not in {room(module), *FLOW[room(module)].split()}
        # The version is the package's own.
        and (room(module), target) != ("cli", "penstock")
    ]

    assert broken == []


def test_pure_half_imports_no_torch() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "penstock", "yaml"}
    broken = [
        f"{module} imports {source}"
        for module in MODULES
        if room(module) in PURE
        for source, _ in imported_names(module)
        if source.partition(".")[0] not in allowed
    ]

    assert broken == []


@pytest.mark.parametrize("pure", PURE)
def test_pure_half_loads_where_there_is_no_torch(pure: str) -> None:
    modules = [module for module in MODULES if room(module) == pure]
    program = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Blocked())
import {", ".join(modules)}
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)

    assert (done.returncode, done.stderr) == (0, "")


def test_parts_of_the_runtime_do_not_know_each_other() -> None:
    parts = {f"penstock.runtime.{name}" for name in STRANGERS} & MODULES.keys()
    broken = [f"{part} imports {other}" for part in parts for other in imported_modules(part) & parts - {part}]

    assert broken == []


def test_only_the_worker_sees_the_parts_of_the_runtime_together() -> None:
    parts = {f"penstock.runtime.{name}" for name in STRANGERS}
    together = [
        module for module in MODULES if room(module) == "runtime" and len(imported_modules(module) & parts) == 3
    ]

    assert set(together) <= {"penstock.runtime.worker"}


def test_only_the_worker_and_its_mailbox_read_actions_in_the_torch_half() -> None:
    readers = {
        module
        for module in MODULES
        if room(module) not in (*PURE, "")
        for _, name in imported_names(module)
        if name in ACTIONS
    }

    assert readers == {"penstock.runtime.mailboxes", "penstock.runtime.worker"}


def test_only_lowering_makes_communication() -> None:
    messages = {action for action in ACTIONS if action.startswith(("Receive", "Send"))}
    makers = {
        module
        for module, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in messages
    }

    assert {"Receive", "Send"} <= messages
    assert makers == {"penstock.scheduling.lowering"}


def test_every_reader_of_actions_is_complete() -> None:
    """A `match` on actions ends with `assert_never`, so that a new action cannot be forgotten anywhere."""
    broken = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Match):
                continue
            classes = {ast.unparse(part.cls) for part in ast.walk(node) if isinstance(part, ast.MatchClass)}
            if classes & ACTIONS and "assert_never" not in ast.unparse(node.cases[-1]):
                broken.append(f"{module}:{node.lineno}")

    assert broken == []


def test_a_schedule_is_one_file() -> None:
    allowed = {"penstock.errors", "penstock.scheduling.actions", "penstock.scheduling.methods"}
    broken = [
        f"{module} imports {target}"
        for module in MODULES
        if module.startswith("penstock.scheduling.orders.")
        for target in imported_modules(module) - allowed
    ]

    assert broken == []


def test_no_module_is_named_after_nothing() -> None:
    parts = {part for module in MODULES for part in module.split(".")}

    assert parts & {"base", "common", "core", "helper", "helpers", "misc", "shared", "util", "utils"} == set()


def test_no_public_function_shares_a_name_with_a_module() -> None:
    modules = {module.rpartition(".")[2] for module in MODULES}
    public = {
        node.name: module
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
    }

    assert {name: public[name] for name in modules & public.keys()} == {}


def test_files_stay_small() -> None:
    lengths = {module: len(path.read_text().splitlines()) for module, path in MODULES.items()}

    assert {module: length for module, length in lengths.items() if length > 400} == {}


def test_functions_stay_small() -> None:
    lengths = {
        f"{module}.{function.name}": code_lines(module, function)
        for module in MODULES
        for function in functions(module)
    }

    assert {name: length for name, length in lengths.items() if length > 60} == {}


def test_every_module_says_what_it_is() -> None:
    without = [
        module for module, tree in TREES.items() if not (ast.get_docstring(tree) or "").partition("\n")[0].strip()
    ]

    assert without == []


def test_every_module_lists_its_public_names_in_order() -> None:
    lists = {module: exported(module) for module in MODULES}

    assert [module for module, names in lists.items() if names is None] == []
    assert [module for module, names in lists.items() if names is not None and names != in_order(names)] == []


def test_every_public_name_is_listed() -> None:
    """What has no underscore in front is in `__all__`; what only its own file uses has one."""
    missing = [
        f"{module}.{node.name}"
        for module, tree in TREES.items()
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        and not node.name.startswith("_")
        and node.name not in (exported(module) or [])
    ]
    # A method's file offers one name, the method; its order and its promise are reached through that.
    assert [name for name in missing if not name.startswith("penstock.scheduling.orders.")] == []


def test_nothing_is_hidden_or_unfinished() -> None:
    """No `hasattr` (an attribute is there or the type is wrong), no `global`, nothing left to be written."""
    broken = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            named = isinstance(node, ast.Name) and node.id in {"hasattr", "NotImplementedError"}
            if named or isinstance(node, ast.Global):
                broken.append(f"{module}:{node.lineno}: {ast.unparse(node)}")
        if re.search(r"#.*\b(TODO|FIXME|XXX)\b", MODULES[module].read_text()):
            broken.append(f"{module}: an unfinished thing is noted in a comment")

    assert broken == []


def test_public_names_are_those_of_the_design() -> None:

    names = exported("penstock") or []

    assert sorted(set(PUBLIC.split()) - set(names)) == []
    assert [name for name in names if name != "__version__" and name.startswith("_")] == []


def test_public_names_load_and_explain_themselves() -> None:
    import penstock

    names = [name for name in penstock.__all__ if name != "__version__"]

    assert [name for name in names if not getattr(penstock, name).__doc__] == []
    assert set(names) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no_such_name"):
        penstock.no_such_name  # noqa: B018
