"""What a process keeps beside the model: random generators, and the user's own objects, such as loaders.

Each process has its own, and most often they are equal. As many processes as have saved get their own back. Another
number of processes gets them only if they were all equal.
"""

import hashlib
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.data import Batches, warn_of_untracked
from penstock.errors import CheckpointError
from penstock.progress import warn_once
from penstock.runtime.checkpoints.manifests import Manifest, bytes_of
from penstock.runtime.files.plain_values import Json, encode
from penstock.runtime.parameters.shards import whole

_OBJECTS, BESIDE = "objects", "beside"
ALL_KINDS = ("generators", "loaders", _OBJECTS)
"""Of what a process keeps: loaders are the objects that `penstock.data` makes."""


@dataclass(slots=True, eq=False)
class OwnStates:
    """What this process keeps, on `device`."""

    device: torch.device
    since: float = field(default_factory=time.perf_counter)
    """Loaders that are used after it count."""
    tracked: dict[str, Any] = field(default_factory=dict)
    """The user's objects, by name."""
    waiting: dict[str, Callable[[], Any]] = field(default_factory=dict)
    """What reads the states of a checkpoint whose objects are not tracked yet."""

    def track(self, objects: Mapping[str, Any]) -> None:
        """Takes the state of `objects` into checkpoints. If the checkpoint that was loaded has a state under one of the
        names, that object gets it now.
        """
        for name, value in objects.items():
            if isinstance(value, torch.Generator):
                continue
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(value, method, None)):
                    raise CheckpointError(
                        f"track({name}=...): expected an object with state_dict() and load_state_dict(), found "
                        f"{type(value).__qualname__} without {method}. Give it both"
                    )
            if self.tracked.get(name, value) is not value:
                raise CheckpointError(
                    f"track({name}=...): expected a name of its own, found that of "
                    f"{type(self.tracked[name]).__qualname__}, which is tracked already. Choose another name"
                )
        for name, value in objects.items():
            self.tracked[name] = value
            if name in self.waiting:
                give_state(name, value, self.waiting.pop(name)())

    def take_over(self, other: "OwnStates") -> None:
        """Goes on with the objects of a pipeline whose place this one has taken."""
        self.since, self.tracked, self.waiting = other.since, other.tracked, other.waiting

    def collect(self, beside: Mapping[str, Any], tensors: dict[str, Tensor]) -> Json:
        """The document of this process's own states. Their tensors are added to `tensors`, as copies on the CPU.

        `beside`: what the training keeps beside weights and the state of parameters, by name.
        """
        keep = partial(keep_copy, tensors)
        warn_of_untracked(self.tracked.values(), self.since)
        for name in self.waiting.keys() - self.tracked.keys():
            warn_once(
                "the checkpoint that was loaded has a state of %r, and no such object was tracked: this state is not "
                "in the checkpoint that is saved now",
                name,
            )
        return {
            BESIDE: {name: encode(value, name, keep) for name, value in beside.items()},
            "generators": encode(self._generators(), "generators", keep),
            _OBJECTS: {name: encode(_state_of(one), f"{_OBJECTS}/{name}", keep) for name, one in self.tracked.items()},
        }

    def choose(self, own: Sequence[Mapping[str, Json]], rank: int, processes: int) -> dict[str, Json]:
        """The states for process `rank` of `processes`, out of those of all that saved.

        `CheckpointError` if an object is tracked that has no state, or if objects had other states on other processes
        and there are now another number of processes.
        """
        if any(each.get("loaders") for each in own):
            warn_once(
                "the checkpoint is of an older version, which kept the places of loaders without track(): they begin "
                "anew. Call their set_epoch(epoch, position) with these: %s",
                own[min(rank, len(own) - 1)]["loaders"],
            )
        chosen: dict[str, Json] = {}
        for kind in ("generators", _OBJECTS):
            found = [each[kind] for each in own]
            if len(found) == processes:
                chosen[kind] = found[rank]
            elif all(each == found[0] for each in found):
                chosen[kind] = found[0]
            elif kind == "generators":
                chosen[kind] = None
            else:
                raise CheckpointError(
                    f"the {kind} of the checkpoint had different states on its {len(own)} processes: expected as many "
                    f"processes now, found {processes}. Start as many, or keep what depends on the rank out of the "
                    "state"
                )
        missing = sorted(self.tracked.keys() - chosen[_OBJECTS].keys())
        if missing:
            raise CheckpointError(
                f"the checkpoint has no state of {missing[0]!r}, which is tracked: expected one, found "
                f"{sorted(chosen[_OBJECTS])}. Track it under the name of then, or after the load if it is new"
            )
        return chosen

    def restore(self, states: Mapping[str, Json], manifest: Manifest, kinds: Collection[str]) -> None:
        """Takes over the `kinds` of what `choose` has chosen from the checkpoint of `manifest`."""
        if "generators" in kinds and states["generators"] is not None:
            self._restore_generators(manifest.read(states["generators"]))
        if _OBJECTS not in kinds:
            return
        objects = {name: partial(manifest.read, state) for name, state in states[_OBJECTS].items()}
        self.waiting = {name: read for name, read in objects.items() if name not in self.tracked}
        for name, value in self.tracked.items():
            if "loaders" in kinds or not isinstance(value, Batches):
                give_state(name, value, objects[name]())

    def _generators(self) -> dict[str, Any]:
        numpy = np.random.get_state(legacy=False)
        states = {"torch": torch.get_rng_state(), "numpy": numpy, "python": random.getstate()}
        if self.device.type == "cuda":
            states["cuda"] = torch.cuda.get_rng_state(self.device)
        return states

    def _restore_generators(self, states: Mapping[str, Any]) -> None:
        torch.set_rng_state(states["torch"])
        np.random.set_state(states["numpy"])
        random.setstate(states["python"])
        if self.device.type == "cuda" and "cuda" in states:
            torch.cuda.set_rng_state(states["cuda"], self.device)


def keep_copy(tensors: dict[str, Tensor], tensor: Tensor, where: str) -> str:
    """Adds a copy of `tensor` on the CPU to `tensors`. Returns its key, which equal ones share, so that they are stored
    once.
    """
    own = whole(tensor).detach().cpu().contiguous()
    if own.layout is torch.strided:
        form = f"{own.dtype} {tuple(own.shape)} ".encode()
        where = f"{where}/{hashlib.sha256(form + bytes_of(own)).hexdigest()[:32]}"
    tensors[where] = own.clone() if own.data_ptr() == tensor.data_ptr() else own
    return where


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def give_state(name: str, value: Any, state: Any) -> None:
    """Has `value`, an object of the user's or a generator, take over its `state`."""
    try:
        if isinstance(value, torch.Generator):
            value.set_state(state)
        else:
            value.load_state_dict(state)
    except Exception as error:
        raise CheckpointError(
            f"{name!r}: load_state_dict of {type(value).__qualname__} refused the state of the checkpoint: "
            f"{type(error).__name__}: {error}. Make the object as then"
        ) from error
