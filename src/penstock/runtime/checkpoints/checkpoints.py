"""Saves and loads the training of a pipeline: collects on the main thread, then writes, or reads and restores."""

import logging
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor, nn

from penstock.arguments import is_count
from penstock.capturing.chain import LayerChain
from penstock.capturing.initialization import rooted
from penstock.errors import CheckpointError
from penstock.runtime.assembly.guarded_calls import FailureGuard
from penstock.runtime.assembly.weight_exports import shared_names
from penstock.runtime.checkpoints.background_saves import BackgroundSave, BackgroundSaves, StageStates
from penstock.runtime.checkpoints.checkpoint_reader import (
    Loaded,
    beside_of,
    checked_path,
    find_and_verify,
    model_tensors,
)
from penstock.runtime.checkpoints.checkpoint_writer import MODEL, CheckpointState, agree_on_target, write
from penstock.runtime.checkpoints.directory_claims import DirectoryClaims
from penstock.runtime.checkpoints.manifests import Manifest, digest_of
from penstock.runtime.checkpoints.module_entries import ModuleEntries
from penstock.runtime.checkpoints.own_states import ALL_KINDS, OwnStates
from penstock.runtime.checkpoints.state_checks import check_state
from penstock.runtime.checkpoints.training_state import PARTS, TrainingState, add_beside, describe_run, loss_module
from penstock.runtime.collectives.agreements import Ranks
from penstock.runtime.engine.engine import Engine
from penstock.runtime.engine.local_stage import parameters_of
from penstock.runtime.files.plain_values import Json, encode, name_of
from penstock.runtime.files.step_directories import Retention
from penstock.runtime.parameters.optimizer_steps import Updater
from penstock.runtime.transport.worlds import World
from penstock.torch_internals.subclasses import TensorParts
from penstock.training.recipes import Recipe
from penstock.values.plans import Plan

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoints:
    """The checkpoints of one pipeline."""

    world: World
    plan: Plan
    training: TrainingState
    own: OwnStates
    saves: BackgroundSaves
    claims: DirectoryClaims
    timeout_seconds: float

    @property
    def ranks(self) -> Ranks:
        """The processes, with the world's way to gather."""
        return Ranks(self.world.rank, self.world.gather)

    def close(self, failed: bool = False) -> None:
        """Finishes a save beside the training, unless the pipeline has `failed`."""
        self.saves.close(failed)
        self.claims.close()

    def collect(self) -> CheckpointState:
        """The state of this process, which refers to the tensors of the training itself. The pipeline has drained.

        `CheckpointError` if something in it cannot be kept.
        """
        tensors: dict[str, Tensor] = {}
        described = self._describe(tensors)
        return self._lay_out(self.training.collect(take=lambda value: value), tensors, *described)

    def _describe(self, tensors: dict[str, Tensor]) -> tuple[Json, dict[str, dict[str, Json]], dict[str, Any]]:
        """What this process keeps of its own, whose tensors are added to `tensors`; what the manifest says of the
        entries of the model, between steps: in a step they may have another type; and those that it has digests of.
        """
        training = self.training
        own = self.own.collect(training.beside(scales=training.saves_frozen), tensors)
        return own, self._describe_model(), training.base()

    def _describe_model(self) -> dict[str, dict[str, Json]]:
        held = self.training.held
        return {
            name: {"dtype": name_of(held[name].dtype), "shape": list(held[name].shape), "stored": names[0]}
            for names in shared_names(held)
            for name in names
        }

    def _lay_out(
        self,
        state: Mapping[str, Any],
        tensors: dict[str, Tensor],
        own: Json,
        model: dict[str, dict[str, Json]],
        base: Mapping[str, Any],
    ) -> CheckpointState:
        """`state`, and what `_describe` says of it and has added to `tensors`. Of the model `state` has what this
        process saves.
        """

        def keep(tensor: Tensor, where: str) -> str:
            if where in tensors:
                raise CheckpointError(f"{where}: expected one value under this name, found two. Rename one of them")
            tensors[where] = tensor
            return where

        def encoded(part: str, entries: Mapping[str, Any]) -> dict[str, Json]:
            return {name: encode(value, f"{part}/{name}", keep) for name, value in entries.items()}

        for name in dict.fromkeys(str(entry["stored"]) for entry in model.values()):
            found = None if name in base else state["model"].get(name)
            if isinstance(found, TensorParts):
                # Its class is that of the model that loads it.
                parts = TensorParts(found.kind, str(found.context), found.tensors, found.layout)
                model[name]["parts"] = encode(parts, f"parts/{name}", keep)
            elif found is not None:
                tensors[MODEL + name] = found
        history = state.get("history", {})
        document = {
            "model": model,
            "base": {name: value if isinstance(value, str) else digest_of(value) for name, value in base.items()},
            "optimizer": {part: encoded(f"optimizer/{part}", entries) for part, entries in state["optimizer"].items()},
            "pipeline": encode(state["pipeline"], "pipeline", keep),
            "history": {part: encoded(f"history/{part}", history[part]) for part in PARTS if part in history},
            "own": own,
        }
        return CheckpointState(tensors, document)

    def save(
        self, directory: object, step: object, *, keep: int | None, keep_every: int | None, wait: bool
    ) -> Path | BackgroundSave:
        """Writes a checkpoint as `Pipeline.save` describes. Collective."""
        if not wait:
            return self._begin(directory, step, (keep, keep_every))
        self.saves.settle()
        write_to, state = self._prepare(directory, step, (keep, keep_every), self.collect)
        return write_to(state, self.ranks)

    def _begin(self, directory: object, step: object, keeping: tuple[int | None, int | None]) -> BackgroundSave:
        """Begins to write a checkpoint beside the training. Collective."""
        self.saves.prepare()

        tensors: dict[str, Tensor] = {}
        write_to, described = self._prepare(directory, step, keeping, lambda: self._describe(tensors))
        gather = self.world.gather_beside(self.timeout_seconds)
        ranks = Ranks(self.world.rank, gather or self.world.gather)

        def write_beside(collect: Callable[[], Mapping[str, Any]]) -> Path:
            return write_to(ranks.each(lambda: self._lay_out(collect(), tensors, *described)), ranks)

        return self.saves.begin(write_beside, gather)

    def _prepare(
        self, directory: object, step: object, keeping: tuple[int | None, int | None], collect: Callable[[], T]
    ) -> tuple[Callable[[CheckpointState, Ranks], Path], T]:
        """What writes to the place of a save, which is this run's, and what `collect` returns. Collective."""

        def prepare() -> tuple[tuple[Path, int, Retention], T]:
            path, retention = checked_path(directory), Retention(*keeping)
            number = self.training.engine.steps if step is None else step
            if not is_count(number, 0):
                raise CheckpointError(f"step={step!r}: expected a whole number of at least 0, or None. Pass one")
            assert isinstance(number, int)
            return (path, number, retention), collect()

        (path, number, retention), collected = self.ranks.each(prepare)
        agree_on_target(path, number, retention, self.ranks)
        run, plan = self.claims.claim(path, self.ranks), self.plan.to_yaml()
        # The script may change to another directory before a thread writes.
        place = path.absolute()

        def write_to(state: CheckpointState, ranks: Ranks) -> Path:
            with self.claims.hold(place, ranks):
                return write(state, place, number, retention=retention, ranks=ranks, plan=plan, run=run)

        return write_to, collected

    def find(self, directory: str | os.PathLike[str]) -> Loaded:
        """The checkpoint that `Pipeline.load` restores, compared with the training and with its files. Collective."""
        path = self.ranks.each(lambda: checked_path(directory))
        held = self.training.held
        return find_and_verify(path, self.ranks, self.training.chain, self._read, held.__contains__)

    def load(self, directory: str | os.PathLike[str], guarded: FailureGuard) -> None:
        """Restores a checkpoint as `Pipeline.load` describes. `guarded` reports errors to all processes. Collective."""
        self._load(directory, guarded, ALL_KINDS)

    def go_back(self, directory: str | os.PathLike[str], guarded: FailureGuard) -> None:
        """Restores the newest checkpoint, one that is being saved included, and leaves loaders where they are.
        Collective.
        """
        self._load(directory, guarded, ("generators", "objects"))

    def continue_from(
        self, own: OwnStates, claims: DirectoryClaims, directory: str | os.PathLike[str], guarded: FailureGuard
    ) -> None:
        """Takes the place of a pipeline that had the objects `own`, which stay as they are, and `claims`,
        and has saved itself to `directory`. Collective.
        """
        self.claims.take_over(claims)
        self._load(directory, guarded, ("generators",))
        self.own.take_over(own)

    def _load(self, directory: str | os.PathLike[str], guarded: FailureGuard, kinds: Collection[str]) -> None:
        self.saves.settle()
        found = self.find(directory)
        with guarded("in a load"):
            self.training.restore(found.state)
            self.own.restore(found.own, found.manifest, kinds)
        self.claims.run = found.manifest.run
        guarded.after_load()

    def _read(self, manifest: Manifest) -> Loaded:
        content, trained = manifest.content, self.training.trained()
        # The tensors of other processes are not looked for.
        optimizer = {
            part: {name: manifest.value(entry) for name, entry in entries.items() if name in trained}
            for part, entries in content["optimizer"].items()
        }
        pipeline = manifest.value(content["pipeline"])
        base = content.get("base", {})
        state = {"model": model_tensors(manifest), "base": base, "optimizer": optimizer, "pipeline": pipeline}
        if (beside := beside_of(manifest)) is None:
            beside = self.training.beside()
            if beside and self.world.rank == 0:
                text = "the checkpoint is of an older version, which did not keep %s: it stays as it is"
                logging.getLogger("penstock").warning(text, ", ".join(beside))
        state = add_beside(state, beside)
        if kept := content["history"]:
            state["history"] = {
                part: {
                    name: manifest.value(entry)
                    for name, entry in kept.get(part, {}).items()
                    if part != "weights" or name in trained
                }
                for part in PARTS
            }
        check_state(self.training, state)
        own = self.own.choose(content["own"], self.world.rank, self.world.processes)
        return Loaded(manifest, state, own)


def make_checkpoints(
    world: World,
    engine: Engine,
    recipe: Recipe,
    updater: Updater,
    *,
    plan: Plan,
    model: nn.Module | Sequence[Any],
    chain: LayerChain,
    drain: Callable[[], None],
    parallelized: bool,
    saves_frozen: bool,
    timeout_seconds: float,
) -> Checkpoints:
    """The checkpoints of the pipeline that `engine` runs. `drain`: drains it, and reports an error to all processes."""
    schedule = engine.schedule
    held = {index for stages in engine.stages.values() for index in stages}
    root, stages = rooted(model), [plan.stages[index] for index in sorted(held)]
    loss = loss_module(recipe.loss_fn)
    training = TrainingState(
        chain=chain,
        stages=stages,
        trained=partial(parameters_of, engine.stages),
        updater=updater,
        engine=engine,
        run=describe_run(plan, schedule, recipe),
        rank=world.rank,
        entries=ModuleEntries(root, chain, stages),
        loss=None if loss in {*root.modules()} else loss,
        saves_frozen=saves_frozen,
    )
    predicted = any(map(recipe.predicts, schedule.guarantees.delays))
    states = StageStates(training, schedule, engine.stages, parallelized=parallelized, predicted=predicted)
    return Checkpoints(
        world,
        plan,
        training,
        own=OwnStates(engine.device),
        saves=BackgroundSaves(states, drain),
        claims=DirectoryClaims(world.name),
        timeout_seconds=timeout_seconds,
    )
