"""Stores for what a device has no room for: in host memory, or in a file in a directory.

What is put and fetched is flat and of bytes. On an accelerator the copies run on the two streams of its staging, into
pinned memory and back. On a CPU host memory is the memory that they come from, so that only a file saves any; a thread
writes and reads it while the computation goes on. The file is written and not mapped: a disk that is full is then an
error and not a signal that ends the process. It has no name, and ends with the process. `memory` is read in place: in a
directory a file of its own is mapped, which has its room on the disk before.

Laws of this file:
  1. What was put is valid when its copy has ended, and so is what was fetched. `wait` orders the caller after a copy.
  2. A tensor that is put must be kept, unchanged, until `wait` has returned for its copy.
  3. A slot is used again only after `release`, and after the copy back: ranks that share a device share slots, and the
     stream of one rank is not ordered after the copies of another one.
"""

import os
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.host_copies import HostCopier
from penstock.runtime.devices.staging import NOTHING_STAGED, HostStaging, Staged, Staging, layout_of

HOST = "host"
"""The value of ``offload_to=`` for host memory."""
Slot: TypeAlias = Any
"""Room for one tensor in a store."""
Copying: TypeAlias = Any
"""Copies between a device and a store, on their way."""


class MemoryStore:
    """Keeps tensors of the device of `staging` in host memory, which is pinned if it is an accelerator's."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._free: defaultdict[int, list[tuple[Tensor, Staged]]] = defaultdict(list)
        """By size, each with the last copy from it."""
        self._last = NOTHING_STAGED
        """The last copy back."""

    def memory(self, layout: Layout) -> Tensor:
        """Memory for copies by the staging."""
        return self._staging.host_memory(layout)

    def put(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Staged]:
        """Starts to copy `tensors` of the device. Returns their slots."""
        # All slots before the copies, which come after what this stream waits for now.
        slots = iter([self._slot(layout_of(tensor)) for tensor in tensors])
        staged = self._staging.to_host(tensors, lambda _: next(slots), kept=True)
        return staged[0], staged

    def fetch(self, slots: Sequence[Tensor]) -> tuple[Sequence[Tensor], Staged]:
        """Starts to copy back what is in `slots`, into new memory of the device."""
        staged = self._staging.back_to_device(slots)
        self._last = (), staged[1]
        return staged[0], staged

    def wait(self, copying: Staged) -> None:
        """Has what the caller computes from now on come after these copies."""
        self._staging.follow(copying)

    def release(self, slots: Sequence[Tensor], fetched: Staged | None) -> None:
        """Lets others use `slots`, after they have been copied back, if they are: `fetched`."""
        for slot in slots:
            self._free[slot.numel()].append((slot, NOTHING_STAGED if fetched is None else ((), fetched[1])))

    def close(self) -> None:
        """Frees all that is kept. Later work of the caller comes after all copies, so that it may have their memory."""
        self.wait(self._last)
        self._free.clear()

    def _slot(self, layout: Layout) -> Tensor:
        if not (free := self._free[layout[0].numel()]):
            return self._staging.host_memory(layout)
        slot, fetched = free.pop()
        self.wait(fetched)
        return slot


_Span: TypeAlias = tuple[int, int]
"""The first byte in the file, and how many."""


class FileStore:
    """Keeps tensors of the CPU in a file without a name in `directory`, by the methods of `MemoryStore`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise PenstockError(
                f"offload_to={str(directory)!r}: expected a directory that this process can write in, found: "
                f"{error.strerror}. Create it, or pass another one"
            ) from error
        self._copier = HostCopier(HostStaging(), torch.device("cpu"))
        self._free: defaultdict[int, list[_Span]] = defaultdict(list)
        self._size = 0

    def memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        size = torch.empty_strided(shape, strides, dtype=dtype, device="meta").untyped_storage().nbytes()
        if not size:
            return torch.empty_strided(shape, strides, dtype=dtype)
        # A full disk is an error here, and none later; macOS has no such call.
        reserve = getattr(os, "posix_fallocate", lambda file, _, length: os.truncate(file, length))
        try:
            with tempfile.NamedTemporaryFile(dir=self._directory) as file:
                reserve(file.fileno(), 0, size)
                storage: Any = torch.UntypedStorage.from_file(file.name, True, size)
        except OSError as error:
            raise self._no_room(size, error) from error
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def put(self, tensors: Sequence[Tensor]) -> tuple[Sequence[_Span], "Future[None]"]:
        slots = [self._slot(tensor.numel()) for tensor in tensors]
        return slots, self._copier.submit(self._pass, os.pwrite, list(zip(tensors, slots, strict=True)))

    def fetch(self, slots: Sequence[_Span]) -> tuple[Sequence[Tensor], "Future[None]"]:
        tensors = [torch.empty(size, dtype=torch.uint8) for _, size in slots]
        return tensors, self._copier.submit(self._pass, _read, list(zip(tensors, slots, strict=True)))

    def wait(self, copying: "Future[None]") -> None:
        try:
            copying.result()
        except OSError as error:
            raise self._no_room(self._size, error) from error

    def release(self, slots: Sequence[_Span], fetched: "Future[None] | None") -> None:
        for slot in slots:
            self._free[slot[1]].append(slot)

    def close(self) -> None:
        self._copier.close()
        self._file.close()

    def _no_room(self, size: int, error: OSError) -> PenstockError:
        return PenstockError(
            f"offload_to={str(self._directory)!r}: expected room for {size} bytes there, found: {error.strerror}. Keep "
            "the directory while the pipeline trains, pass one of a larger file system, or offload less"
        )

    def _slot(self, size: int) -> _Span:
        if free := self._free[size]:
            return free.pop()
        self._size += size
        return self._size - size, size

    def _pass(self, move: Callable[[int, Any, int], int], pairs: list[tuple[Tensor, _Span]]) -> None:
        """Writes or reads, in the thread, which holds no tensor when it is done. A call of the system moves 2 GB at
        most.
        """
        while pairs:
            tensor, (start, size) = pairs.pop()
            memory, done = tensor.numpy().data, 0
            while done < size:
                done += move(self._file.fileno(), memory[done:], start + done)


def _read(file: int, memory: memoryview, start: int) -> int:
    found = os.preadv(file, [memory], start)
    if not found:
        raise OSError(0, "the file ends too early")
    return found


HostStore: TypeAlias = MemoryStore | FileStore


def make_host_store(offload_to: str | Path, staging: Staging) -> HostStore:
    """The store of ``offload_to=``: `HOST`, or a directory. `PenstockError` for a directory beside an accelerator."""
    if offload_to == HOST:
        return MemoryStore(staging)
    if staging.separate_memory:
        raise PenstockError(
            f"offload_to={str(offload_to)!r}: expected {HOST!r} where stages run on a GPU, found a directory: its "
            f"copies go to pinned memory. Pass {HOST!r}"
        )
    return FileStore(Path(offload_to))
