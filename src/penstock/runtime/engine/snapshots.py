"""Snapshots of the state of the stages, taken while the training goes on.

A snapshot is taken at one version of every stage. A stage that has made this version is copied at once; another one
right after the update that makes it, in a step or a drain that follows. The forwards and backwards of later
microbatches do not change what is copied. The next update does, so it waits until the copies of its stage are made.

Laws of this file:
  1. What a snapshot holds depends on the versions only, not on how fast the copies are made.
  2. At most one snapshot is under way.
  3. Where older versions are on the host, forwards copy another one over the newest: the copies come before them.
"""

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import Tensor

from penstock.runtime.devices.host_copies import HostCopier, HostCopies
from penstock.runtime.parameters.host_states import HostStates
from penstock.torch_internals import pytrees as pytree

REST = -1
"""In the place of a stage: what no update changes, such as frozen parameters and buffers."""

Collect: TypeAlias = Callable[[int], Mapping[str, Any]]
"""Returns the state of a stage: nested values with the tensors themselves, not copies."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A copy of nested values; its tensors are on their way."""

    values: Sequence[Any]
    """The leaves that are no tensors; None in the places of tensors."""
    places: Sequence[int]
    """Of the tensors among the leaves."""
    copies: HostCopies
    structure: pytree.TreeSpec

    def build(self) -> Any:
        leaves = list(self.values)
        for place, tensor in zip(self.places, self.copies.tensors, strict=True):
            leaves[place] = tensor
        return pytree.tree_unflatten(leaves, self.structure)


@dataclass(slots=True, eq=False)
class Snapshot:
    """A copy of the state of this process's stages at the versions `targets`, on the host."""

    targets: Mapping[int, int]
    """By stage."""
    collect: Collect
    then: Callable[["Snapshot"], object]
    """Called when the last stage was reached; its copies are still on their way."""
    parts: dict[int, _Part] = field(default_factory=dict)
    """By stage."""
    stalled_seconds: float = 0.0
    """How long the training has waited for copies."""

    def wait(self) -> None:
        for part in self.parts.values():
            part.copies.wait()

    def states(self) -> dict[int, Any]:
        """What was collected, by stage, on the host; after `wait`."""
        return {stage: self.parts[stage].build() for stage in sorted(self.parts)}

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts.values() for tensor in part.copies.tensors]


class Snapshots:
    """Takes snapshots of the stages of a process; the workers call it around their updates, while one is `present`."""

    def __init__(self, copier: HostCopier, host: HostStates | None = None) -> None:
        """`host`: has the state where versions are on the host."""
        self.copier, self._host = copier, host
        self.present: Snapshot | None = None
        """The snapshot that is under way; None when its copies are made."""

    def begin(self, snapshot: Snapshot, newest: Mapping[int, int]) -> None:
        """Begins `snapshot`; `newest`: by stage, the version that exists. Called between steps."""
        assert self.present is None, "one snapshot at a time"
        self.present = snapshot
        for stage, version in newest.items():
            self.after_update(stage, version)

    def before_update(self, stage: int) -> None:
        """Waits until the copies of `stage` are made, if there are any on their way."""
        present = self.present
        if present is not None and stage in present.parts:
            began = time.perf_counter()
            self.copier.order_after(present.parts[stage].copies)
            present.stalled_seconds += time.perf_counter() - began

    def after_update(self, stage: int, version: int) -> None:
        """Copies the state of `stage` if the snapshot is to have `version`, which is the newest."""
        present = self.present
        if present is None or present.targets.get(stage) != version or stage in present.parts:
            return
        began = time.perf_counter()
        present.parts[stage] = self._start(present.collect(stage))
        if len(present.parts) == len(present.targets):
            present.then(present)
        present.stalled_seconds += time.perf_counter() - began

    def settle(self) -> bool:
        """Waits for the copies of a snapshot that has reached all stages. Afterwards any tensor may be changed. False
        if a snapshot has not reached them.
        """
        present = self.present
        if present is not None and len(present.parts) == len(present.targets):
            began = time.perf_counter()
            present.wait()
            present.stalled_seconds += time.perf_counter() - began
            self.present = None
        return self.present is None

    def abandon(self) -> None:
        """Forgets a snapshot that cannot be completed."""
        self.present = None

    def _start(self, state: Mapping[str, Any]) -> _Part:
        leaves, structure = pytree.tree_flatten(state)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        if self._host is not None:
            self._host.settle()
        copies = self.copier.start([leaves[place] for place in places])
        if self._host is not None:
            self.copier.order_after(copies)
        values = [None if isinstance(leaf, Tensor) else copy.deepcopy(leaf) for leaf in leaves]
        return _Part(values, places, copies, structure)
