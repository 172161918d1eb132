"""How many bytes a rank needs at its peak.

The papers say that memory is taken into account and leave the gradients and the optimizer out of their formulas
(thesis, chapter 3); then "does it fit" is answered wrongly. Here they are terms of their own:

    in flight x saved + working + (weight versions + 1 gradient + optimizer copies) x parameters

`working` is what the one microbatch takes that is computed on: the largest workspace of the stage's layers. With
recomputation a microbatch in flight keeps only the stage's input, and the one at work all that the stage saves.
For a stage of r replicas, with R workers in it and behind it, so that D = ceil(R / r) microbatches fill the pipe:

    schedule      in flight                       weight versions
    gpipe         ceil(m / r)                     1
    1f1b-flush    min(ceil(m / r), D)             1
    interleaved   chunks, see `peak_bytes`        1
    spp           min(ceil(m / r), 4 (D - 1) + 1) 1
    zb-h1         min(ceil(m / r), all ranks / r) 1
    zb-v          chunks, see `peak_bytes`        1
    pipedream          D                               D; with vertical sync ceil(all workers / r)
    2bw           D                               2

Where microbatches are split, a replica holds 1/r of each, and as many are in flight as without replicas. With tensor
parallelism the profile is that of one rank of a group, and so are these bytes. Fragmentation, communication buffers and
what the device's runtime takes are not in it.
"""

from dataclasses import dataclass
from math import ceil

from penstock.errors import PlanError
from penstock.planning.costs import ChainCosts, Counts, Flags, Matrix
from penstock.values.clusters import Cluster
from penstock.values.plans import Plan
from penstock.values.stages import DEALT

__all__ = [
    "OPTIMIZER_COPIES",
    "Room",
    "chunks_in_flight",
    "held_bytes",
    "interval_bytes",
    "live_counts",
    "peak_bytes",
    "require_fit",
]

OPTIMIZER_COPIES = 2.0
"""Optimizer state in units of the weights: 2 for Adam (the two moments), 1 for momentum, 0 for plain SGD."""


def live_counts(
    schedule: str,
    microbatches: int,
    replicas: int,
    behind: int,
    workers: int,
    *,
    vertical_sync: bool = False,
) -> tuple[int, int]:
    """(Activations in flight, weight versions) on each replica of a stage that takes its microbatches in turn.

    `behind` counts the workers of this stage and of all later ones, `workers` those of the pipeline. Not for
    `interleaved` and `zb-v`, whose ranks hold several stages.
    """
    deep = ceil(behind / replicas)
    match schedule:
        case "gpipe":
            return ceil(microbatches / replicas), 1
        case "pipedream":
            return deep, ceil(workers / replicas) if vertical_sync else deep
        case "2bw":
            return deep, 2
        case "spp":
            return min(ceil(microbatches / replicas), 4 * (deep - 1) + 1), 1
        case "zb-h1":
            return min(ceil(microbatches / replicas), ceil(workers / replicas)), 1
        case _:
            return min(ceil(microbatches / replicas), deep), 1


def chunks_in_flight(
    ranks: int, stages_per_rank: int, microbatches: int, schedule: str = "interleaved"
) -> tuple[int, ...]:
    """Per rank of one pipeline: its stages' microbatches in flight, of all its stages together.

    ``min(2 (p - q - 1) + (v - 1) p + 1, m v)`` on rank q: the warm-up of Megatron-LM's rule, and one (SC 2021, 2.2).
    Under `zb-v` ``min(2p, min(m, 2p - q) + min(m, q + 1))``.
    """
    if schedule == "zb-v":
        longest = 2 * ranks
        return tuple(
            min(longest, min(microbatches, longest - rank) + min(microbatches, rank + 1)) for rank in range(ranks)
        )
    most = microbatches * stages_per_rank
    return tuple(min(2 * (ranks - rank - 1) + (stages_per_rank - 1) * ranks + 1, most) for rank in range(ranks))


def held_bytes(
    saved: Matrix,
    working: Matrix,
    weights: Matrix,
    in_flight: float | Matrix,
    versions: float | Matrix,
    optimizer_copies: float,
) -> Matrix:
    """The formula of this file, element by element; all in bytes."""
    return in_flight * saved + working + (versions + 1 + optimizer_copies) * weights


def interval_bytes(
    costs: ChainCosts,
    in_flight: float,
    versions: int,
    optimizer_copies: float = OPTIMIZER_COPIES,
    starts: Counts | None = None,
) -> Matrix:
    """(N+1, N+1): the bytes of a stage of layers i up to and without j; of `starts` alone, the rows of these i."""
    rows = slice(None) if starts is None else starts
    saved, working = costs.saved_bytes[rows], costs.working_bytes[rows]
    return held_bytes(saved, working, costs.parameter_bytes[rows], in_flight, versions, optimizer_copies)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory that each rank has, and the schedule that decides how much of it a stage takes."""

    size_bytes: float
    schedule: str
    microbatches: int
    workers: int
    """Of the whole pipeline."""
    vertical_sync: bool = False
    optimizer_copies: float = OPTIMIZER_COPIES

    def counts(self, replicas: int, behind: int) -> tuple[int, int]:
        """`live_counts` of a stage of this pipeline."""
        return live_counts(
            self.schedule,
            self.microbatches,
            replicas,
            behind,
            self.workers,
            vertical_sync=self.vertical_sync,
        )

    def fitting(self, costs: ChainCosts, counts: tuple[int, int], starts: Counts | None = None) -> Flags:
        """[i, j]: whether layers i (of `starts`; None: all) up to and without j fit as a stage with these `counts`."""
        fits: Flags = interval_bytes(costs, *counts, self.optimizer_copies, starts) <= self.size_bytes
        return fits


def peak_bytes(plan: Plan, costs: ChainCosts, optimizer_copies: float = OPTIMIZER_COPIES) -> tuple[float, ...]:
    """Per rank. An upper bound where a rank holds several stages: all chunks in flight count as the rank's largest.

    So many as `chunks_in_flight` says for one of the parallel pipelines.
    """
    peaks = [0.0] * plan.ranks
    replicas = plan.replicas
    positions = len(plan.stages) // plan.stages_per_rank
    workers = sum(replicas[:positions])
    behind = workers
    for index, (stage, count) in enumerate(zip(plan.stages[:positions], replicas, strict=False)):
        split = plan.routing == "split"
        own = [(other.start, other.stop) for other in plan.stages if other.ranks == stage.ranks]
        if plan.schedule in DEALT:
            each = plan.microbatches if split else ceil(plan.microbatches / count)
            counts = chunks_in_flight(positions, len(own), each, plan.schedule)[index], 1
        else:
            straight = 1, len(plan.stages) - index, len(plan.stages)
            seen = straight if split else (count, behind, workers)
            counts = live_counts(plan.schedule, plan.microbatches, *seen, vertical_sync=plan.vertical_sync)
        for rank in stage.ranks:
            peaks[rank] = _rank_bytes(plan, costs, own, count if split else 1, counts, optimizer_copies)
        behind -= count
    return tuple(peaks)


def _rank_bytes(
    plan: Plan,
    costs: ChainCosts,
    own: list[tuple[int, int]],
    sharers: int,
    counts: tuple[int, int],
    optimizer_copies: float,
) -> float:
    """The bytes of a rank with these intervals of layers; `sharers` replicas split every microbatch."""
    saved = max(float(costs.saved_bytes[interval]) for interval in own) / sharers
    working = max(float(costs.working_bytes[interval]) for interval in own) / sharers
    weights = sum(float(costs.parameter_bytes[interval]) for interval in own)
    in_flight, versions = counts
    return in_flight * saved + working + (versions + 1 + optimizer_copies) * weights


def require_fit(plan: Plan, peaks: tuple[float, ...], cluster: Cluster) -> None:
    """Raises `PlanError` if a rank needs more than the cluster's memory."""
    if cluster.memory_bytes is None:
        return
    worst = max(range(len(peaks)), key=peaks.__getitem__)
    if peaks[worst] > cluster.memory_bytes:
        stage = next(index for index, stage in enumerate(plan.stages) if worst in stage.ranks)
        raise PlanError(
            f"stage {stage} ({plan.stages[stage]}) does not fit: expected at most {cluster.memory_bytes / 1e9:.4g} GB "
            f"on rank {worst}, found {peaks[worst] / 1e9:.4g} GB under {plan.schedule}. Use more devices, smaller "
            "microbatches, recompute=True, or a schedule that keeps less (1f1b-flush)"
        )
