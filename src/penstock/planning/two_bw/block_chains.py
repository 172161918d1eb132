"""A chain of repeated blocks: what its stages cost and need, at one microbatch size, with or without recomputation.

Stages begin and end between repeated blocks, never inside one, so a chain of hundreds of layers has few positions to
cut. Cuts are counted in these positions here; `layers` translates them. Results are cached, because a planner needs
them for every number of replicas.

Large models repeat one block [Narayanan 2021, section 3.2.2], and a profile may show each block as several layers. A
layer is like the one a period before it if all its sizes are equal, byte for byte, and its times are as far apart as
noise makes them. The longest run of such layers is cut into blocks; what lies before them (an embedding) and behind
them (a head) stays apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
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

TIME_TOLERANCE = 0.3
"""How far apart two measured times of the same layer may be, as a share of the larger one or of the mean layer's time;
the mean, because a layer that takes microseconds is measured with more noise than one that takes milliseconds."""

_LEAST_SHARE = 1 / 3


@dataclass(frozen=True, slots=True)
class RepeatedBlocks:
    """The structure ``[prefix | block | block | ... | suffix]`` of a chain; without blocks if `count` is 0."""

    prefix: int
    """Layers before the first block; all layers if there are no blocks."""
    length: int
    """Layers in a block."""
    count: int
    """Blocks; 0, or 2 and more."""
    suffix: int
    """Layers behind the last block."""

    @property
    def layers(self) -> int:
        """The number of layers of the whole chain."""
        return self.prefix + self.length * self.count + self.suffix

    @property
    def cuts(self) -> tuple[int, ...]:
        """Where stages may begin and end: between any two layers, except inside a block; including 0 and all layers."""
        start, stop = self.prefix, self.prefix + self.length * self.count
        return (*range(start), *range(start, stop, max(self.length, 1)), *range(stop, self.layers + 1))

    def equal_cuts(self, stages: int) -> tuple[int, ...] | None:
        """The ``stages + 1`` cuts of equally many blocks per stage; the first has the prefix too, the last the suffix.

        None if the blocks cannot be divided evenly.
        """
        if stages == 1:
            return 0, self.layers
        if not self.count or self.count % stages:
            return None
        layers = self.count // stages * self.length
        return 0, *(self.prefix + stage * layers for stage in range(1, stages)), self.layers


def find_blocks(profile: Profile) -> RepeatedBlocks:
    """The blocks that cover the most layers of `profile`; of equals those of fewer layers each. O(N^2) for N layers.

    If the run is longer than its blocks, they begin where the fewest bytes cross the cuts between them, and of equals
    as early as possible. A repetition that takes less than `_LEAST_SHARE` of the chain's seconds (a few equal
    convolutions in a row) does not count as blocks.
    """
    layers = profile.layers
    sizes = np.array([(layer.parameter_bytes, layer.cut_bytes, layer.saved_bytes) for layer in layers])
    seconds = np.array([(layer.forward_seconds, layer.backward_seconds) for layer in layers])

    covered, best = 0, RepeatedBlocks(len(layers), 0, 0, 0)
    for length in range(1, len(layers) // 2 + 1):
        start, stop = _longest_run(_alike(sizes, seconds, length))
        count = (stop - start) // length + 1
        if start < stop and count >= 2 and count * length > covered:
            covered = count * length
            # The run, and the period before it that it is like, may be up to a block longer than whole blocks.
            spare = stop - start + length - covered
            begins = range(start, start + spare + 1)
            begin = min(begins, key=lambda first: _crossing(sizes[:, 1], first, length, count))
            best = RepeatedBlocks(begin, length, count, len(layers) - begin - covered)
    repeated = seconds[best.prefix : best.layers - best.suffix].sum()
    return best if covered and repeated >= _LEAST_SHARE * seconds.sum() else RepeatedBlocks(len(layers), 0, 0, 0)


def cut_positions(profile: Profile, blocks: RepeatedBlocks, most: int) -> tuple[int, ...]:
    """`blocks.cuts`, or, of a chain without blocks, about `most` of them: one in every equal share of its seconds.

    In each share it is the position that the fewest bytes cross. 0 and all layers are included.
    """
    cuts = blocks.cuts
    if blocks.count or len(cuts) <= most:
        return cuts
    totals = np.cumsum([layer.seconds for layer in profile.layers])
    shares = np.minimum((totals / (totals[-1] or 1.0) * most).astype(np.int64), most - 1)
    cheapest: dict[int, int] = {}
    for cut in cuts[1:-1]:
        share, crossing = int(shares[cut - 1]), profile.layers[cut - 1].cut_bytes
        if share not in cheapest or crossing < profile.layers[cheapest[share] - 1].cut_bytes:
            cheapest[share] = cut
    return 0, *cheapest.values(), cuts[-1]


def _alike(sizes: npt.NDArray[np.float64], seconds: npt.NDArray[np.float64], length: int) -> npt.NDArray[np.bool_]:
    """Whether layer i + `length` is like layer i, for every i."""
    one, other = seconds[:-length], seconds[length:]
    scale = np.maximum(np.maximum(one, other), seconds.mean(axis=0))
    near = np.abs(one - other) <= TIME_TOLERANCE * scale
    equal = sizes[:-length] == sizes[length:]
    alike: npt.NDArray[np.bool_] = near.all(axis=1) & equal.all(axis=1)
    return alike


def _longest_run(flags: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """The first of the longest runs of true flags, as start and stop."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8)))
    starts, stops = edges[::2], edges[1::2]
    if not len(starts):
        return 0, 0
    longest = int((stops - starts).argmax())
    return int(starts[longest]), int(stops[longest])


def _crossing(cut_bytes: npt.NDArray[np.float64], first: int, length: int, count: int) -> float:
    """The bytes over the cuts between blocks, if the first block begins with layer `first`."""
    last_layers = first + length * np.arange(1, count) - 1
    return float(cut_bytes[last_layers].sum())


StageCounts = tuple[tuple[int, int], ...]
"""(Activations in flight, weight versions) of every stage."""


@cache
def stage_counts(schedule: ScheduleDefinition | str, microbatches: int, stages: int) -> StageCounts:
    """The counts of each of `stages` stages under `schedule` with `microbatches` per pipeline."""
    return tuple(live_counts(schedule, microbatches, 1, stages - stage, stages) for stage in range(stages))


class BlockChain:
    """Holds the costs of `profile`, whose stages begin and end at `positions`, which include the cuts of `blocks`."""

    def __init__(
        self,
        profile: Profile,
        blocks: RepeatedBlocks,
        positions: tuple[int, ...],
        *,
        recompute: bool,
        optimizer_copies: float,
        cluster: Cluster,
        buffers: int = 0,
    ) -> None:
        self.profile = profile
        self.recompute = recompute
        self._blocks = blocks
        self._positions = positions
        self._optimizer_copies = optimizer_copies
        least = cluster.least_memory_bytes
        self._memory_bytes = np.inf if least is None else least
        self._bytes: dict[tuple[int, int], Matrix] = {}
        self._least: dict[StageCounts, float] = {}
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
        """Blocks and single layers between two positions to cut; no pipeline has more stages."""
        return len(self._positions) - 1

    def layers(self, cuts: Sequence[int]) -> tuple[int, ...]:
        """`cuts` counted in layers."""
        return tuple(self._positions[cut] for cut in cuts)

    def equal_cuts(self, stages: int) -> tuple[int, ...] | None:
        """The cuts with equally many blocks per stage; None if there are none."""
        cuts = self._blocks.equal_cuts(stages)
        return None if cuts is None else tuple(self._positions.index(cut) for cut in cuts)

    def stage_bytes(self, cuts: Sequence[int], counts: StageCounts) -> tuple[float, ...]:
        """The peak memory of a rank of each stage."""
        return tuple(float(self._interval_bytes(*held)[cut]) for cut, held in zip(pairwise(cuts), counts, strict=True))

    def fits(self, cuts: Sequence[int], counts: StageCounts) -> bool:
        """Whether every stage fits in a device's memory."""
        return self._memory_bytes == np.inf or max(self.stage_bytes(cuts, counts)) <= self._memory_bytes

    def can_fit(self, counts: StageCounts) -> bool:
        """Whether every stage fits in a device's memory with some cuts."""
        return self._memory_bytes == np.inf or self._least_bytes(counts) <= self._memory_bytes

    def _least_bytes(self, counts: StageCounts) -> float:
        """The least peak of the worst rank over all cuts; infinite if there are too few layers."""
        if counts not in self._least:
            # A stage has a layer; `interval_bytes` gives a number for empty intervals too.
            empty = np.tri(self.units + 1, dtype=bool)
            first, *others = (np.where(empty, np.inf, self._interval_bytes(*held)) for held in counts)
            least: Matrix = first[0]
            for stage in others:
                least = np.maximum(least[:, None], stage).min(axis=0)
            self._least[counts] = float(least[-1])
        return self._least[counts]

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
            if found[1] and not self.fits(found[1], counts):
                fits = [self._interval_bytes(*held) <= self._memory_bytes for held in counts]
                found = _cut_evenly([np.where(fit, work, np.inf) for fit, work in zip(fits, works, strict=True)])
            self._balanced[key] = found
        return self._balanced[key]

    def _interval_bytes(self, in_flight: int, versions: int) -> Matrix:
        key = in_flight, versions
        if key not in self._bytes:
            self._bytes[key] = interval_bytes(self.costs, in_flight, versions, self._optimizer_copies)
        return self._bytes[key]


def _cut_evenly(works: Sequence[Matrix]) -> tuple[float, tuple[int, ...]]:
    """(Slowest seconds, cuts) of stages that take `works`, messages included; no cuts if nothing fits."""

    def seconds(stage: int, starts: npt.NDArray[np.int64]) -> Matrix:
        return works[stage][starts]

    between = [np.zeros(len(works[0]))] * (len(works) - 1)
    slowest = least_bottleneck(seconds, between)
    return slowest, cut_evenly(seconds, between, slowest) if slowest < np.inf else ()
