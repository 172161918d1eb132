"""The laws of the architecture, checked on the source: which room may import which, and what code may look like.

Ruff holds those that are not ours alone: complexity, docstrings of modules, order of `__all__`, unfinished notes.

Each law is a function of source text in `support/architecture.py`. One test applies it to the library and lists every
breach; the test after it shows that the law finds a planted breach.
"""

import inspect
import subprocess
import sys
from collections.abc import Callable

import pytest

from support import architecture as laws
from support.paths import ROOT

SOURCE = ROOT / "src"
SOURCES = {
    ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): path.read_text()
    for path in sorted((SOURCE / "penstock").rglob("*.py"))
}
"""The text of every module of the library, by its name."""

# Who may import whom, room by room: the flow from a model to a running pipeline. A room may also import itself, and a
# room inside another one what is beside it there. Rooms of the runtime stand on each other, from the device up.
FLOW = {
    "errors": "",
    "arguments": "errors",
    "torch_internals": "errors",
    "values": "errors arguments progress scheduling scheduling.orders scheduling.verification",
    "timelines": "errors arguments values",
    "progress": "errors",
    "process_states": "",
    "planning": "errors arguments values scheduling scheduling.orders simulating rendering planning.search",
    "planning.search": """errors arguments values progress scheduling scheduling.orders scheduling.verification
        simulating planning""",
    "scheduling": "errors arguments scheduling.orders scheduling.verification",
    "scheduling.orders": "errors scheduling",
    "scheduling.verification": "errors arguments scheduling",
    "simulating": "errors arguments values timelines scheduling",
    "rendering": "errors arguments values timelines scheduling simulating",
    "capturing": "errors arguments torch_internals values capturing.export",
    "capturing.export": "errors torch_internals capturing",
    # The probe measures the links through the transport that the pipeline will use, and an action in the worker.
    "profiling": """errors arguments torch_internals values progress capturing training runtime.devices
        runtime.collectives runtime.transport runtime.execution runtime.batches runtime.engine runtime.assembly""",
    "training": "errors arguments torch_internals",
    "data": "errors arguments torch_internals progress capturing",
    "packing": "errors arguments values training",
    "oracle": """errors arguments torch_internals values scheduling scheduling.orders scheduling.verification capturing
        training""",
    "runtime": "",
    "runtime.devices": "errors torch_internals",
    "runtime.files": "errors arguments torch_internals capturing",
    "runtime.collectives": "errors process_states runtime.devices runtime.files",
    "runtime.transport": "errors torch_internals process_states runtime.devices runtime.files runtime.collectives",
    "runtime.execution": "errors arguments torch_internals capturing runtime.devices",
    "runtime.parameters": "errors torch_internals scheduling capturing training runtime.devices runtime.transport",
    "runtime.batches": """errors arguments torch_internals values scheduling capturing training runtime.devices
        runtime.transport""",
    "doctor": "errors process_states values timelines scheduling",
    "runtime.engine": """errors arguments torch_internals values doctor timelines scheduling scheduling.verification
        capturing training runtime.devices runtime.collectives runtime.transport runtime.execution runtime.parameters
        runtime.batches""",
    "runtime.assembly": """errors arguments torch_internals values doctor scheduling
        scheduling.orders scheduling.verification capturing training runtime.devices runtime.files runtime.collectives
        runtime.transport runtime.execution runtime.parameters runtime.batches runtime.engine""",
    "runtime.checkpoints": """errors arguments torch_internals values progress scheduling capturing training data
        runtime.devices runtime.files runtime.collectives runtime.transport runtime.parameters runtime.engine
        runtime.assembly""",
    "autoplans": """errors arguments values planning scheduling scheduling.orders capturing capturing.export profiling
        training runtime.collectives runtime.transport runtime.assembly""",
    "reporting": """errors arguments values doctor timelines scheduling simulating capturing runtime.collectives
        runtime.transport runtime.batches runtime.engine""",
    "testing": "errors scheduling runtime.batches runtime.engine",
    "pipeline": """errors arguments values doctor timelines autoplans scheduling scheduling.verification
        capturing profiling training reporting testing runtime.devices runtime.collectives
        runtime.transport runtime.parameters runtime.batches runtime.engine runtime.assembly runtime.checkpoints""",
    "rehearsing": """errors arguments torch_internals values capturing training oracle runtime.transport
        runtime.assembly pipeline""",
    "fleet": "errors arguments values planning",
    "commands": """errors arguments values progress doctor timelines planning scheduling simulating rendering capturing
        profiling training rehearsing fleet""",
    "integrations": "errors training pipeline",
    "scan": "errors arguments torch_internals",
    "cli": "errors progress commands",
    "__main__": "cli",
}
PURE = (
    "errors",
    "arguments",
    "progress",
    "process_states",
    "values",
    "doctor",
    "timelines",
    "planning",
    "scheduling",
    "simulating",
    "rendering",
    "fleet",
)
ACTIONS = laws.classes_of(SOURCES["penstock.scheduling.actions"])
MESSAGES = {action for action in ACTIONS if action.startswith(("Receive", "Send"))}
PUBLIC = """
    CaptureError CheckpointError Cluster DeviceKind LayerProfile LossScale Microbatches
    NamedParameters PenstockError Pipeline Plan PlanError Profile ProfileError RehearsalError RowInt8 Schedule
    ScheduleDefinition ScheduleError Stage Stats Subject Timeline Transformer TransportError UpdateHook WeightAverage
    WeightPrediction WeightUpdate WireCodec capture compare_clusters frontier initialize latest_checkpoint
    load_weights loader local_device log_stats model_loss pack packed_batch plan prefetch probe profile reference_train
    rehearse render reset_parameters schedule shapes_of simulate token_count verify
"""
METHODS = {
    "__init__": "(self, model, sample, loss_fn, optimizer, *, schedule=None, microbatches=None, stages=None, "
    "plan=None, balance='work', vertical_sync=False, autocast=None, version_dtype=None, loss_weight=None, "
    "loss_scale=None, clip_grad_norm=None, lr_scheduler=None, update_hooks=(), on_nonfinite='raise', "
    "recompute=None, compile=False, init_fn=None, parallelize=None, "
    "tensor_parallel=None, wire_dtype=None, seed=0, check='warn', resume=None, save_frozen=True, offload_to='host', "
    "state_on_host=False, shard_optimizer=False, memory_bytes=None, "
    "timeout_seconds=600.0)",
    "auto_plan": "attribute",
    "averaged": "(self)",
    "averages": "(self)",
    "close": "(self)",
    "drain": "(self)",
    "evaluate": "(self, inputs, target=None)",
    "full_state_dict": "(self, *, rank=0)",
    "gather_model": "(self)",
    "gradient_norm": "property",
    "load": "(self, directory)",
    "load_state_dict": "(self, state)",
    "loss_scale": "property",
    "measure": "(self, *, iterations=10, warmup=2, progress=False)",
    "named_parameters": "(self, prefix='')",
    "optimizer": "property",
    "parameters": "(self)",
    "predict": "(self, inputs)",
    "rank": "property",
    "replan": "(self, *, profile=None, apply=None)",
    "save": "(self, directory, step=None, *, keep=None, keep_every=None, wait=True)",
    "save_weights": "(self, directory, *, max_shard_size='5GB', dtype=None)",
    "skipped_updates": "property",
    "rollbacks": "property",
    "state_dict": "(self)",
    "stats": "(self, *, tokens_per_sample=None, flops_per_sample=None, peak_flops=None, all_ranks=False)",
    "step": "(self, inputs, target=None)",
    "steps": "property",
    "stragglers": "(self, *, profile=None, tolerance=1.25, layers=False)",
    "timeline": "(self, minibatches=1)",
    "track": "(self, **objects)",
}
"""What a pipeline has, with the parameters of its methods."""

FRAGMENTS: set[str] = set()
"""Short files that one other file imports: each has an idea that its importer has not. The list only gets shorter."""
MOST_POSITIONAL = 5
ALLOWED_POSITIONAL: dict[str, int] = {
    "penstock.data": 1,
    "penstock.oracle.references": 1,
    "penstock.planning.two_bw.orientations": 1,
    "penstock.runtime.batches.microbatches": 1,
    "penstock.runtime.assembly.started_engines": 1,
    "penstock.runtime.engine.engine": 1,
    "penstock.runtime.engine.worker": 1,
    "penstock.runtime.execution.compilation": 2,
    "penstock.runtime.execution.split_backward": 1,
    "penstock.runtime.parameters.gradient_buckets": 2,
    "penstock.runtime.transport.backend_selection": 1,
    "penstock.runtime.transport.connections": 1,
    "penstock.runtime.transport.distributed_transport": 1,
    "penstock.runtime.transport.message_headers": 1,
    "penstock.runtime.transport.nccl.all_reduce": 1,
    "penstock.runtime.transport.tensor_parallel_transport": 1,
    "penstock.runtime.transport.worlds": 1,
    "penstock.simulating.memory_traces": 1,
    "penstock.simulating.simulator": 1,
    "penstock.timelines.drawings": 3,
    "penstock.timelines.timelines": 1,
    "penstock.values.plans": 2,
}
"""Calls and functions with more positional arguments, by module. These numbers only go down."""


def is_pure(module: str) -> bool:
    """Whether `module` may not import torch."""
    return laws.room_of(module, FLOW).partition(".")[0] in PURE


def sources_where(chosen: Callable[[str], bool], sources: dict[str, str] = SOURCES) -> dict[str, str]:
    return {module: text for module, text in sources.items() if chosen(module)}


def readers_in_the_torch_half(sources: dict[str, str]) -> set[str]:
    half = sources_where(lambda module: bool(laws.room_of(module, FLOW)) and not is_pure(module), sources)
    return laws.action_readers(half, ACTIONS)


PLANNERS = {
    # Each plans for the schedules of its paper.
    "penstock.planning.memory": "INTERLEAVED",
    "penstock.planning.ptd_p.parallel_configs": "INTERLEAVED ONE_F_ONE_B_FLUSH",
    "penstock.planning.search.constraints": "SPP",
    "penstock.planning.spp.spp_search": "SPP",
    "penstock.planning.two_bw.pipeline_searches": "GPIPE ONE_F_ONE_B_FLUSH TWO_BW",
}
NAMING = {"oracle", "scheduling.orders", "penstock.planning.requests"}
"""Where schedules are defined, and the rooms that may say their names."""


def names_of_schedules(sources: dict[str, str]) -> dict[str, set[str]]:
    """What a module says or imports of schedules that are not its own: such a file asks for their facts instead."""
    read = sources_where(lambda module: not {module, laws.room_of(module, FLOW)} & NAMING, sources)
    found = {module: laws.naming_breaches(module, source) for module, source in read.items()}
    return {module: {breach.partition(" ")[2] for breach in breaches} for module, breaches in found.items() if breaches}


def argument_bags(sources: dict[str, str]) -> list[str]:
    return sorted(laws.argument_bags(sources_where(lambda module: laws.room_of(module, FLOW) != "commands", sources)))


ARGUMENTS_OF_OTHERS = [
    "penstock.data.Batches.__init__(options)",
    "penstock.rehearsing.trainings._read_options(arguments)",
    "penstock.runtime.execution.compilation.CompiledStage.__init__(options)",
    "penstock.runtime.execution.compilation.compile_chain(options)",
]
"""Those of `DataLoader` and `torch.compile`, and what a function of the user's returns."""

LAWS: dict[str, tuple[Callable[[dict[str, str]], object], object]] = {
    "the import graph has no cycle": (laws.cycle, []),
    "FLOW says what every room may import": (lambda sources: laws.unknown_rooms(sources, FLOW), set()),
    "imports follow the flow": (lambda sources: laws.imports_against_flow(sources, FLOW), []),
    "the pure half imports no torch": (lambda sources: laws.imports_of_torch(sources_where(is_pure, sources)), []),
    "only the worker and its mailbox read actions in the torch half": (
        readers_in_the_torch_half,
        {"penstock.runtime.engine.mailbox", "penstock.runtime.engine.worker"},
    ),
    "only lowering makes communication": (
        lambda sources: laws.makers_of_messages(sources, MESSAGES),
        {"penstock.scheduling.lowering"},
    ),
    "every reader of actions is complete": (lambda sources: laws.incomplete_matches(sources, ACTIONS), []),
    "a schedule is one file": (laws.strange_imports_of_orders, []),
    "no other file names a schedule": (
        names_of_schedules,
        {module: {f"imports {name}" for name in names.split()} for module, names in PLANNERS.items()},
    ),
    "no module is named after nothing": (laws.meaningless_names, set()),
    "no public function shares a name with a module": (laws.shared_names, {}),
    "no two public classes share a name": (laws.shared_classes, {}),
    "short files have several importers": (laws.fragments, FRAGMENTS),
    "long lists of arguments have keywords": (
        lambda sources: laws.count_positional(sources, MOST_POSITIONAL),
        ALLOWED_POSITIONAL,
    ),
    "arguments travel as typed values": (argument_bags, ARGUMENTS_OF_OTHERS),
    "lists of names stand where names are passed on": (laws.needless_lists, []),
    "nothing is hidden": (laws.hidden, []),
}


@pytest.mark.parametrize("law", LAWS)
def test_the_library_keeps_the_law(law: str) -> None:
    check, expected = LAWS[law]

    assert check(SOURCES) == expected


ACTION_READER = "match action:\n    case Forward():\n        pass\n    case {last}:\n        {end}\n"
GPIPE = "penstock.scheduling.orders.gpipe"
PLANTED: list[tuple[str, dict[str, str], object]] = [
    (
        "the import graph has no cycle",
        {"penstock.errors": "import penstock.progress", "penstock.progress": "import penstock.errors"},
        ["penstock.errors", "penstock.progress", "penstock.errors"],
    ),
    ("FLOW says what every room may import", {"penstock.attic.boxes": ""}, {"attic"}),
    *(
        ("only lowering makes communication", {GPIPE: text}, {GPIPE})
        for text in ("Send(0, 1)", "actions.Receive(0, 1)", "[Send(k, 1) for k in range(3)]")
    ),
    (
        "every reader of actions is complete",
        {
            "penstock.a": ACTION_READER.format(last="Backward()", end="pass"),
            "penstock.b": ACTION_READER.format(last="_", end="pass"),
            "penstock.c": ACTION_READER.format(last="_", end="assert_never(action)"),
        },
        ["penstock.a:1", "penstock.b:1"],
    ),
    (
        "a schedule is one file",
        {
            GPIPE: "from penstock.scheduling.orders.interleaved import turns",
            "penstock.scheduling.orders.interleaved": "",
        },
        [f"{GPIPE} imports penstock.scheduling.orders.interleaved"],
    ),
    *(
        ("no other file names a schedule", {"penstock.planted": source}, {"penstock.planted": {breach}})
        for source, breach in {
            'fast = plan.schedule == "2bw"': "says '2bw'",
            'match name:\n    case "pipedream":\n        pass': "says 'pipedream'",
            'PAIRED = {"interleaved": 2}': "says 'interleaved'",
            'raise ValueError("choose gpipe or 1f1b-flush")': "says 'choose gpipe or 1f1b-flush'",
            'raise ValueError(f"{name}: choose zb-v")': "says ': choose zb-v'",
            "from penstock.scheduling.orders import METHODS, ZB_V": "imports ZB_V",
            "from penstock.scheduling.orders.two_bw import TWO_BW": "imports TWO_BW",
        }.items()
    ),
    (
        "no other file names a schedule",
        {"penstock.a": '"""Like 2bw."""\ndef double():\n    """Under 1f1b-flush."""\nDEPTH = 2\n"""For gpipe."""'},
        {},
    ),
    *(
        ("no module is named after nothing", {f"penstock.{path}.queues": ""}, {path.rpartition(".")[2]})
        for path in ("utils", "runtime.common", "values.helpers")
    ),
    (
        "no public function shares a name with a module",
        {"penstock.rendering.pictures": "def plans() -> None: ...", "penstock.values.plans": ""},
        {"plans": "penstock.rendering.pictures"},
    ),
    (
        "no two public classes share a name",
        dict.fromkeys(("penstock.a", "penstock.b"), "class Queue: ...\nclass _Item: ..."),
        {"Queue": ["penstock.a", "penstock.b"]},
    ),
    (
        "short files have several importers",
        {
            "penstock.a": "import penstock.b\nfrom penstock.c import x\nfrom penstock import d",
            "penstock.b": "x = 0\n" * 79,
            "penstock.c": "x = 0\n" * 80,
            "penstock.d": "import penstock.a\nimport penstock.e",
            "penstock.e": "import penstock.a",
            "penstock.commands.f": "",
        },
        {"penstock.b", "penstock.d", "penstock.e"},
    ),
    *(
        ("long lists of arguments have keywords", {"penstock.a": text}, {"penstock.a": 1})
        for text in (
            "f(1, 2, 3, 4, 5, 6)",
            "Plan(1, 2, 3, 4, 5, 6, name='')",
            "f(1, *(2, 3), *[4, 5, 6])",
            "def f(a, b, c, d, e, g): ...",
            "def f(a, b, c, /, d, e, g=1, *, h=2): ...",
            "class A:\n    def __init__(self, a, b, c, d, e, g): ...",
        )
    ),
    *(
        ("long lists of arguments have keywords", {"penstock.a": text}, {})
        for text in ("f(1, 2, 3, 4, 5, g=6)", "f(*values)", "class A:\n    def f(self, a, b, c, d, e, *, g, **h): ...")
    ),
    *(
        ("arguments travel as typed values", {"penstock.a": text}, [f"penstock.a{found}"] if found else [])
        for text, found in {
            "def f(a, b):\n    g(locals())": ": locals()",
            "def f(given: Mapping[str, Any]): ...": ".f(given)",
            "class A:\n    def f(self, *, options: dict[str, object] | None = None): ...": ".A.f(options)",
            "def f(state: Mapping[str, Any]): ...": "",
            "def f(options: Mapping[str, int]): ...": "",
        }.items()
    ),
    *(
        ("lists of names stand where names are passed on", {"penstock.a": text}, ["penstock.a"])
        for text in ("def f(): ...\n__all__ = ['f']", "from x import b\n__all__ = []")
    ),
    ("nothing is hidden", {"penstock.a": "hasattr(x, 'y')"}, ["penstock.a:1: hasattr"]),
    ("nothing is hidden", {"penstock.a": "raise NotImplementedError"}, ["penstock.a:1: NotImplementedError"]),
]


@pytest.mark.parametrize(("law", "planted", "found"), PLANTED, ids=[law for law, _, _ in PLANTED])
def test_a_planted_breach_is_found(law: str, planted: dict[str, str], found: object) -> None:
    assert LAWS[law][0](planted) == found


@pytest.mark.parametrize(
    ("module", "target"),
    [
        ("penstock.runtime.devices.streams", "penstock.runtime.transport.distributed_transport"),
        ("penstock.runtime.transport.nccl.endpoints", "penstock.runtime.engine.worker"),
        ("penstock.runtime.execution.executor", "penstock.runtime.transport.transport"),
        ("penstock.runtime.execution.executor", "penstock.runtime.parameters.weight_versions"),
        ("penstock.runtime.parameters.weight_versions", "penstock.runtime.execution.executor"),
        ("penstock.runtime.batches.results", "penstock.runtime.parameters.weight_versions"),
        ("penstock.runtime.engine.worker", "penstock.runtime.assembly.started_engines"),
        ("penstock.profiling.profiler", "penstock.runtime.checkpoints.checkpoints"),
        ("penstock.values.plans", "penstock.timelines.timelines"),
        ("penstock.scheduling.orders.gpipe", "penstock.scheduling.verification.verifier"),
        ("penstock.capturing.export.tracing", "penstock.runtime.devices.streams"),
    ],
)
def test_an_import_against_the_flow_is_found(module: str, target: str) -> None:
    assert {module, target} <= SOURCES.keys()
    package, _, name = target.rpartition(".")
    for line in (f"import {target}", f"from {target} import x", f"def f():\n    from {package} import {name}"):
        assert laws.imports_against_flow({**SOURCES, module: line}, FLOW) == [f"{module} imports {target}"]


@pytest.mark.parametrize("text", ["import torch", "from torch.nn import Module", "def f():\n    import torch.nn"])
def test_an_import_of_torch_in_the_pure_half_is_found(text: str) -> None:
    assert len(laws.imports_of_torch({**sources_where(is_pure), "penstock.values.plans": text})) == 1


def test_another_reader_of_actions_is_found() -> None:
    planted = {"penstock.runtime.engine.engine": "from penstock.scheduling.actions import Forward, Send"}

    assert {"Receive", "Send"} <= MESSAGES
    assert "penstock.runtime.engine.engine" in readers_in_the_torch_half({**SOURCES, **planted})


@pytest.mark.processes
def test_pure_half_loads_where_there_is_no_torch() -> None:
    program = f"""
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Blocked())
import {", ".join(sources_where(is_pure))}
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240)

    assert (done.returncode, done.stderr) == (0, "")


def test_public_names_are_those_that_are_listed_here() -> None:
    assert {name for name in laws.exported(SOURCES["penstock"]) or [] if name != "__version__"} == set(PUBLIC.split())


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
