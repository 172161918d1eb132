"""Finds the checkpoint to load, and compares its files with its manifest before anything is changed.

Every process looks itself, and all choose the same: the newest that is whole for each of them. A checkpoint that is
whole but of another training is not skipped; it is an error.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from penstock.capturing.chain import LayerChain
from penstock.errors import CheckpointError
from penstock.runtime.checkpoints.checkpoint_writer import MODEL
from penstock.runtime.checkpoints.manifests import Damaged, Manifest, StoredTensor, read_manifest
from penstock.runtime.collectives.agreements import Ranks
from penstock.runtime.files.plain_values import Json, name_of
from penstock.runtime.files.step_directories import MANIFEST, step_of, steps_in
from penstock.torch_internals import pytrees as pytree
from penstock.torch_internals.subclasses import packs


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A checkpoint that is whole, with a `StoredTensor` for each tensor."""

    manifest: Manifest
    state: Mapping[str, Any]
    """As `Pipeline.state_dict` has it, of the optimizers what belongs to this process."""
    own: Mapping[str, Json]
    """The own states of this process."""


def latest_checkpoint(directory: str | os.PathLike[str]) -> Path | None:
    """The newest checkpoint in the directory of a run; None if there is none, or no directory.

    Its manifest and the sizes of its files are checked, and the numbers are not read. A newer one that is damaged is
    passed over, with a warning.
    """
    run, tried = checked_path(directory), set[Path]()
    # The job that saves there may remove one that was seen, when a newer one is there.
    while left := [path for _, path in steps_in(run) if path not in tried]:
        tried.add(left[0])
        try:
            with _as_damage(left[0]):
                _checked_manifest(left[0])
        except Damaged as damage:
            _warn(left[0], damage)
            continue
        return left[0]
    return None


def checked_path(directory: object) -> Path:
    """`directory` as a path. `CheckpointError` if it is none."""
    if isinstance(directory, str | os.PathLike):
        path = os.fspath(directory)
        if isinstance(path, str) and path and "\0" not in path:
            return Path(path)
    raise CheckpointError(
        f"directory={directory!r}: expected the path of a directory, a text or a pathlib.Path. Pass one"
    )


def find_and_verify(
    directory: Path, ranks: Ranks, chain: LayerChain, read: Callable[[Manifest], Loaded], mine: Callable[[str], bool]
) -> Loaded:
    """The checkpoint `directory`, or the newest whole one in the run `directory`. Collective.

    `read` makes of a manifest what is loaded, and raises if it does not fit. `mine`: whether this process reads the
    tensor of the model with that name. Raises `CheckpointError` on all processes.
    """
    places = ranks.gather(os.path.abspath(directory))
    for rank, place in enumerate(places):
        if place != places[0]:
            raise CheckpointError(
                f"rank {rank} loads {place} and rank 0 {places[0]}: expected the same directory on all ranks. Make its "
                "name from what all ranks know"
            )

    def attempt(path: Path) -> Loaded:
        with _as_damage(path):
            manifest = _checked_manifest(path)
            _check_model(manifest, chain)
            loaded = read(manifest)
            state = loaded.state
            parts = [[value for name, value in state["model"].items() if mine(name)], state["optimizer"]]
            parts += [state["beside"], state.get("history")]
            tensors = [leaf for leaf in pytree.tree_leaves(parts) if isinstance(leaf, StoredTensor)]
            tensors += [tensor for value in loaded.own.values() for tensor in manifest.tensors_in(value)]
        for tensor in tensors:
            tensor.verify()
        return loaded

    tried, last = set[str](), None
    # The job that saves there may remove one that was seen, when a newer one is there.
    while left := [name for name in ranks.together(lambda: _candidates(directory))[0] if name not in tried]:
        tried.add(left[0])
        path = directory / left[0]
        try:
            # One manifest for all: a host could have another copy.
            sums = ranks.together(partial(_sum_of, path))
            if len(set(sums)) > 1:
                raise Damaged(f"{path / MANIFEST}: expected the same file on all ranks, found different ones")
            return ranks.each(partial(attempt, path))
        except Damaged as damage:
            last = damage
            if ranks.rank == 0 and left[1:]:
                _warn(path, damage)
    assert last is not None, "there was a candidate"
    raise last


def _checked_manifest(path: Path) -> Manifest:
    """The manifest in `path`, whose files are there."""
    manifest = read_manifest(path)
    if step_of(path.name) not in (None, manifest.step):
        raise Damaged(
            f"{path / MANIFEST}: expected step {step_of(path.name)}, as the name of its directory says, found "
            f"{manifest.step}: the directory was renamed or copied. Give it its own name"
        )
    manifest.check_files()
    return manifest


def _sum_of(path: Path) -> str:
    with _as_damage(path):
        return read_manifest(path).sha256


def _candidates(directory: Path) -> list[str]:
    """The names of the checkpoints in `directory`, the newest first; an empty one if it is a checkpoint itself."""
    if (directory / MANIFEST).exists() or (step_of(directory.name) is not None and directory.is_dir()):
        return [""]
    names = [path.name for _, path in steps_in(directory)]
    if not names:
        found = "no such directory" if not directory.exists() else "no directory of a step in it"
        raise CheckpointError(
            f"{directory}: there is no checkpoint ({found}). Expected a directory that Pipeline.save(...) wrote to its "
            "end. Check the path"
        )
    return names


def _check_model(manifest: Manifest, chain: LayerChain) -> None:
    """The whole model is compared on every process."""
    for name, tensor in (*chain.parameters.items(), *chain.buffers.items()):
        entry = manifest.model.get(name)
        if tensor.is_meta and packs(tensor):
            # Another process has it, in the form that was packed there.
            continue
        form = {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape)}
        if entry is None or any(entry[key] != value for key, value in form.items()):
            found = "nothing" if entry is None else {key: entry[key] for key in form}
            raise CheckpointError(
                f"{manifest.directory}: expected {name} with {form}, as the model has it, found {found}: it is the "
                "checkpoint of another model. Load one of this model, or only weights with penstock.load_weights"
            )


def model_tensors(manifest: Manifest) -> dict[str, Any]:
    """All tensors of the model, by name, but those that it only names; those that wrap others as their parts."""
    found = {}
    for name, entry in manifest.model.items():
        if name in manifest.content.get("base", {}):
            continue
        parts = manifest.model[entry["stored"]].get("parts")
        found[name] = manifest.tensor(MODEL + entry["stored"]) if parts is None else manifest.value(parts)
    return found


def beside_of(manifest: Manifest) -> dict[str, Any] | None:
    """What is kept beside weights and the state of parameters, by name; None if an older version wrote it."""
    found = [own["beside"] for own in manifest.content["own"] if "beside" in own]
    return {name: manifest.value(entry) for own in found for name, entry in own.items()} if found else None


@contextmanager
def _as_damage(path: Path) -> Iterator[None]:
    """Makes an error of reading what no writer wrote a `Damaged`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as error:
        raise Damaged(
            f"{path / MANIFEST}: expected the manifest of a checkpoint, found one that cannot be read "
            f"({type(error).__name__}: {error}). Load another checkpoint"
        ) from error


def _warn(path: Path, damage: Damaged) -> None:
    logging.getLogger("penstock").warning("%s is damaged and is passed over: %s", path, damage)
