"""Stores for what a device has no room for: in host memory, or in a file in a directory.

`memory` is a tensor's home, which users read in place, and `staging` copies to and from homes: on an accelerator on two
streams, into pinned memory and back, on a CPU in two threads. There host memory is the memory that tensors come from,
so that only a file saves any. In a directory a home is a part of the file, which is mapped and has its room on the disk
before: a disk that is full is then an error and not a signal that ends the process. The file is written and read by
calls, which is twice as fast as through the map, and the kernel drops the pages: in a memory cgroup pages that are not
yet written count. It has no name, and ends with the process.

What is put and fetched, flat and of bytes, has homes that are used again.

Laws of this file:
  1. What was put is valid when its copy has ended, and so is what was fetched. `wait` orders the caller after a copy.
  2. A tensor that is put must be kept, unchanged, until `wait` has returned for its copy.
  3. A slot is used again only after `release`, and after the copy back: ranks that share a device share slots, and the
     stream of one rank is not ordered after the copies of another one.
"""

import ctypes
import mmap
import os
import tempfile
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.errors import PenstockError
from penstock.runtime.devices.accelerators import Layout
from penstock.runtime.devices.host_copies import ThreadStaging
from penstock.runtime.devices.staging import NOTHING_STAGED, DeviceStaging, HostStaging, Staged, Staging, layout_of

HOST = "host"
"""The value of ``offload_to=`` for host memory."""


class MemoryStore:
    """Keeps tensors of the device of `staging` in host memory, which is pinned if it is an accelerator's."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self.staging: Staging = staging if isinstance(staging, DeviceStaging) else ThreadStaging()
        """Copies to and from what `memory` returned."""
        self._free: defaultdict[int, list[tuple[Tensor, Staged]]] = defaultdict(list)
        """By size, each with the last copy from it."""
        self._last = NOTHING_STAGED
        """The last copy back."""

    def memory(self, layout: Layout) -> Tensor:
        """Memory for copies by the staging."""
        return self._staging.host_memory(layout)

    def check(self) -> None:
        """Raises `PenstockError` if something is lost of what is kept."""

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is in memory such as `memory` returns."""
        return tensor.device.type == "cpu" and (not self._staging.separate_memory or tensor.is_pinned())

    def put(self, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Staged]:
        """Starts to copy `tensors` of the device. Returns their slots."""
        # All slots before the copies, which come after what this stream waits for now.
        slots = iter([self._slot(layout_of(tensor)) for tensor in tensors])
        staged = self.staging.to_host(tensors, lambda _: next(slots), kept=True)
        return staged[0], staged

    def fetch(self, slots: Sequence[Tensor]) -> tuple[Sequence[Tensor], Staged]:
        """Starts to copy back what is in `slots`, into new memory of the device."""
        staged = self.staging.back_to_device(slots)
        self._last = (), staged[1]
        return staged[0], staged

    def wait(self, copying: Staged) -> None:
        """Has what the caller computes from now on come after these copies."""
        self.staging.follow(copying)

    def release(self, slots: Sequence[Tensor], fetched: Staged | None) -> None:
        """Lets others use `slots`, after they have been copied back, if they are: `fetched`."""
        for slot in slots:
            self._free[slot.numel()].append((slot, NOTHING_STAGED if fetched is None else ((), fetched[1])))

    def close(self) -> None:
        """Frees all that is kept. Later work of the caller comes after all copies, so that it may have their memory."""
        self.wait(self._last)
        self._free.clear()
        if isinstance(self.staging, ThreadStaging):
            self.staging.close()

    def _slot(self, layout: Layout) -> Tensor:
        if not (free := self._free[layout[0].numel()]):
            return self.memory(layout)
        slot, fetched = free.pop()
        self.wait(fetched)
        return slot


_Span: TypeAlias = tuple[int, int]
"""The first byte in the file, and how many."""
_PAGE, _WAIT = mmap.ALLOCATIONGRANULARITY, 7
"""The unit of maps; and the flags of ``sync_file_range`` that have it wait until all is written."""
_MOST_PAGES = 2**26
"""Bytes that stay in the kernel's memory of what was written, and of what was read."""
_advise, _NOT_NEEDED = getattr(os, "posix_fadvise", None), getattr(os, "POSIX_FADV_DONTNEED", 0)
_SYSTEM = ctypes.CDLL(None, use_errno=True)
_map, _unmap = _SYSTEM.mmap, _SYSTEM.munmap
# Each map of Python's own keeps a file open.
_map.restype, _unmap.argtypes = ctypes.c_void_p, (ctypes.c_void_p, ctypes.c_size_t)
_map.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
_SHARED = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED
_write_out = getattr(_SYSTEM, "sync_file_range", None)
if _write_out is not None:
    _write_out.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


class FileStore(MemoryStore):
    """Keeps tensors of the CPU in a file without a name in `directory`."""

    def __init__(self, directory: Path) -> None:
        super().__init__(HostStaging())
        self._directory = directory
        try:
            self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise PenstockError(
                f"offload_to={str(directory)!r}: expected a directory that this process can write in, found: "
                f"{error.strerror}. Create it, or pass another one"
            ) from error
        # A pipeline whose build has failed is collected, not closed.
        self._close = weakref.finalize(self, self._file.close)
        self._spans: defaultdict[int, list[_Span]] = defaultdict(list)
        """By length, those of homes that are no more."""
        self._size = 0
        self._homes: dict[int, int] = {}
        """By the address of what is mapped, its first byte in the file."""
        self._touched: dict[Any, list[_Span]] = {os.pwrite: [], _read: []}
        """What was written and read, and may have pages in memory."""
        write = partial(self._pass_home, os.pwrite)
        self.staging = ThreadStaging(write, lambda tensor, home: self._pass_home(_read, home, tensor))

    def memory(self, layout: Layout) -> Tensor:
        shape, strides, dtype = layout
        size = torch.empty_strided(shape, strides, dtype=dtype, device="meta").untyped_storage().nbytes()
        if not size:
            return torch.empty_strided(shape, strides, dtype=dtype)
        self.check()
        # A full disk is an error here, and none later; macOS has no such call.
        reserve = getattr(os, "posix_fallocate", lambda file, start, length: os.truncate(file, start + length))
        try:
            length = -(-size // _PAGE) * _PAGE
            start, _ = span = self._spans[length].pop() if self._spans[length] else (self._size, length)
            if start == self._size:
                reserve(self._file.fileno(), start, length)
                self._size += length
            address = _map(None, length, *_SHARED, self._file.fileno(), start)
            if address == ctypes.c_void_p(-1).value:
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        except OSError as error:
            raise self._no_room(size, error) from error
        mapped = (ctypes.c_char * size).from_address(address)
        weakref.finalize(mapped, self._forget, address, span).atexit = False
        self._homes[address] = start
        storage = torch.frombuffer(mapped, dtype=torch.uint8).untyped_storage()
        return torch.empty(0, dtype=dtype).set_(storage, 0, shape, strides)

    def _forget(self, address: int, span: _Span) -> None:
        """Ends a map, after the last tensor there."""
        del self._homes[address]
        _unmap(address, span[1])
        self._spans[span[1]].append(span)

    def check(self) -> None:
        # The next write would make a short file longer again, with zeros for what is lost. Read before the file grows.
        if (expected := self._size) > (found := os.fstat(self._file.fileno()).st_size):
            raise PenstockError(
                f"offload_to={str(self._directory)!r}: expected {expected} bytes in the file without a name there "
                f"(descriptor {self._file.fileno()} of process {os.getpid()}), found {found}: it was truncated, and "
                "weights or state are lost. Look for what did that, and go on from the last checkpoint"
            )

    def holds(self, tensor: Tensor) -> bool:
        return tensor.data_ptr() in self._homes

    def _pass_home(self, move: Callable[[int, Any, int], int], home: Tensor, tensor: Tensor) -> None:
        """In the thread of `move`."""
        if not home.nbytes:
            return
        self.check()
        # Its memory in its own order: homes are laid out as what they are the homes of.
        memory = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
        start, touched, done = self._homes[home.data_ptr()], self._touched[move], 0
        try:
            # A call of the system moves 2 GB at most.
            while done < home.nbytes:
                done += move(self._file.fileno(), memory[done:], start + done)
            touched.append((start, home.nbytes))
            if sum(size for _, size in touched) >= _MOST_PAGES:
                self._drop_pages(touched)
        except OSError as error:
            raise self._no_room(home.nbytes, error) from error

    def _drop_pages(self, touched: list[_Span]) -> None:
        """Has the kernel forget the pages of these spans, when they are on the disk."""
        file = self._file.fileno()
        while touched:
            span = touched.pop()
            if _write_out is None or _write_out(file, *span, _WAIT):
                os.fsync(file)
            if _advise is not None:
                _advise(file, *span, _NOT_NEEDED)

    def close(self) -> None:
        # A copy that has failed was an error before.
        self._last = NOTHING_STAGED
        super().close()
        self._close()

    def _no_room(self, size: int, error: OSError) -> PenstockError:
        return PenstockError(
            f"offload_to={str(self._directory)!r}: expected room for {size} bytes there, found: {error.strerror}. Keep "
            "the directory while the pipeline trains, pass one of a larger file system, or offload less"
        )


def _read(file: int, memory: memoryview, start: int) -> int:
    if not (found := os.preadv(file, [memory], start)):
        raise OSError(0, "the file ends too early")
    return found


def make_host_store(offload_to: str | Path, staging: Staging) -> MemoryStore:
    """The store of ``offload_to=``: `HOST`, or a directory. `PenstockError` for a directory beside an accelerator."""
    if offload_to == HOST:
        return MemoryStore(staging)
    if staging.separate_memory:
        raise PenstockError(
            f"offload_to={str(offload_to)!r}: expected {HOST!r} where stages run on a GPU, found a directory: its "
            f"copies go to pinned memory. Pass {HOST!r}"
        )
    return FileStore(Path(offload_to))
