"""Writes what the processes of a pipeline have collected to a new directory of a step.

Nothing here looks at the pipeline: a `CheckpointState` may be written by another thread than the one that trains, if
its tensors do not change any more and the thread has a way of its own to gather.

Laws of this file:
  1. A tensor that several processes hold is written by one of them; their shares have about equal bytes.
  2. The manifest is the last file, and the directory gets its name when all files are on the disk.
  3. A process that fails to write goes on to take part in what the others wait for. The error is then raised on all,
     nothing is left behind, and older checkpoints are as they were.
"""

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from penstock.capturing.weight_files import TYPE_CODES
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.manifests import bytes_of, manifest_text
from penstock.runtime.collectives.agreements import Ranks
from penstock.runtime.files.file_errors import files_explained
from penstock.runtime.files.plain_values import Json, name_of, type_named
from penstock.runtime.files.safetensors_files import SafetensorsWriter, StoredEntry, write_index, write_through
from penstock.runtime.files.step_directories import (
    MANIFEST,
    Retention,
    begin,
    check_target,
    file_name,
    publish,
    recover,
)
from penstock.runtime.parameters.shards import whole

MODEL = "model/"
"""How the keys of the model's own tensors begin. They have files of their own, with the names that the model has."""


@dataclass(frozen=True, slots=True, eq=False)
class CheckpointState:
    """What one process puts into a checkpoint."""

    tensors: Mapping[str, Tensor]
    """By key. What several processes have under one key is the same tensor. A `DTensor` is made whole when it is
    written, by all processes that share it."""
    document: Mapping[str, Json]
    """The rest, as JSON that refers to the keys: ``model``, ``base`` (digests), ``optimizer``, ``pipeline``,
    ``history`` and ``own``."""


Form: TypeAlias = tuple[tuple[int, ...], str]
"""What other processes must know of a tensor: its shape and its type."""

_Part: TypeAlias = tuple[dict[str, Json], dict[str, Json]]
"""What a process has written: the manifest's entries of tensors, by key, and of files, by name."""


def write(
    state: CheckpointState, directory: Path, step: int, *, retention: Retention, ranks: Ranks, plan: str, run: str
) -> Path:
    """Writes the checkpoint of `step` into the `directory`, and returns its path. Collective.

    `plan`: the text of the plan. `run`: the name of the run. Raises `CheckpointError` on all processes if one of them
    fails.
    """
    ranks.alone(lambda: check_target(directory))
    # What was left by a process that was killed may be what fills the disk.
    ranks.alone(lambda: recover(directory))
    made = ranks.alone(lambda: begin(directory).name)
    written = directory / str(made)
    try:
        ranks.each(lambda: _require(written, ranks.rank))
        own = ranks.together(lambda: _forms(state))
        owners = assign_owners(own)
        parts = ranks.together(lambda: _write_own(state, owners, written, ranks.rank))
        documents = ranks.gather(state.document)
        path = ranks.alone(lambda: _write_manifest(written, step, parts, documents, {"run": run, "plan": plan}))
    except CheckpointError:
        # All processes have come here, so none of them writes any more.
        ranks.alone(lambda: recover(directory))
        raise
    ranks.alone(lambda: retention.apply(directory, step))
    return directory / str(path)


def agree_on_target(directory: Path, step: int, retention: Retention, ranks: Ranks) -> None:
    """Raises `CheckpointError` unless all processes save the same step to the same place, by the same rules.
    Collective.
    """
    target = (
        f"step {step} to {os.path.abspath(directory)} with keep={retention.keep}, keep_every={retention.keep_every}"
    )
    for rank, other in enumerate(ranks.gather(target)):
        if other != target:
            raise CheckpointError(
                f"rank {rank} saves {other}, and rank {ranks.rank} {target}: expected the same on all ranks. Make the "
                "name and the options from what all ranks know, such as the step, not the time"
            )


def _require(written: Path, rank: int) -> None:
    if not written.is_dir():
        raise CheckpointError(
            f"{written.parent}: rank {rank} does not see {written.name}, which rank 0 has made in it: expected a "
            "directory on a file system that all hosts share. Give another one"
        )


def _forms(state: CheckpointState) -> dict[str, Form]:
    for key, tensor in state.tensors.items():
        if tensor.dtype not in TYPE_CODES or tensor.layout is not torch.strided or tensor.is_meta:
            raise CheckpointError(
                f"{key}: expected a dense tensor of a type that safetensors files have, found {tensor.dtype} with the "
                f"layout {tensor.layout} on {tensor.device.type}. Convert it, or leave it out of the state"
            )
    return {key: (tuple(tensor.shape), name_of(tensor.dtype)) for key, tensor in state.tensors.items()}


def _entry(key: str, form: Form) -> StoredEntry:
    """The tensor as its file has it."""
    dtype = type_named(form[1])
    assert dtype is not None, "a type has its name"
    return StoredEntry(key.removeprefix(MODEL), tuple(form[0]), dtype)


def assign_owners(own: Sequence[Mapping[str, Form]]) -> dict[str, int]:
    """By key, the process that writes it, of those that have it: the one with the fewest bytes so far.

    `own`: what each has. The keys with the fewest holders come first, and of these the largest.
    """
    holders: dict[str, list[int]] = {}
    forms: dict[str, Form] = {}
    for rank, described in enumerate(own):
        for key, form in described.items():
            if forms.setdefault(key, form) != form:
                raise CheckpointError(
                    f"{key}: expected the same tensor on all ranks that have it, found {forms[key]} on rank "
                    f"{holders[key][0]} and {form} on rank {rank}. Build the same model everywhere"
                )
            holders.setdefault(key, []).append(rank)
    sizes = {key: _entry(key, form).bytes for key, form in forms.items()}
    owners, loads = {}, [0] * len(own)
    for key in sorted(holders, key=lambda key: (len(holders[key]), -sizes[key], key)):
        owner = min(holders[key], key=lambda rank: (loads[rank], rank))
        owners[key] = owner
        loads[owner] += sizes[key]
    return owners


def _write_own(state: CheckpointState, owners: Mapping[str, int], written: Path, rank: int) -> _Part:
    """Writes what `rank` answers for."""
    entries = {key: _entry(key, form) for key, form in _forms(state).items()}
    # Larger types first, so that all are aligned; the same order everywhere, since some are made whole together.
    order = sorted(entries, key=lambda key: (not key.startswith(MODEL), -entries[key].dtype.itemsize, key))
    tensors = ((key, whole(state.tensors[key])) for key in order)
    own = ((key, tensor) for key, tensor in tensors if owners[key] == rank)
    part: _Part = {}, {}
    try:
        for kind, chosen in (
            ("model", [key for key in order if key.startswith(MODEL)]),
            ("state", [key for key in order if not key.startswith(MODEL)]),
        ):
            keys = [key for key in chosen if owners[key] == rank]
            if keys:
                _write_file(written / file_name(kind, rank), {key: entries[key] for key in keys}, own, part)
    finally:
        # Also after a failure: other processes wait for this one where a tensor is made whole.
        for _ in own:
            pass
    return part


def _write_file(path: Path, entries: Mapping[str, StoredEntry], own: Iterator[tuple[str, Tensor]], part: _Part) -> None:
    tensors, files = part
    with files_explained(path), SafetensorsWriter(path, list(entries.values()), mode=0o600) as writer:
        header = start = writer.header_bytes
        for _ in entries:
            key, tensor = next(own)
            values = tensor.cpu().contiguous()
            writer.append(values)
            tensors[key] = {
                "file": path.name,
                "dtype": name_of(values.dtype),
                "shape": list(values.shape),
                "start": start,
                "sha256": hashlib.sha256(bytes_of(values)).hexdigest(),
            }
            start += entries[key].bytes
        files[path.name] = {"bytes": start, "header_bytes": header, "header_sha256": writer.header_sha256}


def _write_manifest(
    written: Path, step: int, parts: Sequence[_Part], documents: Sequence[Mapping[str, Json]], names: Mapping[str, str]
) -> str:
    """Writes the manifest, and gives the directory its name. Returns the name."""
    tensors = {key: entry for part, _ in parts for key, entry in part.items()}
    files = {name: entry for _, part in parts for name, entry in part.items()}
    content = {
        "step": step,
        **names,
        "penstock": _version(),
        "torch": torch.__version__,
        "processes": len(documents),
        **_merge(documents),
        "files": files,
        "tensors": tensors,
    }
    model = {key: entry for key, entry in tensors.items() if key.startswith(MODEL)}
    homes = {key.removeprefix(MODEL): entry["file"] for key, entry in model.items()}
    path = written / MANIFEST
    # A disk that is full is found by a write, whose error has no file.
    with files_explained(written):
        write_index(written, homes, [_entry(key, (entry["shape"], entry["dtype"])) for key, entry in model.items()])
    with files_explained(path):
        path.write_text(manifest_text(path, content), encoding="utf-8")
    for path in written.iterdir():
        # Umasks can only take away more.
        path.chmod(0o600 & path.stat().st_mode)
        write_through(path)
    return publish(written, step).name


def _version() -> str:
    try:
        return version("penstock")
    except PackageNotFoundError:
        # The sources are used without being installed.
        return "unknown"


def _merge(documents: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """One document of those of all processes."""
    first, beside = documents[0]["pipeline"], dict[str, Json]()
    for rank, document in enumerate(documents):
        for count in ("steps", "microbatches"):
            if document["pipeline"][count] != first[count]:
                raise CheckpointError(
                    f"rank {rank} has trained {document['pipeline'][count]} {count} and rank 0 {first[count]}: "
                    "expected the same on all ranks. Make the same calls everywhere, and start again from the "
                    "checkpoint before"
                )
        for name, value in {**document["own"]["beside"], **document["base"]}.items():
            if beside.setdefault(name, value) != value:
                raise CheckpointError(
                    f"{name} has another value on rank {rank} than on a rank before it: expected the same on all that "
                    "have it. Compute it from what all ranks have, or use no replicas of its stage"
                )
    model: dict[str, Any] = {}
    base: dict[str, str] = {}
    optimizer: dict[str, Any] = {}
    history: dict[str, Any] = {}
    for document in documents:
        base.update(document["base"])
        for name, entry in document["model"].items():
            model.setdefault(name, {}).update(entry)
        for merged, entries in ((optimizer, document["optimizer"]), (history, document["history"])):
            for name, entry in entries.items():
                merged.setdefault(name, {}).update(entry)
    pipeline = {name: value for document in reversed(documents) for name, value in document["pipeline"].items()}
    return {
        "model": model,
        "base": base,
        "optimizer": optimizer,
        "pipeline": pipeline,
        "history": history,
        "own": [document["own"] for document in documents],
    }
