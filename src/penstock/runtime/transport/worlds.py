"""The processes of a pipeline: this one alone, or all those that ``torchrun`` has started.

The pipeline asks its world for ranks, a transport and collective calls, and does not depend on which world it is. In a
single process all ranks live in it, and the numbers are the same.
"""

import json
import os
import sys
import traceback
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import PlanError, TransportError
from penstock.runtime.devices.local_devices import prepare_gpu
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS, hooks_allowed
from penstock.runtime.devices.staging import staging_for
from penstock.runtime.transport.distributed_transport import DistributedTransport
from penstock.runtime.transport.failures import FailureBoard
from penstock.runtime.transport.transport import Edge, LoopbackTransport, Transport
from penstock.runtime.transport.wait_observers import WaitObserver

__all__ = ["Processes", "SingleProcess", "World", "join_world"]

T = TypeVar("T")
Groups: TypeAlias = Iterable[tuple[int, ...]]


class World(Protocol):
    """The processes that hold the ranks of a pipeline."""

    name: str
    """A random name, the same in all processes."""
    processes: int
    rank: int
    """The rank of this process."""
    group: dist.ProcessGroup | None
    """The group for collectives on CPU tensors and Python objects; None for a single process."""

    def local(self, ranks: int, tensor_parallel_size: int = 1) -> tuple[int, ...]:
        """Which of a pipeline's `ranks` live here, if each consists of `tensor_parallel_size` processes. `PlanError` if
        they do not fit the processes.
        """

    def connect(
        self, edges: Iterable[Edge], device: torch.device, timeout_seconds: float, groups: Groups = ()
    ) -> Transport:
        """Makes a transport along `edges`, with sums over `groups` of ranks. Collective."""

    def gather(self, value: T) -> Sequence[T]:
        """Returns the `value` of every process, by rank of the process. Collective."""

    def publish(self, topic: str, numbers: Sequence[float]) -> None:
        """Makes `numbers` readable by all processes. Called once for each topic; does not block."""

    def published(self, topic: str) -> Sequence[Sequence[float]] | None:
        """Returns every process's numbers on `topic`, by rank; None while some are missing. Does not block."""

    def observe(self, observer: WaitObserver) -> None:
        """Shows the waits and the failure of this process to `observer`."""

    def report(self, context: str, error: BaseException) -> None:
        """Reports to the other processes that this one failed with `error`. `context` says where."""

    def leave(self) -> None:
        """Restores what joining changed in this process."""


class SingleProcess:
    """A single process that holds all ranks."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.processes = 1
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        self._numbers: dict[str, Sequence[float]] = {}

    def local(self, ranks: int, tensor_parallel_size: int = 1) -> tuple[int, ...]:
        if tensor_parallel_size > 1:
            needed = ranks * tensor_parallel_size
            raise PlanError(
                f"tensor_parallel is {tensor_parallel_size} and this is a single process: expected {needed} processes, "
                f"{tensor_parallel_size} for each rank. Start them with torchrun --nproc-per-node {needed}, or set "
                "tensor_parallel to 1"
            )
        return tuple(range(ranks))

    def connect(
        self, edges: Iterable[Edge], device: torch.device, timeout_seconds: float, groups: Groups = ()
    ) -> Transport:
        return LoopbackTransport(staging_for(device))

    def gather(self, value: T) -> Sequence[T]:
        return [value]

    def publish(self, topic: str, numbers: Sequence[float]) -> None:
        self._numbers[topic] = numbers

    def published(self, topic: str) -> Sequence[Sequence[float]] | None:
        return [self._numbers[topic]] if topic in self._numbers else None

    def observe(self, observer: WaitObserver) -> None:
        """Does nothing: this process waits for no other one."""

    def report(self, context: str, error: BaseException) -> None:
        """Does nothing: there are no other processes."""

    def leave(self) -> None:
        """Does nothing: joining changed nothing."""


class Processes:
    """The processes of ``torch.distributed``'s default group, with at most one rank each. Made collectively."""

    def __init__(self) -> None:
        self.processes = dist.get_world_size()
        self.rank = dist.get_rank()
        # Python objects need a group of their own: the default group may be NCCL's, which takes GPU tensors only.
        with _explained():
            self.group: dist.ProcessGroup | None = dist.new_group(backend="gloo")
        self.name = self.gather(uuid.uuid4().hex)[0]
        world = dist.group.WORLD
        assert world is not None, "it has a size and a rank"
        store = PrefixStore(f"penstock/{self.name}", world.get_group_store())
        self._store, self._transports = store, 0
        self._board = FailureBoard(store, self.rank, self.processes)
        self._previous_hook = sys.excepthook
        if hooks_allowed():
            sys.excepthook = self._report_uncaught

    def local(self, ranks: int, tensor_parallel_size: int = 1) -> tuple[int, ...]:
        needed = ranks * tensor_parallel_size
        if needed != self.processes:
            each = f" ({ranks} times tensor_parallel {tensor_parallel_size})" if tensor_parallel_size > 1 else ""
            raise PlanError(
                f"the plan is for {needed} rank(s){each} and {self.processes} process(es) were started: start as many "
                f"processes as the plan has ranks (torchrun --nproc-per-node {needed}), or plan for {self.processes}"
            )
        return (self.rank // tensor_parallel_size,)

    def connect(
        self, edges: Iterable[Edge], device: torch.device, timeout_seconds: float, groups: Groups = ()
    ) -> Transport:
        store = PrefixStore(f"transport {self._transports}", self._store)
        self._transports += 1
        with _explained():
            return DistributedTransport(
                edges,
                self.rank,
                self.processes,
                device,
                store,
                self._board,
                timeout_seconds,
                self.gather,
                groups,
            )

    def gather(self, value: T) -> Sequence[T]:
        values: list[T | None] = [None] * self.processes
        with _explained():
            dist.all_gather_object(values, value, group=self.group)
        return values  # type: ignore[return-value]  # all_gather_object has filled every entry

    def publish(self, topic: str, numbers: Sequence[float]) -> None:
        # If the store cannot be reached, its process has ended. A later wait for that process reports it.
        with suppress(RuntimeError):
            self._store.set(f"{topic}/{self.rank}", json.dumps(numbers))

    def published(self, topic: str) -> Sequence[Sequence[float]] | None:
        names = [f"{topic}/{rank}" for rank in range(self.processes)]
        with suppress(RuntimeError):
            if self._store.check(names):
                return [json.loads(self._store.get(name)) for name in names]
        return None

    def report(self, context: str, error: BaseException) -> None:
        reason = f"{type(error).__name__} {context}: {str(error).partition(chr(10))[0][:1000]}"
        self._board.observer.failing(reason)
        self._board.report(context, "".join(traceback.format_exception(error)))

    def observe(self, observer: WaitObserver) -> None:
        self._board.observer = observer

    def leave(self) -> None:
        if sys.excepthook == self._report_uncaught:
            sys.excepthook = self._previous_hook

    def _report_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports an error of the user's own code, so that the other ranks end as well, with its traceback."""
        if not isinstance(error, TransportError):
            self.report("outside the pipeline", error)
        self._previous_hook(kind, error, trace)


@contextmanager
def _explained() -> Iterator[None]:
    """Explains an error of a collective call, whose own message only names a socket."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(
            "another rank ended or failed while all ranks were setting up or gathering something: look at the other "
            f"ranks' logs. torch.distributed says: {error}"
        ) from error


def join_world() -> World:
    """Joins the processes of the initialized default group, else those of ``torchrun``, else this process alone."""
    prepare_gpu()
    if dist.is_available() and dist.is_initialized():
        return Processes() if dist.get_world_size() > 1 else SingleProcess()
    if (processes := int(os.environ.get("WORLD_SIZE", "1"))) > 1 and "RANK" in os.environ:
        if not hooks_allowed():
            raise TransportError(
                f"WORLD_SIZE is {processes} and {PROCESS_HOOKS}=0: expected a process group that you have made, found "
                f"none. Call torch.distributed.init_process_group() before, or unset {PROCESS_HOOKS}"
            )
        dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")
        return Processes()
    return SingleProcess()
