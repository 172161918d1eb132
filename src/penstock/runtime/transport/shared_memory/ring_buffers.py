"""A queue of bytes between two processes that share memory: one writes, one reads, neither waits for the other.

The memory is a file without a name (``memfd_create``), so nothing is left anywhere when its processes end, however they
end, and the size of ``/dev/shm`` is no limit. It begins with a page that holds two counters, the bytes written and the
bytes read since the beginning, and a note of the reader that it goes to sleep; behind it lie *segments*, of which the
last one is in use, as a ring.

A record is a word with its length, and its bytes. A record that would not fit twice into the ring makes the writer
begin a larger segment; a word below zero tells the reader so, who then gives the old one's memory back.

Laws of this file:
  1. Only the writer changes the first counter, only the reader the second one, and each after the bytes it speaks of
     have been copied. Both are aligned words, which x86-64 stores at once and in the order of the program; there are
     no rings on machines that promise less.
  2. It never waits. Whoever wants to wait has other means to do so.
"""

import ctypes
import mmap
import os
import platform
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import TypeAlias

from penstock.errors import TransportError

__all__ = ["Piece", "RingReader", "RingWriter", "can_share"]

Piece: TypeAlias = tuple[int, int]
"""Memory of this process: its address, and its number of bytes."""

RECORDS = 2
"""So many of the largest records fit into a ring: one that is read and one on its way."""
_LEAST_BYTES = 2**16
_PAGE = mmap.ALLOCATIONGRANULARITY
_WORD = 8
_WRITTEN, _READ, _ASLEEP = 0, 8, 16
"""Where the counters and the reader's note lie, in words: each has a cache line to itself."""


def can_share() -> bool:
    """Whether this machine has what a ring needs, and lets this process have it."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return False
    try:
        RingWriter()
    except OSError:
        return False
    return True


class _Segment:
    """`size` bytes of a file from `offset` on, as a ring that begins at the count `start`."""

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
        """Copies `piece` to where `count` points."""
        address, size = piece
        place = (count - self.start) % self.size
        first = self.size - place
        if size <= first:
            ctypes.memmove(self._address + place, address, size)
        else:
            ctypes.memmove(self._address + place, address, first)
            ctypes.memmove(self._address, address + first, size - first)

    def get(self, count: int, piece: Piece) -> None:
        """Copies what lies where `count` points to `piece`."""
        address, size = piece
        place = (count - self.start) % self.size
        first = self.size - place
        if size <= first:
            ctypes.memmove(address, self._address + place, size)
        else:
            ctypes.memmove(address, self._address + place, first)
            ctypes.memmove(address + first, self._address, size - first)


class RingWriter:
    """The writing end of a new queue. The file `descriptor` is what the reader needs."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("penstock", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, _PAGE + _LEAST_BYTES)
        self._page = mmap.mmap(self.descriptor, _PAGE)
        self._counters = memoryview(self._page).cast("q")
        self._segment = _Segment(self.descriptor, _PAGE, _LEAST_BYTES, 0)
        self._written = 0
        self._fence = threading.Lock()

    def write(self, pieces: Sequence[Piece]) -> bool:
        """Writes a record out of `pieces`; False if there is no room at present."""
        needed, total = _WORD, 0
        for _, size in pieces:
            needed += _padded(size)
            total += size
        segment, written = self._segment, self._written
        if needed * RECORDS > segment.size:
            if self._room(segment) < _WORD:
                return False
            size = -(-needed * RECORDS // _PAGE) * _PAGE
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

    def asleep(self) -> bool:
        """Whether the reader may have gone to sleep before it saw the last record."""
        # What was written must be there for the reader before its note is looked at: taking a lock is a fence.
        with self._fence:
            pass
        return self._counters[_ASLEEP] != 0

    def _room(self, segment: _Segment) -> int:
        return segment.size - (self._written - max(self._counters[_READ], segment.start))


class RingReader:
    """The reading end of the queue whose file is `descriptor`, which is the reader's own from now on."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        weakref.finalize(self, os.close, descriptor)
        self._page = mmap.mmap(descriptor, _PAGE)
        self._counters = memoryview(self._page).cast("q")
        self._segment = _Segment(descriptor, _PAGE, _LEAST_BYTES, 0)
        self._read = 0
        self._fence = threading.Lock()

    def filled(self) -> bool:
        """Whether there is a record."""
        return self._counters[_WRITTEN] != self._read

    def lie_down(self) -> bool:
        """Notes that the reader goes to sleep, until it does `rise`; False if a record has come in time."""
        self._counters[_ASLEEP] = 1
        # The writer must see the note, or the reader the record.
        with self._fence:
            pass
        return not self.filled()

    def rise(self) -> None:
        """Takes the note back."""
        self._counters[_ASLEEP] = 0

    def size(self) -> int:
        """The bytes of the next record, which must be there."""
        segment = self._segment
        word = segment.word(self._read)
        if word < 0:
            self._read += _WORD
            self._segment = _Segment(self._descriptor, segment.end, -word, self._read)
            segment.map.madvise(mmap.MADV_REMOVE)
            word = self._segment.word(self._read)
        return word

    def read(self, pieces: Sequence[Piece]) -> None:
        """Reads the next record, which must be there, into `pieces`. `TransportError` if they are not as long."""
        size, expected = self.size(), sum([length for _, length in pieces])
        if size != expected:
            raise TransportError(
                f"a message has {size} bytes where {expected} were expected: the processes "
                "make different calls. Call the same methods of the Pipeline on every rank, in the same order"
            )
        count = self._read + _WORD
        for piece in pieces:
            self._segment.get(count, piece)
            count += _padded(piece[1])
        self._read = self._counters[_READ] = count


def _padded(size: int) -> int:
    return (size + _WORD - 1) & -_WORD
