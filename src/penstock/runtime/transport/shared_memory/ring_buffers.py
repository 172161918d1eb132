"""A queue of bytes between two processes that share memory: one writes, one reads, and neither blocks.

The memory is a file without a name (``memfd_create``). So nothing is left behind when its processes end, however they
end, and the size of ``/dev/shm`` is no limit. It begins with a page that holds two counters, the bytes written and the
bytes read since the beginning, and a flag that the reader sets before it sleeps. The *segments* follow; the last one is
in use, as a ring.

A frame is a word with its length, and its bytes. If two frames of some size would not fit into the ring, the writer
begins a larger segment before it writes one. A negative word tells the reader the size of the new segment; the reader
then releases the memory of the old one.

Invariants of this file:
  1. Only the writer changes the first counter, and only the reader the second one, each after the bytes that it counts
     have been copied. Both are aligned words, which x86-64 stores atomically and in program order. On machines with
     weaker guarantees there are no rings.
  2. Nothing here blocks. A caller that wants to wait has other means.
  3. The reader checks every size that it reads against the file before it uses it. The file is sealed against becoming
     smaller, since memory that is cut off ends the process that reads it.
"""

import ctypes
import fcntl
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TypeAlias

from penstock.errors import TransportError

Piece: TypeAlias = tuple[int, int]
"""Memory of this process: its address and its size in bytes."""

_FRAMES = 2
"""This many frames of the largest size fit into a ring: one that is read and one on its way."""
_LEAST_BYTES = 2**16
_PAGE = mmap.ALLOCATIONGRANULARITY
_WORD = 8
_WRITTEN, _READ, _ASLEEP = 0, 8, 16
"""The positions of the counters and of the sleep flag, in words: each has a cache line of its own."""


def can_share() -> bool:
    """Whether this machine supports rings, and allows this process to make one."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        RingWriter()
    except OSError:
        return False
    return True


class _Segment:
    """`size` bytes of a file, from `offset` on, as a ring whose first byte has the count `start`."""

    def __init__(self, descriptor: int, offset: int, size: int, start: int) -> None:
        self.map = mmap.mmap(descriptor, size, offset=offset)
        self.start, self.size, self.end = start, size, offset + size
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self._words = memoryview(self.map).cast("q")

    def put_word(self, count: int, word: int) -> None:
        self._words[(count - self.start) % self.size // _WORD] = word

    def word(self, count: int) -> int:
        return self._words[(count - self.start) % self.size // _WORD]

    def put(self, count: int, piece: Piece) -> None:
        """Copies `piece` to the position of `count`."""
        address, size = piece
        offset = (count - self.start) % self.size
        first = self.size - offset
        if size <= first:
            ctypes.memmove(self._address + offset, address, size)
        else:
            ctypes.memmove(self._address + offset, address, first)
            ctypes.memmove(self._address, address + first, size - first)

    def get(self, count: int, piece: Piece) -> None:
        """Copies from the position of `count` to `piece`."""
        address, size = piece
        offset = (count - self.start) % self.size
        first = self.size - offset
        if size <= first:
            ctypes.memmove(address, self._address + offset, size)
        else:
            ctypes.memmove(address, self._address + offset, first)
            ctypes.memmove(address + first, self._address, size - first)


class RingWriter:
    """The writing end of a new queue. The reader needs the file `descriptor`."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _PAGE + _LEAST_BYTES)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)
        self._page = mmap.mmap(self.descriptor, _PAGE)
        self._counters = memoryview(self._page).cast("q")
        self._segment = _Segment(self.descriptor, _PAGE, _LEAST_BYTES, 0)
        self._written = 0
        self._fence = threading.Lock()

    def write(self, pieces: Sequence[Piece]) -> bool:
        """Writes a frame made of `pieces`. Returns False if there is no room at present."""
        needed, total = _WORD, 0
        for _, size in pieces:
            needed += _padded(size)
            total += size
        segment, written = self._segment, self._written
        if needed * _FRAMES > segment.size:
            if self._room(segment) < _WORD:
                return False
            size = -(-needed * _FRAMES // _PAGE) * _PAGE
            os.ftruncate(self.descriptor, segment.end + size)
            segment.put_word(written, -size)
            segment = self._segment = _Segment(self.descriptor, segment.end, size, written + _WORD)
            written = self._written = written + _WORD
        elif self._room(segment) < needed:
            return False
        count = written + _WORD
        for piece in pieces:
            segment.put(count, piece)
            count += _padded(piece[1])
        segment.put_word(written, total)
        self._written = self._counters[_WRITTEN] = count
        return True

    def reader_sleeps(self) -> bool:
        """Whether the reader may have fallen asleep before it saw the last frame."""
        # The frame must be visible to the reader before its flag is read. Taking a lock is a memory fence.
        with self._fence:
            pass
        return self._counters[_ASLEEP] != 0

    def _room(self, segment: _Segment) -> int:
        return segment.size - (self._written - max(self._counters[_READ], segment.start))


class RingReader:
    """The reading end of the queue in the file `descriptor`, which it takes over.

    `TransportError` if the file is not one of `RingWriter`, or holds what no writer of this run can have written.
    """

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        if not _is_sealed(descriptor) or os.fstat(descriptor).st_size < _PAGE + _LEAST_BYTES:
            raise _foreign("a file that another process could make smaller, or that is too small")
        self._page = mmap.mmap(descriptor, _PAGE)
        self._counters = memoryview(self._page).cast("q")
        self._segment = _Segment(descriptor, _PAGE, _LEAST_BYTES, 0)
        self._read = 0
        self._fence = threading.Lock()

    def filled(self) -> bool:
        """Whether there is a frame."""
        return self._counters[_WRITTEN] != self._read

    def mark_sleeping(self) -> bool:
        """Sets the flag that the reader sleeps, until `mark_awake`. Returns False if a frame has arrived in time."""
        self._counters[_ASLEEP] = 1
        # Either the writer sees the flag, or the reader sees the frame.
        with self._fence:
            pass
        return not self.filled()

    def mark_awake(self) -> None:
        """Clears the flag."""
        self._counters[_ASLEEP] = 0

    def size(self) -> int:
        """The size in bytes of the next frame, which must be there."""
        segment = self._segment
        word = segment.word(self._read)
        if word < 0:
            if segment.end - word > os.fstat(self._descriptor).st_size or -word % _PAGE:
                raise _foreign(f"a segment of {-word} bytes")
            self._read += _WORD
            self._segment = _Segment(self._descriptor, segment.end, -word, self._read)
            segment.map.madvise(mmap.MADV_REMOVE)
            word = self._segment.word(self._read)
        if not 0 <= word <= self._segment.size - _WORD:
            raise _foreign(f"a message of {word} bytes in {self._segment.size} bytes")
        return word

    def expect(self, expected: int) -> None:
        """Raises `TransportError` if the next frame, which must be there, has other than `expected` bytes."""
        size = self.size()
        if size != expected:
            raise TransportError(
                f"a message has {size} bytes where {expected} were expected: the processes "
                "make different calls. Call the same methods of the Pipeline on every rank, in the same order"
            )

    def read(self, pieces: Sequence[Piece]) -> None:
        """Reads the next frame, which must be there, into `pieces`. `TransportError` if the sizes differ."""
        total = 0
        for _, size in pieces:
            total += size
        self.expect(total)
        count = self._read + _WORD
        for piece in pieces:
            self._segment.get(count, piece)
            count += _padded(piece[1])
        self._read = self._counters[_READ] = count


def _padded(size: int) -> int:
    return (size + _WORD - 1) & -_WORD


def _is_sealed(descriptor: int) -> bool:
    """Whether the file can only grow."""
    try:
        return bool(fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK)
    except OSError:
        return False


def _foreign(found: str) -> TransportError:
    return TransportError(
        f"shared memory of another process: expected messages of this run, found {found}. Another program has written "
        "to it, or the processes run different versions of Penstock: see docs/trust.md"
    )
