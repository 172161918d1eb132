"""Layers to stages and stages to devices, for every number of stages at once: the dynamic program of SPP.

PRM (partition, replication, mapping) of [SPP 2022, section IV-B]. The devices have a fixed order, each stage takes the
next r of them, and all are used. With M microbatches, W is the least possible time that the busiest stage or link works
for a whole minibatch:

    stage   M (forward + backward) / r  +  all-reduce of the weights among the r devices
    link    M (activations + gradients) / (r r' B)      B: the slowest link between the two stages' devices

Every microbatch is split over the replicas, so r r' links carry it. (On machines whose devices share one port, that is
too optimistic by up to r r'; the simulator decides in the end.)

The printed recurrence runs over the first layers and devices. This one runs over the last: a suffix of the layers in
xi stages on the last n devices. The results are the same, and the number of stages behind a stage, which determines how
many microbatches it keeps in flight, is then part of the state, so that a memory limit excludes stages exactly.

    W(l, xi, r, n) = min over c, r' of max(stage(l..c, r), link(c, r, r'), W(c, xi-1, r', n-r))

The minimum over r' is taken first, for every c: O(V^3 L xi + V^2 L^2 xi) instead of O(V^3 L^2 xi).
Where devices differ, a stage takes as long as its slowest device.

Plans tie often. The first stage then gets the fewest devices, next the fewest layers, then the second stage the fewest
devices, and so on.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from penstock.planning.stage_costs import ChainCosts, Flags, Matrix
from penstock.simulating.action_costs import reduce_rounds
from penstock.values.plans import Stage

_Choices: TypeAlias = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class OrderedDevices:
    """Holds the devices and their links in the order of the pipeline."""

    ranks: tuple[int, ...]
    """The rank at every position."""
    speeds: Matrix
    """(V, V), by position: bytes per second, symmetric; infinite on the diagonal."""
    latencies: Matrix
    """(V, V), by position: seconds; 0 on the diagonal."""
    shared_medium: bool = False
    """Whether the all-reduce moves 2 (r-1) times the weights through one medium, not 2 (r-1)/r on every link."""

    @property
    def devices(self) -> int:
        """``V``."""
        return len(self.ranks)


@dataclass(frozen=True, slots=True)
class StageMapping:
    """The best plan for some number of stages."""

    seconds: float
    """``W``: the busiest stage or link, for a whole minibatch; infinite if no plan fits in memory."""
    stages: tuple[Stage, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """The best plans on the last n devices, by replicas of the first stage (less 1), stages (less 1), first layer."""

    seconds: Matrix
    cuts: _Choices
    """Where the first stage stops."""
    replicas: _Choices
    """The replicas of the second stage, less 1; the last index is here the layer at which that stage starts."""


def cheapest_mappings(
    costs: ChainCosts,
    machine: OrderedDevices,
    microbatches: int,
    most_stages: int,
    fits: Callable[[int, int], Flags] | None = None,
    *,
    last: ChainCosts | None = None,
    replicas: Collection[int] | None = None,
) -> tuple[StageMapping, ...]:
    """The best plan in 1, 2, ... `most_stages` stages.

    ``fits(replicas, behind)``, if given, returns for every interval of layers whether it fits in memory as a stage with
    this number of replicas and of stages behind it. `last` has the seconds of the last stage if they differ from
    `costs`: with recomputation the last stage has nothing to recompute. `replicas` are the numbers of
    replicas that a stage may have; None: any.
    """
    counts = range(1, machine.devices + 1) if replicas is None else sorted(replicas)
    last = costs if last is None else last
    fitting = None
    if fits is not None:
        fitting = {r: np.stack([fits(r, behind) for behind in range(most_stages)]) for r in counts}
    tables: list[_Table] = []
    while len(tables) < machine.devices:
        tables.append(
            _table(
                costs,
                machine,
                microbatches,
                tables=tables,
                most_stages=most_stages,
                counts=counts,
                fitting=fitting,
                last=last,
            )
        )
    return tuple(_unfold(tables, machine, costs.layers, stages) for stages in range(1, most_stages + 1))


def _table(
    costs: ChainCosts,
    machine: OrderedDevices,
    microbatches: int,
    *,
    tables: Sequence[_Table],
    most_stages: int,
    counts: Sequence[int],
    fitting: dict[int, Flags] | None,
    last: ChainCosts,
) -> _Table:
    """The table of one device more than the last of `tables`."""
    devices = len(tables) + 1
    shape = min(devices, max(counts)), min(devices, most_stages), costs.layers + 1
    table = _Table(np.full(shape, np.inf), np.zeros(shape, np.int32), np.zeros(shape, np.int32))
    last_ones = slice(machine.devices - devices, machine.devices)
    speeds, latencies = machine.speeds[last_ones, last_ones], machine.latencies[last_ones, last_ones]
    for r in (count for count in counts if count <= devices):
        rounds = reduce_rounds(r, shared=machine.shared_medium)
        reduced = rounds / speeds[:r, :r].min() * costs.parameter_bytes + 2 * (r - 1) * latencies[:r, :r].max()
        allowed = None if fitting is None else fitting[r]
        leading = machine.ranks[machine.devices - devices :][:r]
        if r == devices:
            alone = microbatches * last.seconds_on(leading)[:, -1] / r + reduced[:, -1]
            table.seconds[r - 1, 0] = alone if allowed is None else np.where(allowed[0, :, -1], alone, np.inf)
            table.cuts[r - 1, 0] = costs.layers
        elif most_stages > 1:
            behind = tables[devices - r - 1].seconds[:, : most_stages - 1]
            # The slowest link from any of the first r to the next one, two, ... devices.
            outer = np.minimum.accumulate(speeds[:r, r:].min(axis=0))[: len(behind), None]
            delays = np.maximum.accumulate(latencies[:r, r:].max(axis=0))[: len(behind), None]
            carried = r * np.arange(1, len(behind) + 1)[:, None] * outer
            sent = costs.exchanged_bytes / carried + 2 * delays
            rest = np.maximum(behind, microbatches * sent[:, None, :])
            deeper = slice(1, behind.shape[1] + 1)
            followers = rest.argmin(axis=0)
            least = np.take_along_axis(rest, followers[None], axis=0)[0]
            stage = microbatches * costs.seconds_on(leading) / r + reduced
            first = stage if allowed is None else np.where(allowed[deeper], stage, np.inf)
            slowest = np.maximum(first, least[:, None, :])
            cuts = slowest.argmin(axis=2)
            table.seconds[r - 1, deeper] = np.take_along_axis(slowest, cuts[:, :, None], axis=2)[:, :, 0]
            table.cuts[r - 1, deeper] = cuts
            table.replicas[r - 1, deeper] = followers
    return table


def _unfold(tables: Sequence[_Table], machine: OrderedDevices, layers: int, count: int) -> StageMapping:
    """The best plan in `count` stages on all devices."""
    firsts = tables[-1].seconds[:, count - 1, 0]
    replicas = int(firsts.argmin()) + 1
    seconds = float(firsts[replicas - 1])
    if seconds == np.inf:
        return StageMapping(seconds, ())
    stages: list[Stage] = []
    start, used = 0, 0
    for index in range(count):
        table = tables[machine.devices - used - 1]
        stop = int(table.cuts[replicas - 1, count - index - 1, start])
        stages.append(Stage(start, stop, machine.ranks[used : used + replicas]))
        used += replicas
        replicas = int(table.replicas[replicas - 1, count - index - 1, stop]) + 1
        start = stop
    return StageMapping(seconds, tuple(stages))
