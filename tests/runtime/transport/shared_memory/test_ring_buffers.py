"""A queue of bytes in shared memory: nothing is lost, nothing blocks, and unused memory is released."""

import ctypes
import mmap
import os
import struct
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import TransportError
from penstock.runtime.transport.shared_memory.ring_buffers import Piece, RingReader, RingWriter


def piece_of(data: bytes) -> tuple[ctypes.Array[ctypes.c_char], Piece]:
    """Memory that holds `data`, and its address."""
    held = ctypes.create_string_buffer(data, max(len(data), 1))
    return held, (ctypes.addressof(held), len(data))


def write(ring: RingWriter, *pieces: bytes) -> bool:
    held = [piece_of(piece) for piece in pieces]
    return ring.write([piece for _, piece in held])


def read(ring: RingReader, *sizes: int) -> list[bytes]:
    held = [piece_of(bytes(size)) for size in sizes]
    ring.read([piece for _, piece in held])
    return [memory.raw[:size] for (memory, _), size in zip(held, sizes, strict=True)]


def ends() -> tuple[RingWriter, RingReader]:
    writer = RingWriter()
    return writer, RingReader(os.dup(writer.descriptor))


def held_bytes(writer: RingWriter) -> int:
    """The memory that the queue occupies."""
    return os.fstat(writer.descriptor).st_blocks * 512


@given(
    st.lists(
        st.one_of(st.none(), st.lists(st.one_of(st.integers(0, 40), st.integers(0, 90_000)), max_size=4).map(tuple)),
        max_size=60,
    )
)
def test_what_is_written_is_read(operations: list[tuple[int, ...] | None]) -> None:
    """An operation is a frame of pieces of these sizes, or None: a read."""
    writer, reader = ends()
    queued: deque[list[bytes]] = deque()
    for number, sizes in enumerate(operations):
        assert reader.filled() == bool(queued)
        if sizes is not None:
            pieces = [bytes([(number * 7 + index) % 251 + 1]) * size for index, size in enumerate(sizes)]
            if write(writer, *pieces):
                queued.append(pieces)
            else:
                # A writer that was refused has at least one frame to wait for.
                assert queued
        elif queued:
            pieces = queued.popleft()

            assert reader.size() == sum(map(len, pieces))
            assert read(reader, *map(len, pieces)) == pieces
    while queued:
        pieces = queued.popleft()
        assert read(reader, *map(len, pieces)) == pieces
    assert not reader.filled()


@given(st.lists(st.integers(0, 300_000), min_size=1, max_size=8))
def test_two_of_the_largest_frames_always_fit(sizes: list[int]) -> None:
    writer, reader = ends()
    largest = 0
    for size in sizes:
        largest = max(largest, size)
        for _ in range(2):
            assert write(writer, bytes(largest))
        for _ in range(2):
            read(reader, largest)


def test_a_larger_ring_replaces_the_smaller_one() -> None:
    writer, reader = ends()
    assert write(writer, b"small")
    assert write(writer, b"x" * 1_000_000)
    assert held_bytes(writer) >= 1_000_000

    assert read(reader, 5) == [b"small"]
    assert read(reader, 1_000_000) == [b"x" * 1_000_000]
    for _ in range(10):
        assert write(writer, b"y" * 1_000_000)
        read(reader, 1_000_000)
    # The counters, and the ring for two of the largest frames. The memory of the first ring is released.
    assert held_bytes(writer) <= mmap.PAGESIZE + 2_000_000 + 2 * mmap.PAGESIZE


def test_a_frame_of_another_size_than_expected_is_refused() -> None:
    writer, reader = ends()
    write(writer, b"four")

    with pytest.raises(TransportError, match="has 4 bytes where 5 were expected: the processes make different calls"):
        read(reader, 5)


def test_nothing_has_a_name() -> None:
    before = sorted(os.listdir("/dev/shm"))
    writer, _ = ends()
    write(writer, b"x" * 1_000_000)

    assert sorted(os.listdir("/dev/shm")) == before


def test_either_the_writer_sees_the_flag_or_the_reader_the_frame() -> None:
    writer, reader = ends()

    assert not writer.reader_sleeps()
    assert reader.mark_sleeping()
    assert writer.reader_sleeps()
    write(writer, b"frame")
    assert not reader.mark_sleeping()
    reader.mark_awake()
    assert not writer.reader_sleeps()


def word_at(writer: RingWriter, position: int, word: int) -> None:
    """Writes a word into the memory of the queue, as a hostile writer could."""
    os.pwrite(writer.descriptor, struct.pack("<q", word), position)


FIRST_FRAME = mmap.ALLOCATIONGRANULARITY


@pytest.mark.parametrize("word", [2**16, 2**40, 2**62, -1, -(2**16), -(2**62), -(2**63)])
def test_a_size_that_no_writer_writes_is_refused(word: int) -> None:
    writer, reader = ends()
    assert write(writer, b"text")
    word_at(writer, FIRST_FRAME, word)
    with pytest.raises(TransportError, match=r"expected messages of this run, found a (message|segment) of"):
        reader.size()


def test_a_file_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("other")
    os.ftruncate(descriptor, 2**20)
    with pytest.raises(TransportError, match="a file that another process could make smaller"):
        RingReader(descriptor)
    writer, _ = ends()
    with pytest.raises(PermissionError):
        os.ftruncate(writer.descriptor, 0)
