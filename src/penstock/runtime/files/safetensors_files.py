"""Safetensors files, written tensor by tensor, and the directory that they appear in all at once.

The format is a length, a JSON header with names, types, shapes and places, and then the numbers. The library's own
writer takes all tensors of a file at once, on the CPU; a process of a pipeline has no room for that.

Laws of this file:
  1. A writer holds no tensor longer than it takes to write it.
  2. New files appear in a directory after all of them are written, and the one that a reader looks for first is the
     last. So an interruption leaves the old set, the new one, or none that looks whole, and never a mixture.
  3. Nothing is removed but the weights that the new ones replace: files that an index names, and that end in
     ``.safetensors``.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from penstock.capturing.weight_files import INDEX, NEW, SINGLE, TYPE_CODES, read_index
from penstock.errors import CheckpointError
from penstock.runtime.files.file_locks import lock_of

PARTIAL, REPLACED, _LOCK = ".weights.partial", ".weights.replaced.json", ".weights.lock"
"""In the directory: where files are while they are written, the index of the weights that they replace while these are
removed, and the file that says whose all of them are: it is there before them, and goes last."""


@dataclass(frozen=True, slots=True)
class StoredEntry:
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """What its numbers take in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class SafetensorsWriter:
    """Writes the tensors of `entries` to a new file at `path`, one after the other, in their order.

    `mode`: the permissions of the file, of which the process's umask takes away.
    """

    def __init__(self, path: Path, entries: Sequence[StoredEntry], mode: int = 0o666) -> None:
        header = json.dumps(_header(entries), separators=(",", ":")).encode()
        # Numbers begin at a multiple of eight bytes.
        header += b" " * (-len(header) % 8)
        self._left = [entry.bytes for entry in reversed(entries)]
        header = len(header).to_bytes(8, "little") + header
        self.header_bytes = len(header)
        """Where the numbers of the first tensor begin."""
        self.header_sha256 = hashlib.sha256(header).hexdigest()
        self._file = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb")
        self._file.write(header)

    def append(self, tensor: Tensor) -> None:
        """Writes the next tensor, which is on the CPU in the type and shape of its entry."""
        values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
        assert values.nbytes == self._left.pop(), "as its entry says"
        self._file.write(values.data)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._file:
            if error is None:
                assert not self._left, "all entries are written"
                self._file.flush()
                os.fsync(self._file.fileno())


def write_index(directory: Path, homes: Mapping[str, str], entries: Collection[StoredEntry]) -> None:
    """Writes the index of the files in `directory`. `homes`: by the name of each of `entries`, its file."""
    metadata = {
        "total_parameters": sum(torch.Size(entry.shape).numel() for entry in entries),
        "total_size": sum(entry.bytes for entry in entries),
    }
    text = json.dumps({"metadata": metadata, "weight_map": dict(sorted(homes.items()))}, indent=2)
    (directory / INDEX).write_text(text + "\n")


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """A block with an empty `PARTIAL` in `directory` for files that are written, while no other process writes weights
    there. What an interruption has left is removed.
    """
    if directory.exists() and not directory.is_dir():
        raise CheckpointError(f"{directory}: expected a directory or nothing, found a file. Choose another name")
    lock, partial = lock_of(directory.absolute() / _LOCK), directory / PARTIAL
    if not lock.path.exists():
        _require_no(directory, (PARTIAL, NEW, REPLACED), os.path.lexists)
    _require_no(directory, (SINGLE, INDEX), os.path.isdir)
    directory.mkdir(parents=True, exist_ok=True)
    with lock.writing:
        lock.take()
        try:
            # Before anything is written: an index that cannot be read says nothing of the weights to be replaced.
            _shards_of(directory / INDEX)
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            yield
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if not (directory / NEW).exists():
                with suppress(OSError):
                    lock.path.unlink()
            lock.close()


def publish(directory: Path, last: str) -> None:
    """Moves all that was written to `PARTIAL` into `directory`, in place of older weights; `last` goes last.

    An interruption before the end leaves what is not yet moved in `.weights.new`.
    """
    for path in (directory / PARTIAL).iterdir():
        write_through(path)
    new, index, replaced = directory / NEW, directory / INDEX, directory / REPLACED
    # An interruption may have left shards that no index in the directory names any more.
    left = _shards_of(new / INDEX) + _shards_of(replaced)
    names = sorted(path.name for path in (directory / PARTIAL).iterdir())
    _require_no(directory, (*names, *left, *_shards_of(index)), os.path.isdir)
    shutil.rmtree(new, ignore_errors=True)
    (directory / PARTIAL).rename(new)
    if last in (SINGLE, INDEX):
        (directory / SINGLE).unlink(missing_ok=True)
        if index.exists():
            index.replace(replaced)
        for name in (*left, *_shards_of(replaced)):
            (directory / name).unlink(missing_ok=True)
        replaced.unlink(missing_ok=True)
    else:
        (directory / last).unlink(missing_ok=True)
    for name in sorted(names, key=lambda name: name == last):
        (new / name).replace(directory / name)
    new.rmdir()
    write_through(directory)


def _require_no(directory: Path, names: Iterable[str], spoils: Callable[[Path], bool]) -> None:
    for path in (directory / name for name in names):
        if spoils(path):
            raise CheckpointError(
                f"{path}: expected nothing, or a file of weights that are replaced, found what save_weights has not "
                "written. Move it away, or give another directory"
            )


def _header(entries: Sequence[StoredEntry]) -> dict[str, Any]:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        if entry.dtype not in TYPE_CODES:
            raise CheckpointError(
                f"{entry.name} has the type {entry.dtype}, which safetensors files cannot hold: expected one of "
                f"{', '.join(str(known).removeprefix('torch.') for known in TYPE_CODES)}. Convert it with dtype="
            )
        stop = start + entry.bytes
        header[entry.name] = {
            "dtype": TYPE_CODES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [start, stop],
        }
        start = stop
    return header


def _shards_of(index: Path) -> list[str]:
    """The weights that `index` names, in its own directory; none if there is no index."""
    names = set(read_index(index).values()) if index.exists() else ()
    return [name for name in sorted(names) if name.endswith(".safetensors")]


def write_through(path: Path) -> None:
    """Waits until `path` is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
