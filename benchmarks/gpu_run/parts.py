"""What the first run on a GPU consists of: parts, their tasks in order of worth, and the limit of each.

A part takes at most nine minutes, since machines with a GPU are often lent for ten minutes at a time. What a group does
not use of its limit is there for the later ones.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = [
    "CLOSING_SECONDS",
    "ENVIRONMENT",
    "MEETING",
    "PAIRS",
    "PARTS",
    "WAITING",
    "Group",
    "Part",
    "Program",
    "Suite",
    "Task",
]

CLOSING_SECONDS = 20.0
"""Of a part's limit this is kept to end what is overdue and to write the files."""
ENVIRONMENT = "environment"
"""The name of the task whose answer says what the others find."""


@dataclass(frozen=True, slots=True)
class Program:
    """A program of Python, whose figures are in a file that it writes."""

    name: str
    arguments: tuple[str, ...]
    """Of Python. A leading ``FOLDER/`` stands for the directory of its temporary files."""
    limit_seconds: float
    found: str
    """The name of the file in that directory: of lines of JSON (`.jsonl`), or of one value (`.json`)."""
    variables: Mapping[str, str] = field(default_factory=dict)
    needs_card: bool = True


@dataclass(frozen=True, slots=True)
class Suite:
    """The tests of a file that are marked `gpu`."""

    name: str
    path: str
    limit_seconds: float
    """At the first go; what is left of the group's limit goes to those that are not done."""
    selection: str = ""
    """An expression of pytest's ``-k``."""
    run_expected_failures: bool = False
    """As any other test, so that the reason of a failure is reported."""
    silence_seconds: float = 90.0
    """A test that takes longer hangs. The first one of a file also waits for processes that import torch."""
    needs_card: bool = False
    """Without a card each test says itself that it is skipped."""
    options: tuple[str, ...] = ()
    """Of pytest."""


Task = Program | Suite


@dataclass(frozen=True, slots=True)
class Group:
    """Tasks that are done one after the other, or several at once."""

    title: str
    limit_seconds: float
    tasks: tuple[Task, ...]
    at_once: int = 1


@dataclass(frozen=True, slots=True)
class Part:
    """What one command does."""

    number: int
    title: str
    limit_seconds: float
    groups: tuple[Group, ...]

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks of all groups."""
        return tuple(task for group in self.groups for task in group.tasks)


def _environment() -> Group:
    """The first `import torch` of a machine may take most of a minute."""
    arguments = ("benchmarks/gpu_run/environment.py", "FOLDER/environment.json")
    task = Program(ENVIRONMENT, arguments, 60, "environment.json", needs_card=False)
    return Group("machine, driver, versions, variables", 60, (task,))


def _probe(name: str, script: str, arguments: Sequence[str], limit: float, **variables: str) -> Program:
    words = (f"benchmarks/gpu_probe/{script}.py", *arguments, "--found", "FOLDER/found.jsonl")
    return Program(name, words, limit, "found.jsonl", variables)


WAITING = (
    "synchronize",
    "matmul",
    "matmul of another type",
    "backward",
    "elementwise",
    "fused adamw",
    "foreach adamw",
    "cudaMalloc",
    "empty_cache",
    "pinned memory",
    "stream",
    "event",
    "item",
    "copy from the host",
    "graph capture",
    "graph instantiation",
    "graph replay",
    "triton kernel",
    "torch.compile",
    "communicator",
)
"""Calls of the host in gpu_probe/waits.py; the first one is the control, which must wait."""
MEETING = "meeting"
PAIRS = ("both ways", "batched", "blocks", "late", "abort in turn", "abort at once", "abort in a group")
"""What two processes of one card try in gpu_probe/pairs.py, beside the meeting."""


def _waits() -> Group:
    tasks = [
        _probe(f"{call}, {loading}", "waits", (call,), 60, CUDA_MODULE_LOADING=loading)
        for call in WAITING
        for loading in ("LAZY", "EAGER")
    ]
    return Group("which calls of the host wait for a kernel that spins", 110, tuple(tasks), at_once=8)


def _queues() -> Group:
    tasks = [
        _probe("connections unset", "queues", ("unset",), 25),
        _probe("connections 8", "queues", ("8",), 25, CUDA_DEVICE_MAX_CONNECTIONS="8"),
        _probe("connections 32", "queues", ("32",), 25, CUDA_DEVICE_MAX_CONNECTIONS="32"),
    ]
    return Group("which streams are held up by one that spins", 60, tuple(tasks))


def _pairs(names: Sequence[str], limit: float, at_once: int, title: str) -> Group:
    tasks = [_probe(f"pair: {name}", "pairs", (name,), min(limit, 60)) for name in names]
    return Group(title, limit, tuple(tasks), at_once)


_OWN_LIMITS = ("--pool-seconds", "60", "--gpu-seconds", "70")
"""Those of the tests themselves come before that of their silence, and say where every thread stands."""
_OVER_NCCL = "nccl_between_processes"
_FIRST = Part(
    1,
    "machine, probe of the device, NCCL between two processes of one card",
    540,
    (
        _environment(),
        Group("costs on the host", 40, (_probe("costs", "costs", (), 40),)),
        # It reads how much of the card's memory is free, so that no other process may take any.
        _pairs([MEETING], 40, 1, "two processes on one card meet over NCCL"),
        _queues(),
        _waits(),
        _pairs(PAIRS, 110, 3, "what two processes on one card do over NCCL"),
        Group(
            "a pipeline of two processes on one card over NCCL",
            95,
            (
                Suite(
                    "test_gpu.py over NCCL",
                    "tests/gpu/test_gpu.py",
                    95,
                    f"{_OVER_NCCL} and flush and 1-1",
                    run_expected_failures=True,
                    silence_seconds=75,
                    needs_card=True,
                    options=_OWN_LIMITS,
                ),
            ),
        ),
    ),
)
_SECOND = Part(
    2,
    "the tests marked gpu, file by file",
    540,
    (
        _environment(),
        Group(
            "tests, in order of worth",
            460,
            (
                # Four cases that may each hang for minutes; part 1 has one of them.
                Suite("test_gpu.py", "tests/gpu/test_gpu.py", 190, f"not {_OVER_NCCL}", options=_OWN_LIMITS),
                Suite("test_gpu_memory.py", "tests/gpu/test_gpu_memory.py", 80, options=_OWN_LIMITS),
                Suite("test_profiling.py", "tests/profiling/test_profiler.py", 40, options=_OWN_LIMITS),
                Suite("test_data.py", "tests/test_data.py", 30, options=_OWN_LIMITS),
                Suite("test_dispatch.py", "tests/torch_internals/test_dispatch.py", 10, options=_OWN_LIMITS),
                Suite("test_failures.py", "tests/pipeline/test_failures.py", 50, options=_OWN_LIMITS),
            ),
        ),
    ),
)
_THIRD = Part(
    3,
    "benchmarks/gpu.py: every schedule beside a plain loop",
    540,
    (
        _environment(),
        Group(
            "the benchmark",
            460,
            (
                Program(
                    "benchmark",
                    # It begins nothing after its deadline, and ends what it has begun within a minute.
                    (
                        "benchmarks/gpu.py",
                        *("--deadline", "400", "--json", "FOLDER/gpu.json", "--save", "FOLDER/gpu.txt"),
                    ),
                    460,
                    "gpu.json",
                ),
            ),
        ),
    ),
)
PARTS = (_FIRST, _SECOND, _THIRD)
