"""The flight record of a process: where it is in its program, what it waits for, and its stacks, as a JSON document.

Every process writes its own record. All times in a record are seconds before it was written, since the clocks of two
processes need not agree; only `written_unix` is a time of day.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from penstock.process_states import ProcessIdentity
from penstock.values.documents import YamlNode

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class JobRecord:
    """Describes a run: written once, by process 0."""

    job: str
    """Identifies the run, since a directory may be used again."""
    schedule: str
    ranks: int
    tensor_parallel: int
    plan: str
    """The text of the plan's file; empty for a schedule that is no one of Penstock's."""
    processes: tuple[ProcessIdentity, ...]


@dataclass(frozen=True, slots=True)
class ActionRecord:
    """Records an action that was done: when it began, in seconds before the record was written, and how long it took.

    On a GPU these are times of the host, which queues the work and does not wait for it.
    """

    action: str
    began: float
    seconds: float


@dataclass(frozen=True, slots=True)
class RowRecord:
    """Records how far a rank is in its present program: a step, a drain or an evaluation."""

    rank: int
    program: tuple[str, ...]
    done: int
    """The number of actions that are done."""
    runs: bool
    """Whether the next one has begun."""
    seconds: float
    """Since it has begun, or since the last one ended."""


@dataclass(frozen=True, slots=True)
class WaitRecord:
    """Records a wait that has lasted for a while: where, for which of the `processes`, and since when."""

    context: str
    processes: tuple[int, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Frame:
    """One call on the stack of a thread."""

    file: str
    line: int
    function: str
    code: str
    """The text of the line."""
    library: bool
    """Whether it belongs to Python, Penstock or another installed package."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" + (f": {self.code}" if self.code else "")


@dataclass(frozen=True, slots=True)
class ThreadRecord:
    """The stack of one thread, outermost call first."""

    name: str
    trains: bool
    """Whether it called the pipeline last."""
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class Memory:
    """The memory of a process in bytes; None where it has no such device."""

    host_bytes: int | None = None
    device_bytes: int | None = None
    reserved_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class RankRecord:
    """The flight record of one process."""

    job: str
    process: int
    identity: ProcessIdentity
    written_unix: float
    request: str
    """The last request for records that the process has seen."""
    failure: str
    """The error by which the pipeline of this process failed, and where; empty if it has not failed."""
    left: bool
    """Whether the pipeline of this process was closed, or its process left, without a failure."""
    call: str
    """The pipeline's method that runs, such as ``in a step``; empty outside of the pipeline."""
    call_seconds: float
    """Since it was called; outside, since the last one ended."""
    steps: int
    """The number of steps that have begun since the pipeline was built."""
    segment: str
    """The present program: ``step 12``, ``drain 13`` or ``evaluation``; empty before the first."""
    stages: tuple[tuple[int, ...], ...]
    """The ranks of every stage in it."""
    split: bool
    """Whether the replicas of a stage share every microbatch."""
    rows: tuple[RowRecord, ...]
    """One for every rank in this process."""
    last: tuple[ActionRecord, ...]
    """The last actions of this process, oldest first."""
    usual: dict[str, float]
    """The median seconds of its actions in the last steps, by stage and kind: ``3F``."""
    wait: WaitRecord | None
    memory: Memory
    threads: tuple[ThreadRecord, ...]


def dump_record(record: JobRecord | RankRecord) -> str:
    """The JSON document of `record`."""
    return json.dumps(asdict(record), separators=(",", ":"), allow_nan=False)


def read_record(kind: type[T], node: YamlNode) -> T:
    """The record of the dataclass `kind` in `node`. Raises the node's error if it is no such record."""
    record: T = node.build(lambda: _read(kind, node))
    return record


def _read(kind: Any, node: YamlNode) -> Any:
    if kind is str:
        return node.text()
    if kind is bool:
        return node.boolean()
    if kind is int:
        return node.integer()
    if kind is float:
        return float(node.number())
    if is_dataclass(kind):
        assert isinstance(kind, type)
        hints = get_type_hints(kind)
        entries = node.mapping([field.name for field in fields(kind)])
        return kind(**{name: _read(hints[name], entry) for name, entry in entries.items()})
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if node.value is None else _read(arguments[0], node)
    if origin is tuple:
        return tuple(_read(arguments[0], item) for item in node.items())
    assert origin is dict, kind
    if not isinstance(node.value, Mapping):
        node.fail("a mapping", "let Penstock write this file")
    return {name: _read(arguments[1], entry) for name, entry in node.mapping((), list(node.value)).items()}
