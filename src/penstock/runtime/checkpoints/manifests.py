"""The manifest of a checkpoint: what is in it, where, and how to notice that it is damaged.

It is JSON: a format, a checksum, and the content. The content is read as data of an unknown author: sizes and names are
checked before anything is read by them.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.step_directories import MANIFEST, is_file_name
from penstock.runtime.checkpoints.stored_tensors import Damaged, StoredTensor, check_file, opened
from penstock.runtime.transport.plain_values import Json, decode, type_named

FORMAT = "penstock-checkpoint-1"


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
        return decode(encoded, lambda key: self.tensor(key).read())

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
            check_file(self.directory / name, entry["bytes"], entry["header_bytes"], entry["header_sha256"])


def write_manifest(path: Path, content: Mapping[str, Any]) -> str:
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
        with opened(path) as file:
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
