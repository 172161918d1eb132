"""The laws of the house, held by reading the source: who may import whom, who may do what, and how large things may be.

A law that nothing holds is a wish. Each test below is one law; its message lists every place that breaks it.
"""

import ast
import inspect
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter

import pytest

from support.paths import ROOT

SOURCE = ROOT / "src"
MODULES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((SOURCE / "penstock").rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text()) for name, path in MODULES.items()}

# Who may import whom, room by room: the flow from a model to a running pipeline. A room may also import itself, and a
# room inside another one what is beside it there. Rooms of the runtime stand on each other, from the device up.
FLOW = {
    "errors": "",
    "values": "errors",
    "timelines": "errors values",
    "progress": "",
    "planning": "errors values scheduling simulating planning.search",
    "planning.search": "errors values progress scheduling simulating planning",
    "scheduling": "errors values scheduling.orders scheduling.verification",
    "scheduling.orders": "errors scheduling",
    "scheduling.verification": "errors values scheduling",
    "simulating": "errors values timelines scheduling",
    "rendering": "errors values timelines scheduling simulating",
    "capturing": "errors capturing.export",
    "capturing.export": "errors capturing",
    # The probe measures the links through the transport that the pipeline will use.
    "profiling": """errors values progress capturing training runtime.devices runtime.transport runtime.execution
        runtime.assembly""",
    "training": "errors",
    "data": "errors capturing",
    "oracle": "errors values capturing training",
    "runtime": "",
    "runtime.devices": "errors",
    "runtime.transport": "errors scheduling runtime.devices",
    "runtime.execution": "errors values capturing runtime.devices",
    "runtime.parameters": "errors scheduling capturing training runtime.devices runtime.transport",
    "runtime.batches": "errors values scheduling capturing training runtime.devices runtime.transport",
    "runtime.engine": """errors values timelines scheduling capturing training runtime.devices runtime.transport
        runtime.execution runtime.parameters runtime.batches""",
    "runtime.assembly": """errors values scheduling capturing training runtime.devices runtime.transport
        runtime.execution runtime.parameters runtime.batches runtime.engine""",
    "autoplans": "errors values planning capturing capturing.export profiling runtime.transport runtime.assembly",
    "pipeline": """errors values timelines autoplans scheduling scheduling.verification capturing profiling training
        runtime.devices runtime.transport runtime.execution runtime.parameters runtime.batches runtime.engine
        runtime.assembly""",
    "commands": "errors values timelines planning scheduling simulating rendering capturing profiling",
    "cli": "errors commands",
}
PURE = ("errors", "progress", "values", "timelines", "planning", "scheduling", "simulating", "rendering")
ACTIONS = {node.name for node in TREES["penstock.scheduling.actions"].body if isinstance(node, ast.ClassDef)}
PUBLIC = """
    CaptureError CheckpointError Cluster ErrorFeedback LayerProfile LookAhead LossScale NamedParameters PenstockError
    Pipeline Plan PlanError Profile ProfileError Schedule ScheduleError Stage Subject Timeline Transformer
    TransportError UpdateHook WeightAverage WeightPrediction WeightUpdate capture initialise loader local_device plan
    prefetch probe profile reference_train render reset_parameters schedule shapes_of simulate verify
"""
METHODS = {
    "__init__": "(self, model, sample, loss_fn, optimizer, schedule=None, microbatches=None, stages=None, plan=None, "
    "vertical_sync=False, autocast=None, version_dtype=None, loss_weight=None, loss_scale=None, clip_grad_norm=None, "
    "lr_scheduler=None, update_hooks=(), scale_learning_rates=False, recompute=None, compile=False, init_fn=None, "
    "parallelize=None, tensor_parallel=None, skips='auto', seed=0, timeout_seconds=600.0)",
    "averaged": "(self)",
    "averages": "(self)",
    "close": "(self)",
    "cluster": "attribute",
    "drain": "(self)",
    "evaluate": "(self, inputs, target)",
    "gradient_norm": "property",
    "load": "(self, directory)",
    "load_state_dict": "(self, state)",
    "loss_scale": "property",
    "named_parameters": "(self)",
    "optimizer": "property",
    "parameters": "(self)",
    "predict": "(self, inputs)",
    "prediction_error": "(self)",
    "profile": "attribute",
    "rank": "property",
    "save": "(self, directory)",
    "state_dict": "(self)",
    "step": "(self, inputs, target)",
    "timeline": "(self, minibatches=1)",
}
"""What a pipeline has, with the parameters of its methods."""
NAMESAKES = {"Microbatch", "Operator"}
"""The names that two classes still share; it only shrinks."""


def room(module: str) -> str:
    """The innermost room of `FLOW` that `module` is in; if it is in none, the part of its name behind `penstock`, which
    is empty for the package itself.
    """
    parts = module.split(".")[1:]
    inner = (".".join(parts[:depth]) for depth in range(len(parts), 0, -1))
    return next((name for name in inner if name in FLOW), parts[0] if parts else "")


def is_pure(module: str) -> bool:
    """Whether `module` may not import torch."""
    return room(module).partition(".")[0] in PURE


def breaches(module: str, targets: Iterable[str]) -> list[str]:
    """What `module` imports among `targets` against the flow."""
    return [
        f"{module} imports {target}"
        for target in targets
        if room(target) not in {room(module), *FLOW[room(module)].split()}
        # The version is the package's own.
        and (room(module), target) != ("cli", "penstock")
    ]


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
            return list(ast.literal_eval(node.value))  # type: ignore[attr-defined]
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

    assert [breach for module in MODULES if room(module) for breach in breaches(module, imported_modules(module))] == []


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("penstock.runtime.devices.streams", "penstock.runtime.transport.endpoints"),
        ("penstock.runtime.transport.nccl.endpoints", "penstock.runtime.engine.worker"),
        ("penstock.runtime.execution.executor", "penstock.runtime.transport.transport"),
        ("penstock.runtime.execution.executor", "penstock.runtime.parameters.weight_versions"),
        ("penstock.runtime.parameters.weight_versions", "penstock.runtime.execution.executor"),
        ("penstock.runtime.batches.results", "penstock.runtime.parameters.weight_versions"),
        ("penstock.runtime.engine.worker", "penstock.runtime.assembly.stages"),
        ("penstock.values.plans", "penstock.timelines.timelines"),
        ("penstock.scheduling.orders.gpipe", "penstock.scheduling.verification.verifier"),
        ("penstock.capturing.export.tracing", "penstock.runtime.devices.streams"),
    ],
)
def test_an_import_against_the_flow_is_a_breach(module: str, target: str) -> None:
    assert {module, target} <= MODULES.keys()
    assert breaches(module, [target]) == [f"{module} imports {target}"]


def test_pure_half_imports_no_torch() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "penstock", "yaml"}
    broken = [
        f"{module} imports {source}"
        for module in MODULES
        if is_pure(module)
        for source, _ in imported_names(module)
        if source.partition(".")[0] not in allowed
    ]

    assert broken == []


@pytest.mark.processes
@pytest.mark.parametrize("pure", PURE)
def test_pure_half_loads_where_there_is_no_torch(pure: str) -> None:
    modules = [module for module in MODULES if room(module).partition(".")[0] == pure]
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


def test_only_the_worker_and_its_mailbox_read_actions_in_the_torch_half() -> None:
    readers = {
        module
        for module in MODULES
        if room(module) and not is_pure(module)
        for _, name in imported_names(module)
        if name in ACTIONS
    }

    assert readers == {"penstock.runtime.engine.mailboxes", "penstock.runtime.engine.worker"}


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
    allowed = {"penstock.errors", "penstock.scheduling.actions", "penstock.scheduling.definitions"}
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


def test_no_two_public_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for module, tree in TREES.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(module)
    shared = {name for name, modules in homes.items() if len(modules) > 1}

    assert shared == NAMESAKES, {name: homes[name] for name in shared ^ NAMESAKES if name in homes}


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
                broken.append(f"{module}:{node.lineno}: {ast.unparse(node)}")  # type: ignore[attr-defined]
        if re.search(r"#.*\b(TODO|FIXME|XXX)\b", MODULES[module].read_text()):
            broken.append(f"{module}: an unfinished thing is noted in a comment")

    assert broken == []


def test_public_names_are_those_that_are_listed_here() -> None:
    names = [name for name in exported("penstock") or [] if name != "__version__"]

    assert names == in_order(PUBLIC.split())


def signature_of(member: object) -> str:
    """The parameters of a method with their defaults; of what is none, its kind."""
    if not inspect.isfunction(member):
        return "property" if isinstance(member, property) else "attribute"
    found = inspect.signature(member)
    plain = [parameter.replace(annotation=inspect.Parameter.empty) for parameter in found.parameters.values()]
    return str(found.replace(parameters=plain, return_annotation=inspect.Signature.empty))


def test_the_methods_of_a_pipeline_are_those_that_are_listed_here() -> None:
    import penstock

    members = vars(penstock.Pipeline)
    public = {name for name in members if not name.startswith("_")} | {"__init__"}

    assert {name: signature_of(members[name]) for name in public} == METHODS


def test_public_names_load_and_explain_themselves() -> None:
    import penstock

    names = [name for name in penstock.__all__ if name != "__version__"]

    assert [name for name in names if not getattr(penstock, name).__doc__] == []
    assert set(names) <= set(dir(penstock))
    with pytest.raises(AttributeError, match="no_such_name"):
        penstock.no_such_name  # noqa: B018


TESTS = ROOT / "tests"
BESIDE_ROOMS = {"support", "project", "pipeline", "gpu", "benchmarks", "data"}
"""Folders of tests/ that mirror no room: helpers, the repository, whole pipelines, GPUs, benchmarks, and data files."""


def test_tests_have_the_rooms_of_the_source() -> None:
    rooms = {path.relative_to(SOURCE / "penstock") for path in (SOURCE / "penstock").rglob("*") if path.is_dir()}
    folders = {path.parent.relative_to(TESTS) for path in TESTS.rglob("test_*.py")}
    unknown = sorted(str(folder) for folder in folders - rooms if folder.parts and folder.parts[0] not in BESIDE_ROOMS)

    assert unknown == [], "name the folder like the room whose modules it tests"


def test_test_files_are_short_enough_to_read() -> None:
    lengths = {path.relative_to(TESTS): len(path.read_text().splitlines()) for path in TESTS.rglob("*.py")}

    assert {str(path): length for path, length in lengths.items() if length >= 800} == {}, "split by what is tested"
