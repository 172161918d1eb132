"""Saves and loads the training of a pipeline: collects on the main thread, then writes, or reads and restores."""

import os
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from penstock.data import restore_loaders
from penstock.errors import CheckpointError
from penstock.runtime.assembly.gathered_tensors import shared_names
from penstock.runtime.checkpoints.agreement import Ranks
from penstock.runtime.checkpoints.checkpoint_reader import Loaded, checked_path, find_and_verify, model_tensors
from penstock.runtime.checkpoints.checkpoint_writer import MODEL, CheckpointState, write
from penstock.runtime.checkpoints.manifests import Manifest
from penstock.runtime.checkpoints.own_states import OwnStates
from penstock.runtime.checkpoints.plain_values import Json, encode, name_of
from penstock.runtime.checkpoints.retention import Retention
from penstock.runtime.checkpoints.training_state import TrainingState
from penstock.runtime.transport.worlds import World
from penstock.values.documents import is_count
from penstock.values.plans import Plan

__all__ = ["Checkpoints"]


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoints:
    """The checkpoints of one pipeline."""

    world: World
    plan: Plan
    training: TrainingState
    own: OwnStates

    @property
    def ranks(self) -> Ranks:
        """The processes, with the world's way to gather."""
        return Ranks(self.world.rank, self.world.gather)

    def close(self) -> None:
        """Ends the wait for loaders that are made after a load."""
        restore_loaders([])

    def collect(self) -> CheckpointState:
        """The state of this process, which refers to the tensors of the training itself. The pipeline has drained.

        `CheckpointError` if something in it cannot be kept.
        """
        tensors: dict[str, Tensor] = {}

        def keep(tensor: Tensor, where: str) -> str:
            if where in tensors:
                raise CheckpointError(f"{where}: expected one value under this name, found two. Rename one of them")
            tensors[where] = tensor
            return where

        state = self.training.collect(take=lambda value: value)
        held, model = self.training.held, dict[str, Json]()
        for names in shared_names(held):
            for name in names:
                tensor = held[name]
                model[name] = {"dtype": name_of(tensor.dtype), "shape": list(tensor.shape), "stored": names[0]}
            tensors[MODEL + names[0]] = held[names[0]].detach()
        document = {
            "model": model,
            "optimizer": {
                part: {name: encode(value, f"optimizer/{part}/{name}", keep) for name, value in entries.items()}
                for part, entries in state["optimizer"].items()
            },
            "pipeline": encode(state["pipeline"], "pipeline", keep),
            "own": self.own.collect(self.training.engine.seed, tensors),
        }
        return CheckpointState(tensors, document)

    def save(self, directory: object, step: object, *, keep: int | None, keep_every: int | None) -> Path:
        """Writes a checkpoint as `Pipeline.save` describes. Collective."""

        def prepare() -> tuple[Path, int, Retention, CheckpointState]:
            path, retention = checked_path(directory), Retention(keep, keep_every)
            number = self.training.engine.steps if step is None else step
            if not is_count(number, 0):
                raise CheckpointError(f"step={step!r}: expected a whole number of at least 0, or None. Pass one")
            assert isinstance(number, int)
            return path, number, retention, self.collect()

        path, number, retention, state = self.ranks.each(prepare)
        return write(state, path, number, retention=retention, ranks=self.ranks, plan=self.plan.to_yaml())

    def find(self, directory: str | os.PathLike[str]) -> Loaded:
        """The checkpoint that `Pipeline.load` restores, compared with the training and with its files. Collective."""
        path = self.ranks.each(lambda: checked_path(directory))
        held = self.training.held
        return find_and_verify(path, self.ranks, self.training.chain, self._read, held.__contains__)

    def restore(self, loaded: Loaded) -> None:
        """Takes over what `find` has found."""
        self.training.restore(loaded.state)
        self.own.restore(loaded.own, loaded.manifest)

    def _read(self, manifest: Manifest) -> Loaded:
        content, trained = manifest.content, self.training.trained()
        # The tensors of other processes are not looked for.
        optimizer = {
            part: {name: manifest.value(entry) for name, entry in content["optimizer"][part].items() if name in trained}
            for part in ("state", "options", "classes", "hooks")
        }
        pipeline = manifest.value(content["pipeline"])
        state = {"model": model_tensors(manifest), "optimizer": optimizer, "pipeline": pipeline}
        self.training.check(state)
        own = self.own.choose(content["own"], self.world.rank, self.world.processes)
        return Loaded(manifest, state, own)
