"""Communicators of some of the ranks, made by these alone.

``torch.distributed.new_group`` is a call of all ranks. It has them wait for each other through the store, once for each
group, and where the default group is bound to a device (``init_process_group(device_id=...)``), ranks that a group does
not connect split the communicator of the default group: those that it does connect take no part in that if the group is
Gloo's, and all stand still (pytorch#145376). So the backends are made here, without groups around them.

A backend numbers its ranks in ascending order of their ranks in the world.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.torch_internals.distributed import end_coalescing, start_coalescing

__all__ = ["Communicator", "Members", "Work", "connect_gloo", "connect_nccl", "nccl_failure", "together"]


class Work(Protocol):
    """What a device, or a thread of the backend, has been told to do."""

    def is_completed(self) -> bool:
        """Whether it is done, or has failed."""

    def wait(self) -> Any:
        """Has the stream of this thread wait for it."""


class Communicator(Protocol):
    """This process's end of a communicator: a backend of ``torch.distributed``."""

    @property
    def supports_coalescing(self) -> bool:
        """Whether several calls can be one, which begin together."""

    def send(self, tensors: list[Tensor], dst_rank: int, tag: int, /) -> Work:
        """Sends them, beside the computation."""

    def recv(self, tensors: list[Tensor], src_rank: int, tag: int, /) -> Work:
        """Receives them, beside the computation."""

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_sizes: list[int], sent_sizes: list[int], /
    ) -> Work:
        """Gives each rank its piece of `sent`; equal pieces if no sizes are given."""

    def abort(self) -> None:
        """Ends what it waits for. May wait until all communicators of the device have been told to end, too."""

    def shutdown(self) -> None:
        """Gives back what it has taken. Its other ends do so at the same time."""


class Members(NamedTuple):
    """Who a communicator connects."""

    name: str
    """Of the communicator, the same on all of them, which no other one has in `store`."""
    ranks: tuple[int, ...]
    """In ascending order."""
    rank: int
    """This process."""
    store: Store
    """Where they meet."""
    seconds: float
    """How long a message may take."""

    def place(self, rank: int) -> int:
        """What the communicator calls `rank`."""
        return self.ranks.index(rank)


def together(communicator: Communicator, calls: Sequence[Callable[[], Work]]) -> Sequence[Work]:
    """What `calls` of `communicator` give. NCCL does several in one kernel, so that none waits for another one."""
    if len(calls) == 1 or not communicator.supports_coalescing:
        return [call() for call in calls]
    start_coalescing(communicator)
    for call in calls:
        call()
    return [end_coalescing(communicator)]


def connect_gloo(members: Members) -> Communicator:
    """A communicator of `members` on the host."""
    made = dist.ProcessGroupGloo(
        PrefixStore(members.name, members.store),
        members.place(members.rank),
        len(members.ranks),
        timedelta(seconds=members.seconds),
    )
    return cast(Communicator, made)


def connect_nccl(members: Members, ctas: int, device: torch.device) -> Communicator:
    """A communicator of `members`, of whom each has a GPU; this one's is `device`. They connect now.

    NCCL waits for a message by a kernel, in as many blocks as a communicator has channels, each of which keeps a
    multiprocessor from computing. By default these are up to 32, of the 132 that an H100 has.
    """
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.group_name = members.name  # type: ignore[assignment]  # a string by another name
    options.global_ranks_in_group = list(members.ranks)
    options.config.max_ctas = ctas
    # PyTorch's own thread would end the process at the first error, before any rank could say what went wrong; a watch
    # of ours looks for errors instead. The other two would have the host wait for messages, and warn of what is meant.
    with _environment(
        TORCH_NCCL_ASYNC_ERROR_HANDLING="0",
        TORCH_NCCL_BLOCKING_WAIT="0",
        TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING="false",
    ):
        made = dist.ProcessGroupNCCL(
            PrefixStore(members.name, members.store), members.place(members.rank), len(members.ranks), options
        )
        # PyTorch counts from when a message is told of, however late the device comes to it; the watch knows better.
        made.set_timeout(timedelta(days=1))
        # Otherwise single messages and grouped ones would each connect at their first use, and apart.
        made.eager_connect_single_device(device)
    return cast(Communicator, made)


def nccl_failure(communicator: Any) -> str:
    """What PyTorch has found wrong with `communicator`, which `connect_nccl` made; empty if nothing."""
    error = communicator.get_error()
    return "" if error.name == "SUCCESS" else f"NCCL: {error}"


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """In its body the environment has `variables`."""
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
