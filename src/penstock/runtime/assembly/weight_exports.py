"""Writes the weights of the whole model in the form of a hub: safetensors files, an index, configurations.

A model of transformers goes whole, with its configuration. Of a PEFT model go the adapters, as PEFT writes them. Any
other module goes whole, under the names of its state dict.

Every process writes the tensors that it answers for into files of its own. A model that fits one file is written by
process 0, which the others send their tensors to, one after the other.

Laws of this file:
  1. Tensors come from other processes one after the other, in an order that all share. So no process holds more than
     its own and one other.
  2. A process that fails to write goes on to take part in what the others wait for, and raises then.
"""

import copy
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from penstock.arguments import PATH, Rule, integer, text_of
from penstock.capturing.chain import LayerChain
from penstock.capturing.weight_files import INDEX, SINGLE
from penstock.errors import CheckpointError, PenstockError
from penstock.runtime.collectives.agreements import Ranks, gather_results
from penstock.runtime.files.file_errors import files_explained
from penstock.runtime.files.plain_values import name_of, type_named
from penstock.runtime.files.safetensors_files import (
    PARTIAL,
    SafetensorsWriter,
    StoredEntry,
    locked,
    publish,
    write_index,
)
from penstock.runtime.parameters.shards import whole
from penstock.runtime.transport.worlds import World
from penstock.torch_internals.subclasses import packs, wraps_tensors
from penstock.values.plan_stages import Stage

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


@dataclass(frozen=True, slots=True, eq=False)
class HeldTensors:
    """The tensors of the model's state dict that this process holds, and who answers for each."""

    own: Mapping[str, Tensor]
    every: Mapping[str, Tensor]
    """All entries of the state dict; those that other processes hold have a shape and a type only."""
    owners: Mapping[str, int]
    """The first of the processes that hold each."""
    world: World

    def take(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """All of the tensor in `dtype` on the CPU, if this process answers for it. Those that share it call together.

        It may be the memory of the model itself.
        """
        if name not in self.own:
            return None
        tensor = whole(self.own[name].detach())
        return tensor.to("cpu", dtype) if self.owners[name] == self.world.rank else None

    def bring(self, name: str, dtype: torch.dtype, rank: int | None) -> Tensor | None:
        """The tensor in `dtype` on the CPU of process `rank` (all, if None); None elsewhere. Collective."""
        taken, owner, here = self.take(name, dtype), self.owners[name], self.world.rank
        if self.world.processes == 1 or rank == owner:
            return taken
        if rank is not None and here not in (rank, owner):
            return None
        values = torch.empty(self.every[name].shape, dtype=dtype) if taken is None else taken.to_dense().contiguous()
        flat, group = values.reshape(-1).view(torch.uint8), self.world.group

        def pass_on() -> None:
            if rank is None:
                dist.broadcast(flat, src=owner, group=group)
            elif here == owner:
                dist.send(flat, dst=rank, group=group)
            else:
                dist.recv(flat, src=owner, group=group)

        peers = [peer for peer in (owner, rank) if peer is not None and peer != here]
        self.world.run(pass_on, f"{name}, from rank {owner} to {'all' if rank is None else f'rank {rank}'}", peers)
        return None if here == owner and rank is not None else values.to_sparse(layout=self.every[name].layout)

    def state_dict(self, rank: int | None) -> dict[str, Tensor]:
        """Copies of all tensors on the CPU of process `rank` (all, if None); nothing elsewhere. Collective."""
        processes = self.world.processes
        one = integer(0, processes - 1).but("give the number of a process, or None for all").optional
        rank = one.check("full_state_dict(rank=)", rank)
        found: dict[str, Tensor] = {}
        for names in shared_names({name: t for name, t in self.every.items() if not wraps_tensors(t)}):
            tensor = self.bring(names[0], self.every[names[0]].dtype, rank)
            if tensor is not None:
                copied = tensor.clone() if names[0] in self.own else tensor
                found.update(dict.fromkeys(names, copied))
        return {name: found[name] for name in self.every if name in found}


def held_tensors(chain: LayerChain, stages: Iterable[Stage]) -> dict[str, Tensor]:
    """The entries of the model's state dict that belong to `stages`.

    What no layer uses belongs to the first stage.
    """
    layers = [range(stage.start, stage.stop) for stage in stages]
    tensors: dict[str, Tensor] = {**chain.parameters, **chain.buffers}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if any(reader in span for span in layers for reader in chain.readers[name] or (0,))
    }


def hold(chain: LayerChain, own: Mapping[str, Tensor], world: World) -> HeldTensors:
    """`own`: the entries of the state dict of the model of `chain` that this process holds. Collective."""
    every: dict[str, Tensor] = {**chain.parameters, **chain.buffers}
    owners: dict[str, int] = {}
    unlike = {name for name, tensor in own.items() if packs(tensor) or name not in every}
    forms = {name: (tuple(own[name].shape), name_of(own[name].dtype)) if name in unlike else None for name in own}
    for rank, held in enumerate(world.gather(forms)):
        for name, form in held.items():
            owners.setdefault(name, rank)
            if form is not None:
                # Packed there, or a scale, which a model without numbers does not have.
                every[name] = own.get(name, torch.empty(form[0], dtype=type_named(form[1]), device="meta"))
    return HeldTensors(own, every, owners, world)


def shared_names(tensors: Mapping[str, Tensor]) -> list[Sequence[str]]:
    """The names of each tensor, in the order of the first: tied weights have several."""
    names: dict[int, list[str]] = {}
    for name, tensor in tensors.items():
        names.setdefault(id(tensor), []).append(name)
    return list(names.values())


def hub_form(model: Any, tensors: Mapping[str, Tensor]) -> tuple[dict[str, str], bool]:
    """The name in the files for each of `tensors` that goes into them, by its name in the state dict of `model`; and
    whether only an adapter goes, which is always one file. Only shapes are read.
    """
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        return _adapter_form(model, peft.get_peft_model_state_dict, tensors)
    if getattr(model, "peft_config", None):
        raise PenstockError(
            f"{type(model).__name__} has adapters of its own (add_adapter): expected a PEFT model around it, whose "
            "adapters have names to be saved under. Build it with peft.get_peft_model(model, config)"
        )
    return {name: name for name in tensors}, False


def _write_configurations(model: Any, adapter: bool, directory: Path, dtype: torch.dtype | None) -> None:
    """Writes the configurations of `model` to `directory`, if it has any. `dtype`: of its weights in the files."""
    if adapter:
        _write_adapter_configuration(model, directory)
        return
    config = getattr(model, "config", None)
    if callable(getattr(config, "save_pretrained", None)):
        config = copy.deepcopy(config)
        assert config is not None
        # transformers notes both when it saves. Which class and which type a reader makes depends on them.
        config.architectures = [type(model).__name__]
        if dtype is not None:
            config.dtype = str(dtype).removeprefix("torch.")
        config.save_pretrained(directory)
    generation = getattr(model, "generation_config", None)
    if callable(getattr(generation, "save_pretrained", None)):
        assert generation is not None
        generation.save_pretrained(directory)


def _adapter_form(
    model: Any, select: Callable[..., Mapping[str, Tensor]], tensors: Mapping[str, Tensor]
) -> tuple[dict[str, str], bool]:
    """What PEFT selects of a state dict without values, recognized by its tensors."""
    if len(model.peft_config) != 1:
        raise PenstockError(
            f"the model has the adapters {', '.join(model.peft_config)}: expected one, which save_weights writes. "
            "Call pipe.gather_model() on all ranks, and model.save_pretrained() on one"
        )
    (adapter,) = model.peft_config
    stand_ins = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    origins = {id(stand_in): name for name, stand_in in stand_ins.items()}
    selected = select(model, state_dict=stand_ins, adapter_name=adapter)
    changed = [name for name, tensor in selected.items() if id(tensor) not in origins]
    if changed:
        raise PenstockError(
            f"PEFT does not save {', '.join(changed)} as the model has it, but computes it first: expected adapters "
            "whose tensors are saved as they are, such as LoRA. Call pipe.gather_model() on all ranks, and "
            "model.save_pretrained() on one"
        )
    return {origins[id(tensor)]: name for name, tensor in selected.items()}, True


def _write_adapter_configuration(model: Any, directory: Path) -> None:
    (config,) = (copy.deepcopy(config) for config in model.peft_config.values())
    base = model.get_base_model()
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(base, "name_or_path", None) or None
    config.inference_mode = True
    mapping = None
    if config.task_type is None:
        mapping = {"base_model_class": type(base).__name__, "parent_library": type(base).__module__}
    config.save_pretrained(directory, auto_mapping_dict=mapping)


def export_weights(
    model: Any, held: HeldTensors, directory: str | Path, *, max_shard_size: int | str, dtype: torch.dtype | None
) -> None:
    """Writes the weights of `model` to `directory`, as `Pipeline.save_weights` describes. Collective."""
    world = held.world
    limit = _bytes_of(max_shard_size)
    directory = Path(PATH.check("save_weights(directory=)", directory))
    _DTYPE.check("save_weights(dtype=)", dtype)

    def form() -> tuple[dict[str, str], bool]:
        # Only rank 0 looks for it, since PEFT may ask a server.
        return hub_form(model, held.every) if world.rank == 0 else ({}, False)

    names, adapter = gather_results(world, "while it read the form of the model", form)[0]
    entries = _entries(names, held, dtype)
    ranks, partial = Ranks(world.rank, world.gather), directory / PARTIAL
    with ExitStack() as opened:
        ranks.alone(lambda: opened.enter_context(locked(directory)))
        if not all(seen := ranks.together(partial.is_dir)):
            raise CheckpointError(
                f"rank {seen.index(False)} does not see {partial}, which rank 0 has made: expected a directory on a "
                "file system that all hosts share. Give another one"
            )
        plan = _plan(adapter, held, entries, limit)
        tensors = (
            held.bring(name, entry.dtype, 0) if plan.homes is None else held.take(name, entry.dtype)
            for name, entry in entries.items()
        )
        ranks.each(lambda: _write_all(tensors, [(partial / name, shard) for name, shard in plan.files]))

        def finish() -> None:
            floating = (entry.dtype for entry in entries.values() if entry.dtype.is_floating_point)
            _write_configurations(model, adapter, partial, next(floating, None))
            if plan.homes is not None:
                write_index(partial, plan.homes, entries.values())
            publish(directory, ADAPTER_CONFIGURATION if adapter else SINGLE if plan.homes is None else INDEX)

        ranks.alone(finish)


@dataclass(frozen=True, slots=True)
class _Plan:
    files: Sequence[tuple[str, Sequence[StoredEntry]]]
    homes: Mapping[str, str] | None
    """By tensor, the file that has it, of all processes; None if there is only one file, which rank 0 writes."""


def _plan(adapter: bool, held: HeldTensors, entries: Mapping[str, StoredEntry], limit: float) -> _Plan:
    """Every process writes its own tensors, in as few files as hold at most `limit` bytes each; rank 0 writes all that
    fits in one file. Collective.
    """
    world = held.world
    if adapter or sum(entry.bytes for entry in entries.values()) <= limit:
        name = ADAPTER if adapter else SINGLE
        return _Plan([(name, list(entries.values()))] if world.rank == 0 else [], None)
    own = [entry for name, entry in entries.items() if held.owners[name] == world.rank]
    shards = list(_in_runs(own, limit))
    every = world.gather([[entry.name for entry in shard] for shard in shards])
    total, first = sum(map(len, every)), sum(map(len, every[: world.rank]))
    names = [f"model-{number + 1:05d}-of-{total:05d}.safetensors" for number in range(total)]
    stored = [tensors for part in every for tensors in part]
    homes = {tensor: name for name, tensors in zip(names, stored, strict=True) for tensor in tensors}
    return _Plan(list(zip(names[first : first + len(shards)], shards, strict=True)), homes)


def _entries(form: Mapping[str, str], held: HeldTensors, dtype: torch.dtype | None) -> dict[str, StoredEntry]:
    """What is stored, by the name in the model: each tensor once, larger types first so that all are aligned."""
    result = {}
    for names in shared_names({name: tensor for name, tensor in held.every.items() if name in form}):
        name, tensor = names[0], held.every[names[0]]
        if tensor.layout is not torch.strided or wraps_tensors(tensor):
            raise CheckpointError(
                f"save_weights: {name} has the layout {tensor.layout} as a {type(tensor).__name__}: expected a dense "
                "tensor, as safetensors files hold. Register it with persistent=False, or gather it with "
                "pipe.full_state_dict()"
            )
        converted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
        result[name] = StoredEntry(form[name], tuple(tensor.shape), converted)
    return dict(sorted(result.items(), key=lambda item: -item[1].dtype.itemsize))


def _write_all(tensors: Iterator[Tensor | None], shards: Sequence[tuple[Path, Sequence[StoredEntry]]]) -> None:
    """Writes `tensors` but None to the files `shards`, which together have an entry for each, in their order."""
    own = (tensor for tensor in tensors if tensor is not None)
    try:
        for path, entries in shards:
            # A disk that is full is found by a write, whose error has no file.
            with files_explained(path), SafetensorsWriter(path, entries) as writer:
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
