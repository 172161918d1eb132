"""The processes of a pipeline: this one alone, or all those that ``torchrun`` has started.

The pipeline asks its world for ranks, a transport and collective calls, and does not depend on which world it is. In a
single process all ranks live in it, and the numbers are the same.
"""

import os
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from datetime import timedelta
from functools import partial
from traceback import walk_stack
from types import TracebackType
from typing import TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import PlanError, TransportError
from penstock.process_states import ProcessIdentity
from penstock.runtime.collectives import one_screen
from penstock.runtime.collectives.failures import FailureBoard, WaitObserver, require_descriptors
from penstock.runtime.collectives.store_gathers import PatientGather, StoreGather
from penstock.runtime.collectives.store_watch import StoreWatch
from penstock.runtime.collectives.timeouts import DEFAULT_TIMEOUT_SECONDS, GRACE_SECONDS, Timeout
from penstock.runtime.devices.local_devices import prepare_gpu
from penstock.runtime.devices.process_hooks import PROCESS_HOOKS, hooks_allowed
from penstock.runtime.devices.staging import staging_for
from penstock.runtime.transport.default_groups import call_at_meeting, check_token, launched_rank, make_default_group
from penstock.runtime.transport.distributed_transport import DistributedTransport
from penstock.runtime.transport.transport import Edge, LoopbackTransport, Transport
from penstock.torch_internals.distributed import hook_below

T = TypeVar("T")
Groups: TypeAlias = Iterable[tuple[int, ...]]

_PLACE = "_penstock_place"
"""The attribute of an error that was reported: where it was raised."""
_MEETING = "all ranks building their pipelines"


class SingleProcess:
    """A single process that holds all ranks. Its methods are those of `Processes`, where they are described."""

    def __init__(self) -> None:
        self.name = uuid.uuid4().hex
        self.processes = 1
        self.rank = 0
        self.group: dist.ProcessGroup | None = None
        self.watch: StoreWatch | None = None

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
        self,
        edges: Iterable[Edge],
        device: torch.device,
        timeout_seconds: float,
        groups: Groups = (),
        *,
        mesh_groups: Sequence[dist.ProcessGroup] = (),
        members: Sequence[int] = (),
    ) -> Transport:
        return LoopbackTransport(staging_for(device))

    @property
    def identities(self) -> tuple[ProcessIdentity, ...]:
        return (ProcessIdentity.own(),)

    def gather(self, value: T, context: str = "") -> Sequence[T]:
        return [value]

    def run(self, work: Callable[[], T], context: str, peers: Sequence[int] = ()) -> T:
        return work()

    def enter(self, place: str) -> None:
        """Does nothing: there are no other processes."""

    def gather_beside(self, timeout_seconds: float) -> None:
        return None

    def observe(self, observer: WaitObserver) -> None:
        """Does nothing: this process waits for no other one."""

    def report(self, context: str, error: BaseException) -> None:
        """Does nothing: there are no other processes."""

    def announce_leave(self) -> None:
        """Does nothing: there are no other processes."""

    def leave(self) -> None:
        """Does nothing: joining changed nothing."""


class Processes:
    """The processes of ``torch.distributed``'s default group, with at most one rank each. Made collectively.

    They wait for each other for at most `timeout_seconds`.
    """

    def __init__(self, timeout_seconds: float) -> None:
        self.processes = dist.get_world_size()
        self.rank, self._process = dist.get_rank(), os.getpid()
        world = dist.group.WORLD
        assert world is not None, "it has a size and a rank"
        self._others = [rank for rank in range(self.processes) if rank != self.rank]
        self._common = world.get_group_store()
        common = PrefixStore("penstock", self._common)
        # Every rank makes its worlds in the same order.
        number = call_at_meeting(
            lambda: common.add(f"worlds of {self.rank}", 1),
            time.monotonic() + timeout_seconds,
            timeout_seconds,
            "an answer of the store of the default process group",
        )
        self._store = PrefixStore(f"{number}", common)
        self._transports = self._gathers = 0
        self._left = False
        self._board = FailureBoard(self._store, self.rank, self.processes)
        self.watch: StoreWatch | None = self._board.watch
        """The thread that calls the store of these processes; None for a single process."""
        self._timeout = Timeout(self._board, timeout_seconds)
        self._gather = StoreGather("", self.rank, range(self.processes), self._timeout)
        try:
            met = self.gather((uuid.uuid4().hex, *astuple(ProcessIdentity.own())), _MEETING)
            self.identities = tuple([ProcessIdentity(*fields) for _, *fields in met])
            """By rank."""
            self._board.processes = dict(enumerate(self.identities))
            self.name: str = met[0][0]
            """A random name, the same in all processes."""
            check_token(self.rank, partial(self.gather, context=_MEETING))
            # Our own error says more than one of a collective, so it must come first.
            limit = timedelta(seconds=timeout_seconds + GRACE_SECONDS)
            # Tensors of the host need a group of their own: the default group may be NCCL's, which takes others only.
            making = "making a group of all ranks"
            self.run(partial(require_descriptors, self.processes - 1), making)
            self.group: dist.ProcessGroup | None = self.run(
                lambda: dist.new_group(backend="gloo", timeout=limit), making
            )
            """The group for collectives on CPU tensors; None for a single process."""
        except BaseException:
            self._board.close()
            raise
        self._previous_hook: Callable[[type[BaseException], BaseException, TracebackType | None], object]
        before = getattr(sys.excepthook, "__self__", None)
        # Those of pipelines that have failed and were closed stay until there is another one.
        self._previous_hook = (
            before._previous_hook if isinstance(before, Processes) and before._left else sys.excepthook
        )
        if hooks_allowed():
            sys.excepthook = self._report_uncaught

    def local(self, ranks: int, tensor_parallel_size: int = 1) -> tuple[int, ...]:
        """Which of a pipeline's `ranks` live here, if each consists of `tensor_parallel_size` processes. `PlanError` if
        they do not fit the processes.
        """
        needed = ranks * tensor_parallel_size
        if needed != self.processes:
            each = f" ({ranks} times tensor_parallel {tensor_parallel_size})" if tensor_parallel_size > 1 else ""
            raise PlanError(
                f"the plan is for {needed} rank(s){each} and {self.processes} process(es) were started: start as many "
                f"processes as the plan has ranks (torchrun --nproc-per-node {needed}), or plan for {self.processes}"
            )
        return (self.rank // tensor_parallel_size,)

    def connect(
        self,
        edges: Iterable[Edge],
        device: torch.device,
        timeout_seconds: float,
        groups: Groups = (),
        *,
        mesh_groups: Sequence[dist.ProcessGroup] = (),
        members: Sequence[int] = (),
    ) -> Transport:
        """Makes a transport along `edges`, with sums over `groups` of ranks. Collective.

        `mesh_groups`: groups in which this process's layers communicate. They end with the transport's connections if
        a rank fails. `members`: the processes that hold this process's rank together, if there are several.
        """
        name, self._transports = f"transport {self._transports}", self._transports + 1
        return DistributedTransport(
            edges,
            self.rank,
            self.processes,
            device,
            PrefixStore(name, self._store),
            name,
            Timeout(self._board, timeout_seconds),
            partial(self.gather, context="connecting the ranks"),
            groups,
            mesh_groups,
            members,
        )

    def gather(self, value: T, context: str = "") -> Sequence[T]:
        """Returns the `value` of every process, by rank of the process. Collective. It is plain: `encode_plain` says
        what that is. `context` says what for, in the same words in every process.

        `TransportError` if a process has failed, has ended, does not come in time, or gathers something else.
        """
        watch = self._board.watch
        where = context or watch.doing[0] or "between two calls"
        return self._gather(value, f"{where}, in {watch.call}" if watch.call else where)

    def run(self, work: Callable[[], T], context: str, peers: Sequence[int] = ()) -> T:
        """Returns ``work()``, which may wait for `peers` (all others, by default) in calls that nothing ends, such as
        collectives of PyTorch's. `TransportError` as from `gather`.
        """
        return self._timeout.run(work, context, peers or self._others)

    def enter(self, place: str) -> None:
        """Notes that the main thread is in `place`, for the errors of other processes; empty outside the pipeline."""
        self._board.watch.doing = place, time.monotonic()

    def gather_beside(self, timeout_seconds: float) -> PatientGather | None:
        """Makes a `gather` for another thread, whose calls wait at most `timeout_seconds`; None for a single process.
        Every process makes as many, in the same order.
        """
        name, self._gathers = f"beside {self._gathers}/", self._gathers + 1
        return PatientGather(name, self.rank, range(self.processes), Timeout(self._board, timeout_seconds))

    def report(self, context: str, error: BaseException) -> None:
        """Reports to the other processes that this one failed with `error`. `context` says where. A child that was
        forked reports nothing: it is no rank.
        """
        if os.getpid() != self._process:
            return
        vars(error).setdefault(_PLACE, context)
        reason = f"{type(error).__name__} {context}: {str(error).partition(chr(10))[0][:1000]}"
        self._board.observer.failing(reason)
        trace = "".join(traceback.format_exception(error))
        self._board.report(context, trace, sentence=one_screen.sentence_of(error))

    def announce_leave(self) -> None:
        """Lets the other processes know that this one takes part no longer. Called before its connections close."""
        self._board.leave()

    def observe(self, observer: WaitObserver) -> None:
        """Shows the waits and the failure of this process to `observer`."""
        self._board.observer = observer

    def leave(self) -> None:
        """Restores what joining changed in this process."""
        self._left = True
        # An error that closes the pipeline of a `with` block is still on its way.
        if sys.excepthook == self._report_uncaught and not self._board.failed:
            sys.excepthook = self._previous_hook
        group, self.group = self.group, None
        remove = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)
            # The addresses of its members are in the store of the default group.
            addresses = PrefixStore(f"{group.group_name}/", self._common)
            remove = partial(_remove_keys, processes=self.processes, others=[addresses])
        self._board.close(remove)

    def _report_uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        """Reports an error of the user's own code, so that the other ranks end as well, and shows it on one screen."""
        if not (isinstance(error, TransportError) or self._left):
            self.report("outside the pipeline", error)
        if isinstance(error, Exception) and one_screen.is_wanted(hook_below(self._previous_hook)):
            first, said, repeats = (
                self._board.watch.failure,
                one_screen.sentence_of(error),
                getattr(error, "repeats", ""),
            )
            other = None if first is None or first["rank"] == self.rank else first
            if not repeats and other and one_screen.are_alike(other["sentence"], said):
                repeats = f"rank {other['rank']} failed {other['place']}, and so did rank {self.rank}: {said}"
            if one_screen.show(error, self.rank, vars(error).get(_PLACE, "outside the pipeline"), repeats):
                return
        self._previous_hook(kind, error, trace)


World: TypeAlias = SingleProcess | Processes
"""The processes that hold the ranks of a pipeline."""


def _remove_keys(store: Store, processes: int, others: Sequence[Store]) -> None:
    """Called once by each of the `processes` of `store`, which is theirs alone, when it is done with the store.

    The last one deletes all keys of `store` and of `others`: a process may make many pipelines, and a store keeps what
    no one deletes. One that cannot list its keys or delete them keeps them.
    """
    # If the store cannot be reached, its process has ended.
    with suppress(RuntimeError, AttributeError):
        if store.add("left", 1) == processes:
            for own in (store, *others):
                for key in own.list_keys():
                    own.delete_key(key)


def join_world(timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> World:
    """Joins the processes of the initialized default group, else those of ``torchrun``, else this process alone.

    `TransportError` if another process does not come within `timeout_seconds`, and as from `launched_rank`.
    """
    # A spawned process imports the script under this name, which its functions keep once that is done.
    frames = (frame for frame, _ in walk_stack(None) if frame.f_code.co_name == "<module>")
    if any(frame.f_globals.get("__name__") == "__mp_main__" for frame in frames):
        raise TransportError(
            "this process is a worker that a data loader or multiprocessing has started (spawn), and it imports the "
            "script: expected no Pipeline in it. Put what the script does under if __name__ == '__main__':"
        )
    prepare_gpu()
    if dist.is_available() and dist.is_initialized():
        return Processes(timeout_seconds) if dist.get_world_size() > 1 else SingleProcess()
    rank, processes = launched_rank()
    if processes == 1:
        return SingleProcess()
    if not hooks_allowed():
        raise TransportError(
            f"WORLD_SIZE is {processes} and {PROCESS_HOOKS}=0: expected a process group that you have made, found "
            f"none. Call torch.distributed.init_process_group() before, or unset {PROCESS_HOOKS}"
        )
    make_default_group(rank, processes, timeout_seconds)
    return Processes(timeout_seconds)
