"""Copies of tensors in host memory, made while the computation goes on.

On a CPU a thread copies, and where copies go both ways, one for each. On an accelerator its own stream for copies does,
and the thread has nothing to do. The memory of copies that are no longer needed is kept for the next ones: most of the
time of a copy into new memory goes to its pages (pinning 4 GB took 3 s beside an H200).

Laws of this file:
  1. A copy begins with the tensors as they are when `start` is called.
  2. A tensor that is being copied may be changed only after `order_after`.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import TypeVar

import torch
from torch import Tensor

from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.staging import (
    NOTHING_STAGED,
    HostStaging,
    Memory,
    Staged,
    Staging,
    contiguous_layout,
    layout_of,
)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostCopies:
    """The copies of some tensors, on their way."""

    tensors: Sequence[Tensor]
    """In the order of the originals. They hold the values when `wait` returns."""
    staged: Staged
    """Those that an accelerator copies."""
    copied: "Future[None]"
    """Done when the thread has made the others."""

    def wait(self) -> None:
        """Blocks until all are made. Raises what went wrong with them."""
        self.copied.result()
        self.staged[1].synchronize()


class HostCopier:
    """Makes copies for one user at a time, of tensors on `device`, which `staging` is of, and on the host."""

    def __init__(self, staging: Staging, device: torch.device) -> None:
        self._staging, self._device = staging, device
        self._thread: Thread | None = None
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._kept: defaultdict[Layout, list[Tensor]] = defaultdict(list)
        """Memory of earlier copies."""

    def start(self, tensors: Sequence[Tensor]) -> HostCopies:
        """Starts to copy `tensors`. Called on the computing thread, in whose stream the tensors have their values."""
        on_device = self._staging.separate_memory
        away = [index for index, one in enumerate(tensors) if on_device and one.device.type == self._device.type]
        staged = self._staging.to_host([tensors[index] for index in away], self._memory) if away else NOTHING_STAGED
        copies: dict[int, Tensor] = dict(zip(away, staged[0], strict=True))
        here = [index for index in range(len(tensors)) if index not in copies]
        for index in here:
            copies[index] = self._memory(contiguous_layout(tensors[index]))
        pairs = [(copies[index], tensors[index].detach()) for index in here]
        if on_device:
            # Few and small ones, such as an optimizer's counters, unless its state is on the host.
            _copy(pairs)
        copied = _done() if on_device else self.submit(_copy, pairs)
        return HostCopies([copies[index] for index in range(len(tensors))], staged, copied)

    def order_after(self, copies: HostCopies) -> None:
        """Makes what this thread does from now on come after `copies`. Blocks the host only for a CPU's tensors."""
        copies.copied.result()
        self._staging.follow(copies.staged)

    def submit(self, work: Callable[..., T], *arguments: object) -> "Future[T]":
        """Runs ``work(*arguments)`` in the thread, after all that was given to it before."""
        if self._thread is None:
            # A daemon: one of `concurrent.futures` takes no more work once the interpreter ends.
            self._thread = Thread(target=self._serve, name="penstock-copies", daemon=True)
            self._thread.start()
        future: Future[T] = Future()
        self._work.put(partial(fulfil, future, partial(work, *arguments)))
        return future

    def recycle(self, copies: Sequence[Tensor]) -> None:
        """Takes the memory of `copies` for later ones: nothing else may use them any more."""
        for copy in copies:
            self._kept[layout_of(copy)].append(copy)

    def close(self) -> None:
        """Ends the thread when its work is done, and drops the memory."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
            self._thread = None
        self._kept.clear()

    def _serve(self) -> None:
        self._staging.enter_thread()
        while (work := self._work.get()) is not None:
            work()
            # What it refers to may be dropped while the thread waits.
            del work

    def _memory(self, layout: Layout) -> Tensor:
        kept = self._kept[layout]
        return kept.pop() if kept else self._staging.host_memory(layout)


@dataclass(frozen=True, slots=True)
class _Copied:
    """An event: all of these are done, and none has failed."""

    futures: Sequence["Future[None]"]

    def query(self) -> bool:
        return all(future.done() and future.exception() is None for future in self.futures)

    def synchronize(self) -> None:
        """Raises what went wrong with the copies."""
        for future in self.futures:
            future.result()


def copy_memory(target: Tensor, source: Tensor) -> None:
    """Copies `source` into `target`, outside of autograd."""
    with torch.no_grad():
        target.copy_(source)


class ThreadStaging(HostStaging):
    """Copies tensors of the CPU to and from other memory of the host, in a thread for each direction. Its methods are
    those of `DeviceStaging`; a caller blocks where a stream would wait.

    `write` and `read` copy the second of two tensors into the first one, to and from that memory.
    """

    def __init__(
        self,
        write: Callable[[Tensor, Tensor], None] = copy_memory,
        read: Callable[[Tensor, Tensor], None] = copy_memory,
    ) -> None:
        self._moves = [(HostCopier(HostStaging(), torch.device("cpu")), move) for move in (write, read)]
        self._last = [_done(), _done()]

    def to_host(self, tensors: Sequence[Tensor], memory: Memory | None = None, *, kept: bool = False) -> Staged:
        targets = [(memory or self.host_memory)(layout_of(tensor)) for tensor in tensors]
        return targets, self._start(0, list(zip(targets, tensors, strict=True)))

    def back_to_device(self, tensors: Sequence[Tensor]) -> Staged:
        copies = [self.host_memory(layout_of(tensor)) for tensor in tensors]
        return copies, self._start(1, list(zip(copies, tensors, strict=True)))

    def in_place(self, tensors: Sequence[Tensor]) -> Staged:
        return tensors, _Copied(tuple(self._last))

    def follow(self, staged: Staged) -> None:
        staged[1].synchronize()

    def close(self) -> None:
        """Ends the threads when their copies are made."""
        for copier, _ in self._moves:
            copier.close()

    def _start(self, way: int, pairs: list[tuple[Tensor, Tensor]]) -> _Copied:
        copier, move = self._moves[way]
        if pairs:
            self._last[way] = copier.submit(_move_each, move, pairs[::-1])
        return _Copied((self._last[way],) if pairs else ())


def _move_each(move: Callable[[Tensor, Tensor], None], pairs: list[tuple[Tensor, Tensor]]) -> None:
    """It holds no tensor when it is done."""
    while pairs:
        move(*pairs.pop())


def _done() -> "Future[None]":
    future: Future[None] = Future()
    future.set_result(None)
    return future


def fulfil(future: "Future[T]", work: Callable[[], T]) -> None:
    """Has ``work()`` decide the result of `future`."""
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        copy_memory(target, source)
