"""Tensors in the data files of a checkpoint, read one at a time and compared with their checksums.

The manifest says where each tensor is, so that no header of a file need be believed. A file is opened anew for every
tensor, and no more of it is in memory than that tensor.
"""

import hashlib
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError

_CHUNK = 1 << 20


class Damaged(CheckpointError):
    """A file of a checkpoint is missing, cut off or changed. Another checkpoint may be whole."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint that is not read yet."""

    path: Path
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    """Where its numbers begin in the file, in bytes."""
    sha256: str

    @property
    def bytes(self) -> int:
        """What its numbers take."""
        return self.shape.numel() * self.dtype.itemsize

    def read(self) -> Tensor:
        """The tensor on the CPU. `CheckpointError` if the file ends before it does."""
        tensor = torch.empty(self.shape, dtype=self.dtype)
        with opened(self.path) as file:
            file.seek(self.start)
            view = bytes_of(tensor)
            if len(view) and file.readinto(view) != len(view):
                raise Damaged(self._cut_off())
        return tensor

    def numpy(self) -> Any:
        """The tensor as an array, after `verify`."""
        self.verify()
        return self.read().numpy()

    def verify(self) -> None:
        """Raises `Damaged` unless the file has the bytes that were written. Holds none of them."""
        digest, left = hashlib.sha256(), self.bytes
        with opened(self.path) as file:
            file.seek(self.start)
            while left:
                chunk = file.read(min(left, _CHUNK))
                if not chunk:
                    raise Damaged(self._cut_off())
                digest.update(chunk)
                left -= len(chunk)
        if digest.hexdigest() != self.sha256:
            raise Damaged(
                f"{self.path}: expected {self.name} with the checksum {self.sha256[:12]}..., found "
                f"{digest.hexdigest()[:12]}...: the file was changed or damaged after it was written. "
                "Load another checkpoint"
            )

    def _cut_off(self) -> str:
        return f"{self.path}: expected {self.name} whole, found the end of the file in it. Load another checkpoint"


def read_value(value: Any) -> Any:
    """`value`, read if it is a `StoredTensor`."""
    return value.read() if isinstance(value, StoredTensor) else value


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of `tensor`, which is contiguous and on the CPU."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def check_file(path: Path, size: int, header: int, sha256: str) -> None:
    """Raises `Damaged` unless `path` is a file of `size` bytes whose first `header` bytes have the checksum."""
    with opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Damaged(f"{path}: expected {size} bytes, found {found}: it was cut off. Load another checkpoint")
        if hashlib.sha256(file.read(header)).hexdigest() != sha256:
            raise Damaged(f"{path}: expected the header that was written, found another one. Load another checkpoint")


@contextmanager
def opened(path: Path) -> Iterator[FileIO]:
    """The file at `path`, open for reading; `Damaged` for whatever the system refuses."""
    try:
        # A pipe under that name would not open before another process writes to it.
        if not stat.S_ISREG(path.stat().st_mode):
            raise Damaged(f"{path}: expected a file, found something else. Load another checkpoint")
        with path.open("rb", buffering=0) as file:
            yield file
    except OSError as error:
        raise Damaged(
            f"{path}: expected a readable file, found {error.strerror or error}. Load another checkpoint"
        ) from error
