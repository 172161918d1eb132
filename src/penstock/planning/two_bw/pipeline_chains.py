"""A chain of layers as parallel pipelines cut it: what its stages cost and need, with or without recomputation.

Cuts are counted in the positions at which stages may begin and end; `layers` translates them. Results are cached,
because a planner needs them for every number of replicas.
"""

from collections.abc import Sequence
from dataclasses import fields
from functools import cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from penstock.planning.memory import interval_bytes, live_counts
from penstock.planning.stage_costs import AllReduce, ChainCosts, Matrix, chain_costs
from penstock.planning.two_bw.orientations import Orientation
from penstock.scheduling.definitions import ScheduleDefinition
from penstock.simulating.action_costs import reduce_rounds
from penstock.values.chain_cuts import cut_evenly, least_bottleneck
from penstock.values.clusters import Cluster
from penstock.values.profiles import Profile


def cut_positions(profile: Profile, most: int) -> tuple[int, ...]:
    """Where stages may begin and end: between any two layers, or, of a long chain, at about `most` positions.

    They are one in every equal share of its seconds: the position that the fewest bytes cross. 0 and all layers are
    included.
    """
    layers = profile.layers
    if len(layers) < most:
        return tuple(range(len(layers) + 1))
    totals = np.cumsum([layer.seconds for layer in layers])
    shares = np.minimum((totals / (totals[-1] or 1.0) * most).astype(np.int64), most - 1)
    cheapest: dict[int, int] = {}
    for cut in range(1, len(layers)):
        share, crossing = int(shares[cut - 1]), layers[cut - 1].cut_bytes
        if share not in cheapest or crossing < layers[cheapest[share] - 1].cut_bytes:
            cheapest[share] = cut
    return 0, *cheapest.values(), len(layers)


StageCounts = tuple[tuple[int, int], ...]
"""(Activations in flight, weight versions) of every stage."""


@cache
def stage_counts(schedule: ScheduleDefinition | str, microbatches: int, stages: int) -> StageCounts:
    """The counts of each of `stages` stages under `schedule` with `microbatches` per pipeline."""
    return tuple(live_counts(schedule, microbatches, 1, stages - stage, stages) for stage in range(stages))


class PipelineChain:
    """Holds the costs of `profile`, whose stages begin and end at `positions`."""

    def __init__(
        self,
        profile: Profile,
        positions: tuple[int, ...],
        *,
        recompute: bool,
        optimizer_copies: float,
        shard_optimizer: bool = False,
        cluster: Cluster,
        buffers: int = 0,
    ) -> None:
        self.profile = profile
        self.recompute = recompute
        self._positions = positions
        self._optimizer_copies, self._shared, self._devices = optimizer_copies, shard_optimizer, cluster.devices
        least = cluster.least_memory_bytes
        self._memory_bytes = np.inf if least is None else least
        self._bytes: dict[tuple[int, int, int], Matrix] = {}
        self._least: dict[StageCounts, float] = {}
        """The least peak of the worst rank over all cuts; infinite if there are too few layers."""
        self._balanced: dict[tuple[object, ...], tuple[float, tuple[int, ...]]] = {}

        whole = chain_costs(profile, cluster, recompute=recompute, buffers=buffers)
        points = np.array(self._positions)
        sums = {field.name: getattr(whole, field.name) for field in fields(whole)}
        grid = np.ix_(points, points)
        by_rank = {id(each): each[grid] for each in sums.pop("rank_seconds")}
        arrays = {name: each[grid if each.ndim == 2 else points] for name, each in sums.items()}
        self.costs = ChainCosts(**arrays, rank_seconds=tuple(by_rank[id(each)] for each in whole.rank_seconds))

    @property
    def units(self) -> int:
        """Layers or runs of layers between two positions to cut; no pipeline has more stages."""
        return len(self._positions) - 1

    def layers(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """`cuts` counted in layers."""
        return tuple(self._positions[cut] for cut in cuts)

    def stage_bytes(self, cuts: Sequence[int], counts: StageCounts) -> tuple[float, ...]:
        """The peak memory of a rank of each stage."""
        own = self._stages_bytes(counts)
        return tuple(float(size[cut]) for cut, size in zip(pairwise(cuts), own, strict=True))

    def can_fit(self, counts: StageCounts) -> bool:
        """Whether every stage fits in a device's memory with some cuts."""
        if self._memory_bytes < np.inf and counts not in self._least:
            own = self._stages_bytes(counts)
            self._least[counts] = least_bottleneck(lambda stage, starts: own[stage][starts], _nothing_between(own))
        return self._memory_bytes == np.inf or self._least[counts] <= self._memory_bytes

    def balanced_cuts(
        self, counts: StageCounts, orientation: Orientation, microbatches: int, allreduce: AllReduce
    ) -> tuple[int, ...] | None:
        """The cuts whose slowest stage is fastest among those that fit in memory; None if none does.

        Exact if all links of `orientation` within pipelines are equally fast, and all between them; otherwise each
        counts as the slowest of its kind. A stage takes as long as on the slowest of its devices.
        """
        hop = orientation.hop_seconds_per_byte.max(initial=0.0), orientation.hop_latency_seconds.max(initial=0.0)
        replicas = orientation.ranks.shape[1]
        rounds = reduce_rounds(replicas, shared=allreduce == "shared")
        per_byte = rounds * orientation.ring_seconds_per_byte.max() / microbatches
        constant = 2 * (replicas - 1) * orientation.ring_latency_seconds.max() / microbatches

        # The all-reduce is usually hidden: then the cuts without it, the same for any number of replicas, are best.
        ranks = tuple(map(tuple, orientation.ranks.tolist())) if self.costs.rank_seconds else ()
        slowest, cuts = self._cut(counts, hop, ranks=ranks)
        if cuts:
            heaviest = max(float(self.costs.parameter_bytes[cut]) for cut in pairwise(cuts))
            if constant + per_byte * heaviest > slowest:
                _, cuts = self._cut(counts, hop, (per_byte, constant), ranks)
        return cuts or None

    def _cut(
        self,
        counts: StageCounts,
        hop: tuple[float, float],
        reduced: tuple[float, float] = (0.0, 0.0),
        ranks: tuple[tuple[int, ...], ...] = (),
    ) -> tuple[float, tuple[int, ...]]:
        """(Slowest seconds, cuts); no cuts if nothing fits. `hop`, `reduced`: (seconds per byte, seconds). `ranks`: of
        every stage, where devices differ.
        """
        key = (counts if self._memory_bytes < np.inf else len(counts), hop, reduced, ranks)
        if key not in self._balanced:
            edges = self.costs.exchanged_bytes * hop[0] + hop[1]
            edges[[0, -1]] = 0.0
            every = [self.costs.seconds_on(own) for own in ranks] or [self.costs.seconds] * len(counts)
            # Stages on equal devices share one matrix.
            different = {id(work): work + edges[:, None] + edges[None, :] for work in every}
            if any(reduced):
                sums = self.costs.parameter_bytes * reduced[0] + reduced[1]
                different = {key: np.maximum(work, sums) for key, work in different.items()}
            works = [different[id(work)] for work in every]
            found = _cut_evenly(works)
            if found[1] and max(self.stage_bytes(found[1], counts)) > self._memory_bytes:
                fits = [own <= self._memory_bytes for own in self._stages_bytes(counts)]
                found = _cut_evenly([np.where(fit, work, np.inf) for fit, work in zip(fits, works, strict=True)])
            self._balanced[key] = found
        return self._balanced[key]

    def _stages_bytes(self, counts: StageCounts) -> list[Matrix]:
        # As many pipelines as there are devices for.
        replicas = max(1, self._devices // len(counts)) if self._shared else 1
        return [self._interval_bytes(*held, replicas) for held in counts]

    def _interval_bytes(self, in_flight: int, versions: int, replicas: int) -> Matrix:
        key = in_flight, versions, replicas
        if key not in self._bytes:
            size_bytes = interval_bytes(self.costs, in_flight, versions, self._optimizer_copies / replicas)
            # A stage has a layer at least.
            self._bytes[key] = np.where(np.tri(self.units + 1, dtype=bool), np.inf, size_bytes)
        return self._bytes[key]


def _cut_evenly(works: Sequence[Matrix]) -> tuple[float, tuple[int, ...]]:
    """(Slowest seconds, cuts) of stages that take `works`, messages included; no cuts if nothing fits."""

    def seconds(stage: int, starts: npt.NDArray[np.int64]) -> Matrix:
        return works[stage][starts]

    between = _nothing_between(works)
    slowest = least_bottleneck(seconds, between)
    return slowest, cut_evenly(seconds, between, slowest) if slowest < np.inf else ()


def _nothing_between(works: Sequence[Matrix]) -> list[Matrix]:
    return [np.zeros(len(works[0]))] * (len(works) - 1)
