"""Writes the weights of the whole model in the form of a hub: safetensors files, an index, configurations.

Every process writes the tensors that it answers for into files of its own. A model that fits one file is written by
process 0, which the others send their tensors to, one after the other.

Law of this file: a process that fails to write goes on to take part in what the others wait for, and raises then.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.arguments import PATH, Rule, text_of
from penstock.capturing.weight_files import INDEX, SINGLE
from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.assembly.gathered_tensors import HeldTensors, shared_names
from penstock.runtime.assembly.hub_forms import HubForm, hub_form, write_configurations
from penstock.runtime.assembly.safetensors_files import (
    PARTIAL,
    SafetensorsWriter,
    StoredEntry,
    begin,
    publish,
    write_index,
)
from penstock.runtime.transport.collective_errors import agreed, gather_results

ADAPTER, ADAPTER_CONFIGURATION = "adapter_model.safetensors", "adapter_config.json"
"""The names that PEFT looks for."""

_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGT]i?B)?")
_UNITS = {None: 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
_UNITS |= {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "TiB": 2.0**40}


_DTYPE = Rule(
    "a type of floating-point numbers",
    lambda value: isinstance(value, torch.dtype) and value.is_floating_point,
    lambda value: value,
    "give one such as torch.bfloat16, or leave it out for that of the model",
).optional


def export_weights(
    model: Any, held: HeldTensors, directory: str | Path, *, max_shard_size: int | str, dtype: torch.dtype | None
) -> None:
    """Writes the weights of `model` to `directory`, as `Pipeline.save_weights` describes. Collective."""
    world = held.world
    limit = _bytes_of(max_shard_size)
    directory = Path(PATH.check("save_weights(directory=)", directory))
    _DTYPE.check("save_weights(dtype=)", dtype)
    names, adapter = gather_results(world, "while it read the form of the model", lambda: _form(model, held))[0]
    form = HubForm(names, adapter)
    entries = _entries(form, held, dtype)
    with agreed(world, "while it began to write weights"):
        if world.rank == 0:
            begin(directory)
    with agreed(world, "while it began to write weights"):
        if not (directory / PARTIAL).is_dir():
            raise CheckpointError(
                f"rank {world.rank} does not see {directory / PARTIAL}, which rank 0 has made: expected a directory on "
                "a file system that all hosts share. Give another one"
            )
    plan = _plan(form, held, entries, limit)
    with agreed(world, "while it wrote weights"):
        tensors = (
            held.bring(name, entry.dtype, 0) if plan.homes is None else held.take(name, entry.dtype)
            for name, entry in entries.items()
        )
        _write_all(tensors, [(directory / PARTIAL / name, shard) for name, shard in plan.files])
    with agreed(world, "while it published weights"):
        if world.rank == 0:
            floating = (entry.dtype for entry in entries.values() if entry.dtype.is_floating_point)
            write_configurations(model, form, directory / PARTIAL, next(floating, None))
            if plan.homes is not None:
                write_index(directory / PARTIAL, plan.homes, entries.values())
            publish(directory, ADAPTER_CONFIGURATION if form.adapter else SINGLE if plan.homes is None else INDEX)


@dataclass(frozen=True, slots=True)
class _Plan:
    """Which files this process writes."""

    files: Sequence[tuple[str, Sequence[StoredEntry]]]
    homes: Mapping[str, str] | None
    """By tensor, the file that has it, of all processes; None if there is only one file, which rank 0 writes."""


def _plan(form: HubForm, held: HeldTensors, entries: Mapping[str, StoredEntry], limit: float) -> _Plan:
    """Every process writes its own tensors, in as few files as hold at most `limit` bytes each; rank 0 writes all that
    fits in one file. Collective.
    """
    world = held.world
    if form.adapter or sum(entry.bytes for entry in entries.values()) <= limit:
        name = ADAPTER if form.adapter else SINGLE
        return _Plan([(name, list(entries.values()))] if world.rank == 0 else [], None)
    own = [entry for name, entry in entries.items() if held.owners[name] == world.rank]
    shards = list(_in_runs(own, limit))
    every = world.gather([[entry.name for entry in shard] for shard in shards])
    total, first = sum(map(len, every)), sum(map(len, every[: world.rank]))
    names = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
    stored = [tensors for part in every for tensors in part]
    homes = {tensor: name for name, tensors in zip(names, stored, strict=True) for tensor in tensors}
    return _Plan(list(zip(names[first : first + len(shards)], shards, strict=True)), homes)


def _form(model: Any, held: HeldTensors) -> tuple[Mapping[str, str], bool]:
    """The fields of the form. Only rank 0 looks for it, since PEFT may ask a server."""
    form = hub_form(model, held.every) if held.world.rank == 0 else HubForm({})
    return dict(form.names), form.adapter


def _entries(form: HubForm, held: HeldTensors, dtype: torch.dtype | None) -> dict[str, StoredEntry]:
    """What is stored, by the name in the model: each tensor once, larger types first so that all are aligned."""
    result = {}
    for names in shared_names({name: tensor for name, tensor in held.every.items() if name in form.names}):
        name, tensor = names[0], held.every[names[0]]
        converted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        result[name] = StoredEntry(form.names[name], tuple(tensor.shape), converted)
    return dict(sorted(result.items(), key=lambda item: -item[1].dtype.itemsize))


def _write_all(tensors: Iterator[Tensor | None], shards: Sequence[tuple[Path, Sequence[StoredEntry]]]) -> None:
    """Writes `tensors` but None to the files `shards`, which together have an entry for each, in their order."""
    own = (tensor for tensor in tensors if tensor is not None)
    try:
        for path, entries in shards:
            with SafetensorsWriter(path, entries) as writer:
                for _ in entries:
                    writer.append(next(own))
    finally:
        # Also after a failure: other processes wait for this one in the collectives that bring the rest.
        for _ in own:
            pass


def _in_runs(entries: Sequence[StoredEntry], limit: float) -> Iterator[list[StoredEntry]]:
    """`entries` in as few consecutive runs as have at most `limit` bytes each; a larger entry is a run of its own."""
    run: list[StoredEntry] = []
    for entry in entries:
        if run and sum(each.bytes for each in run) + entry.bytes > limit:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _bytes_of(size: int | str) -> float:
    """Bytes, of a number or of a text such as ``5GB``."""
    match = _SIZE.fullmatch(str(size).strip())
    if match is None or not 0 < float(match["number"]) < math.inf:
        raise PenstockError(
            f"max_shard_size= is {text_of(size)}: expected bytes, 5000000000, or a text with a unit, '5GB'"
        )
    return float(match["number"]) * _UNITS[match["unit"]]
