"""The manifest of a checkpoint: what is in it, where, and how to notice that it is damaged.

``checkpoint_writer.py`` writes it. It is JSON: a format, a checksum, and the content. The content is read as data of an
unknown author: sizes and names are checked before anything is read by them. The manifest says where each tensor is, so
that no header of a file need be believed. A file is opened anew for every tensor, and no more of it is in memory than
that tensor.
"""

import copy
import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.runtime.files.plain_values import Json, decode, type_named
from penstock.runtime.files.step_directories import MANIFEST, is_file_name
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.subclasses import form_of, plain_tensors, put_together, taken_apart

FORMAT = "penstock-checkpoint-1"
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
        # Also where the user has another default device.
        tensor = torch.empty(self.shape, dtype=self.dtype, device="cpu")
        with _opened(self.path) as file:
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
        with _opened(self.path) as file:
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


@dataclass(frozen=True, slots=True, eq=False)
class Manifest:
    """The content of a manifest."""

    directory: Path
    content: Mapping[str, Any]
    sha256: str
    """The checksum of the content."""

    @property
    def step(self) -> int:
        """The number that the checkpoint was saved under."""
        return int(self.content["step"])

    @property
    def run(self) -> str:
        """The name of the run that saved it; empty if it was written before runs had names."""
        return str(self.content.get("run", ""))

    @property
    def model(self) -> Mapping[str, Mapping[str, Any]]:
        """By name, ``dtype`` and ``shape`` of all entries of the model's state dict, and ``stored``, under which name
        the tensor is stored.
        """
        found: Mapping[str, Mapping[str, Any]] = self.content["model"]
        return found

    def tensor(self, key: str) -> StoredTensor:
        """The tensor that is stored under `key`."""
        place = f"{self.directory / MANIFEST}: the tensor {key!r}"
        entry = self.content["tensors"].get(key)
        if entry is None:
            raise Damaged(f"{place}: expected its place, found none. Load another checkpoint")
        dtype, shape, start = type_named(entry["dtype"]), entry["shape"], entry["start"]
        file = self.content["files"].get(entry["file"])
        counts = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in (*shape, start))
        if not (counts and dtype is not None and file is not None and isinstance(entry["sha256"], str)):
            raise Damaged(f"{place}: expected file, dtype, shape, start and sha256, found {entry!r:.200}")
        path = self.directory / entry["file"]
        found = StoredTensor(path, key, torch.Size(shape), dtype, start=start, sha256=entry["sha256"])
        if found.start + found.bytes > file["bytes"]:
            raise Damaged(f"{place}: expected it to lie in {entry['file']}, found its end behind the end of the file")
        return found

    def value(self, encoded: Json) -> Any:
        """What `encode` made `encoded` of, with a `StoredTensor` for each tensor."""
        return decode(encoded, self.tensor)

    def read(self, encoded: Json) -> Any:
        """What `encode` made `encoded` of, with all tensors in memory."""
        return put_together(decode(encoded, lambda key: self.tensor(key).read()))

    def tensors_in(self, encoded: Json) -> list[StoredTensor]:
        """The tensors that `encoded` refers to."""
        found: list[StoredTensor] = []

        def note(key: str) -> StoredTensor:
            found.append(self.tensor(key))
            return found[-1]

        decode(encoded, note)
        return found

    def check_files(self) -> None:
        """Raises `Damaged` unless all data files are there with their sizes and headers."""
        for name, entry in self.content["files"].items():
            _check_file(self.directory / name, entry["bytes"], entry["header_bytes"], entry["header_sha256"])


def read_value(value: Any) -> Any:
    """`value`, read if it is a `StoredTensor`."""
    return value.read() if isinstance(value, StoredTensor) else value


def copied_value(value: Any, place: Callable[[Tensor], Tensor] = lambda tensor: tensor) -> Any:
    """A copy of nested values; its tensors are read or cloned, and then go through `place`."""

    def copied(leaf: Any) -> Any:
        if isinstance(leaf, Tensor | StoredTensor):
            return place(leaf.read() if isinstance(leaf, StoredTensor) else leaf.detach().clone())
        return copy.deepcopy(leaf)

    apart = pytree.tree_map_only(Tensor, taken_apart, value)
    return put_together(pytree.tree_map_only(object, copied, apart))


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of `tensor`, which is contiguous and on the CPU."""
    values: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(values)


def digest_of(value: Tensor) -> str:
    """The checksum of a tensor, with its type and its shape; of one of a subclass, with those of what it wraps."""
    found = hashlib.sha256(form_of(value).encode())
    for plain in plain_tensors(value):
        found.update(bytes_of(plain.detach().cpu().contiguous()))
    return found.hexdigest()


def manifest_text(path: Path, content: Mapping[str, Any]) -> str:
    """The text of the manifest of `content`, for `path`. `CheckpointError` if it cannot be JSON."""
    try:
        text = _text(content)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: the state cannot be written as JSON: {error}. Leave that value out") from error
    return json.dumps({"format": FORMAT, "sha256": _checksum(text), "content": content}, indent=1) + "\n"


def read_manifest(directory: Path) -> Manifest:
    """The manifest of the checkpoint in `directory`. `Damaged` unless it is there as it was written."""
    path = directory / MANIFEST
    try:
        with _opened(path) as file:
            document = json.loads(file.readall())
    except (ValueError, RecursionError) as error:
        raise Damaged(f"{path}: expected JSON, found a damaged file ({error}). Load another checkpoint") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        found = document.get("format") if isinstance(document, dict) else document
        raise Damaged(
            f"{path}: expected the format {FORMAT!r}, found {found!r:.80}: another version of Penstock wrote it, or "
            "it is no manifest. Load it with that version"
        )
    content, written = document.get("content"), document.get("sha256")
    if not isinstance(content, dict) or _checksum(_text(content)) != written:
        raise Damaged(
            f"{path}: expected the checksum {written!r:.80}, found another: it was changed after it was written. Load "
            "another checkpoint"
        )
    if not all(is_file_name(name) for name in content["files"]):
        raise Damaged(f"{path}: expected files with names of Penstock's, found {sorted(content['files'])!r:.200}")
    return Manifest(directory, content, written)


def _text(content: Mapping[str, Any]) -> str:
    return json.dumps(content, separators=(",", ":"), allow_nan=False)


def _checksum(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _check_file(path: Path, size: int, header: int, sha256: str) -> None:
    """Raises `Damaged` unless `path` is a file of `size` bytes whose first `header` bytes have the checksum."""
    with _opened(path) as file:
        found = os.fstat(file.fileno()).st_size
        if found != size:
            raise Damaged(f"{path}: expected {size} bytes, found {found}: it was cut off. Load another checkpoint")
        if hashlib.sha256(file.read(header)).hexdigest() != sha256:
            raise Damaged(f"{path}: expected the header that was written, found another one. Load another checkpoint")


@contextmanager
def _opened(path: Path) -> Iterator[FileIO]:
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
