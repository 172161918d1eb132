"""The costs of stages and cuts, for every choice of layers at once.

The planners choose among all intervals of layers. These matrices cover all of them, so that a choice takes a few numpy
operations. Index ``[i, j]`` means the layers i up to and without j. Times are seconds per microbatch.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Literal, TypeAlias, assert_never

import numpy as np
import numpy.typing as npt

from penstock.simulating.assumptions import Options
from penstock.values.chain_cuts import Counts, Matrix
from penstock.values.clusters import Cluster
from penstock.values.device_kinds import DeviceKind
from penstock.values.profiles import Profile

__all__ = [
    "AllReduce",
    "ChainCosts",
    "Counts",
    "Flags",
    "Matrix",
    "chain_costs",
    "replicated_seconds",
    "simulator_options",
]

Flags: TypeAlias = npt.NDArray[np.bool_]

AllReduce: TypeAlias = Literal["ring", "shared", "released"]
"""``ring``: dedicated links, each replica sends 2 (r-1)/r of the weights. ``shared``: all r replicas send through one
medium, 2 (r-1) times the weights in total, as the recurrence in [PipeDream 2019, section 3.1] prints it. ``released``:
as the authors' program counts, 4 (r-1)/r of the weights, added to the compute and not overlapped with it. (By default
that program ignores activations, which count here; a profile with ``cut_bytes`` of 0 ignores them, too.)"""


@dataclass(frozen=True, slots=True, eq=False)
class ChainCosts:
    """Holds the sums over all intervals of a chain of N layers."""

    seconds: Matrix
    """(N+1, N+1): forward and backward; infinite where the interval is empty."""
    parameter_bytes: Matrix
    """(N+1, N+1): what is trained."""
    frozen_bytes: Matrix
    """(N+1, N+1): what is held once."""
    saved_bytes: Matrix
    """(N+1, N+1): what each microbatch in flight keeps until its backward."""
    working_bytes: Matrix
    """(N+1, N+1): what the one microbatch that is computed on takes in addition: the workspace of a layer, with
    recomputation all that the stage saves, and the memory reserved for messages. It grows with the interval."""
    exchanged_bytes: Matrix
    """(N+1,): activations forward and gradients back over the cut before layer i: twice the cut's bytes, or once if
    both are sent at the same time."""
    rank_seconds: tuple[Matrix, ...] = ()
    """By rank, (N+1, N+1): forward and backward, where devices differ; `seconds` are then those of the fastest."""

    def seconds_on(self, ranks: Iterable[int]) -> Matrix:
        """(N+1, N+1): forward and backward on the slowest of `ranks`."""
        if not self.rank_seconds:
            return self.seconds
        different = {id(self.rank_seconds[rank]): self.rank_seconds[rank] for rank in ranks}
        return reduce(np.maximum, different.values())

    @property
    def layers(self) -> int:
        """``N``."""
        return len(self.exchanged_bytes) - 1

    def exchange_seconds(self, bandwidth: float) -> Matrix:
        """(N+1,): the time of each cut at `bandwidth` bytes per second; zero at the start and the end of the chain."""
        seconds = self.exchanged_bytes / bandwidth
        seconds[[0, -1]] = 0.0
        return seconds


def chain_costs(
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    recompute: bool = False,
    full_duplex: bool = False,
    buffers: int = 0,
) -> ChainCosts:
    """The costs of `profile`; with `recompute` every forward runs twice and only the stage's input is kept.

    [PipeDream 2019] counts both directions of a cut one after the other; `full_duplex` does not. `buffers` is the
    number of messages on either side of a stage that memory is reserved for; those behind it have the size of the
    largest cut inside the stage, so that a longer stage never needs less. `cluster`: has the kind of every device; by
    default all are as the one that was profiled.
    """
    layers = profile.layers
    empty = np.tri(len(layers) + 1, dtype=bool)
    rank_seconds: tuple[Matrix, ...] = ()
    if cluster is None or not cluster.kinds:
        seconds = _sums([layer.seconds + layer.forward_seconds * recompute for layer in layers])
    else:
        by_kind: dict[DeviceKind, Matrix] = {}
        classes = [cluster.class_of(rank) for rank in range(cluster.devices)]
        for kind in classes:
            if kind not in by_kind:
                times = profile.times_on(kind)
                both = zip(times.forward_seconds, times.backward_seconds, strict=True)
                own = _sums([forward + backward + forward * recompute for forward, backward in both])
                by_kind[kind] = np.where(empty, np.inf, own)
        seconds = min(by_kind.values(), key=lambda own: float(own[0, -1]))
        if len(by_kind) > 1:
            rank_seconds = tuple(by_kind[kind] for kind in classes)
    saved = _sums([layer.saved_bytes for layer in layers])
    crossing, sent = (
        np.array([0.0, *(layer.cut_bytes for layer in each.layers)]) for each in (profile, profile.on_wire)
    )
    # A layer frees its workspace when it has run, so that a stage needs the largest. Libraries keep theirs.
    working = _largest([0.0, *(layer.workspace_bytes + profile.library_bytes for layer in layers)])
    if recompute:
        saved, working = np.broadcast_to(crossing[:, None], saved.shape), saved + working
    if buffers:
        # Nothing is sent before the first and after the last layer.
        cuts = np.append(crossing[:-1], 0.0)
        working = working + buffers * (cuts[:, None] + _largest(cuts))
    return ChainCosts(
        np.where(empty, np.inf, seconds),
        parameter_bytes=_sums([layer.parameter_bytes for layer in layers]),
        frozen_bytes=_sums([layer.frozen_bytes for layer in layers]),
        saved_bytes=saved,
        working_bytes=working,
        exchanged_bytes=sent if full_duplex else 2 * sent,
        rank_seconds=rank_seconds,
    )


def replicated_seconds(
    below: Matrix, parameter_bytes: Matrix, replicas: int | Counts, bandwidth: float, allreduce: AllReduce
) -> Matrix:
    """``T^k(i -> j, r)`` of [PipeDream 2019, section 3.1] by element: one stage on `replicas` components of level k-1.

    `below` is ``A^(k-1)(i -> j, m_(k-1))``. The r replicas work on r microbatches while one all-reduce runs.
    """
    match allreduce:
        case "ring":
            times = np.maximum(below, parameter_bytes * (2 * (replicas - 1) / replicas / bandwidth))
        case "shared":
            times = np.maximum(below, parameter_bytes * (2 * (replicas - 1) / bandwidth))
        case "released":
            times = below + parameter_bytes * (4 * (replicas - 1) / replicas / bandwidth)
        case _:
            assert_never(allreduce)
    seconds: Matrix = times / replicas
    return seconds


def simulator_options(allreduce: AllReduce, optimizer_copies: float, *, shared_nic: bool = False) -> Options:
    """The planners' assumptions as keywords of the simulator, which has no `released` and takes a ring instead."""
    known: Literal["ring", "shared"] = "shared" if allreduce == "shared" else "ring"
    return {"allreduce": known, "optimizer_copies": optimizer_copies, "shared_nic": shared_nic}


def _sums(values: Sequence[float]) -> Matrix:
    """``[i, j]``: the sum of values i up to and without j."""
    prefix = np.concatenate([[0.0], np.cumsum(np.array(values, dtype=np.float64))])
    sums: Matrix = prefix[None, :] - prefix[:, None]
    return sums


def _largest(values: Sequence[float] | Matrix) -> Matrix:
    """``[i, j]``: the largest of values i + 1 to j; 0 if there are none."""
    inside = ~np.tri(len(values), dtype=bool)
    largest: Matrix = np.maximum.accumulate(np.where(inside, np.array(values)[None, :], 0.0), axis=1)
    return largest
