"""Communicators between some of the ranks, made without the others.

``torch.distributed.new_group`` must be called by all ranks, and synchronizes them through the store once for each
group. If the default group is bound to a device (``init_process_group(device_id=...)``), there is a second problem:
ranks outside the new group split the communicator of the default group. That is a collective of all ranks, but the
members of a new Gloo group take no part in it, so all ranks hang (pytorch#145376). So this file creates the backends
directly, without a process group around them.

A backend numbers its ranks in ascending order of their ranks in the world.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.torch_internals.distributed import end_coalescing, gloo_backend, start_coalescing

_NEVER_SENT = 2**20
"""The tag of messages that no rank sends."""


class CommunicatorWork(Protocol):
    """An operation of a communicator that has been started."""

    def is_completed(self) -> bool:
        """Whether the operation is done or has failed."""

    def wait(self, timeout: timedelta = ..., /) -> Any:
        """Makes the current stream of this thread wait for the operation; on the host, for at most `timeout`."""


class Communicator(Protocol):
    """This process's end of a communicator: a backend of ``torch.distributed``."""

    @property
    def supports_coalescing(self) -> bool:
        """Whether several operations can be merged into one that starts them together."""

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int, /) -> CommunicatorWork:
        """Starts to send the tensors, beside the computation."""

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int, /) -> CommunicatorWork:
        """Starts to receive the tensors, beside the computation."""

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], /
    ) -> CommunicatorWork:
        """Sends each rank its slice of `sent`. The slices are equal if no sizes are given."""

    def abort(self) -> None:
        """Ends all operations. May block until all communicators of the device are being aborted as well."""

    def shutdown(self) -> None:
        """Releases the communicator. Collective."""


class Members(NamedTuple):
    """The processes that a communicator connects."""

    name: str
    """The name of the communicator: the same on all members, and unique in `store`."""
    ranks: tuple[int, ...]
    """The ranks of the members, in ascending order."""
    rank: int
    """The rank of this process."""
    store: Store
    """Where the members exchange their addresses."""
    seconds: float
    """The timeout of an operation."""

    def group_rank(self, rank: int) -> int:
        """The rank that `rank` has inside the communicator."""
        return self.ranks.index(rank)


def coalesce(communicator: Communicator, calls: Sequence[Callable[[], CommunicatorWork]]) -> Sequence[CommunicatorWork]:
    """Starts the operations `calls` of `communicator` together. NCCL runs them in one kernel, so that none of them
    waits for another.
    """
    if len(calls) == 1 or not communicator.supports_coalescing:
        return [call() for call in calls]
    start_coalescing(communicator)
    for call in calls:
        call()
    return [end_coalescing(communicator)]


def connect_gloo(members: Members) -> Communicator:
    """Makes a communicator of `members` on the host."""
    store, rank = PrefixStore(members.name, members.store), members.group_rank(members.rank)
    return cast(Communicator, gloo_backend(store, rank, len(members.ranks), timedelta(seconds=members.seconds)))


def break_gloo(communicator: Communicator, peer: int) -> None:
    """Ends all operations of `communicator`, which `connect_gloo` made: their waits raise. `peer`: another rank of it.

    Gloo's own ``abort()`` and ``shutdown()`` leave threads where they wait. But a receive whose wait ends at a timeout
    closes the connections of its communicator.
    """
    with suppress(RuntimeError):
        communicator.recv([torch.empty(1, dtype=torch.uint8)], peer, _NEVER_SENT).wait(timedelta(milliseconds=1))


def connect_nccl(members: Members, ctas: int, device: torch.device) -> Communicator:
    """Makes and connects a communicator of `members`, which have one GPU each; `device` is this one's.

    A kernel of NCCL waits for each message. It has as many blocks as the communicator has channels, and each block
    keeps a multiprocessor from computing. NCCL's default is up to 32 channels; an H100 has 132 multiprocessors.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.group_name = members.name  # type: ignore[assignment]  # a string by another name
    options.global_ranks_in_group = list(members.ranks)
    options.config.max_ctas = ctas
    # By default a thread of PyTorch ends the process at the first error, before any rank could say what went wrong. Our
    # own watchdog looks for errors instead. The other two variables turn off blocking waits on the host and a warning
    # about messages between two ranks, which are intended here.
    with (
        without_monitor(),
        _environment(
            TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
            TORCH_NCCL_BLOCKING_WAIT="0",
            TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="false",
        ),
    ):
        made = dist.ProcessGroupNCCL(
            PrefixStore(members.name, members.store), members.group_rank(members.rank), len(members.ranks), options
        )
        # PyTorch measures the timeout from the call, however late the device begins the operation. Our own watchdog
        # measures better.
        made.set_timeout(timedelta(days=1))
        # Without this call, single and merged messages would each connect at their first use, separately.
        made.eager_connect_single_device(device)
    return cast(Communicator, made)


def without_monitor() -> AbstractContextManager[None]:
    """A context in which backends of NCCL are made without PyTorch's monitor, which would end the process minutes after
    an error that the script may have caught, and would write a record of all ranks before, with a lock that sends take.
    """
    return _environment(
        TORCH_NCCL_ENABLE_MONITORING="0", TORCH_NCCL_DUMP_ON_TIMEOUT="0", TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC="1"
    )


def nccl_failure(communicator: Any) -> str:
    """Describes the error that PyTorch has found in `communicator`, from `connect_nccl`; empty if there is none."""
    error = communicator.get_error()
    return "" if error.name == "SUCCESS" else f"NCCL: {error}"


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Sets `variables` in the environment for the duration of a block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
